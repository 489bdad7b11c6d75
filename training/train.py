"""``cloudtrain train``: check everything that a user can get wrong, then train."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

from commlib import Communicator, Topology
from commlib.profile import Profile
from commlib.transport.mpi import abort_on_error
from training.choices import profile_for
from training.config import Config, load_with_warnings
from training.data import Data
from training.datasets import DATASETS
from training.job import FAILURE, LaunchError, Place, complain, leave, refuse, together, world
from training.metrics import RunFolder
from training.progress import Progress
from training.quiet import import_tensorflow
from training.summary import closing_lines

if TYPE_CHECKING:
    from training.loop import Trainer  # which imports TensorFlow


def train(path: str, overrides: Sequence[str]) -> None:
    """Run a configuration on all ranks of this job; rank 0 speaks."""
    try:
        comm = world()
    except LaunchError as error:
        refuse(str(error))
    with abort_on_error():
        config = _load(comm, path, overrides)
        topology = together(comm, lambda: Topology(comm, ranks_per_node=config.ranks_per_node))
        data = together(comm, lambda: _load_data(config, topology))
        profile = profile_for(config, topology)
        trainer = _trainer(config, topology, data, profile)
        folder = together(comm, lambda: RunFolder(trainer.config) if comm.rank == 0 else None)
        with folder or nullcontext():
            _run(trainer, folder)


def _load(comm: Communicator, path: str, overrides: Sequence[str]) -> Config:
    """Return rank 0's configuration, on all ranks: copies of the file on other hosts may differ."""
    loaded = together(comm, lambda: load_with_warnings(path, overrides) if comm.rank == 0 else None)
    if loaded is not None:
        for line in loaded.warnings:
            complain(f"warning: {line}")
    config: Config = comm.allgather_objects(loaded and loaded.config)[0]
    return config


def _load_data(config: Config, topology: Topology) -> Data:
    data, size = Data(config, topology, DATASETS[config.dataset]()), topology.world.size
    for number, phase in enumerate(config.phases):
        if phase.batch_size * size > len(data.training):
            raise ValueError(
                f"phases[{number}].batch_size: expected at most the {len(data.training)} training samples "
                f"for all {size} ranks together, got {phase.batch_size} on each"
            )
        if phase.batch_size * size % config.cache.shards:
            raise ValueError(
                f"cache.shards: expected a divisor of the {phase.batch_size * size} samples that all {size} "
                f"ranks take together in a step of phases[{number}], got {config.cache.shards}"
            )
    return data


def _trainer(config: Config, topology: Topology, data: Data, profile: Profile | None) -> "Trainer":
    import_tensorflow()
    from training.loop import Trainer, prepare_tensorflow

    prepare_tensorflow(config.seed, topology.world, Place.of(topology.world))
    return Trainer(config, topology, data, profile)


def _run(trainer: "Trainer", folder: RunFolder | None) -> None:
    from training.loop import TrainingDiverged

    try:
        with Progress(silent=folder is None) as progress:
            summary = trainer.run(folder, progress)
    except TrainingDiverged as error:  # on all ranks, in the same step
        if folder is not None:
            complain(str(error))
        leave(trainer.topology.world, FAILURE)
    if folder is not None:
        for line in closing_lines(summary, str(folder.path)):
            print(line, flush=True)
