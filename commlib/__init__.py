"""Sparse gradient communication for clusters that are fast inside a node and slow between nodes.

>>> import numpy as np
>>> def step(comm):
...     topology = Topology(comm, ranks_per_node=2)
...     reducer = make_reducer("hitopk", topology, size=8, density=0.25)
...     gradient = np.zeros(8, np.float32)
...     gradient[comm.rank] = 4.0
...     return reducer.reduce(gradient)
>>> transport.simulated.run(step, world_size=4)[0]
array([1., 0., 1., 0., 0., 0., 0., 0.], dtype=float32)
"""

from commlib import cost, transport
from commlib.errors import (
    CommlibError,
    InvalidArgument,
    NonFiniteInput,
    PeerFailed,
    RanksDisagree,
    UnknownName,
)
from commlib.exchange import BucketExchange, Exchange
from commlib.network import Link, Network
from commlib.prediction import Prediction, bytes_of_nodes, bytes_sent, predict, predict_seconds
from commlib.reducers import REDUCERS, Reducer, Report, make_reducer
from commlib.selection import SELECTORS, Selector, select
from commlib.topology import LinkBytes, Topology, Traffic
from commlib.transport import Communicator
from commlib.vectors import SparseVector
from commlib.version import __version__
from commlib.wire import CODECS, Codec

__all__ = [
    "CODECS",
    "REDUCERS",
    "SELECTORS",
    "BucketExchange",
    "Codec",
    "CommlibError",
    "Communicator",
    "Exchange",
    "InvalidArgument",
    "Link",
    "LinkBytes",
    "Network",
    "NonFiniteInput",
    "PeerFailed",
    "Prediction",
    "RanksDisagree",
    "Reducer",
    "Report",
    "Selector",
    "SparseVector",
    "Topology",
    "Traffic",
    "UnknownName",
    "__version__",
    "bytes_of_nodes",
    "bytes_sent",
    "cost",
    "make_reducer",
    "predict",
    "predict_seconds",
    "select",
    "transport",
]
