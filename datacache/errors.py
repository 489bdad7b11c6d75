"""What can go wrong beyond bad arguments, which are ``ValueError``."""

from datacache.escaping import escaped


class _NamesFiles(Exception):
    """Its message holds names of files, which others have chosen, in a form that can be printed."""

    def __str__(self) -> str:
        return escaped(super().__str__())


class StorageFailed(_NamesFiles, RuntimeError):
    """Central storage gave no answer, or not a whole one, however often it was asked."""


class SourceChanged(_NamesFiles, RuntimeError):
    """A file is no longer what it was when the manifest was made."""


class CacheFull(RuntimeError):
    """There is no room for what would have to be written."""


class Damaged(_NamesFiles, ValueError):
    """A record is not what was written."""


class BadSample(_NamesFiles, ValueError):
    """What central storage holds cannot be decoded."""


class Untrusted(PermissionError):
    """A folder or file of a cache that somebody else has made or may change."""
