"""Checkpoints: each is complete or does not exist.

A folder ``step-00000040`` holds ``shared.safetensors``, written by rank 0, one ``own-00000.safetensors`` for
each rank, and ``COMPLETE``, the manifest with the length and digest of every file. It is written beside
earlier ones, so a crash never damages those; where a digest reveals damage, the one before is used instead.

With a place for each host, the lowest rank of each host writes the shared file and the manifest of its place,
which holds the files of this host's ranks. A checkpoint counts if it is complete on all hosts.

A thread of each rank writes its files; then a thread of each rank that writes a manifest completes the
folder. Threads do not communicate with other ranks: the methods of :class:`Checkpoints` gather their results.
"""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np
from pydantic import NonNegativeInt, PositiveInt
from xxhash import xxh3_128_hexdigest

from commlib import Communicator, RanksDisagree
from commlib.agreement import differences
from commlib.vectors import Float32
from datacache.storage import ThreadPool
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
    write_tree,
)
from training.process.job import all_or_raise, attempt, log_error

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
    in float64 and rounded once: up to that rounding, the sum over all ranks stays the same.
    """
    if len(ranks) == 1:
        return np.array(residual_of(ranks[0]), np.float32)
    total = np.zeros(length, np.float64)
    for rank in ranks:
        total += residual_of(rank)
    return total.astype(np.float32)


Result = TypeVar("Result")


class CheckpointFailed(RuntimeError):
    """A checkpoint could not be written on some rank; earlier checkpoints are unchanged."""


@dataclass(frozen=True)
class Saved:
    """A complete checkpoint; ``write_seconds``: from ``start`` until it was complete."""

    step: int
    write_seconds: float


@dataclass
class _Writing:
    """A checkpoint that is being written, into the folder ``name``. ``work``: this rank's, in the background.

    It first writes its files; when those of all ranks are written, leaders complete the folder.
    """

    step: int
    number: int
    best: bool
    name: str
    work: "Future[Any]"
    is_completing: bool = False
    since: float = field(default_factory=time.perf_counter)


@dataclass(frozen=True)
class Listed:
    """The checkpoints in one place: names with manifests, newest first, and a line for each damaged one."""

    found: list[tuple[str, Manifest]] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)


class Checkpoints:
    """The checkpoints of one run in ``place``, which all ranks of ``comm`` must see.

    The last ``keep`` stay, and the last one that was saved as the best. All ranks call every method together,
    but for the properties. Checkpoints of another ``run`` than rank 0's are neither found nor removed.

    ``per_host``: each host has a place of its own, which its ranks see. Only as many ranks on the same hosts
    then find the checkpoints, of which at least two stay.
    """

    def __init__(
        self, place: Place, comm: Communicator, *, run: str = "", keep: int = 3, per_host: bool = False
    ) -> None:
        self.place, self._comm, self._run = place, comm, run
        # A host that fails while others complete a checkpoint has only the one before, which all then need.
        self._keep, self._keep_best = (max(keep, 2), 2) if per_host else (keep, 1)
        hosts = comm.allgather_objects(comm.host if per_host else "")
        self._leader = hosts.index(hosts[comm.rank])  # the lowest of the ranks that share this rank's place
        self._threads = ThreadPool("checkpoint")
        self._writing: _Writing | None = None
        self._number: int | None = None  # of the newest checkpoint, once the stored ones were listed

    def _on_leader(self, function: Callable[[], Result]) -> Result | None:
        """Return the function's result on the leader of a place, and ``None`` on other ranks."""
        return function() if self._comm.rank == self._leader else None

    # ---------------------------------------------------------------------------------------- saving

    def start(self, step: int, shared: Tree, own: Tree, *, best: bool = False) -> None:
        """Begin to write a checkpoint in the background: ``shared`` of a leader, ``own`` of every rank.

        The previous checkpoint must be complete. The trees are only read, and must not change until this one
        is complete. If any rank cannot write, all raise :class:`CheckpointFailed`, here or in later calls;
        nothing of this one stays. A step that is saved again, or an earlier step, becomes the newest.
        """
        assert self._writing is None
        if different := differences(self._comm.allgather_objects({"step": step, "best": best})):
            raise RanksDisagree(f"a checkpoint is not the same on all ranks: {different}")
        if self._number is None:
            listed = self._all(step, lambda: self._on_leader(self._list))
            found = [manifest.number for each in listed if each for _, manifest in each.found]
            self._number = max(found, default=0)
        self._number += 1
        names = self._all(step, lambda: self._on_leader(lambda: self.place.begin(step)))
        name = str(names[self._leader])
        kept = self._on_leader(lambda: shared)  # other ranks can free theirs
        work = self._threads.submit(lambda: self._write(name, kept, own))
        self._writing = _Writing(step, self._number, best, name, work)

    @property
    def is_under_way(self) -> bool:
        """Whether a checkpoint was started and is not complete; equal on all ranks."""
        return self._writing is not None

    @property
    def is_working(self) -> bool:
        """Whether this rank still works on it in the background."""
        return self._writing is not None and not self._writing.work.done()

    def proceed(self) -> Saved | None:
        """Wait until no rank works, and begin the next part; return the checkpoint once it is on the disk."""
        writing = self._writing
        assert writing is not None
        try:
            results = self._all(writing.step, writing.work.result)
        except CheckpointFailed:
            self._writing = None
            self._on_leader(self.place.remove_unfinished)
            raise
        if writing.is_completing:
            self._writing = None
            return Saved(writing.step, time.perf_counter() - writing.since)
        files = {name: written for each in results for name, written in each.items() if name != SHARED}
        files[SHARED] = results[self._leader][SHARED]
        writing.work = self._threads.submit(lambda: self._on_leader(lambda: self._seal(writing, files)))
        writing.is_completing = True
        return None

    def finish(self) -> Saved | None:
        """Wait for the checkpoint that is under way, and return it; ``None`` if none is."""
        saved = None
        while self._writing is not None:
            saved = self.proceed()
        return saved

    def _write(self, name: str, shared: Tree, own: Tree) -> dict[str, Written]:
        folder, rank = self.place.at(name), self._comm.rank
        if not self.place.sees(name):
            raise FileNotFoundError(
                f"{folder}: rank {self._leader} has made it, and rank {rank} on {self._comm.host} "
                "does not see it: choose a folder on storage that all ranks share"
            )
        written = {own_file(rank): write_tree(folder / own_file(rank), own)}
        if rank == self._leader:
            written[SHARED] = write_tree(folder / SHARED, shared)
        return written

    def _seal(self, writing: _Writing, files: Mapping[str, Written]) -> None:
        found = self._list().found
        manifest = Manifest(self._run, writing.step, writing.number, self._comm.size, writing.best, files)
        manifest.write(self.place.at(writing.name))
        newest_first = [(self.place.complete(writing.name, writing.step), manifest), *found]
        best = [name for name, manifest in newest_first if manifest.best]
        for name, _ in newest_first[self._keep :]:
            if name not in best[: self._keep_best]:
                self.place.remove(name)
        self.place.remove_unfinished()

    def _all(self, step: int, function: Callable[[], Result]) -> list[Result]:
        """Return what the function returned on every rank; an ``OSError`` on any fails all."""
        results: list[Any] = self._comm.allgather_objects(attempt(function, OSError))
        for rank, (_, each) in enumerate(results):
            if each is not None:
                raise CheckpointFailed(f"{self.place}: step {step} is not saved: rank {rank}: {each}")
        return [result for result, _ in results]

    # --------------------------------------------------------------------------------------- reading

    def complete(self, *, at_most: int | None = None) -> Iterator[Checkpoint]:
        """Yield the checkpoints that all ranks can read, newest first; all ranks take the same number.

        ``at_most``: only of this step and earlier ones. Rank 0 prints a line for each damaged one. With
        another world size each rank checks the files of the ranks whose residuals :func:`merged` gives to it.
        """
        lists = self._all_lists()
        mine = {manifest.number: (name, manifest) for name, manifest in lists[self._leader].found}
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
        counts = self._comm.allgather_objects(self._on_leader(lambda: len(self.place.names())))
        return int(max(count for count in counts if count is not None))

    def usable(self, step: int, function: Callable[[], Result]) -> Result | None:
        """Return ``function()``, or ``None`` on all ranks, with a warning, if any raises :class:`Damaged`."""
        result, problem = attempt(function, Damaged)
        problems = [each for each in self._comm.allgather_objects(problem) if each]
        self._warn(f"the checkpoint of step {step}", problems)
        return None if problems else result

    def _list(self) -> Listed:
        """Return the checkpoints in the place of this rank; called by each leader alone."""
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

        def lists() -> Listed | None:
            try:
                return self._on_leader(self._list)
            except OSError as error:
                expected = "expected a place that can be read"
                raise ValueError(f"checkpoints: {self.place}: {expected}: {reason(error)}") from error

        gathered = self._comm.allgather_objects(all_or_raise(self._comm, lists))
        return {rank: each for rank, each in enumerate(gathered) if each is not None}

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
        for each in dict.fromkeys(problems) if self._comm.rank == 0 else ():
            log_error(f"warning: {what} is left out: {each}")
