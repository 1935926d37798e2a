"""The swarm as this node knows it: peers, connections to them, and who serves what."""
