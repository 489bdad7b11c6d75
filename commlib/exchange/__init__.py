"""The exchange of a gradient: frameworks submit buckets, and wait for the mean over all ranks.

>>> import numpy as np
>>> from commlib import Topology, transport
>>> def step(comm):
...     with BucketExchange(Topology(comm), [2, 4], {"name": "dense"}) as exchange:
...         exchange.submit(1, np.arange(4.0) * comm.rank)
...         exchange.submit(0, np.arange(2.0))
...         mean, report = exchange.wait()
...         return mean.tolist(), report.finite
>>> transport.simulated.run(step, world_size=2)[0]
([0.0, 1.0, 0.0, 0.5, 1.0, 1.5], True)
"""

from commlib.exchange.buckets import bucket_bounds, check_variables
from commlib.exchange.exchange import BucketExchange, Exchange

__all__ = ["BucketExchange", "Exchange", "bucket_bounds", "check_variables"]
