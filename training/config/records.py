"""The records of a configuration: its data set, its phases, and others with keys of their own."""

import re
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import ConfigDict, model_validator

from commlib.registry import check_options
from commlib.rounds import Schedule
from datacache.storage import Storage
from training.config.reducers import GivenReducer, Reducing
from training.config.schedules import DensityWarmup, LearningRate, MomentumSchedule, Span
from training.config.schema import (
    ConfigurationError,
    Count,
    Momentum,
    PartRecord,
    Positive,
    Rate,
    Record,
    WholeNumber,
    expect,
    imported,
    is_number,
    is_whole,
    one_of,
    part_in,
    reported,
)
from training.config.secrets import resolved
from training.datasets import DATASETS, Dataset, check_dataset, make_dataset
from training.models import MODELS

AnyConfig: TypeAlias = Any  # a Config, for modules of which its class is made: tasks and checks


def _is_layout(value: Any) -> bool:
    counts = value if isinstance(value, list) else [value]
    return value is None or (len(counts) > 0 and all(is_whole(count, 1) for count in counts))


Seed = Annotated[
    int, expect("a whole number from 0 to 2³¹ − 1", lambda value: is_whole(value, 0) and value < 1 << 31)
]
Layout = Annotated[
    int | list[int] | None, expect("a number of ranks, or a list of them, one a node", _is_layout)
]
Port = Annotated[int, expect("a port from 1 to 65535", lambda value: is_whole(value, 1) and value < 1 << 16)]
FileName = Annotated[
    str,
    expect(
        "letters, digits, '_', '.' and '-'",
        lambda value: isinstance(value, str) and re.fullmatch(r"\w[\w.-]*", value, re.ASCII) is not None,
    ),
]
Transport = Literal["auto", "nccl", "nccl+mpi", "mpi"]
Level = Annotated[
    float, expect("a number from 0 to 255", lambda value: is_number(value) and 0 <= value <= 255)
]
Part = Annotated[float, expect("a number in [0, 1)", lambda value: is_number(value) and 0 <= value < 1)]
Number = Annotated[float, expect("a number", is_number)]
CropShare = Annotated[float, expect("a number in (0, 1]", lambda value: is_number(value) and 0 < value <= 1)]


class ModelRecord(PartRecord):
    """A model: its name, and its own options."""

    name: Annotated[str, part_in(MODELS, "model")]
    """A name of ``training.models.MODELS``, or an import path."""


class DatasetRecord(PartRecord):
    """A data set: its name, the path of its files where it has any, and its own options.

    Secrets of its storage are references to the environment until it is made, see
    :mod:`training.config.secrets`.
    """

    name: Annotated[str, part_in(DATASETS, "dataset")]
    """A name of ``training.datasets.DATASETS``, or an import path."""
    path: str | None = None
    """A folder or URL."""

    @model_validator(mode="after")
    def _takes_what_is_given(self) -> "DatasetRecord":
        if imported(DATASETS, "dataset", self.name) is not None:
            check_dataset(self.name, self.path, self.options)
        return self

    def make(self) -> Dataset:
        """Return the data set; raises a ``ValueError`` of one line if it is invalid."""
        try:
            path, options = resolved(self.path), resolved(self.options)
        except ValueError as error:
            raise ValueError(f"dataset {self.name}: {error}") from error
        return make_dataset(self.name, path, **options)


FILE_URLS = ("file://", "local://")  # of a folder


