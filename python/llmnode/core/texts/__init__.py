"""Finds token sequences that share a beginning."""
