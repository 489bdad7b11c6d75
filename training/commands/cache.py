"""``cloudtrain cache``: fill, list, verify, repair and remove the folders of a node's cache."""

import sys
from collections.abc import Iterator, Sequence
from functools import partial

from commlib import Topology
from datacache import management
from datacache.capacity import readable
from datacache.errors import Untrusted
from datacache.levels import CacheDirs
from datacache.management import CacheFolder
from datacache.sources.base import superseded
from training.commands.printing import NOTHING, Table
from training.config.config import load
from training.config.records import Cache
from training.process.job import all_or_exit, as_rank, usage_error
from training.run.data import PhaseData, cache_dirs_of, load_data
from training.run.parts import load_together

AUTO = Cache(disk="auto", memory="auto")


def build(path: str, overrides: Sequence[str]) -> None:
    """Fill this node's cache for all phases, each rank a part; its first rank reports its own part."""
    for number, phase, topology in _phases(path, overrides):
        is_silent = topology.node.rank > 0
        phase.fill(partial(_report, f"phase {number}", is_silent))
        topology.world.barrier()


def repair(path: str, overrides: Sequence[str]) -> None:
    """Read all that this node's cache stores for a configuration, and replace damaged records."""
    for number, phase, topology in _phases(path, overrides):
        if topology.node.rank == 0:
            print(f"phase {number}: {phase.repair()} damaged records read again", flush=True)
        topology.world.barrier()


def _phases(path: str, overrides: Sequence[str]) -> Iterator[tuple[int, PhaseData, Topology]]:
    """Yield the number and the data of each phase, on every rank of this job."""
    with as_rank() as comm:
        config = all_or_exit(comm, lambda: load_together(comm, path, overrides))
        if all_or_exit(comm, lambda: cache_dirs_of(config.cache)) == CacheDirs():
            usage_error(f"{path}: cache: expected a folder for disk or memory, got none")
        topology = all_or_exit(comm, lambda: Topology(comm, ranks_per_node=config.ranks_per_node))
        data = all_or_exit(comm, lambda: load_data(config, topology))
        for number, phase in enumerate(config.phases, 1):
            of_phase = data.of_phase(phase)
            yield number, of_phase, topology
            of_phase.close()


def _report(what: str, is_silent: bool, done: int, total: int) -> None:
    if total and not is_silent and (done == total or sys.stdout.isatty()):
        end = "\n" if done == total else "\r"
        print(f"{what}: {done:,} of {total:,} samples", end=end, flush=True)


def _folders(path: str | None, overrides: Sequence[str]) -> list[CacheFolder]:
    try:
        dirs = cache_dirs_of(AUTO if path is None else load(path, overrides).cache)
        outdated = superseded(dirs.disk) if dirs.disk else ()
        roots = [root for root in (dirs.disk, dirs.memory) if root]
        return [each for root in roots for each in management.list_folders(root, outdated)]
    except (ValueError, Untrusted) as error:
        usage_error(str(error))


def info(path: str | None, overrides: Sequence[str]) -> None:
    """Print the contents of a configuration's cache, or of the default folders."""
    folders = _folders(path, overrides)
    if not folders:
        print("nothing is stored here")
        return
    header = ["folder", "level", "samples", "size", "state", "requested", "found", "in use", "days"]
    Table("samples that are stored here", header, [_row(each) for each in folders]).print()
    for root in dict.fromkeys(each.path.parent for each in folders):
        own = [each for each in folders if each.path.parent == root]
        print(f"{root}: {readable(sum(each.bytes for each in own))} in {len(own)} folders")


def _row(folder: CacheFolder) -> list[str]:
    return [
        folder.path.name[:16],
        NOTHING if folder.level is None else str(folder.level),
        f"{folder.samples:,}",
        readable(folder.bytes),
        folder.state,
        f"{folder.requested:,}",
        f"{folder.found / folder.requested:.1%}" if folder.requested else NOTHING,
        "yes" if folder.in_use else "no",
        f"{folder.days:.1f}",
    ]


def verify(path: str | None, overrides: Sequence[str]) -> int:
    """Print the damaged records of every folder; return the exit status."""
    verdicts = [management.verify(each) for each in _folders(path, overrides)]
    for verdict in verdicts:
        what = verdict.unreadable or f"{verdict.damaged:,} of {verdict.records:,} records damaged"
        print(f"{verdict.folder.path}: {what}")
    return int(any(verdict.damaged or verdict.unreadable for verdict in verdicts))


def remove(path: str | None, overrides: Sequence[str], *, everything: bool) -> None:
    """Remove the folders that no running job uses; print which are removed and which stay."""
    for folder in _folders(path, overrides):
        if management.collect_garbage(folder, everything=everything):
            print(f"{folder.path}: removed, {readable(folder.bytes)}")
        elif folder.in_use:
            print(f"{folder.path}: in use, stays")
        else:
            print(f"{folder.path}: complete samples of level 1, stays (`cloudtrain cache clear` removes it)")
