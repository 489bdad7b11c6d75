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
from training.process import job
from training.process.progress import print_line
from training.receipt import Receipt, Recorded, digests_of, problems, read_records
from training.run.data import load_data
from training.run.parts import import_parts
from training.source import source


def verify(folders: Sequence[Path]) -> int:
    """Print a line for each problem of runs' folders; return 1 if there are any."""
    for folder in folders:
        if not folder.is_dir():
            job.usage_error(f"receipt: expected the folder of a run, got {folder}")
    return max(map(_verify, folders))


def _verify(folder: Path) -> int:
    found = list(problems(folder))
    for line in found:
        print(escaped(line))
    if found:
        return job.FAILURE
    receipt = Receipt.read(folder)
    files = len(receipt.end.files) if receipt.end else 0
    steps = f"{len(digests_of(read_records(folder)))} digests of weights"
    print(escaped(f"{folder}: {files} files are as they were written, {steps} and all records agree"))
    print(f"its receipt: {receipt.digest}")
    return 0


def replay(folder: Path, steps: str | None) -> None:
    """Make steps of a run again on all ranks of this job, and compare; exit with 1 where a digest differs.

    ``steps``: see :meth:`training.receipt.Recorded.of`.
    """
    with job.as_rank() as comm:
        recorded = job.all_or_exit(comm, lambda: job.on_rank0(comm, lambda: Recorded.of(folder, steps)))
        if steps is None and comm.rank == 0:
            print_line(f"no --steps: those up to the first digest, {recorded.first}:{recorded.last}")
        config, checkpoints = job.all_or_exit(
            comm, lambda: job.on_rank0(comm, lambda: _configuration(folder))
        )
        config = job.all_or_exit(comm, lambda: import_parts(config))
        ranks = verified(comm) if config.verify else comm
        topology = job.all_or_exit(comm, lambda: Topology(ranks, ranks_per_node=config.ranks_per_node))
        job.all_or_exit(comm, lambda: recorded.check_job([len(node) for node in topology.nodes]))
        data = job.all_or_exit(comm, lambda: load_data(config, topology))
        job.all_or_exit(comm, lambda: recorded.check_data(data.fingerprints()))
        trainer = make_trainer(config, topology, data)
        from training.run.replay import Replay  # after the import of TensorFlow, which it silences

        say = print_line if comm.rank == 0 else lambda line: None
        agree = _replay(comm, Replay(recorded, trainer, checkpoints, say), recorded)
        job.exit_all(comm, 0 if agree else job.FAILURE)


def _configuration(folder: Path) -> tuple[Config, Checkpointing]:
    """Return a run's configuration but for what leaves files or ends it, and where its checkpoints are."""
    config = load(folder / CONFIG)
    nothing = dict.fromkeys(("checkpoints", "target", "trace", "metrics_port"))
    alone = config.model_copy(update={**nothing, "resume": "never", "callbacks": []})
    return alone, config.checkpoints or Checkpointing()


def _replay(comm: Communicator, again: Any, recorded: Recorded) -> bool:
    """Return whether all digests agree; rank 0 prints."""
    from training.run.provenance import versions

    if comm.rank == 0:
        for line in recorded.differences(source(), versions()):
            job.log_error(f"warning: {line}")
    job.all_or_exit(comm, again.begin)
    try:
        again.run()
    except WeightsDiffer as error:
        if comm.rank == 0:
            job.log_error(str(error))
        return False
    return again.ends_well()
