"""What a run ends with, and how it is told."""

from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass
class PhaseResult:
    """What one phase did: ``sent`` and ``dense`` are inter-node payload bytes of all ranks together.

    ``dense`` is what the reducer of that name would have sent in as many steps.
    """

    reducer: str
    input_size: int
    epochs: int
    sent: int = 0
    dense: int = 0
    void_steps: int = 0


@dataclass
class Summary:
    """The test accuracy after the last epoch, and what every phase did."""

    correct: int
    samples: int
    seconds: float
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
            share = f"1/{phase.dense / phase.sent:.0f}" if phase.sent < phase.dense else "all"
            sizes = f"{megabytes(phase.sent)} of {megabytes(phase.dense)}"
            yield f"  phase {number}, {phase.reducer}: {sizes} ({share})"
    if void := sum(phase.void_steps for phase in summary.phases):
        yield f"{void} steps were void: a NaN or an infinity in their gradients"
    yield f"files: {folder} (metrics.jsonl, config.yaml, model.weights.h5)"
