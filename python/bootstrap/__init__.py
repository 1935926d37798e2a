"""Sets up a checkout: the environment, the locked dependencies with the embedded model, and the Rust extension."""
