"""The ranks of tests with PyTorch: those of the MPI job that pytest runs in, or one."""

from importlib.util import find_spec

import pytest

from commlib import Topology
from commlib.transport import mpi, simulated
from tests.conftest import MPI_RANKS

collect_ignore = [] if find_spec("torch") else ["models.py"]


@pytest.fixture(scope="session")
def topology():
    """Return a topology of nodes of one rank, of which torch has a process group."""
    from commlib.torch import init_process_group

    comm = mpi.world() if MPI_RANKS > 1 else simulated.run(lambda comm: comm, 1)[0]
    topology = Topology(comm, ranks_per_node=1)
    init_process_group(topology)
    return topology
