"""Placement: the blocks that each node of a swarm should hold, decided by each node for itself."""
