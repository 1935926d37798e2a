"""The program: serving nodes, the command line, the demo and the benchmarks."""
