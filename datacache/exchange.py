"""Remote samples: requested by id from the nodes that store them, sent as records with checksums."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from datacache.levels import Sample
from datacache.order import Ids
from datacache.store.records import pack, unpack

ROUND_SAMPLES = 256  # that a rank requests at once, which bounds the memory of messages


class Comm(Protocol):
    """The part of a communicator that is used here; :class:`commlib.Communicator` has it."""

    rank: int
    size: int

    def allgather_ints(self, values: Sequence[int]) -> npt.NDArray[np.int64]:
        """Return every rank's ``values``, shape ``(size, len(values))``."""

    def alltoall_ints(self, values: Sequence[int]) -> npt.NDArray[np.int64]:
        """Send ``values[r]`` to each rank ``r``; return the value of every rank, shape ``(size,)``."""

    def exchange(self, outgoing: Sequence[npt.NDArray[Any]], incoming: Sequence[npt.NDArray[Any]]) -> None:
        """Send ``outgoing[r]`` to every rank ``r`` and fill ``incoming[r]`` with the array of rank ``r``."""


def fetch_remote_samples(
    comm: Comm, wanted: Ids, holders: Ids, read: Callable[[Ids], list[Sample]]
) -> dict[int, Sample]:
    """Return the samples ``wanted``, by id; ``holders``: for each the rank it is requested from.

    ``read(ids)`` returns the samples that other ranks request from this one. All ranks call it together.
    """
    rounds = int(comm.allgather_ints([-(-len(wanted) // ROUND_SAMPLES)]).max())
    samples: dict[int, Sample] = {}
    for each in range(rounds):
        part = slice(each * ROUND_SAMPLES, (each + 1) * ROUND_SAMPLES)
        samples |= _one_round(comm, wanted[part], holders[part], read)
    return samples


def _one_round(
    comm: Comm, wanted: Ids, holders: Ids, read: Callable[[Ids], list[Sample]]
) -> dict[int, Sample]:
    requests = [wanted[holders == rank] for rank in range(comm.size)]
    answers = [_pack_all(ids, read(ids)) for ids in _exchange_ids(comm, requests)]
    sizes = [np.empty(len(ids), np.int64) for ids in requests]
    comm.exchange([lengths for lengths, _ in answers], sizes)
    records = [np.empty(int(lengths.sum()), np.uint8) for lengths in sizes]
    comm.exchange([answer for _, answer in answers], records)
    return {
        number: sample
        for ids, lengths, joined in zip(requests, sizes, records, strict=True)
        for number, sample in _unpack_all(ids, lengths, joined)
    }


def _exchange_ids(comm: Comm, outgoing: list[Ids]) -> list[Ids]:
    """Return the ids that every rank requests from this one."""
    counts = comm.alltoall_ints([len(ids) for ids in outgoing])
    incoming = [np.empty(count, np.int64) for count in counts.tolist()]
    comm.exchange(outgoing, incoming)
    return incoming


def _pack_all(ids: Ids, samples: list[Sample]) -> tuple[Ids, npt.NDArray[np.uint8]]:
    records = [
        pack(number, np.ascontiguousarray(sample).data.cast("B"), sample.shape)
        for number, sample in zip(ids.tolist(), samples, strict=True)
    ]
    return np.array([len(record) for record in records], np.int64), np.frombuffer(b"".join(records), np.uint8)


def _unpack_all(ids: Ids, lengths: Ids, joined: npt.NDArray[np.uint8]) -> list[tuple[int, Sample]]:
    parts = np.split(joined, np.cumsum(lengths)[:-1]) if len(ids) else []
    samples = []
    for number, part in zip(ids.tolist(), parts, strict=True):
        payload, shape = unpack(number, part.data, verify=True)
        samples.append((number, np.frombuffer(payload, np.uint8).reshape(shape)))
    return samples
