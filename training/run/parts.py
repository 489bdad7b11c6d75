"""Import and check the user's own task, reducers, model, data set and callbacks of a configuration.

Loading a configuration imports none of them; a run, a dry run and ``tune`` begin with this step.
"""

import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from commlib import REDUCERS, Communicator, Reducer, Topology, registry
from commlib.exchange import check_config
from commlib.registry import is_import_path
from training.config.checks import check
from training.config.config import Config, Loaded, load_with_warnings
from training.config.reducers import AUTO
from training.config.schema import reported
from training.datasets import DATASETS, check_dataset
from training.models import MODELS
from training.process.job import all_or_raise, log_error, on_rank0


def import_parts(config: Config) -> Config:
    """Return the configuration with its parts imported and checked, and all options of reducers written out.

    Import paths start in the working directory, as with ``python -m``. Raises a ``ValueError`` of one line,
    beginning with the key, where a part cannot be imported, is of another kind or takes other options.
    """
    phases = enumerate(config.phases)
    reducers = {f"phases[{number}].reducer": config.reducer_name(phase) for number, phase in phases}
    given = [("reducer", config.reducer)]
    given += [
        (key, phase.reducer) for key, phase in zip(reducers, config.phases, strict=True) if phase.reducer
    ]
    names = [config.task.name, config.dataset.name, config.model.name, *reducers.values()]
    names += [each.name for each in config.callbacks]
    names += [part for _, record in given for part in record.parts]
    if any(map(is_import_path, names)) and (folder := os.getcwd()) not in sys.path:
        sys.path.insert(0, folder)
    _at("task", config.task.check)
    config = config.with_task_imported()
    for key, name in reducers.items():
        if name != AUTO:
            _at(key, partial(registry.resolve, REDUCERS, "reducer", name, subclass_of=Reducer))
    for key, record in given:
        _at(key, record.check_parts)
    dataset, model = config.dataset, config.model
    _at("dataset", lambda: registry.resolve(DATASETS, "dataset", dataset.name))
    _at("dataset", lambda: check_dataset(dataset.name, dataset.path, dataset.options))
    _at("model", lambda: registry.resolve(MODELS, "model", model.name))
    for number, each in enumerate(config.callbacks):
        _at(f"callbacks[{number}]", each.check)
    check(config)
    resolved = config.resolved()
    check_reducers(resolved)
    return resolved


def check_reducers(config: Config, topology: Topology | None = None) -> None:
    """Raise ``ValueError`` of one line where the reducer of a phase does not take its options' values.

    ``topology``: of the run, whose ranks call it together.
    """
    for number, phase in enumerate(config.phases):
        if config.reducer_name(phase) != AUTO:
            options = config.reducer_config(phase)
            _at(f"phases[{number}].reducer", partial(check_config, options, topology))


def load_together(comm: Communicator, path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Return rank 0's configuration on all ranks, its parts imported; ``ValueError`` of one line on all."""
    return import_together(comm, on_rank0(comm, lambda: load_with_warnings(path, overrides)))


def import_together(comm: Communicator, loaded: Loaded) -> Config:
    """Return what ``import_parts`` returns, on all ranks; rank 0 prints the warnings."""
    if comm.rank == 0:
        for line in loaded.warnings:
            log_error(f"warning: {line}")
    return all_or_raise(comm, lambda: import_parts(loaded.config), names_rank=True)


def _at(key: str, function: Callable[[], object]) -> None:
    with reported(key):
        function()
