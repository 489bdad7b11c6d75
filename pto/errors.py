"""The exceptions of pto.

::

    PtoError
    ├── InvalidArgument   a value outside what its argument allows                (also a ValueError)
    ├── RanksDisagree     ranks that were given different tensors or settings     (also a ValueError)
    └── DependsOnRank     an operation whose result is not the same on all ranks  (also a ValueError)
"""


class PtoError(Exception):
    """Base of all exceptions of pto."""


class InvalidArgument(PtoError, ValueError):
    """A value outside what its argument allows; the message names both and what was expected."""


class RanksDisagree(PtoError, ValueError):
    """Ranks that must make the same plan were given different tensors or settings; raised on all of them."""


class DependsOnRank(PtoError, ValueError):
    """A result that differs between ranks, found with ``check=True``; raised on all of them."""
