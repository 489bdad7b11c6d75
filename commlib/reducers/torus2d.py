"""2D-torus all-reduce: dense in both directions (HiTopKComm's 2DTAR, section 5.3; Mikami et al. 2018)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np

from commlib.arrays import clear, memory_errors, to_host
from commlib.cost import Cost, LinkSeconds, Step, other_messages_bytes, partition_lengths, ring_bytes, shards
from commlib.errors import InvalidArgument, look_up
from commlib.kernels import kernels_of
from commlib.reducers.base import Options, Reducer
from commlib.reducers.dense import make_mean
from commlib.reducers.mean import MeanBuffer
from commlib.reducers.messages import gather_messages, swap_messages
from commlib.reducers.report import Outcome
from commlib.topology import LinkBytes, Topology
from commlib.transport.base import Ring
from commlib.vectors import VALUE_BYTES, Float32, SparseVector, partition
from commlib.wire import VALUE_CODECS, Message, ValueCodec
from commlib.work import Work


@dataclass(frozen=True)
class TorusOptions(Options):
    """``values``: the value codec between nodes."""

    values: str

    def __post_init__(self) -> None:
        if self.values not in list(VALUE_CODECS):  # some values have no hash
            raise InvalidArgument(f"values: expected one of {', '.join(VALUE_CODECS)}, got {self.values!r}")


def _codec(step: Step) -> ValueCodec:
    return look_up(VALUE_CODECS, "codec", step.options["values"])()


def _traffic(step: Step, rank: int) -> LinkBytes:
    """``2·(d/n)·(m − 1)/m`` values between nodes, in the bytes of their codec; ``2·d·(n − 1)/n`` inside."""
    local_rank, lengths, stream = shards(step.nodes, rank, step.size)
    place, codec = stream.index(rank), _codec(step)
    right = lengths[(local_rank + 1) % len(lengths)]
    intra = VALUE_BYTES * (2 * step.size - lengths[local_rank] - right)
    if codec.lossless:
        inter = ring_bytes(lengths[local_rank], len(stream), place, (place + 1) % len(stream))
    else:
        slices = partition_lengths(lengths[local_rank], len(stream))
        to_owners = sum(map(codec.message_bytes, slices)) - codec.message_bytes(slices[place])
        inter = to_owners + other_messages_bytes(slices, place, codec.message_bytes)
    return LinkBytes(intra, inter)


def _seconds(step: Step) -> LinkSeconds:
    """``(n − 1)·(α + d/n·β)`` twice inside, ``(m − 1)·(α + d/(n·m)·β)`` twice between (HiTopKComm, 5.3)."""
    codec, inside = _codec(step), step.scatter + step.node.ring(VALUE_BYTES * step.shard)
    if codec.lossless:
        return inside, step.stream.ring(VALUE_BYTES * step.shard / step.world.nodes, rounds=2)
    part = codec.message_bytes(round(step.shard / step.world.nodes))
    return inside, step.stream.exchange(part) + step.stream.ring_of_messages(part)


def _work(step: Step) -> Work:
    """Add up the node's shards, then what ``dense`` does on the stream.

    Rounding takes passes over the shard: add the residual, encode, decode sent and received messages.
    """
    nodes = step.world.nodes
    passes = (nodes + 1) / nodes if _codec(step).lossless else 6 + 2 / nodes
    return step.summing_shards() + Work(add=step.shard * passes)


class Torus2D(Reducer):
    """Reduce-scatter in the node, all-reduce of the shard on each stream, all-gather in the node.

    Between nodes ``2·(d/n)·(m − 1)/m`` values a rank, where ``dense`` sends about ``n`` times as many. Uneven
    nodes share as many shards as the smallest node has ranks.

    ``values``: the codec between nodes. With ``fp32`` a shard goes round a ring. With a codec that
    rounds, each slice is rounded and sent to its owner, which adds up, rounds the sum and sends it to all.
    The rounding error is the residual of the rank that rounds. On a single node nothing is rounded.
    """

    sparse: ClassVar[bool] = False
    cost = Cost(_traffic, _seconds, _work, is_exact=True)
    options: TorusOptions

    def __init__(self, topology: Topology, size: int, *, values: str = "fp32") -> None:
        super().__init__(topology, size)
        self.options = TorusOptions(values)
        self._codec = kernels_of(self.arrays).make_codec(values)
        self._bounds = topology.shard_bounds(size)
        low, high = self._bounds[topology.local_rank : topology.local_rank + 2].tolist()
        self._low, self._length = low, high - low
        self._slices = partition(self._length, topology.stream.size)
        self._ring = Ring(topology.stream, range(topology.stream.size))
        pairs = zip(self._bounds[:-1], np.diff(self._bounds), strict=True)
        slices = [low + partition(int(length), len(topology.nodes)) for low, length in pairs]
        firsts = np.concatenate([self._ring.first_entries(each) for each in slices])
        self._first_entries = self.arrays.asarray(firsts)  # of the pieces of all shards
        self._rounds = not self._codec.lossless and len(topology.nodes) > 1
        kept = self._length if self._rounds else 0
        with memory_errors(self):
            self._residual = self.arrays.zeros(kept, np.float32)
            self._spare = self.arrays.empty(kept, np.float32)  # the next residual is made in it

    def _reduce(self, gradient: Float32, buffer: MeanBuffer) -> Outcome:
        topology = self.topology
        with self.measure("intra"):
            shard = topology.node.reduce_scatter(gradient, self._bounds, self.workspace)
        mean = buffer.dense()
        shards = np.split(mean, self._bounds[1:-1])
        # A rank that owns no shard has a stream all the same: of ranks that own none either.
        own_shard = shards[topology.local_rank]
        parts = np.split(own_shard, self._slices[1:-1])
        if self._rounds:
            self._add_up_rounded(shard, parts)
            make_mean(self, own_shard)
        else:
            with self.measure("inter"):
                self._ring.allreduce(np.split(shard, self._slices[1:-1]), parts, partial(make_mean, self))
        with self.measure("intra"):
            topology.node.allgather(own_shard, shards)
        if np.isnan(mean[self._first_entries]).any():
            return Outcome(None)
        return Outcome(mean, selected=self.size, applied=self.size)

    def _add_up_rounded(self, shard: Float32, parts: Sequence[Float32]) -> None:
        """Write the sum of the stream's shards to ``parts``, and the rounding errors to the next residual."""
        stream = self.topology.stream
        own = parts[stream.rank]
        with self.measure("combine"):
            np.add(shard, self._residual, out=self._spare)
            kept = np.split(self._spare, self._slices[1:-1])
            outgoing = [self._round(part) for part in kept]
        with self.measure("inter"):
            received = swap_messages(stream, outgoing, self.workspace)
        with self.measure("combine"):
            clear(own)
            for message in received:  # in the order of the ranks
                own += self._decode(message, len(own))
            message = self._round(own)
            kept[stream.rank][...] += own
        with self.measure("inter"):
            sums = gather_messages(stream, message, self.workspace)
        with self.measure("combine"):
            for part, message in zip(parts, sums, strict=True):
                part[...] = self._decode(message, len(part))

    def _round(self, values: Float32) -> Message:
        """Return the message of ``values``, and leave the rounding errors in ``values``."""
        message = self._codec.encode(SparseVector.trusted(len(values), None, values))
        values -= self._decode(message, len(values))
        return message

    def _decode(self, message: Message, length: int) -> Float32:
        return self._codec.decode(message, length).values

    def _commit(self) -> None:
        self._residual, self._spare = self._spare, self._residual

    @property
    def residual(self) -> Float32:
        """See :attr:`Reducer.residual`: with a codec that rounds, the own shard's."""
        residual = super().residual
        if self._rounds:
            residual[self._low : self._low + self._length] += self._residual
        return residual

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"low": self._low, "residual": to_host(self._residual.copy())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._residual = self.arrays.array(state["residual"], np.float32)
