"""Samples that nodes lend each other: asked for by id, sent as records with their checksums."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from datacache.levels import Sample
from datacache.order import Ids
from datacache.store.records import pack, unpack

ROUND_SAMPLES = 256  # that a rank asks for at once: what is under way stays far below what memory holds


class Exchanging(Protocol):
    """What is needed of a group of ranks; :class:`commlib.Communicator` has it."""

    rank: int
    size: int

    def allgather_ints(self, values: Sequence[int]) -> npt.NDArray[np.int64]:
        """Return every rank's ``values``, shape ``(size, len(values))``."""

    def alltoall_ints(self, values: Sequence[int]) -> npt.NDArray[np.int64]:
        """Give ``values[r]`` to each rank ``r``; return what they gave, shape ``(size,)``."""

    def exchange(self, outgoing: Sequence[npt.NDArray[Any]], incoming: Sequence[npt.NDArray[Any]]) -> None:
        """Send ``outgoing[r]`` to every rank ``r`` and fill ``incoming[r]`` with what ``r`` sent here."""


def fetch_remote_samples(
    comm: Exchanging, wanted: Ids, holders: Ids, read: Callable[[Ids], list[Sample]]
) -> dict[int, Sample]:
    """Return the samples ``wanted``, by id; ``holders`` names the rank that is asked for each.

    ``read`` gives the samples that others ask this rank for. All ranks call it together.
    """
    rounds = int(comm.allgather_ints([-(-len(wanted) // ROUND_SAMPLES)]).max())
    samples: dict[int, Sample] = {}
    for each in range(rounds):
        part = slice(each * ROUND_SAMPLES, (each + 1) * ROUND_SAMPLES)
        samples |= _one_round(comm, wanted[part], holders[part], read)
    return samples


def _one_round(
    comm: Exchanging, wanted: Ids, holders: Ids, read: Callable[[Ids], list[Sample]]
) -> dict[int, Sample]:
    asked = [wanted[holders == rank] for rank in range(comm.size)]
    asking = _swapped(comm, asked)
    answers = [_packed(ids, read(ids)) for ids in asking]
    sizes = [np.empty(len(ids), np.int64) for ids in asked]
    comm.exchange([lengths for lengths, _ in answers], sizes)
    records = [np.empty(int(lengths.sum()), np.uint8) for lengths in sizes]
    comm.exchange([answer for _, answer in answers], records)
    return {
        number: sample
        for ids, lengths, joined in zip(asked, sizes, records, strict=True)
        for number, sample in _unpacked(ids, lengths, joined)
    }


def _swapped(comm: Exchanging, outgoing: list[Ids]) -> list[Ids]:
    """Return the ids that every rank has for this one."""
    counts = comm.alltoall_ints([len(ids) for ids in outgoing])
    incoming = [np.empty(count, np.int64) for count in counts.tolist()]
    comm.exchange(outgoing, incoming)
    return incoming


def _packed(ids: Ids, samples: list[Sample]) -> tuple[Ids, npt.NDArray[np.uint8]]:
    records = [
        pack(number, np.ascontiguousarray(sample).data.cast("B"), sample.shape)
        for number, sample in zip(ids.tolist(), samples, strict=True)
    ]
    return np.array([len(record) for record in records], np.int64), np.frombuffer(b"".join(records), np.uint8)


def _unpacked(ids: Ids, lengths: Ids, joined: npt.NDArray[np.uint8]) -> list[tuple[int, Sample]]:
    parts = np.split(joined, np.cumsum(lengths)[:-1]) if len(ids) else []
    samples = []
    for number, part in zip(ids.tolist(), parts, strict=True):
        payload, shape = unpack(number, part.data, verify=True)
        samples.append((number, np.frombuffer(payload, np.uint8).reshape(shape)))
    return samples
