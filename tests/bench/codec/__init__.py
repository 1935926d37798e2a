"""Activations in 8 bits, and packing without loss."""
