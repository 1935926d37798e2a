"""Many clients of one server."""
