"""``cloudtrain train``: check the user's input, then run the configuration as its kind is run."""

import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from importlib import import_module
from typing import Any

from commlib import Communicator, Topology
from commlib.transport.verified import verified
from training.callbacks.callback import CallbackFailed
from training.callbacks.digests import WeightsDiffer
from training.callbacks.stopping import TrainingDiverged
from training.checkpoint.folders import CheckpointFailed
from training.config.config import Config, Loaded, load_with_warnings
from training.config.reading import Given, read_given
from training.process import job
from training.process.compile_kernels import announce_compiling
from training.process.devices import see_own_gpu
from training.process.progress import Progress, print_line
from training.process.tf_logging import import_tensorflow
from training.results import Summary
from training.run.data import Data
from training.run.dry_run import checked, generated, tiny
from training.run.events import closing_lines
from training.run.parts import import_together
from training.run_folder import WeightsNotSaved

# The kinds of configurations, by task: a module whose ``load`` checks the keys, and whose ``run`` runs them.
KINDS = {"linear": "training.linear.run"}
NETWORK = __name__


def train(path: str, overrides: Sequence[str], *, dry_run: bool = False) -> None:
    """Run a configuration on all ranks of this job; rank 0 reads it, and prints."""
    with job.as_rank() as comm:
        if comm.rank == 0:
            announce_compiling()
        kind, loaded = job.all_or_exit(
            comm, lambda: job.on_rank0(comm, lambda: load_any(path, overrides, dry_run=dry_run))
        )
        try:
            import_module(kind).run(comm, loaded, path if dry_run else None)
        except CallbackFailed as error:
            job.fail_alone(comm, str(error))


def load_any(path: str, overrides: Sequence[str], *, dry_run: bool) -> tuple[str, Loaded]:
    """Return the kind of a configuration, and the configuration; raise ``ValueError`` of one line."""
    given = read_given(path, overrides)
    kind = KINDS.get(str(given.keys.get("task")), NETWORK)
    return kind, import_module(kind).load(given, dry_run=dry_run)


def load(given: Given, *, dry_run: bool) -> Loaded:
    """Return the checked configuration of a network from its keys; of generated data for a dry run."""
    return load_with_warnings(given, change=generated if dry_run else dict)


def run(comm: Communicator, loaded: Loaded, dry_path: str | None) -> None:
    """Train a network; with ``dry_path``, that of the file, take one step of each phase."""
    whole = job.all_or_exit(comm, lambda: import_together(comm, loaded))
    is_dry = dry_path is not None
    with tempfile.TemporaryDirectory(prefix="cloudtrain-") if is_dry else nullcontext("") as work:
        config = job.all_or_exit(comm, lambda: tiny(whole, comm.size, work)) if is_dry else whole
        ranks = verified(comm) if config.verify else comm
        topology = job.all_or_exit(comm, lambda: Topology(ranks, ranks_per_node=config.ranks_per_node))
        with make_trainer(config, topology) as trainer:
            if is_dry:
                trainer.callbacks.leave_out_given()
            summary = _run(trainer, is_dry=is_dry)
    if trainer.folder is not None:
        path, target = str(trainer.folder.path), trainer.config.target
        end = closing_lines(summary, trainer.task, trainer.ranks, path, target)
        for line in end if dry_path is None else checked(dry_path, whole):
            print_line(line)


def make_trainer(config: Config, topology: Topology, data: Data | None = None, **parts: Any) -> Any:
    """Return the trainer of a configuration, with TensorFlow imported; where that is impossible, all exit.

    ``parts``: a ``build`` of other parts than those of a run.
    """
    see_own_gpu(job.LocalRank.of(topology.world))  # before the import of TensorFlow, which lists them
    import_tensorflow()
    from training.run.trainer import Trainer

    return job.all_or_exit(topology.world, lambda: Trainer(config, topology=topology, data=data, **parts))


def _run(trainer: Any, *, is_dry: bool) -> Summary:
    comm = trainer.topology.world
    job.all_or_exit(comm, trainer.begin)
    if is_dry:
        trainer.progress = Progress(silent=True)  # losses on generated data are meaningless
    try:
        summary: Summary = trainer.run()
    except job.Preempted:  # on all ranks, after the same step
        job.exit_all(comm, job.PREEMPTED)
    # On all ranks, in the same step.
    except (TrainingDiverged, WeightsDiffer, CheckpointFailed, WeightsNotSaved) as error:
        if comm.rank == 0:
            job.log_error(str(error))
        job.exit_all(comm, job.FAILURE)
    return summary
