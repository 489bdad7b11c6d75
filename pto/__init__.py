"""Parallel tensor operators: work that every rank would repeat is divided among the ranks, then gathered.

>>> import numpy as np
>>> from commlib.transport import simulated
>>> def squares(comm):
...     weights = [np.ones((3, 4), np.float32), np.full(2, 3.0, np.float32)]
...     return Norms([12, 2], comm, lists=1, partition="slices").squares(weights)
>>> simulated.run(squares, world_size=4)[3]
array([[12., 18.]])
"""

from pto.comm import Choice, Comm, Seconds
from pto.errors import DependsOnRank, InvalidArgument, PtoError, RanksDisagree
from pto.norms import Norms, sum_of_squares
from pto.parallel import Parallel, parallel
from pto.partition import Partition, Piece, by_layer, by_slices, by_tensor

__all__ = [
    "Choice",
    "Comm",
    "DependsOnRank",
    "InvalidArgument",
    "Norms",
    "Parallel",
    "Partition",
    "Piece",
    "PtoError",
    "RanksDisagree",
    "Seconds",
    "by_layer",
    "by_slices",
    "by_tensor",
    "parallel",
    "sum_of_squares",
]
