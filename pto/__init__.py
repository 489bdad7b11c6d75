"""Parallel tensor operators: what every rank would compute alike is computed in parts, then gathered.

Nothing is here yet; the optimizers that use it (LARS, LAMB) come with it.
"""

__all__: list[str] = []
