"""Where this program keeps what it can make anew."""

import os
from pathlib import Path


def user_cache() -> Path:
    """Return the folder of the user for it, below ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cloudtrain"
