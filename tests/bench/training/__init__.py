"""LoRA that clients train through servers."""
