"""The run of a configuration with ``task: linear``; TensorFlow is not imported."""

import io
import math
from contextlib import nullcontext
from dataclasses import asdict

import numpy as np

from commlib import Communicator, Topology
from training.config.config import Loaded
from training.config.reading import Given
from training.linear.config import GeneratedData, LinearConfig
from training.linear.config import load as load_linear
from training.linear.generated import SHAPES
from training.linear.rows import Rows
from training.linear.solver import Diverged, Pass, Solver
from training.linear.solvers import make_solver
from training.process.job import FAILURE, all_or_exit, exit_all, log_error
from training.process.progress import announce_folder, print_line
from training.run_folder import RunFolder, unwritable, write_whole

MODEL = "model.npz"
DRY = {"epochs": 1, "batch_size": 2}


def load(given: Given, *, dry_run: bool) -> Loaded:
    """Return the checked configuration of these keys; see :mod:`training.commands.train`."""
    return Loaded(load_linear(given), [])


def run(comm: Communicator, loaded: Loaded, dry_path: str | None) -> None:
    """Run a configuration on all ranks; rank 0 prints. With ``dry_path`` take one step on generated rows."""
    config: LinearConfig = loaded.config
    if dry_path is not None:
        shape = getattr(config.data, "shape", next(iter(SHAPES)))
        data = GeneratedData(shape=shape, rows=2 * comm.size)
        config = config.model_copy(update={**DRY, "data": data})
    topology = all_or_exit(comm, lambda: Topology(comm, ranks_per_node=config.ranks_per_node))
    rows, test = all_or_exit(comm, lambda: config.data.load(topology))
    solver = all_or_exit(comm, lambda: make_solver(topology, rows, config))
    is_writer = comm.rank == 0 and dry_path is None
    folder = all_or_exit(comm, lambda: RunFolder(config) if is_writer else None)
    with folder or nullcontext():
        try:
            _run(solver, test, folder, config)
        except Diverged as error:
            if comm.rank == 0:
                log_error(str(error))
            exit_all(comm, FAILURE)
    solver.close()
    if comm.rank == 0 and dry_path is not None:
        print_line(f"dry run of {dry_path}: all is built, and a step was taken")


def _run(solver: Solver, test: Rows | None, folder: RunFolder | None, config: LinearConfig) -> None:
    """Take all passes; the rank with the folder reports them and writes the model."""
    all_or_exit(solver.topology.world, lambda: _begin(solver, folder, config))
    for _ in range(config.epochs):
        done = solver.run_pass()
        reached = solver.value()
        if not math.isfinite(reached):
            at = f"after pass {solver.passes} at {done.rate:g}"
            raise Diverged(f"learning_rate: expected one that converges, got an objective of {reached} {at}")
        accuracy = None if test is None else share_right(solver, test)
        if folder is not None:
            _report(folder, solver, done, reached, accuracy)
    all_or_exit(solver.topology.world, lambda: _save(solver, folder))


def _save(solver: Solver, folder: RunFolder | None) -> None:
    if folder is None:
        return
    content = io.BytesIO()
    np.savez(content, weights=solver.model.weights, intercept=solver.model.intercept)
    with unwritable(f"{folder.path / MODEL}: expected room for it"):
        write_whole(folder.path / MODEL, content.getvalue())
    print_line(f"files: {folder.path}")


def _begin(solver: Solver, folder: RunFolder | None, config: LinearConfig) -> None:
    if folder is None:
        return
    announce_folder(folder.path)
    folder.write_config(config)
    rows, ranks = int(solver.counts.sum()), solver.topology.world.size
    shown = "1 rank" if ranks == 1 else f"{ranks} ranks"
    ways = "" if solver.choice is None else f"; {solver.choice}"
    print_line(f"{rows:,} rows of {solver.rows.features:,} features, {shown}, {solver.steps} steps{ways}")


def _report(folder: RunFolder, solver: Solver, done: Pass, reached: float, accuracy: float | None) -> None:
    """Write a line of ``metrics.jsonl``, and print one."""
    tested = {} if accuracy is None else {"accuracy": accuracy}
    values = asdict(done)
    values["pass_seconds"] = values.pop("seconds")
    folder.write("pass", number=solver.passes, objective=reached, **tested, **values)
    of_test = "" if accuracy is None else f"   accuracy {100 * accuracy:.2f} %"
    of_links = f" ({done.communication:.2f} s of them in exchanges)" if done.communication else ""
    print_line(f"pass {solver.passes}   objective {reached:.6f}{of_test}   {done.seconds:.2f} s{of_links}")


def share_right(solver: Solver, rows: Rows) -> float:
    """Return the share of the rows of all ranks whose label the model predicts; collective."""
    right = int(((solver.model.margins(rows) > 0) == (rows.labels > 0)).sum())
    sums = solver.topology.world.allgather_ints([right, len(rows)]).sum(axis=0)
    return float(sums[0] / sums[1])
