"""Placement: the shared plan against the paper's rules, exact optima, and layouts that others have published."""
