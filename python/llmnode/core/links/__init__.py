"""Decisions about a link: how much to write at once, and whether to pack."""