class Cache(Record):
    """Where the ranks of a node cache samples: ``auto``, a folder, or none."""

    disk: str | None = None
    """Folder for samples as central storage has them. ``auto``: below ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    memory: str | None = None
    """Folder for samples pre-processed for a phase. ``auto``: a folder of the user in ``/dev/shm``."""
    shards: Count = 1
    """Parts of the samples, of which each node caches those that its ranks read; 1: every node caches all."""
    exchange: Part = 0.0
    """Share of every part, different in each epoch, that is exchanged with other parts."""

    @model_validator(mode="after")
    def _there_are_parts_to_exchange(self) -> "Cache":
        if self.exchange and self.shards == 1:
            raise ConfigurationError(f"expected 0 where shards is 1, got {self.exchange}", key="exchange")
        return self


class Normalise(Record):
    """Levels of 0 to 255, one a channel, that inputs are normalised with: ``(level − mean)/std``."""

    mean: list[Level]
    """Mean level of each channel."""
    std: list[Positive]
    """Standard deviation of each channel."""

    @model_validator(mode="after")
    def _has_as_many(self) -> "Normalise":
        if len(self.mean) != len(self.std):
            raise ConfigurationError(
                f"expected as many as the {len(self.mean)} of mean, got {len(self.std)}", key="std"
            )
        return self


class Outer(Record):
    """The outer optimizer, which moves the common weights by the mean difference of a round.

    At the defaults the common weights become the mean of all replicas' weights.
    """

    optimizer: Literal["sgd"] = "sgd"
    """Gradient descent, with the mean difference in place of a gradient."""
    rate: Positive = 1.0
    """Outer learning rate: the factor of the mean difference that is subtracted from the common weights."""
    momentum: Momentum = 0.0
    """Share of the last round's velocity that is added to the next."""
    nesterov: bool = False
    """Whether the weights are moved by Nesterov's momentum."""
    fragments: Count = 1
    """Parts of the weights, of about equal size, that are exchanged in turns."""
    delay: WholeNumber = 0
    """Steps that a replica takes while a fragment is exchanged, before the mean difference is applied."""
    update: Literal["mixed", "eager"] = "mixed"
    """After a delay, ``mixed``: the common weights are mixed into those of the replica; ``eager``: the
    replica has moved by its own difference at once, which is corrected."""
    mixing: Part | None = None
    """Share of the replica's own weights in the mixture; 0.5 without it."""

    @model_validator(mode="after")
    def _has_what_its_settings_need(self) -> "Outer":
        if self.nesterov and not self.momentum:
            raise ConfigurationError("expected false where momentum is 0, got true", key="nesterov")
        if self.update == "eager" and not self.delay:
            raise ConfigurationError("expected mixed where delay is 0, got eager", key="update")
        if self.mixing is not None and (not self.delay or self.update == "eager"):
            why = f"update is {self.update}" if self.delay else "delay is 0"
            raise ConfigurationError(f"expected none where {why}, got {self.mixing}", key="mixing")
        return self

    @property
    def own_share(self) -> float:
        """Return the share of the replica's own weights where a fragment arrives."""
        if self.update == "eager" or not self.delay:
            return 0.0
        return 0.5 if self.mixing is None else self.mixing


class Budget(Record):
    """What a rank may send on average: ``auto`` chooses reducer, codec and local steps for it."""

    mbit_per_second: Positive
    """Of a rank, between nodes where there are several; the time of exchanges is not counted."""
    step_seconds: Positive
    """How long a local step takes."""

    @property
    def bytes_per_step(self) -> float:
        return self.mbit_per_second * 1e6 / 8 * self.step_seconds


