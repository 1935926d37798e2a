"""Models as folders of tensors, and the parts of them that a node runs: spans of blocks, and the ends."""
