"""What every transport does, on arrays of a GPU: through a fake NCCL, and through MPI between nodes."""

import sys
from unittest.mock import Mock

import numpy as np
import pytest

from commlib import InvalidArgument, PeerFailed, Topology, make_reducer
from commlib.errors import OutOfDeviceMemory
from commlib.transport import nccl, simulated
from commlib.transport.verified import VERIFY, VerifiedCommunicator
from tests.extent import more
from tests.gpu.fake_cupy import FakeCuPy, installed
from tests.gpu.fake_nccl import NcclError
from tests.gpu.on_gpu import FromHost, GPURanks, bodies_of
from tests.transport import test_communicator

# NCCL waits for ever for what it was promised.
NOT_PROMISED = ("test_a_message_of_another_length_is_refused",)


@pytest.fixture(params=[3, *more(1, 2, 4, 6)], ids=lambda size: f"P{size}")
def gpu_ranks(request):
    return GPURanks(request.param, wrap=FromHost)


globals().update(bodies_of(test_communicator, "gpu_ranks", without=NOT_PROMISED))


# ------------------------------------------------------------- streams


def test_a_sent_buffer_may_be_overwritten_once_its_send_was_waited_for():
    def body(comm):
        right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        outgoing, incoming = comm.arrays.full(9, comm.rank, np.int64), comm.arrays.zeros(9, np.int64)
        receipt, sent = comm.receive(incoming, left), comm.send(outgoing, right)
        sent.wait()
        outgoing[...] = -1
        receipt.wait()
        return incoming.get().tolist()

    assert GPURanks(3).run(body) == [[(rank - 1) % 3] * 9 for rank in range(3)]


# ------------------------------------------------------------- through MPI between nodes


def test_between_nodes_messages_go_by_mpi_and_inside_by_nccl():
    def body(comm):
        topology = Topology(comm)
        return [type(each).__name__ for each in (topology.world, topology.node, topology.stream)]

    seen = GPURanks(4, between="mpi").run(body, ranks_per_node=2)
    assert seen == [["StagedCommunicator", "NCCLCommunicator", "StagedCommunicator"]] * 4


# ------------------------------------------------------------- bad input


def over_fake(gpus=8, prepare=lambda cupy: None, **options):
    """Return what ``nccl.over`` says to four ranks."""
    cupy = FakeCuPy(gpus)
    prepare(cupy)

    def body(comm):
        cupy.nccl.speaks_as(comm)
        return str(nccl.over(comm, **options))

    with installed(cupy):
        return simulated.run(body, 4)


def no_device(cupy):
    cupy.cuda.runtime.getDeviceCount = Mock(side_effect=RuntimeError("cudaErrorNoDevice: no device"))


def invalid_usage(cupy):
    problem = NcclError("NCCL_ERROR_INVALID_USAGE: invalid usage\nsecond line")
    cupy.nccl.NcclCommunicator = Mock(side_effect=problem)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpus": 2}, r"ranks 0 and 2 share GPU 0000:00:00.0 of node0.*share_gpus=True"),
        ({"gpus": 0}, "rank 0: CuPy finds no GPU$"),
        ({"between": "tcp"}, "between: expected one of nccl, mpi, got 'tcp'"),
        ({"prepare": lambda cupy: setattr(cupy.nccl, "available", False)}, "this CuPy has no NCCL: pip"),
        ({"prepare": no_device}, r"rank 0: CuPy finds no GPU \(cudaErrorNoDevice"),
        ({"prepare": invalid_usage}, "connecting: NCCL_ERROR_INVALID_USAGE: invalid usage .NCCL_DEBUG=WARN"),
    ],
)
def test_what_cannot_be_connected_is_one_line(options, message):
    with pytest.raises(InvalidArgument, match=message):
        over_fake(**options)


def test_without_cupy_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(InvalidArgument, match=r"^nccl: rank 0: CuPy cannot be imported .*: pip install"):
        simulated.run(nccl.over, 2)


def test_a_message_that_nccl_fails_to_send_is_a_failed_peer():
    def body(comm):
        comm._nccl.send = Mock(side_effect=NcclError("NCCL_ERROR_REMOTE_ERROR: remote process exited"))
        comm.send(comm.arrays.zeros(3, np.float32), 1 - comm.rank).wait()

    with pytest.raises(PeerFailed, match=r"GPU \d, messages: NCCL_ERROR_REMOTE_ERROR"):
        GPURanks(2).run(body)


@pytest.mark.parametrize(("on_gpu", "expected"), [(True, "a CuPy array"), (False, "an array in host memory")])
def test_a_gradient_of_the_other_memory_is_refused_not_copied(on_gpu, expected):
    def body(comm):
        reducer = make_reducer("dense", Topology(comm), size=4)
        with pytest.raises(InvalidArgument, match=f"gradient: expected {expected}"):
            reducer.reduce(np.zeros(4, np.float32) if on_gpu else FakeCuPy().zeros(4, np.float32))
        return True

    assert all((GPURanks(2).run if on_gpu else lambda body: simulated.run(body, 2))(body))


def test_a_gpu_that_is_full_names_what_the_reducer_holds():
    def body(comm):
        reducer = make_reducer("hitopk", Topology(comm), size=1000)
        reducer.selectors[0].select_sum = Mock(
            side_effect=MemoryError("Out of memory allocating 4,096 bytes")
        )
        reducer.reduce(comm.arrays.zeros(1000, np.float32))

    held = "held by it, in bytes: residual 2,000, spare 2,000"
    with pytest.raises(OutOfDeviceMemory, match=f"HiTopK: Out of memory .*; {held}"):
        GPURanks(2).run(body)


def test_alone_a_rank_needs_no_nccl():
    cupy = FakeCuPy()
    cupy.nccl.NcclCommunicator = None
    with installed(cupy):
        assert simulated.run(lambda comm: str(nccl.over(comm)), 1) == ["rank 0 of 1 on node0, GPU 0"]


def test_where_messages_are_checked_those_between_gpus_are_too(monkeypatch):
    monkeypatch.setenv(VERIFY, "1")
    with installed(FakeCuPy()):
        comm = nccl.world()
    assert isinstance(comm, VerifiedCommunicator)
    assert str(comm).endswith("GPU 0")
