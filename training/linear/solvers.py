"""The solvers by name."""

from commlib import Topology
from training.linear.coordinate import CoordinateDescent
from training.linear.rows import Rows
from training.linear.settings import Settings
from training.linear.sgd import SGD
from training.linear.solver import Solver

SOLVERS: dict[str, type[Solver]] = {"sgd": SGD, "coordinate": CoordinateDescent}


def make_solver(topology: Topology, rows: Rows, settings: Settings) -> Solver:
    """Return a new solver; all ranks of the topology call it together."""
    return SOLVERS[settings.solver](topology, rows, settings)
