"""What can go wrong beyond bad arguments, which are ``ValueError``."""


class StorageFailed(RuntimeError):
    """Central storage gave no answer, or not a whole one, however often it was asked."""


class SourceChanged(RuntimeError):
    """A file is no longer what it was when the manifest was made."""


class CacheFull(RuntimeError):
    """There is no room for what would have to be written."""


class Damaged(ValueError):
    """A record is not what was written."""


class BadSample(ValueError):
    """What central storage holds cannot be decoded."""


class Untrusted(PermissionError):
    """A folder or file of a cache that somebody else has made or may change."""
