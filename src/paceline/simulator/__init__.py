"""Layer 5: what communication costs on a cluster, from numbers alone."""
