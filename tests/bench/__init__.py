"""Benchmarks. `README.md` says what they are and how to run them."""
