"""The schema of a configuration, and how files and command-line overrides become one; without TensorFlow."""
