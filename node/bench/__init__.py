"""`llmnode bench`: measurements in which every figure is a ratio against something run beside it."""
