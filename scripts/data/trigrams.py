"""Texts as rows of character trigrams, in LibSVM's format; so Webspam was made.

Column ``1 + 65536·a + 256·b + c`` is that of the bytes ``abc``: there are 2²⁴. A row has how often each is in
a text, divided so that the row has length 1.
"""

import math
from collections import Counter

FEATURES = 1 << 24


def row(label: int, text: str) -> str:
    """Return the row of a text.

    >>> row(-1, "abab a")
    '-1 6382113:0.5 6382178:0.5 6430818:0.5 6447459:0.5'
    >>> 1 + 65536 * ord("a") + 256 * ord("b") + ord("a")
    6382178
    """
    given = " ".join(text.split()).encode()
    three = zip(given, given[1:], given[2:], strict=False)
    counts = Counter(1 + 65536 * a + 256 * b + c for a, b, c in three)
    length = math.sqrt(sum(count * count for count in counts.values()))
    entries = (f"{column}:{count / length:.4g}" for column, count in sorted(counts.items()))
    return " ".join([f"{label:+d}", *entries])
