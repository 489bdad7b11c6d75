"""The checkpoints that lie in a place, or in one place of each host, as the ranks of a job find them."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from commlib import Communicator, InvalidArgument
from training.checkpoint.manifest import SHARED, Manifest, own_file
from training.checkpoint.other_world import taken_over
from training.checkpoint.places import Location, Place
from training.checkpoint.serialization import Damaged, Tree, Written, check_file, read_tree, reason
from training.process.job import log_error

Result = TypeVar("Result")


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint. ``own`` is ``None`` if it was written by another number of ranks."""

    step: int
    path: Location
    world_size: int
    shared: Tree = field(repr=False)
    own: Tree = field(repr=False)
    files: Mapping[str, Written] = field(repr=False)

    def own_of(self, rank: int) -> Tree:
        """Return what ``rank`` wrote, read again from its file; raises :class:`Damaged`."""
        if not 0 <= rank < self.world_size:
            raise InvalidArgument(f"rank: expected 0 to {self.world_size - 1}, got {rank}")
        return read_tree(self.path / own_file(rank), self.files[own_file(rank)])


@dataclass(frozen=True)
class Listed:
    """What a first rank finds in its place: names and manifests, and a line for each that is damaged."""

    found: list[tuple[str, Manifest]] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)


class StoredCheckpoints:
    """The checkpoints of ``run`` in ``place``; with ``per_host`` each host has a place of its own.

    All ranks call every method together, but for ``on_first`` and ``list``. ``first_rank``: of the ranks that
    see this rank's place.
    """

    def __init__(self, place: Place, comm: Communicator, run: str, *, per_host: bool) -> None:
        self.place, self._comm, self._run = place, comm, run
        hosts = comm.allgather_objects(comm.host if per_host else "")
        self.first_rank = hosts.index(hosts[comm.rank])

    def on_first(self, function: Callable[[], Result]) -> Result | None:
        """Return what the function returns on the first rank of a place, and ``None`` on others."""
        return function() if self._comm.rank == self.first_rank else None

    def complete(self, *, at_most: int | None = None) -> Iterator[Checkpoint]:
        """Yield the checkpoints that all ranks can read, newest first; all ranks take the same number.

        ``at_most``: those of this step and earlier ones. Rank 0 prints a line for each damaged one. With
        another world size each rank checks the files of the ranks whose residuals
        :func:`training.checkpoint.other_world.merged` gives to it.
        """
        lists = self._all_lists()
        mine = {manifest.number: (name, manifest) for name, manifest in lists[self.first_rank].found}
        hosts = [{manifest.number for _, manifest in each.found} for each in lists.values()]
        if self._comm.rank == 0:
            for each in dict.fromkeys(line for listed in lists.values() for line in listed.damaged):
                log_error(f"warning: a checkpoint is left out: {each}")
        for number in sorted(set.intersection(*hosts), reverse=True):
            name, manifest = mine[number]
            if at_most is None or manifest.step <= at_most:
                checkpoint = self.usable(manifest.step, partial(self._read, self.place.at(name), manifest))
                if checkpoint is not None:
                    yield checkpoint

    def count(self) -> int:
        """Return how many checkpoints there are, damaged or not; on several hosts the most of any."""
        counts = self._comm.allgather_objects(self.on_first(lambda: len(self.place.names())))
        return int(max(count for count in counts if count is not None))

    def usable(self, step: int, function: Callable[[], Result]) -> Result | None:
        """Return ``function()``, or ``None`` on all ranks if on any it finds a checkpoint damaged.

        Rank 0 then prints a line, which names the ``step`` of the checkpoint.
        """
        result, problem = None, None
        try:
            result = function()
        except Damaged as error:
            problem = str(error)
        problems = [each for each in dict.fromkeys(self._comm.allgather_objects(problem)) if each]
        if self._comm.rank == 0:
            for each in problems:
                log_error(f"warning: the checkpoint of step {step} is left out: {each}")
        return None if problems else result

    def list(self) -> Listed:
        """Return what is in the place of this rank, newest first."""
        listed = Listed()
        for name in self.place.names():
            try:
                listed.found.append((name, Manifest.read(self.place.at(name), self._run)))
            except Damaged as error:
                listed.damaged.append(str(error))
        listed.found.sort(key=lambda each: each[1].number, reverse=True)
        return listed

    def _all_lists(self) -> dict[int, Listed]:
        """Return what each first rank finds; ``ValueError`` on all ranks where one's place cannot be read."""
        result, problem = None, None
        try:
            result = self.on_first(self.list)
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
