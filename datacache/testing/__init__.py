"""Central storage that is slow on purpose, and generated data sets, for tests and benchmarks."""
