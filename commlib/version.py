"""The version of the distribution ``cloudtrain``, written once."""

__version__ = "0.1.0"
