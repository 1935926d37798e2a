"""This checkout against another one."""
