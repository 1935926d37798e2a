"""Decisions of a server: the next work, the admission of sessions, the blocks to serve."""
