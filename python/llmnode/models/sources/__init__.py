"""Where a model comes from: the Hub, a folder, a GGUF file, the embedded package."""
