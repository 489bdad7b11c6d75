"""The schema of a configuration, and how files and command-line words become one; without TensorFlow."""
