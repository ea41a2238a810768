"""Benchmarks beside the stock baseline, in one interleaved run: ``python -m benchmarks --help``."""
