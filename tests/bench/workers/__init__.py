"""Blocks in a thread, and in a process of their own."""
