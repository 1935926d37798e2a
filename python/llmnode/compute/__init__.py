"""The torch side: attention over many sequences, their KV, and the worker, a thread or process. Knows no network."""
