"""Orders of text: batches by tokens, and windows of a text that runs through all samples.

Like :class:`datacache.Order`, each is a pure function of seed, epoch, step and rank, so that a run resumes at
any step, and every global batch is the same at every world size. Every rank has equally many rows at a step,
a multiple of ``multiple`` where that is given, so that batches can be divided. Rows that only pad do not
count.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from datacache.order import BatchOrder, Flags, Ids, Permutation, check_at_least, check_rank, check_step

_BATCHES, _WITHIN_BUCKET, _WINDOWS = range(5, 8)  # so that keys differ from those of datacache.order
Tokens = npt.NDArray[np.int32]
SHORTEST_BUCKET = 8

# ------------------------------------------------------------------------------------ sentences


def bucket_boundaries(longest: int) -> tuple[int, ...]:
    """Return lengths of buckets up to ``longest``, each a tenth above the one before, so little is padded.

    >>> bucket_boundaries(20)
    (8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20)
    >>> bucket_boundaries(100)[-6:]
    (66, 72, 79, 86, 94, 100)
    """
    boundaries = [min(SHORTEST_BUCKET, longest)]
    while boundaries[-1] < longest:
        boundaries.append(min(max(boundaries[-1] + 1, int(boundaries[-1] * 1.1)), longest))
    return tuple(boundaries)


class LengthBuckets(BatchOrder):
    """Batches of sentences of similar length, so that little is padded; each sentence once an epoch.

    ``lengths``: of the samples, in tokens. ``boundaries``: the longest sentence of each bucket, ascending;
    samples that are longer than the last are left out (``left_out`` counts them). A global batch takes
    sentences of one bucket, drawn anew in each epoch; padded to the bucket's length it has at most ``tokens``
    tokens. A bucket's batches have equally many sentences, but for one; batches of all buckets are shuffled.

    >>> order = LengthBuckets([3, 9, 2, 4, 8], tokens=16, seed=1, boundaries=(4, 9))
    >>> [order.batch(0, step, rank=0, world_size=1).tolist() for step in range(order.steps())]
    [[4], [2, 3, 0], [1]]
    """

    unit: ClassVar[str] = "tokens"

    def __init__(
        self, lengths: npt.ArrayLike, tokens: int, seed: int, boundaries: Sequence[int], *, multiple: int = 1
    ) -> None:
        self.lengths = np.asarray(lengths, np.int64)
        self.samples, self.global_batch, self.seed = len(self.lengths), tokens, seed
        self._multiple = multiple
        self.boundaries = tuple(boundaries)
        if not self.boundaries or self.boundaries[0] < 1 or (np.diff(self.boundaries) < 1).any():
            raise ValueError(f"boundaries: expected ascending lengths from 1 on, got {self.boundaries}")
        if tokens < self.boundaries[-1]:
            raise ValueError(f"tokens: expected at least {self.boundaries[-1]}, one sentence, got {tokens}")
        buckets = np.searchsorted(self.boundaries, self.lengths)
        sizes = np.bincount(buckets, minlength=len(self.boundaries) + 1)
        self.left_out = int(sizes[-1])
        if self.left_out == self.samples:
            raise ValueError(
                f"boundaries: expected sentences of up to {self.boundaries[-1]} tokens, found none"
            )
        self._ids = np.argsort(buckets, kind="stable")  # bucket by bucket
        self._sizes = sizes[:-1]
        self._starts = np.cumsum(self._sizes) - self._sizes
        self._batches = -(-self._sizes // (tokens // np.array(self.boundaries)))
        self._last_batches = np.cumsum(self._batches)

    def steps(self) -> int:
        return int(self._last_batches[-1])

    def batch(self, epoch: int, step: int, rank: int, world_size: int) -> Ids:
        bucket, part = self._global_batch(epoch, step)
        rows, _ = _rows_of_rank(len(part), rank, world_size, self._multiple)
        within = Permutation(int(self._sizes[bucket]), _WITHIN_BUCKET, self.seed, epoch, bucket)
        return np.take(self._ids, self._starts[bucket] + within.at(part.start + rows))

    def counts(self, epoch: int, step: int, rank: int, world_size: int) -> Flags:
        _, part = self._global_batch(epoch, step)
        return _rows_of_rank(len(part), rank, world_size, self._multiple)[1]

    def _global_batch(self, epoch: int, step: int) -> tuple[int, range]:
        """Return the bucket of a step, and the positions in the bucket's order of its sentences."""
        check_step(step, self.steps())
        batch = Permutation(self.steps(), _BATCHES, self.seed, epoch)[step]
        bucket = int(np.searchsorted(self._last_batches, batch, side="right"))
        size, batches = int(self._sizes[bucket]), int(self._batches[bucket])
        return bucket, _part(size, batch + batches - int(self._last_batches[bucket]), batches)


