"""Every exception that commlib raises on purpose.

::

    CommlibError
    ├── UnknownName      a name that is in no table of known names         (also a ValueError)
    ├── InvalidArgument  a value outside what its argument allows            (also a ValueError)
    ├── NonFiniteInput   a NaN or an infinity where numbers are compared     (also a ValueError)
    ├── RanksDisagree    ranks that should hold equal state do not          (also a ValueError)
    ├── LaunchError      processes that are not the ranks of one MPI job     (also a ValueError)
    ├── ConcurrentUse    two threads in one communicator at the same time
    ├── UseAfterClose    an exchange over a communicator that was closed
    ├── GpuUnavailable     no CuPy, no CUDA libraries, no device, or one that is too old
    ├── OutOfDeviceMemory  a buffer that does not fit on a GPU               (also a MemoryError)
    └── PeerFailed       another rank stopped, so this one cannot continue
"""

import difflib
import reprlib
from collections.abc import Iterable, Mapping
from typing import TypeVar

Member = TypeVar("Member")

LONGEST_NAME = 100  # characters that are compared with known names
LONGEST_LINE = 1000  # characters of a message
LONGEST_NUMBER = 1 << 256  # integers from here on are not printed in full


class CommlibError(Exception):
    """Base of all exceptions of commlib."""


class UnknownName(CommlibError, ValueError):
    """A name that the table it was looked up in does not hold."""


class InvalidArgument(CommlibError, ValueError):
    """A value outside what its argument allows; the message names both and what was expected.

    ``key``: the argument, where the message begins with it; ``text``: the rest of the message.
    """

    def __init__(self, text: object = "", *, key: str = "") -> None:
        super().__init__(f"{key}: {text}" if key else text)
        self.key, self.text = key, str(text)


class NonFiniteInput(CommlibError, ValueError):
    """A NaN or an infinity in a vector whose magnitudes were to be compared."""


class RanksDisagree(CommlibError, ValueError):
    """Ranks that should hold equal state, or should be at the same step, are not."""


class LaunchError(CommlibError, ValueError):
    """The processes were started in a way that cannot work; one line says why and how to start them."""


class ConcurrentUse(CommlibError):
    """Two threads exchange over one communicator, or a topology of it, at the same time."""


class UseAfterClose(CommlibError):
    """An exchange over a communicator, or a topology's communicator, after its ``close()``."""


class PeerFailed(CommlibError):
    """Another rank raised an exception or never answered, or a message is damaged or has the wrong length."""


class _Short(reprlib.Repr):
    """``repr`` of bounded length, in bounded time."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = 100
        self.maxlist = self.maxtuple = self.maxdict = 6

    def repr_int(self, x: int, level: int) -> str:
        if abs(x) < LONGEST_NUMBER:
            return repr(x)
        # Python refuses to print integers of more than some thousand digits
        return f"a number of about {x.bit_length() * 301 // 1000} digits"


def shown(value: object) -> str:
    """Return ``repr(value)`` for a message: in one line, and shortened where it is long.

    >>> shown(10**400), len(shown("x" * 100_000))
    ('a number of about 400 digits', 100)
    """
    return one_line(_Short().repr(value))


def one_line(text: str) -> str:
    """Return a text with control characters escaped, and its middle left out where it is long.

    >>> one_line("a" + chr(27) + chr(10) + "b") == "a" + chr(92) + "x1b" + chr(92) + "nb"
    True
    """
    if len(text) > LONGEST_LINE:
        text = f"{text[: LONGEST_LINE * 2 // 3]} … {text[-LONGEST_LINE // 4 :]}"
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return ``', did you mean "…"?'`` for the nearest known name, or nothing.

    >>> suggestion("hitopkk", ["dense", "hitopk"])
    ', did you mean "hitopk"?'
    """
    nearest = difflib.get_close_matches(str(name)[:LONGEST_NAME], list(known), n=1)
    return f', did you mean "{nearest[0]}"?' if nearest else ""


def look_up(table: Mapping[str, Member], kind: str, name: str) -> Member:
    """Return ``table[name]``; an unknown name raises ``UnknownName`` listing the known ones.

    >>> look_up({"dense": 1, "hitopk": 2}, "reducer", "hitopk")
    2
    """
    try:
        return table[name]
    except (KeyError, TypeError):  # not in it, or nothing that a table can hold
        known = ", ".join(table)
        given = shown(name)[1:-1] if isinstance(name, str) else shown(name)
        raise UnknownName(f'unknown {kind} "{given}" (known: {known}){suggestion(name, table)}') from None


class GpuUnavailable(CommlibError):
    """Something that the GPU path needs is missing; the message says what, and how to install it."""


class OutOfDeviceMemory(CommlibError, MemoryError):
    """A buffer that does not fit on the device; the message names its size and the buffers held."""
