"""Where the checkpoints of a run lie: in a folder, or on a storage of objects behind a URL of fsspec.

Both hold a folder of files for each checkpoint. In a folder it is written under another name, and renamed
when it is complete. Objects cannot be renamed: there it is complete when its manifest is there, which is
written last.
"""

import io
import secrets
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal, TypeAlias

from datacache.errors import SourceChanged, StorageFailed
from datacache.storage import Storage
from datacache.store.files import sync_folder

COMPLETE, STEP = "COMPLETE", "step-"  # the name of a manifest; what the name of a checkpoint begins with
_UNFINISHED = "unfinished-"
_PIECE_BYTES = 8 << 20  # of an object, in one request


@dataclass(frozen=True)
class ObjectPath:
    """The path of an object, with as much of the interface of ``pathlib.Path`` as checkpoints take.

    What a storage fails with is an ``OSError``, as from a disk.
    """

    storage: Storage
    path: str

    @property
    def name(self) -> str:
        """The last part of it."""
        return self.path.rpartition("/")[2]

    def __truediv__(self, name: str) -> "ObjectPath":
        return ObjectPath(self.storage, f"{self.path}/{name}")

    def __str__(self) -> str:
        return f"{self.storage.url}/{self.path}"

    def open(self, mode: Literal["rb", "xb"]) -> AbstractContextManager[BinaryIO]:
        """Open an object that is read into memory, or a new one, which is there when it is closed."""
        return self._read() if mode == "rb" else self._written()

    @contextmanager
    def _written(self) -> Iterator[BinaryIO]:
        with _as_os_error(), self.storage.writing(self.path) as file:
            yield file

    @contextmanager
    def _read(self) -> Iterator[BinaryIO]:
        with _as_os_error():
            size = self.storage.file(self.path).size
            content = io.BytesIO()
            content.seek(max(0, size - 1))
            content.write(bytes(min(1, size)))  # takes the memory of all of it, once
            with content.getbuffer() as buffer:

                def fill(start: int) -> None:
                    length = min(_PIECE_BYTES, size - start)
                    buffer[start : start + length] = self.storage.read(self.path, start, length)

                self.storage.in_parallel(fill, range(0, size, _PIECE_BYTES))
        content.seek(0)
        yield content


Location: TypeAlias = Path | ObjectPath


@contextmanager
def _as_os_error() -> Iterator[None]:
    try:
        yield
    except (StorageFailed, SourceChanged) as error:
        raise OSError(str(error)) from error


class Place(ABC):
    """The checkpoints of one run, each a folder with a name that begins with ``step-``.

    One process writes, any number read. ``OSError`` where it fails.
    """

    @abstractmethod
    def at(self, name: str) -> Location:
        """Return the folder of this name."""

    @abstractmethod
    def begin(self, step: int) -> str:
        """Return the name of a new folder to write a checkpoint into."""

    @abstractmethod
    def sees(self, name: str) -> bool:
        """Return whether this process sees the folder that another one has begun."""

    @abstractmethod
    def complete(self, name: str, step: int) -> str:
        """Let a checkpoint count whose files are all written, the manifest last; return its name."""

    @abstractmethod
    def names(self) -> list[str]:
        """Return the names of those that count, damaged or not."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Let a checkpoint not count any more; what cannot be removed is, with those that are unfinished."""

    @abstractmethod
    def remove_unfinished(self) -> None:
        """Remove what is written now, and what crashes have left, as far as possible."""


class Folder(Place):
    """A folder, which is created when needed."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __str__(self) -> str:
        return str(self._path)

    def at(self, name: str) -> Path:
        """Return the folder of this name."""
        return self._path / name

    def begin(self, step: int) -> str:
        """Make a new folder; its name is new, since other hosts may cache old entries."""
        self._path.mkdir(parents=True, exist_ok=True)
        sync_folder(self._path.parent)
        self.remove_unfinished()  # it may take the room that this one needs
        path = self._path / f"{_UNFINISHED}{STEP}{step:08d}-{secrets.token_hex(4)}"
        path.mkdir()
        return path.name

    def sees(self, name: str) -> bool:
        """Return whether the folder is there."""
        return (self._path / name).is_dir()

    def complete(self, name: str, step: int) -> str:
        """Sync and rename it."""
        sync_folder(self._path / name)
        path = self._free_name(step)
        (self._path / name).rename(path)
        sync_folder(self._path)
        return path.name

    def _free_name(self, step: int) -> Path:
        """Return a path named after the step, with a number appended if that name is taken."""
        path, attempt = self._path / f"{STEP}{step:08d}", 1
        while path.exists():
            attempt += 1
            path = self._path / f"{STEP}{step:08d}-{attempt}"
        return path

    def names(self) -> list[str]:
        """Return the names of all folders of checkpoints; none where there is nothing."""
        return sorted(path.name for path in self._path.glob(f"{STEP}*"))

    def remove(self, name: str) -> None:
        """Rename it first: a folder with the name of a step is always complete."""
        (self._path / name).rename(self._path / f"{_UNFINISHED}removal-{secrets.token_hex(4)}")

    def remove_unfinished(self) -> None:
        """Remove the folders that have no name of a step."""
        for path in self._path.glob(f"{_UNFINISHED}*"):
            shutil.rmtree(path, ignore_errors=True)


class Objects(Place):
    """Objects below a URL. Those of a checkpoint without a manifest do not count."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def __str__(self) -> str:
        return self._storage.url

    def at(self, name: str) -> ObjectPath:
        """Return the path below which the objects of a checkpoint are."""
        return ObjectPath(self._storage, name)

    def begin(self, step: int) -> str:
        """Return a new name; nothing is written."""
        return f"{STEP}{step:08d}-{secrets.token_hex(4)}"

    def sees(self, name: str) -> bool:
        """Return true: a storage that is no folder is one for all."""
        return True

    def complete(self, name: str, step: int) -> str:
        """Return the name: the manifest is there."""
        return name

    def names(self) -> list[str]:
        """Return the names of those that have a manifest."""
        return [name for name, files in self._listed().items() if COMPLETE in files]

    def remove(self, name: str) -> None:
        """Remove the manifest."""
        with suppress(StorageFailed, FileNotFoundError):  # it is tried again when the next one is complete
            self._storage.remove(f"{name}/{COMPLETE}")

    def remove_unfinished(self) -> None:
        """Remove the objects of checkpoints that have no manifest."""
        with suppress(OSError):
            for name, files in self._listed().items():
                for file in files if COMPLETE not in files else ():
                    with suppress(StorageFailed, FileNotFoundError):
                        self._storage.remove(f"{name}/{file}")

    def _listed(self) -> dict[str, list[str]]:
        """Return the names of all checkpoints, in order, and of the objects of each."""
        found: dict[str, list[str]] = {}
        try:
            with _as_os_error():
                listed = self._storage.files()
        except FileNotFoundError:  # nothing was ever written
            return {}
        for each in listed:
            name, _, file = each.path.partition("/")
            if name.startswith(STEP):
                found.setdefault(name, []).append(file)
        return found
