"""The format of checkpoints, and the atomic folders that hold them; nothing here knows what they hold."""
