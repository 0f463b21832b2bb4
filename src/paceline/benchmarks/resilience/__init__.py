"""Layer 10: `bench resilience`, what a lost worker costs."""

from paceline.benchmarks.resilience.benchmark import ResilienceBenchmark

__all__ = ["ResilienceBenchmark"]
