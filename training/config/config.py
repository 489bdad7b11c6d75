"""The schema of ``configs/*.yaml``; a file and ``key=value`` overrides become a checked configuration.

Every error is a :class:`ConfigurationError` of one line that names the key, the value and what was
expected. The command line overrides the file, which overrides the defaults.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    BeforeValidator,
    SerializeAsAny,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    field_validator,
    model_serializer,
    model_validator,
)

from commlib.errors import one_line, shown
from commlib.rounds import fragment_bounds
from commlib.tuning.tuner import Choice
from training.callbacks import CallbackRecord
from training.config import records, reducers
from training.config.checks import check, without_effect
from training.config.optimizers import AnyOptimizer, Sgd
from training.config.reading import LINEAR, Given, problems_in_one_line, read_given
from training.config.records import Phase
from training.config.reducers import AUTO, ReducerRecord, inherited, written_out
from training.config.schedules import LearningRate, MomentumLine
from training.config.schema import ConfigurationError, Count, Positive, WholeNumber, named, reported
from training.config.secrets import in_clear, mask
from training.datasets import Dataset
from training.tasks import TaskRecord

DEFAULT_BUCKET_MIB = 25  # as in PyTorch's DistributedDataParallel


class Config(reducers.Reducing):
    """A training run."""

    name: records.FileName
    """The run's folder has this name, followed by its time."""
    task: Annotated[TaskRecord, BeforeValidator(named)] = TaskRecord()
    """A name of ``training.tasks.TASKS`` or an import path; with options, ``name`` and those."""
    dataset: Annotated[records.DatasetRecord, BeforeValidator(named)]
    """A name of ``training.datasets.DATASETS``; with more settings, ``name``, ``path`` and options."""
    model: Annotated[records.ModelRecord, BeforeValidator(named)]
    """A name of ``training.models.MODELS`` or an import path; with options, ``name`` and those."""
    phases: list[SerializeAsAny[Phase]]
    """Run in order, with the keys of the task; the residual of a reducer is added to the first step of the
    next one."""
    learning_rate: LearningRate | None = None
    """The default of phases that give none."""
    seed: records.Seed = 1
    """Seed of the initial weights and of the order of samples."""
    optimizer: AnyOptimizer = Sgd()
    """A name of ``training.config.optimizers.OPTIMIZERS``, or ``name`` and its settings."""
    precision: Literal["float32", "float16", "bfloat16"] = "float32"
    """Precision of the model; weights and gradients are float32. float16 scales the loss."""
    normalise: records.Normalise | None = None
    """Without it inputs are levels, and the model brings them to −1 … 1."""
    accumulate: Count = 1
    """Gradient accumulation: the number of equal parts in which a rank computes a batch's gradient."""
    clip_norm: Positive | None = None
    """Gradient clipping: a mean gradient of a larger norm is scaled down to this norm."""
    average: records.Part | None = None
    """Momentum of an exponential moving average of the weights, with which the model is tested."""
    evaluate_every: Count = 1
    """Epochs between tests; the last epoch of a phase is always tested."""
    checkpoints: records.Checkpointing | None = None
    """When and where checkpoints are written; by default never."""
    deterministic: bool = True
    """Whether TensorFlow uses deterministic operations only; else a resumed run is not bitwise equal."""
    resume: str = "never"
    """``auto``: resume the last run of this name that did not end; a run's folder: resume that run."""
    target: records.Target | None = None
    """The run ends when this is reached; its folder also gets ``dawnbench.json`` and ``dawnbench.tsv``."""
    dawnbench: records.DawnBenchEntry = records.DawnBenchEntry()
    """Fields of ``dawnbench.json`` besides those of the run."""
    ranks_per_node: records.Layout = None
    """Emulates nodes: ranks on each, or a list of them. Without it, nodes are told apart by hostname."""
    reducer: reducers.GivenReducer = ReducerRecord()
    """A name of ``commlib.REDUCERS``, ``auto`` or an import path, or a record of the name and options: the
    default of phases; ``dense`` without it."""
    sparse_tables: bool = False
    """Whether gradients of embeddings that only look rows up travel as rows: all of them, apart from the
    reducers of phases, which have the rest of the gradient."""
    overlap: bool = True
    """Whether a bucket of the gradient is reduced while other layers still compute theirs."""
    bucket_mib: Positive | None = None
    """MiB of float32 values that a bucket has at most, unless one variable alone has more. By default from
    the profile, where ``auto`` reads one, else 25."""
    transport: records.Transport = "auto"
    """``nccl``: gradients stay on GPUs; ``nccl+mpi``: but go through host memory between nodes; ``mpi``:
    always through host memory. ``auto``: ``nccl`` where each rank has a GPU for it, else ``mpi``."""
    verify: bool = False
    """Whether a 64-bit digest checks every message between ranks, to find hardware that alters data."""
    stall_timeout: Positive = 1800.0
    """Seconds that a rank waits in an exchange before it ends the job and names the ranks that are missing;
    set it above the longest time by which one rank can lag behind the others."""
    cache: records.Cache = records.Cache()
    """Where the ranks of a node cache samples; by default nowhere."""
    profile: str | None = None
    """The file from which ``auto`` chooses; by default the one that ``cloudtrain tune`` writes."""
    callbacks: list[Annotated[CallbackRecord, BeforeValidator(named)]] = []
    """Names of ``training.callbacks.CALLBACKS`` or import paths; with options, ``name`` and those."""
    digest_every: WholeNumber = 100
    """Steps between two comparisons of the weights of all ranks; 0: only tests compare them."""
    metrics_port: records.Port | None = None
    """Where the machine of rank 0 serves ``http://127.0.0.1:PORT/metrics`` to Prometheus."""
    log_every: Count = 10
    """Steps between two lines of ``metrics.jsonl``."""
    trace: Count | None = None
    """Steps to trace, the first ones after the first of this process; ``trace.json`` shows them by rank."""
    output: str = "runs"
    """The folder in which the run creates its own."""

    @field_validator("phases", mode="before")
    @classmethod
    def _phases_are_of_the_task(cls, value: Any, info: ValidationInfo) -> list[Phase]:
        if not isinstance(value, list) or value == []:
            raise ConfigurationError(f"expected a list of one phase or more, got {shown(value)}")
        task: TaskRecord | None = info.data.get("task")  # none where it is wrong itself
        return [] if task is None else task.phases(value)

    @model_validator(mode="after")
    def _fits_together(self) -> "Config":
        check(self)
        return self

    def with_task_imported(self) -> "Config":
        """Return the configuration with phases of its task, which is imported, checked.

        Raises a ``ValueError`` of one line that begins with the key.
        """
        with problems_in_one_line("", "phases"):
            return self.model_copy(update={"phases": self.task.phases(list(self.phases))})

    def make_dataset(self) -> Dataset:
        """Return the data set; raises a ``ValueError`` of one line if it is invalid or of another kind."""
        dataset, kind = self.dataset.make(), self.task.kind
        if kind is not None and not isinstance(dataset, kind.dataset):
            expected = f"expected one of kind {kind.dataset.__name__} for the task {self.task.name}"
            raise ValueError(f"dataset: {expected}, got {self.dataset.name} ({type(dataset).__name__})")
        return dataset

    def reducer_name(self, phase: Phase) -> str:
        """Return the name of a phase's reducer, or ``auto``."""
        own = phase.reducer and phase.reducer.name
        return own or self.reducer.name or reducers.DEFAULT_REDUCER

    def is_sparse(self, phase: Phase) -> bool:
        """Return whether a phase's reducer sends a part of the gradient; ``auto`` may choose a sparse one."""
        name = self.reducer_name(phase)
        reducer = reducers.class_of(name)
        return name == AUTO or (reducer is not None and reducer.sparse)

    @property
    def bucket_bytes(self) -> int:
        return max(1, round((self.bucket_mib or DEFAULT_BUCKET_MIB) * 2**20))

    def cuts(self, shapes: Sequence[tuple[int, ...]]) -> set[int]:
        """Return the offsets in the flat gradient at which fragments begin, other than 0.

        Raises a ``ValueError`` of one line that begins with the key where there are too few variables.
        """
        cuts = set[int]()
        for number, phase in enumerate(self.phases):
            if phase.outer is not None:
                with reported(f"phases[{number}].outer"):
                    cuts |= {*fragment_bounds(shapes, phase.outer.fragments)[1:-1]}
        return cuts

    @property
    def automatic(self) -> list[int]:
        """Return the numbers of the phases whose reducer is to be chosen."""
        return [number for number, phase in enumerate(self.phases) if self.reducer_name(phase) == AUTO]

    def density_of(self, phase: Phase) -> float:
        """Return the density at which a phase's reducer selects, if it does."""
        return float(inherited(self.reducer, phase.reducer).get("density", reducers.DEFAULT_DENSITY))

    def momentum_of(self, phase: Phase) -> float | MomentumLine | None:
        """Return the momentum of a phase, see ``schedules.momentum_at``; ``None``: the optimizer has none."""
        return getattr(self.optimizer, "momentum", None) if phase.momentum is None else phase.momentum

    def with_choices(self, choices: Mapping[int, Choice]) -> "Config":
        """Return the configuration with the reducers chosen for phases, by number, written out."""
        phases = list(self.phases)
        for number, choice in choices.items():
            given = choice.options | {"density": self.density_of(phases[number])}
            reducer = ReducerRecord(name=choice.reducer, **written_out(choice.reducer, given))
            phases[number] = phases[number].model_copy(update={"reducer": reducer})
            if choice.local_steps is not None:
                phases[number] = phases[number].with_local_steps(choice.local_steps)
        return self.model_copy(update={"phases": phases})

    def reducer_config(self, phase: Phase) -> dict[str, Any]:
        """Return a phase's reducer with options, for :class:`commlib.tensorflow.DistributedGradients`.

        An option that the phase does not give is the configuration's, else the reducer's default. ``auto``
        has only its density here, and must be replaced first: see ``with_choices``.
        """
        name = self.reducer_name(phase)
        return {"name": name, **written_out(name, inherited(self.reducer, phase.reducer))}

    def resolved(self) -> "Config":
        """Return the configuration with every phase's learning rate, reducer and options written out.

        The options of a reducer that is not imported yet stay as they are given.
        """
        return self.model_copy(update={"phases": [self._resolved(phase) for phase in self.phases]})

    def _resolved(self, phase: Phase) -> Phase:
        if reducers.options_of(self.reducer_name(phase)) is not None:  # it is imported
            phase = phase.model_copy(update={"reducer": ReducerRecord(**self.reducer_config(phase))})
        return phase.model_copy(update={"learning_rate": phase.learning_rate or self.learning_rate})

    @model_serializer(mode="wrap")
    def _without_secrets(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Mask secrets that are no references, wherever a configuration is written."""
        return mask(dump(self))

    def to_yaml(self) -> str:
        """Return the configuration as YAML that ``load`` reads back, unless a secret was given in clear."""
        return yaml.safe_dump(self.model_dump(exclude_none=True), sort_keys=False)


@dataclass(frozen=True)
class Loaded:
    """A checked configuration, and a line for each setting without effect.

    ``config``: a ``Config`` with every phase's reducer written out, or a record of another kind of run.
    """

    config: Any
    warnings: list[str]


def load(path: str | Path | Given, overrides: Sequence[str] = ()) -> Config:
    """Return what ``load_with_warnings`` does, without the warnings."""
    return load_with_warnings(path, overrides).config


def load_with_warnings(
    path: str | Path | Given,
    overrides: Sequence[str] = (),
    change: Callable[[dict[str, Any]], dict[str, Any]] = dict,
) -> Loaded:
    """Return the checked configuration of a YAML file or a name that ships, with ``key=value`` overrides.

    ``overrides``: see :func:`training.config.reading.read_given`. ``change`` maps the given keys and values
    to those that are checked.
    """
    given = read_given(path, overrides)
    if given.keys.get("task") == LINEAR:
        expected = f"{LINEAR} is for the commands train and launch"
        raise ConfigurationError(expected, key="task", source=str(given.path))
    with problems_in_one_line(given.path):
        config = Config.model_validate(change(given.keys))
    expected = "expected a reference such as ${oc.env:NAME}, got a secret in clear"
    warnings = [*(f"{place}: {expected}" for place in in_clear(given.keys)), *without_effect(config)]
    return Loaded(config.resolved(), [one_line(mask(line)) for line in warnings])
