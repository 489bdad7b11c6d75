"""A complete checkpoint: its manifest, the trees of ranks, and which residuals a rank takes over."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np
from pydantic import NonNegativeInt, PositiveInt
from xxhash import xxh3_128_hexdigest

from commlib.vectors import Float32
from training.checkpoint.places import COMPLETE, Location
from training.checkpoint.serialization import (
    Damaged,
    Tree,
    Written,
    check_format,
    expect_equal,
    parsed,
    read_tree,
    reason,
    sync,
)

FORMAT = 3  # of folders and files; since 3 a checkpoint names its task
SHARED = "shared.safetensors"


def own_file(rank: int) -> str:
    """Return the name of the file that a rank writes."""
    return f"own-{rank:05d}.safetensors"


@dataclass(frozen=True)
class Manifest:
    """The content of ``COMPLETE``: a line of JSON, and a line with its digest.

    ``run``: the identity of the run. ``number`` counts the saves into a folder, since steps may go back.
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
            file.write(body + b"\n" + _digest_line(body))
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
        if digest != _digest_line(body):
            raise Damaged(f"{path}: not what was written")
        try:
            check_format(body, FORMAT)
            found = parsed(cls, body)
            expect_equal("step", folder.name.split("-")[1], f"{found.step:08d}")
            expect_equal("run", run, found.run)
            expect_equal("world_size", len(found.files) - 1, found.world_size)  # it may be any number
            files = sorted([*map(own_file, range(found.world_size)), SHARED])
            expect_equal("files", files, sorted(found.files))
        except ValueError as error:
            raise Damaged(f"{path}: {error}") from error
        return found


def _digest_line(body: bytes) -> bytes:
    return f"{xxh3_128_hexdigest(body)}\n".encode()


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint. ``own`` is ``None`` if another number of ranks wrote it."""

    step: int
    path: Location
    world_size: int
    shared: Tree = field(repr=False)
    own: Tree = field(repr=False)
    files: Mapping[str, Written] = field(repr=False)

    def own_of(self, rank: int) -> Tree:
        """Return the tree that ``rank`` wrote, read from its file now; raises :class:`Damaged`."""
        return read_tree(self.path / own_file(rank), self.files[own_file(rank)])


def taken_over(world_size: int, rank: int, size: int) -> range:
    """Return the ranks of the earlier world of ``world_size`` whose state ``rank`` of ``size`` takes over.

    >>> [list(taken_over(5, rank, 2)) for rank in range(2)]
    [[0, 2, 4], [1, 3]]
    >>> [list(taken_over(2, rank, 3)) for rank in range(3)]
    [[0], [1], []]
    """
    return range(rank, world_size, size)


def merged(residual_of: Callable[[int], Float32], length: int, ranks: Sequence[int]) -> Float32:
    """Return the sum of the residuals of the ranks of an earlier world that :func:`taken_over` names.

    ``residual_of(rank)`` returns a vector of shape ``(length,)``; it is called in order. The sum is computed
    in float64 and rounded once, to which the sum over all ranks is preserved.
    """
    if len(ranks) == 1:
        return np.array(residual_of(ranks[0]), np.float32)
    total = np.zeros(length, np.float64)
    for rank in ranks:
        total += residual_of(rank)
    return total.astype(np.float32)
