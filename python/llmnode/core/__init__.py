"""Vocabulary and algorithms. Standard library only; time and randomness are arguments."""
