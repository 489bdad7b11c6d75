"""Waits for MPI asleep, in compiled code: a poll takes less time than Python's, and leaves others the GIL."""

import ctypes
from collections.abc import Callable
from typing import Any

import llvmlite.binding
import numpy as np
import numpy.typing as npt
from numba import types

from commlib.arrays import compiled

# Each nap costs processor time, so naps grow to a tenth of the wait, which is how late a rank may wake. The
# first nap is a fraction of the last nap of the previous wait, since a piece of a message takes about as long
# as the piece before it.
SHORTEST_NAP_SECONDS, LONGEST_NAP_SECONDS, NAP_GROWTH, FIRST_NAP = 20e-6, 2e-3, 1.1, 0.25
TURN_SECONDS = 50e-3  # after which Python may handle a signal
STATUS_BYTES = 256  # at least those of any MPI

# Handles and addresses are of the type ``intp``.
Address, Int = types.intp, types.intc
_get_status: Any = types.ExternalFunction("MPI_Request_get_status", Int(Address, Address, Address))
_iprobe: Any = types.ExternalFunction("MPI_Iprobe", Int(Int, Int, Address, Address, Address))
_usleep: Any = types.ExternalFunction("usleep", Int(types.uintc))


@compiled
def _sleep(
    request: int, comm: int, source: int, tag: int, flag: npt.NDArray[np.int32], address: int, nap: float
) -> float:
    """Sleep for a turn, or until the request, if it is not 0, is complete or a message is there.

    ``address``: of ``flag``, whose rest is memory for a status. Returns the seconds of the last nap.
    """
    slept = 0.0
    while slept < TURN_SECONDS:
        _usleep(np.uint32(1e6 * nap))
        slept += nap
        if request:
            error = _get_status(request, address, address + 8)
        else:
            error = _iprobe(source, tag, comm, address, address + 8)
        if error or flag[0]:
            break
        nap = min(NAP_GROWTH * nap, LONGEST_NAP_SECONDS)
    return nap


class Sleeper:
    """Sleeps between polls of the MPI that ``mpi``, mpi4py's module, is linked with."""

    def __init__(self, mpi: Any) -> None:
        library = ctypes.CDLL(mpi.__file__)
        for poll in (_get_status, _iprobe):
            address = ctypes.cast(getattr(library, poll.symbol), ctypes.c_void_p).value
            llvmlite.binding.add_symbol(poll.symbol, address)
        self._mpi, self._last_nap = mpi, 0.0

    def sleep_until(self, test: Callable[[], bool], of: Any, source: int = 0) -> None:
        """Sleep until ``test()``, which a poll precedes.

        ``of``: a request that has to be complete, or a communicator on which ``source`` is to send a message.
        """
        mpi, handle = self._mpi, self._handle(of)
        about = (handle, 0) if isinstance(of, mpi.Request) else (0, handle)
        nap, flag = max(SHORTEST_NAP_SECONDS, FIRST_NAP * self._last_nap), np.zeros(STATUS_BYTES, np.int32)
        while True:
            nap = _sleep(*about, source, mpi.ANY_TAG, flag, flag.ctypes.data, nap)
            if test():
                break
        self._last_nap = nap

    def _handle(self, owner: Any) -> int:
        """Return the handle of an object of mpi4py, a pointer or an integer."""
        kind = ctypes.c_void_p if self._mpi._sizeof(owner) == ctypes.sizeof(ctypes.c_void_p) else ctypes.c_int
        return kind.from_address(self._mpi._addressof(owner)).value or 0
