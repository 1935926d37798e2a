"""Benchmarks: what they are and how they are run is in `README.md`."""
