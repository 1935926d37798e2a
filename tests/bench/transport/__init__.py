"""Our transport beside others."""
