"""The swarm as this node knows it: its peers, what each of them serves, and the connections to them."""
