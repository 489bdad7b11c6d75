"""What a linear model is trained with: keys of a configuration, and parameters of the estimator."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ValidationError, model_validator

from commlib import Reducer, Topology, make_reducer
from commlib.errors import InvalidArgument, shown
from commlib.reducers import SelectingReducer
from commlib.selection import EVERYTHING
from commlib.wire import make_codec
from training.config.reducers import AUTO, GivenReducer, ReducerRecord, check_options, class_of
from training.config.schema import (
    Count,
    Positive,
    Rate,
    Record,
    Share,
    WholeNumber,
    describe,
    name_in,
    problem,
)
from training.linear.kernels import CURVATURES, LOSSES

LOSSLESS = {"selector": EVERYTHING, "density": 1.0}  # options of a sparse reducer that sends all entries


class LearningRate(Record):
    """The learning rate, and how it adapts."""

    rate: Positive = 1.0
    """Of the first step."""
    schedule: Literal["constant", "power", "adaptive"] = "adaptive"
    """``power``: ``rate/(1 + epoch)^power``, where ``epoch`` counts the passes done, also parts of one.
    ``adaptive``: multiplied by ``factor`` after each pass whose mean loss is not below the one before."""
    power: Positive = 0.5
    """Of the schedule ``power``."""
    factor: Share = 0.5
    """Of the schedule ``adaptive``."""


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
            raise problem(f"{expected}, got {shown(self.learning_rate.rate)}", key="learning_rate.rate")
        if self.solver == "coordinate" and self.loss not in CURVATURES:
            raise problem(f"expected {' or '.join(CURVATURES)} with coordinate, got {self.loss}", key="loss")
        _check_reducer(self.reducer)
        return self


def _check_reducer(record: ReducerRecord) -> None:
    name, options = record.name or AUTO, record.options
    for option in ("density", "selector", "wrappers"):
        if option in options:
            got = shown(options[option])
            raise problem(f"expected none, as all entries are sent, got {got}", key=f"reducer.{option}")
    if "wire" in options and not make_codec(options["wire"]).lossless:
        raise problem(f"expected one without loss, got {options['wire']}", key="reducer.wire")
    if name == AUTO and options:
        raise problem(f"expected none with {AUTO}, got {', '.join(options)}", key="reducer")
    if name != AUTO:
        try:
            check_options(name, lossless(name) | options)
        except InvalidArgument as error:
            raise problem(str(error), key="reducer") from error


def lossless(name: str) -> dict[str, Any]:
    """Return the options with which a reducer sends all entries of its gradients."""
    reducer = class_of(name)
    if reducer is None or not reducer.sparse:
        return {}
    if not issubclass(reducer, SelectingReducer):
        raise problem(f"expected one that can send all entries, got {name}", key="reducer")
    return dict(LOSSLESS)


def make_lossless(name: str, topology: Topology, size: int, options: Mapping[str, Any]) -> Reducer:
    """Return a reducer that sends all entries of its gradients."""
    return make_reducer(name, topology, size, **{**lossless(name), **options})


def checked(given: Mapping[str, Any]) -> Settings:
    """Return settings; raise a ``ValueError`` of one line for the first that is wrong."""
    try:
        return Settings.model_validate(dict(given))
    except ValidationError as error:
        raise InvalidArgument(describe(error.errors()[0])) from error
