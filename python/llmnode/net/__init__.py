"""The libp2p side: hosts, streams, links. Knows no tensor; the only place that imports libp2p."""
