"""Decisions of a server: which work is next, who is admitted, which blocks to serve."""
