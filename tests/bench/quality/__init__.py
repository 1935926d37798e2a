"""The cost of lossy codecs and weights in tokens and likelihood."""
