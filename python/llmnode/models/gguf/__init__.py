"""Reading GGUF files, and their conversion into model folders."""
