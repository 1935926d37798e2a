"""The torch side: attention over many sequences, their KV, and the worker that runs it. Knows no network."""
