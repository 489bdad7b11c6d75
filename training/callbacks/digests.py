"""All ranks compare 64-bit digests of their weights, which must be equal."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np
from xxhash import xxh3_64

from commlib import Communicator, RanksDisagree
from training.callbacks.callback import Callback, RunEvent, RunView
from training.results import Step


class WeightsDiffer(RanksDisagree):
    """Ranks have different weights; all ranks raise this, and one line names the ranks that differ."""


class Digests(Callback):
    """Compares the weights of all ranks every ``every`` steps, and ends the run where they differ."""

    def __init__(self, every: int) -> None:
        self._every = every

    def on_step_end(self, run: RunView, step: Step) -> None:
        steps = run.position.steps
        if step.hyperparameters.passes(steps, self._every):
            with run.common_weights():
                digest = check_equal_weights(run.model, run.topology.world, f"after step {steps}")
            run.report(RunEvent("digest", {"steps": steps, "digest": digest}))


def check_equal_weights(model: Any, comm: Communicator, when: str) -> str:
    """Return the digest of the trainable weights, 16 hexadecimal digits; collective.

    Raises :class:`WeightsDiffer` on all ranks where they differ in any bit.
    """
    own = digest_of(variable.numpy() for variable in model.trainable_variables)
    of_ranks = comm.allgather_ints([int.from_bytes(bytes.fromhex(own), "big", signed=True)])[:, 0].tolist()
    usual = Counter(of_ranks).most_common(1)[0][0]
    if others := [rank for rank, each in enumerate(of_ranks) if each != usual]:
        raise WeightsDiffer(
            f"{when}, the weights of ranks {others} differ from those of rank {of_ranks.index(usual)}"
        )
    return own


def digest_of(arrays: Iterable[Any]) -> str:
    """Return the 64-bit digest of the bytes of arrays, one after the other.

    >>> digest_of([np.float32([1, 2])]) == digest_of([np.float32(1), np.float32([[2]])])
    True
    >>> digest_of([np.float32([1, 2])]) == digest_of([np.float32([2, 1])])
    False
    """
    state = xxh3_64()
    for array in arrays:
        state.update(np.ravel(array).view(np.uint8).data)
    return state.hexdigest()
