"""``cloudtrain cache``: fill, list, verify, repair and empty the folders in which a node keeps samples."""

import sys
from collections.abc import Iterator, Sequence
from functools import partial

from commlib import Topology
from datacache import management
from datacache.capacity import readable
from datacache.catalogue import superseded
from datacache.errors import Untrusted
from datacache.levels import CacheDirs
from datacache.management import Kept
from training.commands.printing import print_table
from training.commands.train import load_together
from training.config.config import load
from training.config.records import Cache
from training.config.schema import ConfigurationError
from training.process.job import all_or_exit, as_rank, usage_error
from training.run.data import PhaseData, cache_dirs_of, load_data

AUTO = Cache(disk="auto", memory="auto")


def build(path: str, overrides: Sequence[str]) -> None:
    """Fill the folders of this node for all phases, each rank a part; rank 0 of each node reports its own."""
    for number, phase, topology in _phases(path, overrides):
        is_silent = topology.node.rank > 0
        phase.fill(partial(_report, f"phase {number}", is_silent))
        topology.world.barrier()


def repair(path: str, overrides: Sequence[str]) -> None:
    """Read everything that this node keeps for a configuration, and mend what is damaged."""
    for number, phase, topology in _phases(path, overrides):
        if topology.node.rank == 0:
            print(f"phase {number}: {phase.repair()} damaged records read again", flush=True)
        topology.world.barrier()


def _phases(path: str, overrides: Sequence[str]) -> Iterator[tuple[int, PhaseData, Topology]]:
    """Yield the number and the data of each phase, on every rank of this job."""
    with as_rank() as comm:
        config = load_together(comm, path, overrides)
        if all_or_exit(comm, lambda: cache_dirs_of(config.cache)) == CacheDirs():
            usage_error(f"{path}: cache: expected a folder for disk or memory, got none")
        topology = all_or_exit(comm, lambda: Topology(comm, ranks_per_node=config.ranks_per_node))
        data = all_or_exit(comm, lambda: load_data(config, topology))
        for number, phase in enumerate(config.phases, 1):
            of_phase = data.of_phase(phase)
            yield number, of_phase, topology
            of_phase.close()


def _report(what: str, is_silent: bool, done: int, total: int) -> None:
    end = "\n" if done == total or not sys.stdout.isatty() else "\r"
    if total and not is_silent and (done == total or sys.stdout.isatty()):
        print(f"{what}: {done:,} of {total:,} samples", end=end, flush=True)


def _kept(path: str | None, overrides: Sequence[str]) -> list[Kept]:
    try:
        cache = AUTO if path is None else load(path, overrides).cache
    except ConfigurationError as error:
        usage_error(str(error))
    try:
        places = cache_dirs_of(cache)
        before = superseded(places.disk) if places.disk else ()
        roots = [root for root in (places.disk, places.memory) if root]
        return [each for root in roots for each in management.kept_in(root, before)]
    except (ValueError, Untrusted) as error:
        usage_error(str(error))


def info(path: str | None, overrides: Sequence[str]) -> None:
    """Print what lies in the folders of a configuration, or in the default ones."""
    kept = _kept(path, overrides)
    if not kept:
        print("nothing is kept here")
        return
    header = ["folder", "level", "samples", "size", "state", "asked", "found", "in use", "days"]
    print_table("samples that are kept here", header, [_row(each) for each in kept], notes=[])
    for root in dict.fromkeys(each.folder.parent for each in kept):
        own = [each for each in kept if each.folder.parent == root]
        print(f"{root}: {readable(management.total_bytes(own))} in {len(own)} folders")


def _row(kept: Kept) -> list[str]:
    return [
        kept.folder.name[:16],
        "–" if kept.level is None else str(kept.level),
        f"{kept.samples:,}",
        readable(kept.bytes),
        kept.state,
        f"{kept.asked:,}",
        f"{kept.found / kept.asked:.1%}" if kept.asked else "–",
        "yes" if kept.in_use else "no",
        f"{kept.days:.1f}",
    ]


def verify(path: str | None, overrides: Sequence[str]) -> int:
    """Print what is damaged; return the exit status."""
    verdicts = [management.verify(each) for each in _kept(path, overrides)]
    for verdict in verdicts:
        what = verdict.unreadable or f"{verdict.damaged:,} of {verdict.records:,} records damaged"
        print(f"{verdict.kept.folder}: {what}")
    return int(any(verdict.damaged or verdict.unreadable for verdict in verdicts))


def remove(path: str | None, overrides: Sequence[str], *, of_everything: bool) -> None:
    """Remove what no living job uses, and say what went and what stayed."""
    for kept in _kept(path, overrides):
        if management.collect_garbage(kept, of_everything=of_everything):
            print(f"{kept.folder}: removed, {readable(kept.bytes)}")
        elif kept.in_use:
            print(f"{kept.folder}: in use, stays")
        else:
            print(f"{kept.folder}: complete samples of level 1, stays (`cloudtrain cache clear` removes it)")
