"""Texts divided into a training and a test part, and written."""

import hashlib
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path


def is_test(key: str, share: float) -> bool:
    """Return whether a text goes into the test part: a function of its key alone, on every machine."""
    number = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big")
    return number < share * 2**64


def key_of(text: str) -> str:
    """Return what near-equal texts have in common: lower-case letters, and 0 for every number.

    >>> key_of("Phase 12: on!") == key_of("phase 3 ON")
    True
    """
    return " ".join(re.sub(r"\d+", "0", re.sub(r"[^\w\s]", " ", text.casefold())).split())


def write(folder: Path, texts: Mapping[str, Iterable[str]]) -> None:
    """Write lines to files, and print how many of each."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, found in texts.items():
        lines = list(found)
        (folder / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        words = sum(len(line.split()) for line in lines)
        print(f"{name}: {len(lines):,} lines, {words:,} words", file=sys.stderr)
