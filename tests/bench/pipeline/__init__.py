"""Several texts at once through several servers."""
