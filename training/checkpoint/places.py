"""Where the checkpoints of a run are: in a folder, or in an object store behind a URL of fsspec.

Both hold a folder of files for each checkpoint. In a folder it is written under another name, and renamed
when it is complete. Objects cannot be renamed: there it is complete once its manifest, written last, exists.
"""

import io
import secrets
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal, TypeAlias

from datacache.errors import SourceChanged, StorageFailed
from datacache.storage import Storage
from datacache.store.files import sync_folder

COMPLETE, STEP = "COMPLETE", "step-"  # the name of a manifest; the prefix of a checkpoint's name
_UNFINISHED = "unfinished-"
_PIECE_BYTES = 8 << 20  # of an object, in one request


@dataclass(frozen=True)
class ObjectPath:
    """The path of an object, as far as checkpoints use a ``pathlib.Path``; errors are ``OSError``."""

    storage: Storage
    path: str

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    def __truediv__(self, name: str) -> "ObjectPath":
        return ObjectPath(self.storage, f"{self.path}/{name}")

    def __str__(self) -> str:
        return f"{self.storage.url}/{self.path}"

    @contextmanager
    def open(self, mode: Literal["rb", "xb"]) -> Iterator[BinaryIO]:
        """Open an object, read into memory, or a new object, which exists once it is closed."""
        with _as_os_error():
            if mode == "rb":
                yield self._content()
            else:
                with self.storage.writing(self.path) as file:
                    yield file

    def _content(self) -> BinaryIO:
        size = self.storage.file(self.path).size
        content = io.BytesIO()
        content.seek(max(0, size - 1))
        content.write(bytes(min(1, size)))  # allocates the memory of the whole object once
        with content.getbuffer() as buffer:

            def fill(start: int) -> None:
                length = min(_PIECE_BYTES, size - start)
                buffer[start : start + length] = self.storage.read(self.path, start, length)

            self.storage.in_parallel(fill, range(0, size, _PIECE_BYTES))
        content.seek(0)
        return content


Location: TypeAlias = Path | ObjectPath


@contextmanager
def _as_os_error() -> Iterator[None]:
    try:
        yield
    except (StorageFailed, SourceChanged) as error:
        raise OSError(str(error)) from error


class Place(ABC):
    """The checkpoints of one run, each a folder with a name that begins with ``step-``.

    One process writes, any number read. Methods raise ``OSError`` where they fail.
    """

    @abstractmethod
    def at(self, name: str) -> Location:
        """Return the folder of this name."""

    @abstractmethod
    def begin(self, step: int) -> str:
        """Return the name of a new folder to write a checkpoint into."""

    def sees(self, name: str) -> bool:
        """Return whether this process sees the folder that another one has begun."""
        return True

    def complete(self, name: str, step: int) -> str:
        """Mark a checkpoint complete once its files, the manifest last, are written; return its name."""
        return name

    @abstractmethod
    def names(self) -> list[str]:
        """Return the names of the complete checkpoints, damaged or not."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Mark a checkpoint as incomplete; ``remove_unfinished`` then removes its files."""

    @abstractmethod
    def remove_unfinished(self) -> None:
        """Remove the files of incomplete checkpoints, as far as possible."""


class Folder(Place):
    """A folder, which is created when needed."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __str__(self) -> str:
        return str(self._path)

    def at(self, name: str) -> Path:
        return self._path / name

    def begin(self, step: int) -> str:
        """Make a folder with a new name, since other hosts may cache old entries."""
        self._path.mkdir(parents=True, exist_ok=True)
        sync_folder(self._path.parent)
        self.remove_unfinished()  # frees room for this one
        path = self._path / f"{_UNFINISHED}{STEP}{step:08d}-{secrets.token_hex(4)}"
        path.mkdir()
        return path.name

    def sees(self, name: str) -> bool:
        return (self._path / name).is_dir()

    def complete(self, name: str, step: int) -> str:
        sync_folder(self._path / name)
        path, attempt = self._path / f"{STEP}{step:08d}", 1
        while path.exists():  # the step was saved before
            attempt += 1
            path = self._path / f"{STEP}{step:08d}-{attempt}"
        (self._path / name).rename(path)
        sync_folder(self._path)
        return path.name

    def names(self) -> list[str]:
        return sorted(path.name for path in self._path.glob(f"{STEP}*"))

    def remove(self, name: str) -> None:
        """Rename it first: a folder with the name of a step is always complete."""
        (self._path / name).rename(self._path / f"{_UNFINISHED}removal-{secrets.token_hex(4)}")

    def remove_unfinished(self) -> None:
        for path in self._path.glob(f"{_UNFINISHED}*"):
            shutil.rmtree(path, ignore_errors=True)


class Objects(Place):
    """Objects below a URL, which all ranks see. A checkpoint without a manifest does not count."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def __str__(self) -> str:
        return self._storage.url

    def at(self, name: str) -> ObjectPath:
        return ObjectPath(self._storage, name)

    def begin(self, step: int) -> str:
        return f"{STEP}{step:08d}-{secrets.token_hex(4)}"

    def names(self) -> list[str]:
        return [name for name, files in self._listed().items() if COMPLETE in files]

    def remove(self, name: str) -> None:
        with suppress(StorageFailed, FileNotFoundError):  # tried again when the next one is complete
            self._storage.remove(f"{name}/{COMPLETE}")

    def remove_unfinished(self) -> None:
        with suppress(OSError):
            for name, files in self._listed().items():
                for file in files if COMPLETE not in files else ():
                    with suppress(StorageFailed, FileNotFoundError):
                        self._storage.remove(f"{name}/{file}")

    def _listed(self) -> dict[str, list[str]]:
        """Return the names of all checkpoints, in order, and of the objects of each."""
        found: dict[str, list[str]] = {}
        with suppress(FileNotFoundError), _as_os_error():  # nothing was ever written
            for each in self._storage.files():
                name, _, file = each.path.partition("/")
                if name.startswith(STEP):
                    found.setdefault(name, []).append(file)
        return found
