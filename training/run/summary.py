"""The summary of a run, and how it is reported."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields

from commlib import Topology
from commlib.tuning.profile import processor
from training.config.records import Target
from training.run.stages import StageMeans, shown
from training.tasks.task import Metric, Task

HOSTS_SHOWN = 8
STALL_SECONDS = 0.1  # a shorter stop between phases is not worth a line: a step's own time varies by as much


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
        hosts, processors = zip(
            *topology.world.allgather_objects((topology.world.host, processor())), strict=True
        )
        nodes = [len(node) for node in topology.nodes]
        return cls(topology.world.size, nodes, list(dict.fromkeys(hosts)), summed_up(processors))

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
class PhaseResult:
    """The result of one phase: ``sent`` and ``dense`` are inter-node payload bytes over all ranks.

    ``dense`` is what the dense reducer, a ring, would have sent in as many steps. ``reducer`` is ``None``
    on one rank, which exchanges nothing. ``input``: the size of its inputs. ``skipped_steps``: steps with a
    non-finite gradient on any rank, which changed nothing.
    """

    reducer: str | None
    input: str
    epochs: int
    sent: int = 0
    dense: int = 0
    skipped_steps: int = 0
    stall_seconds: float | None = None
    """Seconds that training stalled at the boundary before it, at least 0; ``None`` for the first."""


@dataclass(frozen=True)
class EpochResult:
    """One epoch over all ranks. ``loss``: mean over the steps whose loss was finite, if any.

    ``input``: the size of its inputs. ``metrics``: of the task, over the ``tested`` samples or tokens; none
    where the epoch was not tested. ``train_seconds``: of its steps; ``run_seconds``: since the run began.
    ``throughput``: in units of the task a second. ``reducer``: ``None`` on one rank. ``stages``: of the steps
    that were made since the latest resumption.
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


@dataclass
class Summary:
    """The metrics of the last test, over the ``tested`` samples or tokens, and the result of every phase.

    ``seconds``: since the run began, without those between a stop and its resumption. ``best``: of the
    target's metric, or of the task's first. ``reached``: whether the target was reached. ``residual_norm``:
    norm of rank 0's residual, which is not in the weights. ``stopped``: why a callback ended the run before
    its last epoch, if one did.
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
        """Record the result of an epoch, and return whether it is the best so far; equal on all ranks.

        ``metrics``: of the task.
        """
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
        for field_ in fields(self):
            if field_.name != "phases":
                setattr(self, field_.name, getattr(before, field_.name))
        for phase, of_then in zip(self.phases, before.phases, strict=False):
            phase.sent, phase.dense = of_then.sent, of_then.dense
            phase.skipped_steps, phase.stall_seconds = of_then.skipped_steps, of_then.stall_seconds


def megabytes(count: float) -> str:
    """Return a number of bytes in MB, with two decimals.

    >>> megabytes(1_234_567)
    '1.23 MB'
    """
    return f"{count / 1e6:.2f} MB"


def epoch_line(result: EpochResult, task: Task, *, epochs: int, width: int) -> str:
    """Return the line of an epoch; ``width`` is that of the reducers' names, 0 without any."""
    loss = "nan" if result.loss is None else f"{result.loss:.3f}"
    between = ""
    if result.dense_inter_bytes:
        sent, dense = megabytes(result.sent_inter_bytes), megabytes(result.dense_inter_bytes)
        between = f"  between nodes {sent} (dense {dense})"
    name, metric = next(iter(task.metrics.items()))
    shown_metric = metric.shown(result.metrics[name]) if result.metrics else ""
    tested = f"{metric.label} {shown_metric:>6}"
    if not result.metrics:
        tested = "not tested".ljust(len(tested))
    reducer = f"{result.reducer or '':<{width}}  " if width else ""
    times = shown(result.stages.hidden_share, result.stages.slowest)
    return (
        f"epoch {result.epoch + 1:>2}/{epochs}  {reducer}{result.input}"
        f"  loss {loss}  {tested}"
        f"  {result.throughput:7,.0f} {task.unit}/s{between}{times}"
    )


def _last_test(summary: Summary, task: Task) -> str:
    if not summary.metrics:
        return "not tested"
    name, metric = next(iter(task.metrics.items()))
    value = summary.metrics[name]
    of = f" ({round(value * summary.tested)} of {summary.tested})" if metric.share else ""
    return f"{metric.label} {metric.shown(value)}{of}"


def _share(phase: PhaseResult) -> str:
    if not phase.sent:
        return "nothing"
    return f"1/{phase.dense / phase.sent:.0f}" if phase.sent < phase.dense else "all"


def _stall_lines(phases: Sequence[PhaseResult]) -> Iterator[str]:
    """Yield a line if training stalled between phases for at least ``STALL_SECONDS``."""
    stalls = {number: phase.stall_seconds or 0.0 for number, phase in enumerate(phases, 1)}
    long = {number: seconds for number, seconds in stalls.items() if seconds >= STALL_SECONDS}
    reported = [f"{seconds:.1f} s before phase {number}" for number, seconds in long.items()]
    if reported:
        yield f"training stood still between phases: {', '.join(reported)}"


def closing_lines(summary: Summary, task: Task, ranks: Ranks, folder: str) -> Iterator[str]:
    """Yield the lines at the end of a run."""
    yield f"{_last_test(summary, task)}, trained in {summary.seconds:.0f} s by {ranks}"
    sent = sum(phase.sent for phase in summary.phases)
    dense = sum(phase.dense for phase in summary.phases)
    if dense:
        yield f"sent between nodes {megabytes(sent)}; dense all the way would have sent {megabytes(dense)}"
        for number, phase in enumerate(summary.phases, 1):
            sizes = f"{megabytes(phase.sent)} of {megabytes(phase.dense)}"
            yield f"  phase {number}, {phase.reducer}: {sizes} ({_share(phase)})"
    yield from _stall_lines(summary.phases)
    if skipped := sum(phase.skipped_steps for phase in summary.phases):
        steps = "1 step was" if skipped == 1 else f"{skipped} steps were"
        yield f"{steps} skipped: a NaN or an infinity in the gradients"
    if summary.residual_norm:
        norm = f"{summary.residual_norm:.3g}"
        yield f"held back at the end, and not in the weights: a residual of norm {norm} on rank 0"
    yield f"files: {folder} (metrics.jsonl, config.yaml, model.weights.h5)"
