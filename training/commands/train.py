"""``cloudtrain train``: check the user's input, then train."""

import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from commlib import Communicator, Topology
from commlib.transport.verified import verified
from training.callbacks.calling import CallbackFailed
from training.callbacks.digests import WeightsDiffer
from training.callbacks.stopping import TrainingDiverged
from training.checkpoint.folders import CheckpointFailed
from training.config.config import Config, load_with_warnings
from training.config.reading import Given, read_given
from training.process.compile_kernels import announce_compiling
from training.process.devices import see_own_gpu
from training.process.job import (
    FAILURE,
    PREEMPTED,
    LocalRank,
    Preempted,
    all_or_exit,
    as_rank,
    exit_all,
    fail_alone,
    log_error,
    on_rank0,
)
from training.process.progress import Progress, print_line
from training.process.tf_logging import import_tensorflow
from training.results import Summary
from training.run.data import Data
from training.run.dry_run import checked, generated, tiny
from training.run.lines import closing_lines
from training.run.parts import import_parts
from training.run_folder import WeightsNotSaved


def train(path: str, overrides: Sequence[str], *, dry_run: bool = False) -> None:
    """Run a configuration on all ranks of this job; rank 0 prints."""
    with as_rank() as comm:
        given = all_or_exit(comm, lambda: on_rank0(comm, lambda: read_given(path, overrides)))
        if given.is_linear:
            from training.commands.linear import train as train_linear

            train_linear(comm, given, dry_run=dry_run)
            return
        try:
            with tempfile.TemporaryDirectory(prefix="cloudtrain-") if dry_run else nullcontext() as work:
                _train(comm, given, work)
        except CallbackFailed as error:
            fail_alone(comm, str(error))


def _train(comm: Communicator, given: Given, work: str | None) -> None:
    """Run a configuration; with ``work``, a temporary folder, only a dry run."""
    if comm.rank == 0:
        announce_compiling()
    whole = config = load_together(comm, given, change=dict if work is None else generated)
    if work is not None:
        config = all_or_exit(comm, lambda: tiny(whole, comm.size, work))
    is_dry = work is not None
    ranks = verified(comm) if config.verify else comm
    topology = all_or_exit(comm, lambda: Topology(ranks, ranks_per_node=config.ranks_per_node))
    with make_trainer(config, topology) as trainer:
        if is_dry:
            trainer.callbacks.leave_out_given()
        summary = _run(trainer, is_dry=is_dry)
    if trainer.folder is not None:
        end = closing_lines(summary, trainer.task, trainer.ranks, str(trainer.folder.path))
        for line in checked(str(given.path), whole) if is_dry else end:
            print_line(line)


def load_together(
    comm: Communicator,
    path: str | Path | Given,
    overrides: Sequence[str] = (),
    change: Callable[[dict[str, Any]], dict[str, Any]] = dict,
) -> Config:
    """Return rank 0's configuration, on all ranks: copies of the file on other hosts may differ.

    The parts that it names by import paths are imported.

    ``change``: see :func:`training.config.config.load_with_warnings`.
    """
    loaded = all_or_exit(comm, lambda: on_rank0(comm, lambda: load_with_warnings(path, overrides, change)))
    if comm.rank == 0:
        for line in loaded.warnings:
            log_error(f"warning: {line}")
    config: Config = loaded.config
    return all_or_exit(comm, lambda: import_parts(config))


def make_trainer(config: Config, topology: Topology, data: Data | None = None) -> Any:
    """Return the trainer of a configuration, with TensorFlow imported; where that is impossible, all exit."""
    see_own_gpu(LocalRank.of(topology.world))  # before the import of TensorFlow, which lists them
    import_tensorflow()
    from training.run.trainer import Trainer

    return all_or_exit(topology.world, lambda: Trainer(config, topology=topology, data=data))


def _run(trainer: Any, *, is_dry: bool) -> Summary:
    comm = trainer.topology.world
    all_or_exit(comm, trainer.begin)
    if is_dry:
        trainer.progress = Progress(silent=True)  # losses on generated data are meaningless
    try:
        summary: Summary = trainer.run()
    except Preempted:  # on all ranks, after the same step
        exit_all(comm, PREEMPTED)
    # On all ranks, in the same step.
    except (TrainingDiverged, WeightsDiffer, CheckpointFailed, WeightsNotSaved) as error:
        if comm.rank == 0:
            log_error(str(error))
        exit_all(comm, FAILURE)
    return summary
