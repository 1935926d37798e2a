"""Which token sequences share a beginning."""
