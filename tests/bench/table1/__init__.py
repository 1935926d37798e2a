"""Petals' table of speeds when stages fail."""
