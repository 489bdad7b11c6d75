"""The manifest of a checkpoint: the file ``COMPLETE`` in its folder, written last."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from pydantic import NonNegativeInt, PositiveInt
from xxhash import xxh3_128_hexdigest

from training.checkpoint.places import COMPLETE, Location
from training.checkpoint.serialization import Damaged, Written, parsed, reason, sync

FORMAT = 3  # of folders and files; since 3 a checkpoint names its task
SHARED = "shared.safetensors"


def own_file(rank: int) -> str:
    """Return the name of the file that a rank writes."""
    return f"own-{rank:05d}.safetensors"


@dataclass(frozen=True)
class Manifest:
    """The content of ``COMPLETE``: a line of JSON, and a line with the digest of it.

    ``run``: the identity of the run. ``number`` counts the saves into a folder, as steps may go back.
    """

    run: str
    step: NonNegativeInt
    number: PositiveInt
    world_size: PositiveInt
    best: bool
    files: Mapping[str, Written]
    format: int = FORMAT

    def write(self, folder: Location) -> None:
        """Write it into the folder of a checkpoint, synced."""
        body = json.dumps(asdict(self)).encode()
        with (folder / COMPLETE).open("xb") as file:
            file.write(body + b"\n" + _last_line(body))
            sync(file)

    @classmethod
    def read(cls, folder: Location, run: str) -> "Manifest":
        """Return the manifest of a folder; :class:`Damaged` unless run and step are those of the folder."""
        path = folder / COMPLETE
        try:
            with path.open("rb") as file:
                body, _, digest = file.read().partition(b"\n")
        except OSError as error:
            raise Damaged(f"{path}: cannot be read: {reason(error)}") from error
        if digest != _last_line(body):
            raise Damaged(f"{path}: not what was written")
        try:
            expect_equal("format", FORMAT, parsed(Version, body).format)
            found = parsed(cls, body)
            expect_equal("step", folder.name.split("-")[1], f"{found.step:08d}")
            expect_equal("run", run, found.run)
            expect_equal("world_size", len(found.files) - 1, found.world_size)  # it may be any number
            files = sorted([*map(own_file, range(found.world_size)), SHARED])
            expect_equal("files", files, sorted(found.files))
        except ValueError as error:
            raise Damaged(f"{path}: {error}") from error
        return found


@dataclass(frozen=True)
class Version:
    """The version of a file's format."""

    format: int


def expect_equal(name: str, expected: object, found: object) -> None:
    """Raise ``ValueError`` that names what was found, unless that is what was expected."""
    if found != expected:
        raise ValueError(f"expected {name} {expected}, got {found}")


def _last_line(body: bytes) -> bytes:
    return f"{xxh3_128_hexdigest(body)}\n".encode()