# -------------------------------------------------------------------------------------- windows


@dataclass(frozen=True, eq=False)
class Spans:
    """The tokens of each row of a batch, ``starts … stops - 1`` of the whole text; none if the row pads."""

    starts: Ids
    stops: Ids


class TextOrder(BatchOrder):
    """Rows of consecutive tokens of a text: the tokens of all samples, one sample after another.

    ``tokens``: of each sample. ``length``: of a row, at most. ``ahead``: a row is read this many tokens
    further: a language model's targets are its inputs, shifted by one.
    """

    def __init__(self, tokens: npt.ArrayLike, length: int, global_batch: int, seed: int, ahead: int) -> None:
        check_at_least(1, length=length, global_batch=global_batch)
        counts = np.asarray(tokens, np.int64)
        self.samples, self.length, self.global_batch = len(counts), length, global_batch
        self.seed, self.ahead = seed, ahead
        self._stops = np.cumsum(counts)  # of the samples in the text
        self._starts = self._stops - counts
        self.positions = int(self._stops[-1]) - ahead
        """The tokens of an epoch's rows: all of the text but the last ``ahead``."""
        if self.positions < 1:
            raise ValueError(f"tokens: expected at least {ahead + 1} in the text, got {int(self._stops[-1])}")

    @abstractmethod
    def spans(self, epoch: int, step: int, rank: int, world_size: int) -> Spans:
        """Return the rows of a rank at a step; those of one rank of one are the global batch."""

    def batch(self, epoch: int, step: int, rank: int, world_size: int) -> Ids:
        """Return the ids of the samples that the rows of a rank touch, ascending, as a new array."""
        spans = self.spans(epoch, step, rank, world_size)
        real = spans.stops > spans.starts
        first = np.searchsorted(self._stops, spans.starts[real], side="right")
        last = np.searchsorted(self._stops, spans.stops[real] + self.ahead - 1, side="right")
        ids = [np.arange(*each) for each in zip(first.tolist(), (last + 1).tolist(), strict=True)]
        return np.unique(np.concatenate([np.empty(0, np.int64), *ids]))

    def counts(self, epoch: int, step: int, rank: int, world_size: int) -> Flags:
        spans = self.spans(epoch, step, rank, world_size)
        return spans.stops > spans.starts

    def size(self, epoch: int, step: int) -> int:
        """Return how many tokens all rows of a step have together, over all ranks."""
        spans = self.spans(epoch, step, 0, 1)
        return int((spans.stops - spans.starts).sum())

    def ends_sample(self, positions: Ids) -> Flags:
        """Return for positions of the text whether the token there is the last one of a sample."""
        samples = np.searchsorted(self._stops, positions, side="right")
        return np.equal(self._stops[np.minimum(samples, self.samples - 1)] - 1, positions)

    def rows(self, spans: Spans, ids: Ids, lines: Sequence[Tokens]) -> Tokens:
        """Return ``(rows, length + ahead)`` tokens, 0 where a row is shorter.

        ``ids`` and ``lines``: the samples of :meth:`batch` and their tokens.
        """
        text = np.concatenate([np.empty(0, np.int32), *lines])
        sizes = np.array([len(line) for line in lines], np.int64)
        if not np.array_equal(sizes, (self._stops - self._starts)[ids]):
            raise ValueError("tokens: expected as many in each sample as the order was made with")
        first = np.cumsum(sizes) - sizes  # of each sample in `text`
        out = np.zeros((len(spans.starts), self.length + self.ahead), np.int32)
        for row, (start, stop) in enumerate(zip(spans.starts.tolist(), spans.stops.tolist(), strict=True)):
            if start == stop:
                continue
            sample = int(np.searchsorted(self._stops, start, side="right"))
            at = int(first[np.searchsorted(ids, sample)]) + start - int(self._starts[sample])
            size = stop + self.ahead - start
            out[row, :size] = text[at : at + size]
        return out


