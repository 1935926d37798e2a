"""This machine: memory, cores, the heap."""
