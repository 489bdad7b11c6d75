"""Training runs: configuration, models, the loop, the command line."""
