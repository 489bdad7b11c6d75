"""The results of training as values: of a step, an epoch, a phase and a run, and the position of a run.

A loop makes these values; callbacks, events and checkpoints read them.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from pydantic import NonNegativeInt

from commlib import Communicator, LinkBytes, Report, Topology
from commlib.tuning.probe import processor
from training.config.records import Target
from training.tasks.task import Metric, Tested

HOSTS_SHOWN = 8
ALL_FRAGMENTS = -1  # in place of the number of a fragment
OWN_WORK = ("data_wait", "forward_backward", "select")  # what a rank does before it needs the others


@dataclass
class LoopSeconds:
    """Time of a step by what the loop did; the stages follow each other, and add up to less than the step.

    ``data_wait``: for the batch. ``forward_backward``: loss and gradient. ``exchange_wait``: for the mean
    gradient; without overlap, the whole exchange. ``norms``: clipping, and LARS. ``update``: of the weights.
    """

    data_wait: float = 0.0
    forward_backward: float = 0.0
    exchange_wait: float = 0.0
    norms: float = 0.0
    update: float = 0.0


@dataclass(frozen=True)
class StepHyperparameters:
    """The hyperparameters of a step.

    ``round_steps``: steps of the round that ends with this step, when all ranks exchange; 0 within a round, 1
    without local steps. With fragments, a round ends where one arrives. ``leaving``: the number of the
    fragment whose exchange begins after this step; ``ALL_FRAGMENTS`` if all do, ``None`` if none does.
    """

    learning_rate: float
    momentum: float | None
    round_steps: int = 1
    leaving: int | None = None

    def passes(self, steps: int, every: int) -> bool:
        """Return whether a multiple of ``every`` was reached in the round that ends with step ``steps``.

        >>> [StepHyperparameters(0.1, None, round_steps).passes(12, 5) for round_steps in (0, 1, 2, 3)]
        [False, False, False, True]
        """
        return steps // every > (steps - self.round_steps) // every


@dataclass(frozen=True)
class Step:
    """A step of one rank. ``seconds``: since the end of the step before; ``loop``: where they went.

    ``size``: of its batch, in the unit of the task. ``start``: the end of the step before, by the transport's
    clock. ``loss_scale``: of the next step, with float16. ``passed_over``: the rank has taken no step, since
    its round of local steps had lasted ``round_seconds``: the loss is NaN, the size 0.
    """

    loss: float
    report: Report
    seconds: float
    loop: LoopSeconds
    size: int = 0
    start: float = 0.0
    hyperparameters: StepHyperparameters = StepHyperparameters(0.0, None)
    loss_scale: float | None = None
    passed_over: bool = False

    @property
    def stage_seconds(self) -> dict[str, float]:
        """Return the seconds of all stages: those of the loop, and those of the reducer."""
        return vars(self.loop) | vars(self.report.seconds)


@dataclass
class StageSums:
    """The stages of some steps of one rank, added up; ``busy`` and ``hidden`` as in its reports."""

    steps: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    busy: float = 0.0
    hidden: float = 0.0

    def add(self, step: Step) -> None:
        self.steps += 1
        for stage, seconds in step.stage_seconds.items():
            self.seconds[stage] = self.seconds.get(stage, 0.0) + seconds
        self.busy += step.report.busy
        self.hidden += step.report.hidden

    @property
    def hidden_share(self) -> float | None:
        """Return the hidden share of the exchange; ``None`` if nothing was exchanged in the background."""
        return self.hidden / self.busy if self.busy else None


@dataclass(frozen=True)
class Slowest:
    """The rank with the longest own work, by the share ``excess`` longer than that of the mean rank.

    >>> print(Slowest(rank=3, excess=0.12))
    slowest rank 3 (+12%)
    """

    rank: int
    excess: float

    def __str__(self) -> str:
        return f"slowest rank {self.rank} (+{self.excess:.0%})"


@dataclass(frozen=True)
class StageMeans:
    """The stages of steps of all ranks: means over steps and ranks. ``slowest``: ``None`` on one rank."""

    stage_seconds: dict[str, float] = field(default_factory=dict)
    hidden_seconds: float = 0.0
    hidden_share: float | None = None
    slowest: Slowest | None = None


def means_over_ranks(of_ranks: Sequence[StageSums]) -> StageMeans:
    """Return the means of the sums of all ranks, which are in the order of the ranks."""
    steps = sum(each.steps for each in of_ranks)
    if not steps:
        return StageMeans()
    names = next(each.seconds for each in of_ranks if each.steps)
    busy, hidden = sum(each.busy for each in of_ranks), sum(each.hidden for each in of_ranks)
    own = [sum(each.seconds.get(stage, 0.0) for stage in OWN_WORK) for each in of_ranks]
    mean = sum(own) / len(own)
    return StageMeans(
        {name: sum(each.seconds.get(name, 0.0) for each in of_ranks) / steps for name in names},
        hidden / steps,
        hidden / busy if busy else None,
        Slowest(own.index(max(own)), max(own) / mean - 1) if mean and len(own) > 1 else None,
    )


def shown(hidden_share: float | None, slowest: Slowest | None) -> str:
    """Return the share and the slowest rank as a line of progress has them, each after two spaces.

    >>> shown(0.83, Slowest(rank=3, excess=0.12))
    '  hidden 83%  slowest rank 3 (+12%)'
    """
    hidden = "" if hidden_share is None else f"  hidden {hidden_share:.0%}"
    return hidden if slowest is None else f"{hidden}  {slowest}"


@dataclass
class PhaseResult:
    """The result of one phase: ``sent_inter_bytes`` are payload bytes between nodes over all ranks.

    ``dense_inter_bytes``: what the dense reducer, a ring, would have sent in as many steps. ``reducer`` is
    ``None`` on one rank, which exchanges nothing. ``input``: the size of its inputs. ``skipped_steps``: steps
    with a non-finite gradient on any rank, which changed nothing. ``passed_over``: steps, over all ranks.
    """

    reducer: str | None
    input: str
    epochs: int
    sent_inter_bytes: int = 0
    dense_inter_bytes: int = 0
    skipped_steps: int = 0
    passed_over: int = 0
    stall_seconds: float | None = None
    """Seconds that training stalled at the boundary before it, at least 0; ``None`` for the first."""


@dataclass(frozen=True)
class EpochResult:
    """One epoch over all ranks. ``loss``: mean over the steps whose loss was finite, if any.

    ``input``: the size of its inputs. ``metrics``: of the task, over the ``tested`` samples or tokens; none
    where the epoch was not tested. ``train_seconds``: of its steps; ``run_seconds``: since the run began.
    ``throughput``: in units of the task a second. ``reducer``: ``None`` on one rank. ``stages``: of the steps
    that were made since the latest resumption. ``passed_over``: steps of all ranks that were passed over.
    """

    epoch: int
    reducer: str | None
    input: str
    steps: int
    loss: float | None
    metrics: Mapping[str, float]
    tested: int
    train_seconds: float
    run_seconds: float
    throughput: float
    sent_intra_bytes: int
    sent_inter_bytes: int
    dense_inter_bytes: int
    stages: StageMeans = StageMeans()
    passed_over: int = 0


@dataclass
class EpochAccumulator:
    """The sums of an epoch so far, on this rank.

    ``seconds``, ``stages``: of the steps of this process; ``seconds_before``: before the latest resumption.
    """

    losses: float = 0.0
    finite: int = 0
    steps: int = 0
    sent: LinkBytes = LinkBytes()
    seconds: list[float] = field(default_factory=list)
    seconds_before: float = 0.0
    size: int = 0
    stages: StageSums = field(default_factory=StageSums)
    passed_over: int = 0

    def add(self, step: Step) -> None:
        self.steps += 1
        self.passed_over += step.passed_over
        self.sent += step.report.traffic.sent
        self.seconds.append(step.seconds)
        self.size += step.size
        self.stages.add(step)
        if np.isfinite(step.loss):
            self.losses += step.loss
            self.finite += 1

    def result(
        self,
        comm: Communicator,
        dense_step_bytes: int,
        *,
        epoch: int,
        phase: PhaseResult,
        tested: Tested,
        run_seconds: float,
    ) -> EpochResult:
        """Return the result of the epoch over all ranks, and add its bytes to the phase; collective.

        ``dense_step_bytes``: what this rank would send to other nodes in a step of the dense reducer.
        """
        dense_bytes = self.steps * dense_step_bytes
        own = [self.sent.intra, self.sent.inter, dense_bytes, self.finite, self.size, self.passed_over]
        intra, inter, dense, finite, size, passed_over = map(int, comm.allgather_ints(own).sum(axis=0))
        losses, stages = zip(*comm.allgather_objects((self.losses, self.stages)), strict=True)
        phase.sent_inter_bytes += inter
        phase.dense_inter_bytes += dense
        phase.passed_over += passed_over
        seconds = self._total_seconds
        return EpochResult(
            epoch=epoch,
            reducer=phase.reducer,
            input=phase.input,
            steps=self.steps,
            loss=sum(losses) / finite if finite else None,
            metrics=dict(tested.values),
            tested=tested.count,
            train_seconds=seconds,
            run_seconds=run_seconds,
            throughput=size / seconds if seconds else 0.0,
            sent_intra_bytes=intra,
            sent_inter_bytes=inter,
            dense_inter_bytes=dense,
            stages=means_over_ranks(stages),
            passed_over=passed_over,
        )

    def as_tree(self) -> dict[str, Any]:
        """Return what is stored in a checkpoint: all but the times of single steps and of stages."""
        tree = vars(self) | {"seconds_before": self._total_seconds, "sent": asdict(self.sent)}
        return {name: value for name, value in tree.items() if name not in ("seconds", "stages")}

    @property
    def _total_seconds(self) -> float:
        return self.seconds_before + float(np.sum(self.seconds))


@dataclass(frozen=True)
class Ranks:
    """The ranks of a run. ``nodes``: how many each has; ``hosts``: their names, each once, in rank order.

    ``hardware``: what they compute on.
    """

    count: int
    nodes: list[int]
    hosts: list[str]
    hardware: str = ""

    @classmethod
    def of(cls, topology: Topology) -> "Ranks":
        """Return the ranks of a topology; collective."""
        world, nodes = topology.world, [len(node) for node in topology.nodes]
        hosts, processors = zip(*world.allgather_objects((world.host, processor())), strict=True)
        return cls(world.size, nodes, list(dict.fromkeys(hosts)), summed_up(processors))

    def __str__(self) -> str:
        """Return how many there are, on how many nodes, and the names of their hosts.

        >>> print(Ranks(4, [2, 2], ["a", "b"]))
        4 ranks on 2 nodes (a, b)
        """
        ranks = f"{self.count} rank{'s' * (self.count > 1)}"
        nodes = f"{len(self.nodes)} node{'s' * (len(self.nodes) > 1)}"
        more = len(self.hosts) - HOSTS_SHOWN
        names = [*self.hosts[:HOSTS_SHOWN], *([f"and {more} more"] if more > 0 else [])]
        return f"{ranks} on {nodes} ({', '.join(names)})"


def summed_up(processors: Sequence[str]) -> str:
    """Return the hardware that all ranks compute on.

    >>> summed_up(["a", "a", "b"])
    '2 ranks on a, 1 rank on b'
    """
    counts = Counter(processors)
    return ", ".join(f"{count} rank{'s' * (count > 1)} on {each}" for each, count in counts.items())


@dataclass
class Summary:
    """The metrics of the last test, over the ``tested`` samples or tokens, and the result of every phase.

    ``seconds``: since the run began, without those between a stop and its resumption. ``best``: of the
    target's metric, or of the task's first. ``reached``: whether the target was reached. ``residual_norm``:
    norm of rank 0's residual, which is not in the weights. ``stopped``: why a callback ended the run early.
    """

    metrics: dict[str, float] = field(default_factory=dict)
    tested: int = 0
    seconds: float = 0.0
    best: float | None = None
    reached: bool = False
    residual_norm: float = 0.0
    phases: list[PhaseResult] = field(default_factory=list)
    stopped: str | None = None

    @property
    def is_over(self) -> bool:
        """Return whether the run ends before its last epoch."""
        return self.reached or self.stopped is not None

    def judge(self, result: EpochResult, metrics: Mapping[str, Metric], target: Target | None) -> bool:
        """Record the result of an epoch, and return whether it is the best so far; equal on all ranks."""
        if not result.metrics:
            return False
        self.metrics, self.tested = dict(result.metrics), result.tested
        name = next(iter(metrics)) if target is None else target.metric
        value, metric = result.metrics[name], metrics[name]
        if math.isnan(value):
            return False
        self.reached = self.reached or (target is not None and metric.reaches(value, target.goal))
        is_best = self.best is None or not metric.reaches(self.best, value)
        self.best = value if is_best else self.best
        return is_best

    def restore(self, before: "Summary") -> None:
        """Take over another summary; phases that no longer exist are left out."""
        vars(self).update(vars(before) | {"phases": self.phases})
        for phase, of_then in zip(self.phases, before.phases, strict=False):
            planned = {"reducer": phase.reducer, "input": phase.input, "epochs": phase.epochs}
            vars(phase).update(vars(of_then) | planned)


@dataclass(frozen=True)
class Position:
    """The position of a run: how much of it is complete.

    ``phase``: phases of the run. ``epoch``, ``phase_steps``: epochs and steps of the current phase. ``step``,
    ``samples``: steps and samples of the current epoch, samples over all ranks, in the unit of its order.
    ``steps``, ``run_epoch``: steps and epochs of the run. Sample order and crops depend on ``run_epoch``.
    """

    phase: NonNegativeInt = 0
    epoch: NonNegativeInt = 0
    step: NonNegativeInt = 0
    phase_steps: NonNegativeInt = 0
    steps: NonNegativeInt = 0
    samples: NonNegativeInt = 0
    run_epoch: NonNegativeInt = 0

    def after_step(self, samples: int) -> "Position":
        """Return the position after a step that took ``samples`` over all ranks.

        >>> Position(step=2, phase_steps=7, steps=9, samples=64).after_step(32)
        Position(phase=0, epoch=0, step=3, phase_steps=8, steps=10, samples=96, run_epoch=0)
        """
        return replace(
            self,
            step=self.step + 1,
            phase_steps=self.phase_steps + 1,
            steps=self.steps + 1,
            samples=self.samples + samples,
        )

    def after_epoch(self) -> "Position":
        """Return the beginning of the next epoch of the phase.

        >>> Position(step=2, phase_steps=7, steps=9, samples=64, run_epoch=3).after_epoch()
        Position(phase=0, epoch=1, step=0, phase_steps=7, steps=9, samples=0, run_epoch=4)
        """
        return replace(self, epoch=self.epoch + 1, run_epoch=self.run_epoch + 1, step=0, samples=0)

    def after_phase(self) -> "Position":
        return Position(self.phase + 1, steps=self.steps, run_epoch=self.run_epoch)

    def in_world(self, global_batch: int, epoch_steps: int) -> "Position":
        """Return the same position in steps of ``global_batch`` samples: no sample is read twice in an epoch.

        >>> Position(epoch=1, step=3, phase_steps=13, steps=13, samples=24).in_world(16, 5)
        Position(phase=0, epoch=1, step=2, phase_steps=7, steps=13, samples=32, run_epoch=0)
        """
        step = min(-(-self.samples // global_batch), epoch_steps)
        steps = self.epoch * epoch_steps + step
        return replace(self, step=step, phase_steps=steps, samples=step * global_batch)
