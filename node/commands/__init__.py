"""One module per command: `add` declares its options, `run` checks them and calls the code that does the work."""
