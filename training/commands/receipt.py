"""``cloudtrain receipt``: verify the files of a run, and replay its steps."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from commlib import Communicator, Topology
from commlib.transport.verified import verified
from datacache.escaping import escaped
from training.callbacks.digests import WeightsDiffer
from training.commands.train import make_trainer
from training.config.config import Config, load
from training.config.records import Checkpointing
from training.config.run_files import CONFIG
from training.process.job import (
    FAILURE,
    all_or_exit,
    as_rank,
    exit_all,
    log_error,
    on_rank0,
    usage_error,
)
from training.process.progress import print_line
from training.receipt.receipt import FILES, Receipt
from training.receipt.recorded import Recorded, digests_of, read_records
from training.receipt.verify import problems
from training.run.data import load_data
from training.run.parts import import_parts


def verify(folders: Sequence[Path]) -> int:
    """Print a line for each problem of runs' folders; return 1 if there are any."""
    for folder in folders:
        if not folder.is_dir():
            usage_error(f"receipt: expected the folder of a run, got {folder}")
    return max(map(_verify, folders))


def _verify(folder: Path) -> int:
    found = list(problems(folder))
    for line in found:
        print(escaped(line))
    if found:
        return FAILURE
    files = [name for name in FILES if (folder / name).exists()]
    digests = digests_of(folder, read_records(folder))
    steps = f"{len(digests)} digests of weights"
    print(escaped(f"{folder}: {len(files)} files are as they were written, {steps} and all records agree"))
    print(f"its receipt: {Receipt.read(folder).digest}")
    return 0


def replay(folder: Path, steps: str | None) -> None:
    """Make steps of a run again on all ranks of this job, and compare; exit with 1 where a digest differs.

    ``steps``: see :meth:`training.receipt.recorded.Recorded.of`.
    """
    with as_rank() as comm:
        recorded = all_or_exit(comm, lambda: on_rank0(comm, lambda: Recorded.of(folder, steps)))
        if steps is None and comm.rank == 0:
            print_line(f"no --steps: those up to the first digest, {recorded.first}:{recorded.last}")
        config, checkpoints = all_or_exit(comm, lambda: on_rank0(comm, lambda: _configuration(folder)))
        config = all_or_exit(comm, lambda: import_parts(config))
        ranks = verified(comm) if config.verify else comm
        topology = all_or_exit(comm, lambda: Topology(ranks, ranks_per_node=config.ranks_per_node))
        all_or_exit(comm, lambda: recorded.check_job([len(node) for node in topology.nodes]))
        data = all_or_exit(comm, lambda: load_data(config, topology))
        all_or_exit(comm, lambda: recorded.check_data(data.fingerprints()))
        trainer = make_trainer(config, topology, data)
        from training.run.replay import Replay  # after the import of TensorFlow, which it silences

        say = print_line if comm.rank == 0 else lambda line: None
        agree = _replay(comm, Replay(recorded, trainer, checkpoints, say), recorded)
        exit_all(comm, 0 if agree else FAILURE)


def _configuration(folder: Path) -> tuple[Config, Checkpointing]:
    """Return the configuration of a run, but for what leaves something behind or ends it.

    And where its checkpoints are.
    """
    config = load(folder / CONFIG)
    nothing = dict.fromkeys(("checkpoints", "target", "trace", "metrics_port"))
    alone = config.model_copy(update={**nothing, "resume": "never", "callbacks": []})
    return alone, config.checkpoints or Checkpointing()


def _replay(comm: Communicator, again: Any, recorded: Recorded) -> bool:
    """Return whether all digests agree; rank 0 prints."""
    from training.run.provenance import source, versions

    is_first = comm.rank == 0
    if is_first:
        for line in recorded.differences(source(), versions()):
            log_error(f"warning: {line}")
    all_or_exit(comm, again.begin)
    try:
        again.run()
    except WeightsDiffer as error:
        if is_first:
            log_error(str(error))
        return False
    agrees: bool = again.ends_well()
    return agrees