class Windows(TextOrder):
    """Windows of ``length`` tokens of a text, shuffled; each once an epoch, the last one may be shorter.

    >>> order = Windows([2, 3, 4], length=3, global_batch=2, seed=1)
    >>> [order.spans(0, step, rank=0, world_size=1).starts.tolist() for step in range(order.steps())]
    [[0], [6, 3]]
    >>> order.batch(0, 0, rank=0, world_size=1)  # one token more than the window, its last target
    array([0, 1])
    """

    unit: ClassVar[str] = "windows"

    def __init__(
        self,
        tokens: npt.ArrayLike,
        length: int,
        global_batch: int,
        seed: int,
        *,
        ahead: int = 1,
        multiple: int = 1,
    ) -> None:
        super().__init__(tokens, length, global_batch, seed, ahead)
        self._multiple = multiple
        self.windows = -(-self.positions // length)

    def steps(self) -> int:
        return -(-self.windows // self.global_batch)

    def spans(self, epoch: int, step: int, rank: int, world_size: int) -> Spans:
        check_step(step, self.steps())
        part = _part(self.windows, step, self.steps())
        rows, counts = _rows_of_rank(len(part), rank, world_size, self._multiple)
        windows = Permutation(self.windows, _WINDOWS, self.seed, epoch).at(part.start + rows)
        starts = windows * self.length
        stops = np.minimum(starts + self.length, self.positions)
        return Spans(starts, np.where(counts, stops, starts))


class Streams(TextOrder):
    """A text cut into ``global_batch`` streams, read side by side, window after window.

    Row ``i`` of a step continues where row ``i`` of the step before it ended, so that the state of a
    recurrent network can be carried from batch to batch. Of ``P`` ranks, rank ``r`` reads the ``r``-th part
    of the streams. All epochs are equal.

    >>> order = Streams([5, 4], length=3, global_batch=2)
    >>> [order.spans(0, step, rank=0, world_size=1).starts.tolist() for step in range(order.steps())]
    [[0, 4], [3, 7]]
    """

    unit: ClassVar[str] = "streams"

    def __init__(self, tokens: npt.ArrayLike, length: int, global_batch: int) -> None:
        super().__init__(tokens, length, global_batch, seed=0, ahead=1)
        if global_batch > self.positions:
            raise ValueError(
                f"global_batch: expected at most {self.positions}, a stream for each token of the text, "
                f"got {global_batch}"
            )

    def steps(self) -> int:
        return -(-self.positions // (self.global_batch * self.length))

    def spans(self, epoch: int, step: int, rank: int, world_size: int) -> Spans:
        check_step(step, self.steps())
        check_rank(rank, world_size)
        rows = -(-self.global_batch // world_size)
        streams = np.arange(rank * rows, (rank + 1) * rows, dtype=np.int64)
        bounds = np.minimum([streams, streams + 1], self.global_batch) * self.positions // self.global_batch
        starts = np.minimum(bounds[0] + step * self.length, bounds[1])
        return Spans(starts, np.minimum(starts + self.length, bounds[1]))


def _part(size: int, number: int, parts: int) -> range:
    """Return one of ``parts`` nearly equal parts of ``range(size)``."""
    return range(size * number // parts, size * (number + 1) // parts)


def _rows_of_rank(rows: int, rank: int, world_size: int, multiple: int) -> tuple[Ids, Flags]:
    """Return a rank's rows of a global batch, dealt out in turn, and which of them count."""
    check_rank(rank, world_size)
    of_each = -(-rows // (world_size * multiple)) * multiple
    dealt = rank + world_size * np.arange(of_each, dtype=np.int64)
    return np.minimum(dealt, rows - 1), dealt < rows
