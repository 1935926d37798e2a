"""Weights in memory: read, quantized, packed, and kept on disk."""
