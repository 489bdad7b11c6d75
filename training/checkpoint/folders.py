"""Checkpoints: each is complete or does not exist.

A folder ``step-00000040`` holds ``shared.safetensors``, written by rank 0, one ``own-00000.safetensors`` for
each rank, and ``COMPLETE``, the manifest with the length and digest of every file. A checkpoint is written
beside earlier ones (:class:`training.checkpoint.places.Place`), so a crash never damages those. A digest
reveals a damaged file, and the checkpoint before is used instead.

With a place for each host, the lowest rank of each host writes the shared file and the manifest of its place,
which holds the files of this host's ranks. A checkpoint counts if it is complete on all hosts.

A thread of each rank writes the files, and then one of each writer of manifests completes the folder. The
threads communicate with no other rank; ranks agree on their results in the methods of :class:`Checkpoints`.
"""

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from commlib import Communicator, InvalidArgument, RanksDisagree
from commlib.agreement import differences
from training.checkpoint.places import Place
from training.checkpoint.serialization import Tree, Written, write_tree
from training.checkpoint.stored import SHARED, Manifest, StoredCheckpoints, own_file

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
    """A checkpoint that is being written, into the folder ``name``.

    ``work``: this rank's work in the background. It first writes its files; when those of all ranks are
    written, leaders complete the folder (``is_completing``).
    """

    step: int
    number: int
    best: bool
    name: str
    work: "Future[Any]"
    is_completing: bool = False
    since: float = field(default_factory=time.perf_counter)


class Checkpoints:
    """The checkpoints of one run in ``place``, which all ranks of ``comm`` must see.

    The last ``keep`` checkpoints stay, and the last one that was saved as the best. All ranks call every
    method together, but for the properties. Two runs must not save into one place at the same time.
    Checkpoints of another ``run`` than rank 0's are neither found nor removed.

    ``per_host``: each host has a place of its own, which its ranks see. Only as many ranks on the same hosts
    then find the checkpoints. ``stored``: the complete checkpoints.
    """

    def __init__(
        self, place: Place, comm: Communicator, *, run: str = "", keep: int = 3, per_host: bool = False
    ) -> None:
        if keep < 1:
            raise InvalidArgument(f"keep: expected at least 1 checkpoint, got {keep}")
        self.place, self._comm, self._run, self._keep = place, comm, run, keep
        self.stored = StoredCheckpoints(place, comm, run, per_host=per_host)
        self._writing: _Writing | None = None
        self._number: int | None = None  # of the newest checkpoint

    def start(self, step: int, shared: Tree, own: Tree, *, best: bool = False) -> None:
        """Begin to write a checkpoint in the background: ``shared`` of a leader, ``own`` of every rank.

        The previous checkpoint must be complete. The trees are only read, and must not change until this one
        is complete. If any rank cannot write, all raise :class:`CheckpointFailed`, here or in later calls;
        nothing of the checkpoint stays, and earlier checkpoints are unchanged. A step that is saved again, or
        an earlier step, becomes the newest checkpoint.
        """
        if step < 0:
            raise InvalidArgument(f"step: expected at least 0, got {step}")
        assert self._writing is None
        if different := differences(self._comm.allgather_objects({"step": step, "best": best})):
            raise RanksDisagree(f"a checkpoint is not the same on all ranks: {different}")
        number = self._next_number(step)
        names = self._all(step, lambda: self.stored.on_leader(lambda: self.place.begin(step)))
        name = str(names[self.stored.leader])
        kept = self.stored.on_leader(lambda: shared)  # other ranks can free theirs
        work = _in_background(lambda: self._write(name, kept, own))
        self._writing = _Writing(step, number, best, name, work)

    @property
    def is_under_way(self) -> bool:
        """Whether a checkpoint was started and is not complete; equal on all ranks."""
        return self._writing is not None

    @property
    def is_working(self) -> bool:
        """Whether this rank still works on it in the background."""
        return self._writing is not None and not self._writing.work.done()

    def proceed(self) -> Saved | None:
        """Wait until no rank works, and begin the next part; return the checkpoint if it is complete.

        A complete checkpoint is synced to the disk.
        """
        writing = self._writing
        assert writing is not None
        try:
            results = self._all(writing.step, writing.work.result)
        except CheckpointFailed:
            self._writing = None
            self.stored.on_leader(self.place.remove_unfinished)
            raise
        if writing.is_completing:
            self._writing = None
            return Saved(writing.step, time.perf_counter() - writing.since)
        files = {name: written for each in results for name, written in each.items() if name != SHARED}
        files[SHARED] = results[self.stored.leader][SHARED]
        writing.work = _in_background(lambda: self.stored.on_leader(lambda: self._complete(writing, files)))
        writing.is_completing = True
        return None

    def finish(self) -> Saved | None:
        """Wait for the checkpoint that is under way, and return it; ``None`` if none is."""
        saved = None
        while self._writing is not None:
            saved = self.proceed()
        return saved

    def _next_number(self, step: int) -> int:
        """Return the number of a new checkpoint: one above those of all stored ones."""
        if self._number is None:
            listed = self._all(step, lambda: self.stored.on_leader(self.stored.list))
            found = [manifest.number for each in listed if each for _, manifest in each.found]
            self._number = max(found, default=0)
        self._number += 1
        return self._number

    def _write(self, name: str, shared: Tree, own: Tree) -> dict[str, Written]:
        folder, rank = self.place.at(name), self._comm.rank
        if not self.place.sees(name):
            raise FileNotFoundError(
                f"{folder}: rank {self.stored.leader} has made it, and rank {rank} on {self._comm.host} "
                "does not see it: choose a folder on storage that all ranks share"
            )
        written = {own_file(rank): write_tree(folder / own_file(rank), own)}
        if rank == self.stored.leader:
            written[SHARED] = write_tree(folder / SHARED, shared)
        return written

    def _complete(self, writing: _Writing, files: Mapping[str, Written]) -> None:
        """Complete the folder of a checkpoint, and remove old checkpoints."""
        found = self.stored.list().found
        size = self._comm.size
        manifest = Manifest(self._run, writing.step, writing.number, size, writing.best, files)
        manifest.write(self.place.at(writing.name))
        newest_first = [(self.place.complete(writing.name, writing.step), manifest), *found]
        best = [name for name, manifest in newest_first if manifest.best]
        for name, _ in newest_first[self._keep :]:
            if name not in best[:1]:
                self.place.remove(name)
        self.place.remove_unfinished()

    def _all(self, step: int, function: Callable[[], Result]) -> list[Result]:
        """Return what the function returned on every rank; an ``OSError`` on any fails all."""
        result, problem = None, None
        try:
            result = function()
        except OSError as error:
            problem = str(error)
        results: list[Any] = self._comm.allgather_objects((result, problem))
        for rank, (_, each) in enumerate(results):
            if each is not None:
                raise CheckpointFailed(f"{self.place}: step {step} is not saved: rank {rank}: {each}")
        return [result for result, _ in results]


def _in_background(function: Callable[[], Result]) -> "Future[Result]":
    """Call a function in a daemon thread; return its future."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # noqa: BLE001 - raised again where the result is taken
            future.set_exception(error)

    threading.Thread(target=run, name="checkpoint", daemon=True).start()
    return future
