"""The seconds of a step: computing, messages, and how much of the messages hides behind the backward pass.

A rank has two resources. Computing takes as long as on one rank alone: a third of it is the forward pass, the
layers share the rest. The messages of a bucket begin when its last gradient is computed, and when those of
the buckets before are over.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from commlib.exchange import bucket_bounds

FORWARD = 1 / 3  # of computing: the backward pass has two products for each of the forward pass


@dataclass(frozen=True)
class Bucket:
    """A part of the gradient: its entries, and the share of the backward pass that ends with them."""

    size: int
    share: float


def buckets_of(sizes: Sequence[int], work: Sequence[int], bucket_bytes: int) -> tuple[Bucket, ...]:
    """Return the buckets of a gradient: of ``sizes`` entries a variable, whose layers compute ``work``.

    >>> buckets_of([10, 30, 20], [1, 1, 2], bucket_bytes=4 * 50)
    (Bucket(size=10, share=0.25), Bucket(size=50, share=0.75))
    """
    ends = [0, *accumulate(sizes)]
    parts = pairwise(ends.index(bound) for bound in bucket_bounds(sizes, bucket_bytes))
    return tuple(Bucket(ends[last] - ends[first], sum(work[first:last]) / sum(work)) for first, last in parts)


@dataclass(frozen=True)
class Workload:
    """A training: the seconds that one rank computes a step, and the buckets of its gradient."""

    name: str
    computing: float
    buckets: tuple[Bucket, ...]

    @property
    def forward(self) -> float:
        """Return the seconds of the forward pass."""
        return FORWARD * self.computing

    def backward(self, bucket: Bucket) -> float:
        """Return the seconds of the layers that end with a bucket."""
        return (1 - FORWARD) * self.computing * bucket.share


@dataclass(frozen=True, kw_only=True)
class StepSeconds:
    """The seconds of a step, of which ``computing`` are of one rank alone.

    ``plain``: the same buckets without overlap; ``undivided``: without buckets and overlap.
    """

    computing: float
    undivided: float
    plain: float
    overlapped: float

    @property
    def messages(self) -> float:
        """Return the seconds of the messages."""
        return self.plain - self.computing

    @property
    def share(self) -> float:
        """Return the messages' share of the step without overlap."""
        return self.messages / self.plain

    @property
    def hidden(self) -> float:
        """Return the share of the messages during which the rank computes."""
        return 1 - (self.overlapped - self.computing) / self.messages

    @property
    def gain(self) -> float:
        """Return how many times as long a step takes without overlap."""
        return self.plain / self.overlapped


def step_seconds(workload: Workload, whole: float, messages: Sequence[float]) -> StepSeconds:
    """Return a step from the seconds of its messages: of the ``whole`` gradient, and of each bucket."""
    backward = [workload.backward(bucket) for bucket in reversed(workload.buckets)]
    ready = list(accumulate(backward, initial=workload.forward))[1:]
    return StepSeconds(
        computing=workload.computing,
        undivided=workload.computing + whole,
        plain=workload.computing + sum(messages),
        overlapped=overlapped(ready, messages[::-1]),
    )


def overlapped(ready: Sequence[float], messages: Sequence[float]) -> float:
    """Return when the last messages are over, which follow each other and begin when their bucket is ready.

    >>> overlapped(ready=[1.0, 2.0, 6.0], messages=[3.0, 1.0, 0.5])
    6.5
    """
    end = 0.0
    for own, seconds in zip(ready, messages, strict=True):
        end = max(end, own) + seconds
    return end
