"""Memory of this process that is given back is kept for the next vector."""

import ctypes

# Of glibc's <malloc.h>
M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8
NEVER = -1


def keep_freed_memory() -> None:
    """Let what is freed stay with this process, from now on; nothing happens where there is no glibc.

    Else a long vector is a mapping of its own, which goes back to the kernel with the vector, and on some
    virtual machines from there to the host. Each new vector then costs its pages anew: 60 ms instead of 6 for
    60 MB, as measured on such a machine. That hits every contender alike, but at random, and hides what is
    to be measured.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return
    mallopt(M_MMAP_MAX, 0)
    mallopt(M_ARENA_MAX, 1)  # those of further threads have no room for long vectors, and map them after all
    mallopt(M_TRIM_THRESHOLD, NEVER)
