"""``cloudtrain train``: check everything that a user can get wrong, then train."""

from collections.abc import Sequence

from commlib import Topology
from commlib.transport.mpi import abort_on_error
from training.config import Config, load, warnings
from training.datasets import DATASETS, Dataset
from training.job import LaunchError, complain, refuse, together, world
from training.metrics import RunFolder
from training.progress import Progress
from training.quiet import import_tensorflow
from training.summary import closing_lines


def train(path: str, overrides: Sequence[str]) -> None:
    """Run a configuration on all ranks of this job; rank 0 speaks."""
    try:
        comm = world()
    except LaunchError as error:
        refuse(str(error))
    with abort_on_error():
        config = together(comm, lambda: load(path, overrides))
        topology = together(comm, lambda: Topology(comm, ranks_per_node=config.ranks_per_node))
        dataset = together(comm, lambda: _load_dataset(config, comm.size))
        folder = together(comm, lambda: RunFolder(config) if comm.rank == 0 else None)
        if folder is not None:
            for line in warnings(config):
                complain(f"warning: {line}")
        _train(config, topology, dataset, folder)


def _load_dataset(config: Config, world_size: int) -> Dataset:
    dataset = DATASETS[config.dataset]()
    for number, phase in enumerate(config.phases):
        if phase.batch_size * world_size > len(dataset.training):
            raise ValueError(
                f"phases[{number}].batch_size: expected at most the {len(dataset.training)} training samples "
                f"for all {world_size} ranks together, got {phase.batch_size} on each"
            )
    return dataset


def _train(config: Config, topology: Topology, dataset: Dataset, folder: RunFolder | None) -> None:
    import_tensorflow()
    from training.loop import Trainer, prepare_tensorflow

    prepare_tensorflow(config.seed, topology.world.rank)
    progress = Progress(silent=folder is None)
    summary = Trainer(config, topology, dataset).run(folder, progress)
    progress.close()
    if folder is not None:
        folder.close()
        for line in closing_lines(summary, str(folder.path)):
            progress.say(line)
