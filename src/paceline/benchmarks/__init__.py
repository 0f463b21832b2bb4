"""Layer 8: measurements, as ratios within one run."""
