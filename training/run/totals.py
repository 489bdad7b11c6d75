"""The sums of an epoch, on one rank and over all ranks."""

from dataclasses import asdict, dataclass, field

import numpy as np

from commlib import Communicator, LinkBytes
from training.checkpoint.serialization import Tree
from training.run.stages import StageMeans, StageSums, Step, means_over_ranks


@dataclass(frozen=True)
class EpochTotals:
    """The sums of an epoch over all ranks. ``loss``: mean of the finite losses, if any.

    ``size``: of all batches, in the unit of the task.
    """

    loss: float | None
    size: int
    sent: LinkBytes
    dense_inter_bytes: int
    stages: StageMeans


@dataclass
class EpochAccumulator:
    """The sums of an epoch so far, on this rank.

    ``seconds``: of each step that this process made; ``stages`` and ``size``: of these steps.
    """

    losses: float = 0.0
    finite: int = 0
    steps: int = 0
    sent: LinkBytes = LinkBytes()
    seconds: list[float] = field(default_factory=list)
    size: int = 0
    stages: StageSums = field(default_factory=StageSums)

    def add(self, step: Step) -> None:
        """Count a step."""
        self.steps += 1
        self.sent += step.report.traffic.sent
        self.seconds.append(step.seconds)
        self.size += step.size
        self.stages.add(step)
        if np.isfinite(step.loss):
            self.losses += step.loss
            self.finite += 1

    def over_ranks(self, comm: Communicator, dense_step_bytes: int) -> EpochTotals:
        """Return the sums over all ranks, equal on all; collective.

        ``dense_step_bytes``: what this rank would send to other nodes in a step of the dense reducer.
        """
        own = [self.sent.intra, self.sent.inter, self.steps * dense_step_bytes, self.finite, self.size]
        intra, inter, dense, finite, size = map(int, comm.allgather_ints(own).sum(axis=0))
        losses, stages = zip(*comm.allgather_objects((self.losses, self.stages)), strict=True)
        loss = sum(losses) / finite if finite else None
        return EpochTotals(loss, size, LinkBytes(intra, inter), dense, means_over_ranks(stages))

    def as_tree(self) -> Tree:
        """Return what is stored in a checkpoint: all but the times, and what goes with them."""
        return {"losses": self.losses, "finite": self.finite, "steps": self.steps, "sent": asdict(self.sent)}
