"""Table 2 of the Petals paper: a swarm on slow networks, against the physical limit."""
