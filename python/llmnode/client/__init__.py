"""The client: routes, sessions and generation. Keeps the ends of the model, holds no block."""
