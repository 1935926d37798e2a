"""Sessions whose servers are killed, frozen and cut off."""
