"""What a run ends with, and how it is told."""

from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass
class PhaseResult:
    """What one phase did: ``sent`` and ``dense`` are inter-node payload bytes of all ranks together.

    ``dense`` is what the reducer of that name, a ring, would have sent in as many steps.
    """

    reducer: str
    input_size: int
    epochs: int
    sent: int = 0
    dense: int = 0
    void_steps: int = 0


@dataclass(frozen=True)
class EpochResult:
    """One epoch of all ranks together. ``loss``: mean over the steps whose loss was finite, if any was."""

    epoch: int
    reducer: str
    input_size: int
    steps: int
    loss: float | None
    correct: int
    samples: int
    train_seconds: float
    images_per_second: float
    sent_intra_bytes: int
    sent_inter_bytes: int
    dense_inter_bytes: int

    @property
    def accuracy(self) -> float:
        """Return the share of the test samples that were answered right."""
        return self.correct / self.samples


@dataclass
class Summary:
    """The test accuracy after the last epoch, and what every phase did.

    ``held_back``: norm of rank 0's residual, which is not in the weights.
    """

    correct: int
    samples: int
    seconds: float
    held_back: float = 0.0
    phases: list[PhaseResult] = field(default_factory=list)

    @property
    def accuracy(self) -> float:
        """Return the share of the test samples that were answered right."""
        return self.correct / self.samples


def megabytes(count: float) -> str:
    """Return a number of bytes in MB, two places.

    >>> megabytes(1_234_567)
    '1.23 MB'
    """
    return f"{count / 1e6:.2f} MB"


def epoch_line(result: EpochResult, *, epochs: int, width: int) -> str:
    """Return the line that stays of an epoch; ``width`` is that of the reducers' names."""
    loss = "nan" if result.loss is None else f"{result.loss:.3f}"
    between = ""
    if result.dense_inter_bytes:
        sent, dense = megabytes(result.sent_inter_bytes), megabytes(result.dense_inter_bytes)
        between = f"  between nodes {sent} (dense {dense})"
    return (
        f"epoch {result.epoch + 1:>2}/{epochs}  {result.reducer:<{width}}  {result.input_size} px"
        f"  loss {loss}  test accuracy {result.accuracy:6.1%}"
        f"  {result.images_per_second:7,.0f} images/s{between}"
    )


def _share(phase: PhaseResult) -> str:
    if not phase.sent:
        return "nothing"
    return f"1/{phase.dense / phase.sent:.0f}" if phase.sent < phase.dense else "all"


def closing_lines(summary: Summary, folder: str) -> Iterator[str]:
    """Yield what a user wants to know at the end."""
    yield (
        f"test accuracy {summary.accuracy:.1%} ({summary.correct} of {summary.samples}), "
        f"trained in {summary.seconds:.0f} s"
    )
    sent = sum(phase.sent for phase in summary.phases)
    dense = sum(phase.dense for phase in summary.phases)
    if dense:
        yield f"sent between nodes {megabytes(sent)}; dense all the way would have sent {megabytes(dense)}"
        for number, phase in enumerate(summary.phases, 1):
            sizes = f"{megabytes(phase.sent)} of {megabytes(phase.dense)}"
            yield f"  phase {number}, {phase.reducer}: {sizes} ({_share(phase)})"
    if void := sum(phase.void_steps for phase in summary.phases):
        yield f"{void} steps were void: a NaN or an infinity in their gradients"
    if summary.held_back:
        norm = f"{summary.held_back:.3g}"
        yield f"held back at the end, and not in the weights: a residual of norm {norm} on rank 0"
    yield f"files: {folder} (metrics.jsonl, config.yaml, model.weights.h5)"
