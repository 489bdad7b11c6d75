"""Sleeps between polls of MPI, in compiled code, which is faster than Python and leaves others the GIL."""

import atexit
import ctypes
import os
import threading
import time
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
FLAGS = 64  # integers: the flag that MPI sets, and more memory than the status of any MPI takes

# Handles and addresses are of the type ``intp``.
Address, Int = types.intp, types.intc
_get_status: Any = types.ExternalFunction("MPI_Request_get_status", Int(Address, Address, Address))
_iprobe: Any = types.ExternalFunction("MPI_Iprobe", Int(Int, Int, Address, Address, Address))
_usleep: Any = types.ExternalFunction("usleep", Int(types.uintc))

Integers = npt.NDArray[np.int32]
_is_ending: Integers = np.zeros(1, np.int32)
_polling: set[int] = set()  # the threads that may call MPI without the GIL
os.register_at_fork(after_in_child=_polling.clear)


@atexit.register
def end() -> None:
    """Stop the polls of other threads, and wait until none is under way: MPI is to be finalized.

    Compiled code would go on without the GIL. The threads wait for the end of the process.
    """
    _is_ending[0] = 1
    while _polling - {threading.get_ident()}:
        time.sleep(SHORTEST_NAP_SECONDS)


@compiled
def _sleep(
    request: int, comm: int, source: int, tag: int, flags: Integers, ending: Integers, nap: float
) -> float:
    """Sleep for a turn, or until the request, if it is not 0, is complete or a message is there.

    Returns the seconds of the next nap.
    """
    slept, address = 0.0, flags.ctypes.data
    while slept < TURN_SECONDS:
        _usleep(np.uint32(1e6 * nap))
        slept += nap
        if ending[0]:
            break
        if request:
            error = _get_status(request, address, address + 8)
        else:
            error = _iprobe(source, tag, comm, address, address + 8)
        if error or flags[0]:
            break
        nap = min(NAP_GROWTH * nap, LONGEST_NAP_SECONDS)
    return nap


IS_COMPILED = hasattr(_sleep, "py_func")  # not with NUMBA_DISABLE_JIT


class Sleeper:
    """Sleeps between polls of the MPI that ``mpi``, mpi4py's module, is linked with."""

    def __init__(self, mpi: Any) -> None:
        library = ctypes.CDLL(mpi.__file__)
        for poll in (_get_status, _iprobe):
            address = ctypes.cast(getattr(library, poll.symbol), ctypes.c_void_p).value
            llvmlite.binding.add_symbol(poll.symbol, address)
        self._mpi, self._last_nap = mpi, 0.0

    def sleep_until(self, test: Callable[[], bool], polled: Any, source: int = 0) -> None:
        """Sleep until ``test()``, which is called after a poll that found something, and after each turn.

        ``polled``: a request that has to be complete, or a communicator on which ``source`` is to send.
        """
        mpi, handle, thread = self._mpi, self._handle(polled), threading.get_ident()
        about = (handle, 0) if isinstance(polled, mpi.Request) else (0, handle)
        nap, flags = max(SHORTEST_NAP_SECONDS, FIRST_NAP * self._last_nap), np.zeros(FLAGS, np.int32)
        is_main = thread == threading.main_thread().ident
        while True:
            _polling.add(thread)
            try:
                nap = _sleep(*about, source, mpi.ANY_TAG, flags, _is_ending, nap)
            finally:
                _polling.discard(thread)
            if _is_ending[0] and not is_main:
                threading.Event().wait()  # for the end of the process
            if test():
                break
        self._last_nap = nap

    def _handle(self, owner: Any) -> int:
        """Return the handle of an object of mpi4py, a pointer or an integer."""
        kind = ctypes.c_void_p if self._mpi._sizeof(owner) == ctypes.sizeof(ctypes.c_void_p) else ctypes.c_int
        return kind.from_address(self._mpi._addressof(owner)).value or 0
