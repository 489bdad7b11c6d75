"""How arrays travel between ranks: one short protocol, and its implementations."""

from commlib.transport import mpi, nccl, simulated
from commlib.transport.base import Communicator, Request
from commlib.transport.verified import verified

__all__ = ["Communicator", "Request", "mpi", "nccl", "simulated", "verified"]
