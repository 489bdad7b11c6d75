"""Configurations of ``task: linear``: rows, a linear model, and how it is trained."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import SerializeAsAny, model_validator

from commlib import InvalidArgument, Topology
from commlib.folders import expanded
from commlib.vectors import partition
from training.config.reading import Given, problems_in_one_line, read_given
from training.config.records import FileName, Layout
from training.config.schema import Count, Record, WholeNumber, name_in, problem, record_in
from training.linear.files import read_rows
from training.linear.generated import SHAPES, generate
from training.linear.rows import Rows
from training.linear.settings import Settings


class LinearData(Record):
    """The rows to train on, and those to test."""

    name: Literal["libsvm", "generated"]
    """Of the kind of rows."""

    def load(self, topology: Topology) -> tuple[Rows, Rows | None]:
        """Return the part of a rank of the rows to train on, and of those to test if there are some.

        All ranks call it together; what is wrong is a ``ValueError`` of one line on all of them.
        """
        raise NotImplementedError


class LibsvmData(LinearData):
    """Files in LibSVM's format, ``label index:value …`` a line, of which each rank reads its own bytes."""

    name: Literal["libsvm"] = "libsvm"
    train: str
    """The file to train on."""
    test: str | None = None
    """The file to test."""
    features: Count | None = None
    """How many there are; by default as many as the largest index to train on says."""
    zero_based: bool = False
    """Whether indices begin at 0."""

    def load(self, topology: Topology) -> tuple[Rows, Rows | None]:
        train = read_rows(expanded(self.train), topology, self.features, zero_based=self.zero_based)
        if self.test is None:
            return train, None
        path = expanded(self.test)
        return train, read_rows(path, topology, train.features, zero_based=self.zero_based)


class GeneratedData(LinearData):
    """Rows of the shape of one of SparCML's data sets."""

    name: Literal["generated"] = "generated"
    shape: Annotated[str, name_in(SHAPES, "shape")]
    """``url`` or ``webspam``."""
    rows: Count
    """To train on, on all ranks."""
    test_rows: WholeNumber = 0
    """To test, on all ranks."""
    seed: WholeNumber = 1
    """Of what is drawn."""

    def load(self, topology: Topology) -> tuple[Rows, Rows | None]:
        world, shape = topology.world, SHAPES[self.shape]
        if self.rows < world.size:
            raise InvalidArgument(f"data.rows: expected one for each of {world.size} ranks, got {self.rows}")

        def own(first: int, rows: int) -> Rows:
            low, high = (first + partition(rows, world.size)[world.rank : world.rank + 2]).tolist()
            return generate(shape, low, high, self.seed)

        return own(0, self.rows), own(self.rows, self.test_rows) if self.test_rows else None


DATA: dict[str, type[LinearData]] = {"libsvm": LibsvmData, "generated": GeneratedData}


OF_SOLVERS = {"sgd": ("batch_size", "learning_rate"), "coordinate": ("coordinates",)}


class LinearConfig(Settings):
    """A run that trains a linear model."""

    name: FileName
    """The run's folder has this name, followed by its time."""
    task: Literal["linear"]
    """What makes it such a configuration."""
    data: Annotated[SerializeAsAny[LinearData], record_in(DATA, "data", "libsvm", "the key name and others")]
    """The rows: ``name`` and the keys of that kind."""
    ranks_per_node: Layout = None
    """Emulates nodes: ranks on each, or a list of them. Without it, nodes are told apart by hostname."""
    output: str = "runs"
    """The folder in which the run creates its own."""

    @model_validator(mode="after")
    def _is_of_the_solver(self) -> "LinearConfig":
        """Refuse keys of the other solver, which have no effect, unless they are the defaults."""
        for solver, keys in OF_SOLVERS.items():
            for key in keys if solver != self.solver else ():
                if getattr(self, key) != Settings.model_fields[key].default:
                    raise problem(f"expected none with solver {self.solver}, got one", key=key)
        return self

    def to_yaml(self) -> str:
        """Return the configuration as YAML that ``load`` reads back."""
        text: str = yaml.safe_dump(self.model_dump(exclude_none=True), sort_keys=False)
        return text


def load(path: str | Path | Given, overrides: Sequence[str] = ()) -> LinearConfig:
    """Return a configuration of ``task: linear``; raise ``ConfigurationError``, of one line."""
    given = read_given(path, overrides)
    with problems_in_one_line(given.path):
        return LinearConfig.model_validate(given.keys)
