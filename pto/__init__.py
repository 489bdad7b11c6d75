"""Parallel tensor operators: operations computed in parts on all ranks."""
