"""The exceptions of datacache, besides ``ValueError`` for bad arguments."""

from datacache.escaping import escaped


class _NamesFiles(Exception):
    """An exception whose message holds file names, which are escaped so that they can be printed."""

    def __str__(self) -> str:
        return escaped(super().__str__())


class StorageFailed(_NamesFiles, RuntimeError):
    """Central storage gave no answer, or an incomplete one, at every attempt."""


class SourceChanged(_NamesFiles, RuntimeError):
    """A file has changed since the manifest was made."""


class CacheFull(RuntimeError):
    """There is no room for what is to be written."""


class Damaged(_NamesFiles, ValueError):
    """A record, or a file of a store, is not what was written."""


class BadSample(_NamesFiles, ValueError):
    """A sample in central storage cannot be decoded."""


class Untrusted(PermissionError):
    """A folder or file of a cache that belongs to another user, or that others may change."""
