"""A run: the trainer, the parts that it is made of, events and checkpoints."""
