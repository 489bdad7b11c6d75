"""Configurations of ``task: linear``: rows, a linear model, and how it is trained."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BeforeValidator, SerializeAsAny, ValidationError, model_validator

from commlib import Reducer, Topology, make_reducer
from commlib.errors import InvalidArgument, shown
from commlib.folders import expanded
from commlib.reducers import SelectingReducer
from commlib.selection import EVERYTHING
from commlib.vectors import partition
from commlib.wire import make_codec
from training.config.reading import Given, problems_in_one_line, read_given
from training.config.records import FileName, Layout
from training.config.reducers import AUTO, GivenReducer, ReducerRecord, check_options, class_of
from training.config.schema import (
    ConfigurationError,
    Count,
    Positive,
    Rate,
    Record,
    Share,
    WholeNumber,
    describe,
    name_in,
    record_in,
    reported,
)
from training.linear.generated import SHAPES, generate
from training.linear.kernels import CURVATURES, LOSSES
from training.linear.rows import Rows, read_rows


class LearningRate(Record):
    """The learning rate, and how it adapts."""

    rate: Positive = 1.0
    """Of the first step."""
    schedule: Literal["constant", "power", "adaptive"] = "adaptive"
    """``power``: ``rate/(1 + epoch)^power``, where ``epoch`` counts the passes done, also parts of one.
    ``adaptive``: multiplied by ``factor`` after each pass whose mean loss is not below the one before."""
    power: Positive = 0.5
    """Exponent of the schedule ``power``."""
    factor: Share = 0.5
    """Factor of the schedule ``adaptive``."""


def _rate(value: Any) -> Any:
    return {"rate": value} if isinstance(value, int | float) else value


class Settings(Record):
    """A linear model, and how it is trained."""

    loss: Annotated[str, name_in(LOSSES, "loss")] = "logistic"
    """``logistic``, ``hinge`` or ``squared_hinge``."""
    l2: Rate = 1e-4
    """Factor of half the squared norm of the weights."""
    l1: Rate = 0.0
    """Factor of the sum of the magnitudes of the weights."""
    intercept: bool = True
    """Whether the model has one; it is not regularized."""
    solver: Literal["sgd", "coordinate"] = "sgd"
    """``sgd``: mini-batches of rows; ``coordinate``: blocks of columns, for losses that have a curvature."""
    epochs: Count = 5
    """Passes over the rows, or the columns."""
    batch_size: Count = 1000
    """Rows of a rank in a step of ``sgd``."""
    coordinates: Count = 100
    """Columns of a rank's slice in a step of ``coordinate``."""
    learning_rate: Annotated[LearningRate, BeforeValidator(_rate)] = LearningRate()
    """A number, or a record of it and how it adapts; of ``sgd``."""
    reducer: GivenReducer = ReducerRecord(name=AUTO)
    """A name of ``commlib.REDUCERS`` or an import path; with options, ``name`` and those. ``auto``: the
    fastest on the first batches."""
    seed: WholeNumber = 1
    """Of the order of the rows, or of the columns."""

    @model_validator(mode="after")
    def _fits_together(self) -> "Settings":
        if self.solver == "sgd" and self.learning_rate.rate * self.l2 >= 1:
            expected = f"expected less than {1 / self.l2:g} with l2 = {self.l2:g}"
            raise ConfigurationError(
                f"{expected}, got {shown(self.learning_rate.rate)}", key="learning_rate.rate"
            )
        if self.solver == "coordinate" and self.loss not in CURVATURES:
            raise ConfigurationError(
                f"expected {' or '.join(CURVATURES)} with coordinate, got {self.loss}", key="loss"
            )
        _check_reducer(self.reducer)
        return self


def _check_reducer(record: ReducerRecord) -> None:
    name, options = record.name or AUTO, record.options
    for option in ("density", "selector", "wrappers"):
        if option in options:
            got = shown(options[option])
            raise ConfigurationError(
                f"expected none, as all entries are sent, got {got}", key=f"reducer.{option}"
            )
    if "wire" in options and not make_codec(options["wire"]).lossless:
        raise ConfigurationError(f"expected one without loss, got {options['wire']}", key="reducer.wire")
    if name == AUTO and options:
        raise ConfigurationError(f"expected none with {AUTO}, got {', '.join(options)}", key="reducer")
    if name != AUTO:
        with reported("reducer"):
            check_options(name, lossless(name) | options)


def lossless(name: str) -> dict[str, Any]:
    """Return the options with which a reducer sends all entries of its gradients."""
    reducer = class_of(name)
    if reducer is None or not reducer.sparse:
        return {}
    if not issubclass(reducer, SelectingReducer):
        raise ConfigurationError(f"expected one that can send all entries, got {name}")
    return {"selector": EVERYTHING, "density": 1.0}


def make_lossless(name: str, topology: Topology, size: int, options: Mapping[str, Any]) -> Reducer:
    """Return a reducer that sends all entries of its gradients."""
    return make_reducer(name, topology, size, **{**lossless(name), **options})


def checked(given: Mapping[str, Any]) -> Settings:
    """Return settings; raise a ``ValueError`` of one line for the first that is wrong."""
    try:
        return Settings.model_validate(dict(given))
    except ValidationError as error:
        raise InvalidArgument(describe(error.errors()[0])) from error


class LinearData(Record):
    """The rows to train on, and those to test."""

    name: Literal["libsvm", "generated"]
    """Of the kind of rows."""

    def load(self, topology: Topology) -> tuple[Rows, Rows | None]:
        """Return this rank's part of the rows to train on, and of the rows to test on, ``None`` without any.

        All ranks call it together; an error is a ``ValueError`` of one line on all of them.
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
    """The number of features; by default it follows from the largest index in the training file."""
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
    """Rows to train on, over all ranks."""
    test_rows: WholeNumber = 0
    """Rows to test on, over all ranks."""
    seed: WholeNumber = 1
    """Seed of the generated rows."""

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
    """Selects this kind of configuration."""
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
                    raise ConfigurationError(f"expected none with solver {self.solver}, got one", key=key)
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
