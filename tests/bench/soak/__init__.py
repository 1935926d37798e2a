"""Many sessions over links that break: what is left open."""
