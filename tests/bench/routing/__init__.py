"""The benchmark `routing`: see its README."""