class Phase(Reducing):
    """A run of epochs with one size of inputs and batches, and one reducer: the keys that all tasks have.

    Each task has a subclass with the keys of its inputs.
    """

    epochs: Count | None = None
    """Passes over the training samples."""
    steps: Count | None = None
    """Instead of epochs."""
    learning_rate: LearningRate | None = None
    """A number, or a schedule of :mod:`training.config.schedules`; the configuration's without it."""
    momentum: MomentumSchedule | None = None
    """A number, or ``start`` and ``end`` of a straight line over the phase; else the optimizer's."""
    reducer: GivenReducer | None = None
    """A name of ``commlib.REDUCERS``, ``auto`` or an import path, or a record of the name and options; what
    is not given is the configuration's."""
    density_warmup: DensityWarmup | None = None
    """Larger densities in the first epochs of the phase."""
    local_steps: Count | None = None
    """Steps that each replica takes alone before its difference of weights is exchanged, in place of
    gradients."""
    local: Literal["node", "rank"] | None = None
    """The replica of local steps: a node, which averages its ranks' gradients in every step, or a rank; node
    without it."""
    round_seconds: Positive | None = None
    """Seconds of its own steps after which a replica takes no further local step until the next exchange;
    its difference counts by the steps that it took."""
    outer: Outer | None = None
    """How the mean difference moves the common weights; without it they become the mean of the replicas'."""
    budget: Budget | None = None
    """What a rank may send, for which ``reducer: auto`` chooses reducer, codec and ``local_steps``."""

    @model_validator(mode="after")
    def _has_one_length(self) -> "Phase":
        one_of(self, ("epochs", "steps"))
        return self

    def span_of(self, epoch_steps: int, global_batch: int) -> Span:
        """Return the steps of the phase, see :class:`Span`."""
        return Span(self.steps or (self.epochs or 0) * epoch_steps, epoch_steps, global_batch)

    @property
    def replica_is_node(self) -> bool:
        """Whether the ranks of a node take their local steps as one replica."""
        return self.local_steps is not None and self.local != "rank"

    @property
    def schedule(self) -> Schedule | None:
        """Return when fragments are exchanged, if steps are local; ``InvalidArgument`` if they cannot be."""
        if self.local_steps is None:
            return None
        outer = self.outer or Outer()
        return Schedule(self.local_steps, outer.fragments, outer.delay)

    def with_local_steps(self, local_steps: int) -> "Phase":
        """Return the phase with the local steps that its budget asks for; one alone is plain training."""
        if local_steps == 1 and self.outer is None:
            return self.model_copy(update={"budget": None, "local": None, "round_seconds": None})
        if (outer := self.outer) is not None:  # the next number that fragments and delay allow
            least = max(local_steps, outer.fragments * (outer.delay + 1))
            local_steps = -(-least // outer.fragments) * outer.fragments
        return self.model_copy(update={"budget": None, "local_steps": local_steps})

    @property
    def own_keys(self) -> dict[str, Any]:
        """Return the keys of the task with their values."""
        return self.model_dump(exclude=set(Phase.model_fields))


class AnyPhase(Phase):
    """A phase of a task that is not imported yet: the keys of its inputs are checked when it is."""

    model_config = ConfigDict(extra="allow")


class Checkpointing(Record):
    """When checkpoints are written, and how many are retained."""

    every_epochs: Count | None = 1
    """Epochs between checkpoints; ``null``: none at the end of epochs."""
    every_steps: Count | None = None
    """Steps between checkpoints, besides those of epochs."""
    keep: Count = 3
    """Number of latest checkpoints to retain, besides the best; at least two of each with `per_node`."""
    path: str | None = None
    """Folder or URL in which each run has a folder for them; ``null``: they are in the run's own folder."""
    storage: dict[str, Any] = {}
    """Of a URL: the keywords of :class:`datacache.storage.Storage`, such as ``options``."""
    per_node: bool = False
    """Whether ``path`` is on a disk of each node's own: each has the weights, and the state of its ranks."""

    @model_validator(mode="after")
    def _is_a_place(self) -> "Checkpointing":
        if self.path is not None and ("::" in self.path or self.path.startswith("memory:")):
            expected = "a folder, or the URL of a storage that outlives the run"
            raise ConfigurationError(f"expected {expected}, got {self.path}", key="path")
        if self.per_node and (self.path is None or self.is_url):
            got = "none" if self.path is None else self.path
            expected = "expected a folder on each node's disk where per_node is true"
            raise ConfigurationError(f"{expected}, got {got}", key="path")
        if self.storage and not self.is_url:
            raise ConfigurationError("expected none where path is no URL, got some", key="storage")
        with reported("storage"):
            check_options("a storage", Storage, self.storage, positional=1)
        return self

    @property
    def is_url(self) -> bool:
        """Whether they are on a storage behind a URL, and not in a folder."""
        return self.path is not None and "://" in self.path and not self.path.startswith(FILE_URLS)


class DawnBenchEntry(Record):
    """Fields of DAWNBench's file besides those of the run."""

    author: str = ""
    """Who submits the entry."""
    author_email: str = ""
    """Where the author is reached."""
    code_url: str = ""
    """Where the code is found."""
    hardware: str | None = None
    """By default the nodes and hardware that are found."""
    cost_per_hour: Rate | None = None
    """In dollars, of all nodes."""


class Target(Record):
    """A target at which a run ends before its last epoch: a metric of the task, and a value."""

    metric: str
    """A metric of the task, such as ``top1``: the share of test samples whose label is ranked first."""
    at_least: Number | None = None
    """The value to reach, of a metric where higher values are better."""
    at_most: Number | None = None
    """The value to reach, of a metric where lower values are better."""

    @model_validator(mode="after")
    def _has_one_value(self) -> "Target":
        one_of(self, ("at_least", "at_most"))
        return self

    @property
    def goal(self) -> float:
        goal = self.at_least if self.at_most is None else self.at_most
        assert goal is not None
        return goal
