"""What lossy codecs and weights cost."""
