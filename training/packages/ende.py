"""English sentences and their German translations: train.en, train.de, test.en, test.de.

Out of PyPI's package homeassistant: catalogues of texts by key, one of every language for each component.
Left out are texts with placeholders, markup, links or several lines, texts equal in both languages, and
single words. An English text has the translation that most components give it. The test part is a tenth
of the texts of four words or more; texts that differ only in case, punctuation or numbers are in the same
part, and what a test text or its translation resembles in this way is not trained on.
"""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from training.packages import Parts, is_test, key_of, members

Pair = tuple[str, str]
SOURCE, TARGET = "en", "de"
NO_PROSE = re.compile(r"[{}<>\[\]`#*_|%\n]|https?:|\[%key")
LEAST_WORDS = 2
TEST_SHARE, TEST_LEAST_WORDS = 0.1, 4


def catalogue(
    texts_by_key: Mapping[str, Any], path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the texts of a catalogue with their keys.

    >>> list(catalogue({"a": {"b": " one ", "c": "two"}}))
    [(('a', 'b'), 'one'), (('a', 'c'), 'two')]
    """
    for key, found in texts_by_key.items():
        if isinstance(found, str):
            yield (*path, key), found.strip()
        else:
            yield from catalogue(found, (*path, key))


def is_prose(pair: Pair) -> bool:
    """Return whether a pair is a sentence or a phrase and its translation.

    >>> is_prose(("Turn it on", "Einschalten")), is_prose(("Turn {name} on", "{name} einschalten"))
    (True, False)
    """
    source, target = pair
    return (
        len(source.split()) >= LEAST_WORDS
        and bool(target)
        and source != target
        and not any(NO_PROSE.search(text) for text in pair)
    )


def translations(pairs: Iterable[Pair]) -> list[Pair]:
    """Return each English text with its most frequent translation, in the order of first occurrence."""
    found: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for source, target in pairs:
        found[source][target] += 1
    return [(source, targets.most_common(1)[0][0]) for source, targets in found.items()]


def pairs_of(package: Path) -> Iterator[Pair]:
    """Yield the pairs of all components of a package."""
    files = dict(members(package, rf".*/translations/({SOURCE}|{TARGET})\.json"))
    for name, content in files.items():
        translated = name.removesuffix(f"{SOURCE}.json") + f"{TARGET}.json"
        if name.endswith(f"{SOURCE}.json") and translated in files:
            source, target = (dict(catalogue(json.loads(each))) for each in (content, files[translated]))
            yield from ((source[key], target[key]) for key in source if key in target)


def ende(package: Path) -> Parts:
    """Return the lines of each file that is made of the package."""
    pairs = translations(filter(is_prose, pairs_of(package)))
    test: dict[str, Pair] = {}
    for pair in pairs:
        key = key_of(pair[0])
        if len(pair[0].split()) >= TEST_LEAST_WORDS and is_test(key, TEST_SHARE):
            test.setdefault(key, pair)
    targets = {key_of(target) for _, target in test.values()}
    train = [pair for pair in pairs if key_of(pair[0]) not in test and key_of(pair[1]) not in targets]
    found = {"train": train, "test": list(test.values())}
    return {
        f"{part}.{language}": [pair[side] for pair in found[part]]
        for part in found
        for side, language in enumerate((SOURCE, TARGET))
    }
