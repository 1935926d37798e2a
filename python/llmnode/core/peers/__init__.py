"""Judgements about peers: their speed, failures, clocks and reachability."""
