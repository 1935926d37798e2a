"""Twelve real servers that come, are killed and come back, while sessions go through them."""
