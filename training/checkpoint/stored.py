"""The complete checkpoints of a run in a place, or in a place of each host, and how ranks read them.

The manifest of a checkpoint is the file ``COMPLETE`` in its folder, written last.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TypeVar

import numpy as np
from pydantic import NonNegativeInt, PositiveInt
from xxhash import xxh3_128_hexdigest

from commlib import Communicator, InvalidArgument
from commlib.vectors import Float32
from training.checkpoint.places import COMPLETE, Location, Place
from training.checkpoint.serialization import (
    Damaged,
    Tree,
    Written,
    check_file,
    check_format,
    expect_equal,
    parsed,
    read_tree,
    reason,
    sync,
)
from training.process.job import log_error

FORMAT = 3  # of folders and files; since 3 a checkpoint names its task
SHARED = "shared.safetensors"

Result = TypeVar("Result")


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
        if not 0 <= rank < self.world_size:
            raise InvalidArgument(f"rank: expected 0 to {self.world_size - 1}, got {rank}")
        return read_tree(self.path / own_file(rank), self.files[own_file(rank)])


@dataclass(frozen=True)
class Listed:
    """The checkpoints in one place: names with manifests, newest first, and a line for each damaged one."""

    found: list[tuple[str, Manifest]] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)


class StoredCheckpoints:
    """The checkpoints of ``run`` in ``place``; with ``per_host`` each host has a place of its own.

    All ranks call every method together, but for ``on_leader`` and ``list``. ``leader``: the lowest of the
    ranks that share this rank's place.
    """

    def __init__(self, place: Place, comm: Communicator, run: str, *, per_host: bool) -> None:
        self.place, self._comm, self._run = place, comm, run
        hosts = comm.allgather_objects(comm.host if per_host else "")
        self.leader = hosts.index(hosts[comm.rank])

    def on_leader(self, function: Callable[[], Result]) -> Result | None:
        """Return the function's result on the leader of a place, and ``None`` on other ranks."""
        return function() if self._comm.rank == self.leader else None

    def complete(self, *, at_most: int | None = None) -> Iterator[Checkpoint]:
        """Yield the checkpoints that all ranks can read, newest first; all ranks take the same number.

        ``at_most``: only of this step and earlier ones. Rank 0 prints a line for each damaged one. With
        another world size each rank checks the files of the ranks whose residuals :func:`merged` gives to it.
        """
        lists = self._all_lists()
        mine = {manifest.number: (name, manifest) for name, manifest in lists[self.leader].found}
        hosts = [{manifest.number for _, manifest in each.found} for each in lists.values()]
        self._warn("a checkpoint", [line for listed in lists.values() for line in listed.damaged])
        for number in sorted(set.intersection(*hosts), reverse=True):
            name, manifest = mine[number]
            if at_most is None or manifest.step <= at_most:
                checkpoint = self.usable(manifest.step, partial(self._read, self.place.at(name), manifest))
                if checkpoint is not None:
                    yield checkpoint

    def count(self) -> int:
        """Return how many checkpoints there are, damaged or not; on several hosts the most of any."""
        counts = self._comm.allgather_objects(self.on_leader(lambda: len(self.place.names())))
        return int(max(count for count in counts if count is not None))

    def usable(self, step: int, function: Callable[[], Result]) -> Result | None:
        """Return ``function()``, or ``None`` on all ranks if it raises :class:`Damaged` on any.

        Rank 0 then prints a line, which names the ``step`` of the checkpoint.
        """
        result, problem = None, None
        try:
            result = function()
        except Damaged as error:
            problem = str(error)
        problems = [each for each in self._comm.allgather_objects(problem) if each]
        self._warn(f"the checkpoint of step {step}", problems)
        return None if problems else result

    def list(self) -> Listed:
        """Return the checkpoints in the place of this rank."""
        listed = Listed()
        for name in self.place.names():
            try:
                listed.found.append((name, Manifest.read(self.place.at(name), self._run)))
            except Damaged as error:
                listed.damaged.append(str(error))
        listed.found.sort(key=lambda each: each[1].number, reverse=True)
        return listed

    def _all_lists(self) -> dict[int, Listed]:
        """Return the list of each leader; ``ValueError`` on all ranks where a place cannot be read."""
        result, problem = None, None
        try:
            result = self.on_leader(self.list)
        except OSError as error:
            problem = f"checkpoints: {self.place}: expected a place that can be read: {reason(error)}"
        gathered = self._comm.allgather_objects((result, problem))
        if problems := [each for _, each in gathered if each is not None]:
            raise ValueError(problems[0])
        return {rank: each for rank, (each, _) in enumerate(gathered) if each is not None}

    def _read(self, path: Location, manifest: Manifest) -> Checkpoint:
        files, own = manifest.files, None
        if manifest.world_size == self._comm.size:
            own = read_tree(path / own_file(self._comm.rank), files[own_file(self._comm.rank)])
        else:
            for rank in taken_over(manifest.world_size, self._comm.rank, self._comm.size):
                check_file(path / own_file(rank), files[own_file(rank)])
        shared = read_tree(path / SHARED, files[SHARED])
        return Checkpoint(manifest.step, path, manifest.world_size, shared, own, files)

    def _warn(self, what: str, problems: Iterable[str]) -> None:
        """Print each problem once, on rank 0."""
        for each in dict.fromkeys(problems) if self._comm.rank == 0 else ():
            log_error(f"warning: {what} is left out: {each}")


def taken_over(world_size: int, rank: int, size: int) -> range:
    """Return the ranks of the earlier world of ``world_size`` whose state ``rank`` of ``size`` takes over.

    >>> [list(taken_over(5, rank, 2)) for rank in range(2)]
    [[0, 2, 4], [1, 3]]
    >>> [list(taken_over(2, rank, 3)) for rank in range(3)]
    [[0], [1], []]
    """
    return range(rank, world_size, size)


def merged(
    residual_of: Callable[[int], Float32], length: int, *, world_size: int, rank: int, size: int
) -> Float32:
    """Return the residual of ``rank`` in a world of ``size``: the sum of the residuals that it takes over.

    ``residual_of(rank)`` returns a vector of shape ``(length,)`` for a rank of the earlier world of
    ``world_size``; it is called for one rank after another, in order. The sum is computed in float64 and
    rounded once; a rank that takes over none gets zeros. The sum over all ranks is preserved to this
    rounding.
    """
    ranks = taken_over(world_size, rank, size)
    if len(ranks) == 1:
        return np.array(residual_of(rank), np.float32)
    total = np.zeros(length, np.float64)
    for each in ranks:
        total += residual_of(each)
    return total.astype(np.float32)
