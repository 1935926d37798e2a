"""The serving side: links in, sessions, answers out. Torch-free: it is handed its worker."""
