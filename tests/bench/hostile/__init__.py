"""The benchmark `hostile`."""
