"""A run: trainer, learner, data, events, metrics and the state that a checkpoint holds."""
