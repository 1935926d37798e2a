"""The table of speeds with failing stages, from the Petals paper."""
