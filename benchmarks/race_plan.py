"""What :mod:`benchmarks.race` races: subjects, models and clusters."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from benchmarks.jobs import DEFAULT, Layout
from commlib import REDUCERS
from commlib.errors import look_up

RATES, LAYOUTS = ("0.2gbit", "1gbit", "10gbit"), ("4x1", "4x2")
DENSITY = 0.01
SEEDS = 3
JOBS = 3  # at least, of each of MPI's algorithms: they alternate, and each measures every subject

AUTO, RING = "auto", "ring"
HOROVOD, HOROVOD_RING, DENSE = "horovod", "horovod, ring", "dense"
OFF = ", overlap off"
WITHOUT_OVERLAP = ("dense", "hitopk", "oktopk")  # are measured in both ways
SWITCHES = "hitopk"  # to dense, in the last phase


@dataclass(frozen=True)
class RacedModel:
    """A model, and how it is trained.

    ``sizes``: of the pictures and of a rank's batch. ``target``: share of the test samples that is
    classified correctly, to which the time is taken, or none where only steps are timed. ``epochs``: of a
    run. ``switch``: epochs of a sparse phase and of a dense one after it, where a run of both is raced, too.
    """

    name: str
    rate: tuple[float, float]
    """First and last learning rate of a run, for 128 samples a step."""
    sizes: Mapping[str, int]
    momentum: float = 0.9
    target: float | None = None
    epochs: int = 1
    switch: tuple[int, int] | None = None


IMAGES = {"input_size": 28, "batch_size": 32}
RACED = {
    model.name: model
    for model in (
        # Momentum would move weights for steps after a sparse reducer has sent them once.
        RacedModel("mlp", (0.1, 0.0), IMAGES, momentum=0.0, target=0.91, epochs=5, switch=(6, 1)),
        RacedModel("resnet20", (0.1, 0.0), IMAGES, target=0.93, epochs=8),
        # With one rank a node at 0.3 Gbit/s, 30 % of a step without overlap are messages.
        RacedModel("vgg16_cifar", (0.001, 0.001), {"input_size": 32, "batch_size": 128}),
    )
}
MODELS = ("mlp", "resnet20")  # unless others are asked for


def may_be_sparse(reducer: str) -> bool:
    """Return whether a reducer has a density; ``auto`` may choose one that has."""
    return reducer == AUTO or REDUCERS[reducer].sparse


@dataclass(frozen=True)
class Subject:
    """A way to exchange gradients.

    ``reducer``: of ``commlib.REDUCERS``, or ``auto``. ``horovod``: Horovod's own path instead. ``algorithm``:
    of MPI's all-reduce. ``steps``, ``accuracy``: whether its steps are timed, and whether it is raced to an
    accuracy. ``phases``: 2 where the run has those of ``RacedModel.switch``, the first with ``reducer``.
    """

    name: str
    reducer: str
    horovod: bool = False
    algorithm: str = DEFAULT
    overlap: bool = True
    steps: bool = True
    accuracy: bool = True
    phases: int = 1

    @property
    def is_sparse(self) -> bool:
        """Return whether it has a density; it is measured against the fastest that has none."""
        return may_be_sparse(self.reducer)


@dataclass(frozen=True)
class Cell:
    """A model on a cluster. ``seeds``: how many runs to the accuracy each subject has, with one seed each."""

    rate: str
    layout: Layout
    model: RacedModel
    seeds: int

    @property
    def jobs(self) -> int:
        """Return how many jobs each of MPI's algorithms has: at least one for each seed."""
        return max(self.seeds, JOBS)

    def config(self, seed: int = 1) -> dict[str, Any]:
        """Return the configuration of the runs, with a phase that others take the place of."""
        return {
            "name": "race",
            "dataset": "mnist5k",
            "phases": [{**self.model.sizes, "steps": 1}],
            "model": self.model.name,
            "optimizer": {"name": "sgd", "momentum": self.model.momentum},
            "learning_rate": _line(*self.model.rate),
            "seed": seed,
        }

    def stepping(self, subject: Subject) -> dict[str, Any]:
        """Return the phase whose steps are timed."""
        return self._phase(subject.reducer) | {"steps": 1_000_000}

    def running(self, subject: Subject) -> dict[str, Any]:
        """Return the phases of a run, which does not end at the accuracy."""
        model = self.model
        if subject.phases == 1:
            return {"phases": [self._phase(subject.reducer) | {"epochs": model.epochs}]}
        (sparse, dense), (start, end) = model.switch, model.rate
        between = (dense * start + sparse * end) / (sparse + dense)
        first = {"epochs": sparse, "learning_rate": _line(start, between)}
        last = {"epochs": dense, "learning_rate": _line(between, end)}
        return {"phases": [self._phase(subject.reducer) | first, self._phase(DENSE) | last]}

    def _phase(self, reducer: str) -> dict[str, Any]:
        density = {"density": DENSITY} if may_be_sparse(reducer) else {}
        return {**self.model.sizes, "reducer": {"name": reducer, **density}}


def cells(
    rates: Sequence[str], layouts: Sequence[str], models: Sequence[str], seeds: int | None
) -> list[Cell]:
    """Return the cells; empty sequences stand for the defaults, a wrong name is an ``InvalidArgument``.

    Accuracies are raced to in the first cell of each model only: they take hours.
    """
    raced = [look_up(RACED, "model", name) for name in models or MODELS]
    places = product(rates or RATES, [Layout.of(text) for text in layouts or LAYOUTS])
    seeds = SEEDS if seeds is None else seeds
    return [
        Cell(rate, layout, model, seeds if model.target and number == 0 else 0)
        for number, (rate, layout) in enumerate(places)
        for model in raced
    ]


def _line(start: float, end: float) -> dict[str, Any]:
    return {"start": start, "end": end, "per_batch": 128}


def subjects(reducers: Sequence[str]) -> Iterator[Subject]:
    """Yield who takes part: Horovod in both ways and ``dense`` always, and these reducers, by default all.

    Those that send all gradients train alike, but for rounding. Of them only the fastest, Horovod over MPI's
    ring, is raced to an accuracy. Without overlap the run is the same to the bit. Steps are timed of all.
    """
    known = {**REDUCERS, AUTO: None}
    for name in reducers:
        look_up(known, "reducer", name)
    names = list(dict.fromkeys([DENSE, *(reducers or known)]))
    yield Subject(HOROVOD, DENSE, horovod=True, accuracy=False)
    yield Subject(HOROVOD_RING, DENSE, horovod=True, algorithm=RING)
    for name in names:
        yield Subject(name, name, accuracy=may_be_sparse(name))
    for name in names:
        if name in WITHOUT_OVERLAP:
            yield Subject(f"{name}{OFF}", name, overlap=False, accuracy=False)
    if SWITCHES in names:
        yield Subject(f"{SWITCHES} then dense", SWITCHES, steps=False, phases=2)
