"""One module per command: `add` declares its options, `run` checks them and hands them on to what does the work."""
