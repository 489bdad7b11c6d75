"""The exchange of a run, phase by phase: which reducer has the gradient, and whether steps are local."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from commlib import Topology
from commlib.arrays import to_host, zeros
from commlib.tensorflow import DistributedGradients
from commlib.topology import Traffic
from commlib.vectors import Float32
from training.checkpoint.folders import Checkpoint, merged, taken_over
from training.config.config import Config
from training.config.records import Phase
from training.run.local_steps import LocalSteps
from training.run.model import Model, OtherRun, Part, PartState


class PhaseExchange(Part):
    """Exchanges the gradients of ``model`` with the reducer of each phase.

    ``gradients``: the exchange of all ranks. ``local``: that of a phase with local steps, else ``None``.
    ``current``: the one that a step uses.
    """

    def __init__(self, config: Config, topology: Topology, model: Model) -> None:
        self._config, self._model = config, model
        exchanges = any(phase.local_steps is None for phase in config.phases)
        delays = any(phase.outer and phase.outer.delay for phase in config.phases)
        shapes = [tuple(variable.shape) for variable in model.variables]
        self.gradients = DistributedGradients(
            topology,
            model.variables,
            config.reducer_config(config.phases[0]),
            bucket_bytes=config.bucket_bytes,
            overlap=config.overlap and config.accumulate == 1 and exchanges,
            tables=model.tables.sparse,
            cuts=config.cuts(shapes),
            background=config.overlap and delays,
        )
        self.local: LocalSteps | None = None

    @property
    def current(self) -> "LocalSteps | DistributedGradients":
        return self.gradients if self.local is None else self.local

    def begin(self, phase: Phase, optimizer: Any) -> float | None:
        """Begin a phase; return the norm of the residual that its new reducer takes over, if it is new.

        ``optimizer``: of the phase, whose state local steps restore. Collective.
        """
        config, residual = self._config.reducer_config(phase), None
        if config != self.gradients.config:
            residual = self.residual_norm()
            self.gradients.switch(config)
        before, self.local = self.local, None
        if before is not None:
            before.close()
        if phase.local_steps is not None:
            changed = [*self._model.keras.non_trainable_weights, *self._model.task.carried]
            variables, checks = self._model.variables, self._config.clip_norm is None
            given = phase, self.gradients, variables, optimizer, changed, before
            self.local = LocalSteps(*given, checks_finite=checks)
        return residual

    def settle(self, apply: Callable[[Float32], object]) -> Traffic:
        """Apply the residual of the reducer; return the traffic of that. Collective, before ``begin``.

        Called between phases with and without local steps, as a residual of gradients cannot be added to
        differences of weights. One dense exchange gives the mean residual to ``apply``, or to the local
        steps; after local steps the optimizer's state is averaged over all ranks, too.
        """
        gradients = self.gradients
        gradients.switch({"name": "dense"})
        world, traffic = gradients.topology.world, Traffic()
        if any(world.allgather_objects(bool(gradients.exchange.residual.any()))):
            for bucket, size in enumerate(gradients.exchange.sizes):
                gradients.submit(bucket, zeros(size, world.arrays))
            mean, report = gradients.wait()
            traffic = report.traffic
            if self.local is None:
                apply(mean)
            else:
                self.local.apply(mean)
        return traffic if self.local is None else traffic + self.local.join()

    def residual_norm(self) -> float:
        return float(np.linalg.norm(to_host(self.gradients.exchange.residual)))

    def common_weights(self) -> AbstractContextManager[None]:
        """Set the model to the weights that all ranks have: within a round, those that it began with."""
        return nullcontext() if self.local is None else self.local.common_weights()

    def lines(self) -> list[str]:
        """Return a line on the buckets of the gradient, where it has several."""
        if (buckets := self.gradients.buckets - len(self._model.tables.sparse)) < 2:
            return []
        when = "while other layers still compute theirs"
        if not self.gradients.overlaps:
            why = "every phase has local steps" if self._config.overlap else "overlap is off"
            if self._config.accumulate > 1:
                why = f"accumulate is {self._config.accumulate}"
            when = f"when all of it is computed ({why})"
        most = f"{self._config.bucket_bytes / 2**20:.3g} MiB"
        return [f"the gradient travels in {buckets} buckets of at most {most}, {when}"]

    def close(self) -> None:
        """Free what reducers and local steps have made; all ranks call it together."""
        if self.local is not None:
            self.local.close()
        self.gradients.close()

    def state_dict(self) -> PartState:
        local = self.local
        return PartState(
            shared={"local_steps": None if local is None else local.shared_state()},
            own={
                "reducer": self.gradients.exchange.state_dict(),
                "local_steps": None if local is None else local.own_state(),
            },
        )

    def check_state(self, shared: Mapping[str, Any]) -> None:
        """Raise :class:`OtherRun` where only the checkpoint or only this phase has local steps."""
        found, expected = shared.get("local_steps") is not None, self.local is not None
        if found != expected:  # residuals of gradients, or of differences of weights
            phase = ("a phase without local_steps", "a phase with local_steps")
            raise OtherRun(f"local_steps: the checkpoint is of {phase[found]}: expected {phase[expected]}")

    def load_state_dict(self, checkpoint: Checkpoint) -> list[str]:
        """Restore reducer and local steps; return a line for each difference.

        The model has its weights and the optimizer its state already. The residual of a reducer that the
        configuration no longer names, and those of another number of ranks, are added to the next gradient.
        """
        shared: Any = checkpoint.shared
        if self.local is not None:
            self.local.restore_shared(shared["local_steps"])
        own: Any = checkpoint.own
        if own is None:
            return self._load_of_another_world(checkpoint, shared.get("local_steps"))
        if self.local is not None:
            self.local.restore_own(shared["local_steps"], own["local_steps"])
        state = own["reducer"]
        dense_residual(state, self.gradients.size)  # raises if the state is not a reducer's
        try:
            self.gradients.exchange.load_state_dict(state)
        except ValueError as error:  # the configuration names another reducer now, or other nodes
            self._add_residuals(lambda rank: state, checkpoint.world_size)
            return [f"what the reducer held back goes into the next step: {error}"]
        return []

    def _load_of_another_world(self, checkpoint: Checkpoint, local_steps: Any) -> list[str]:
        owns: Any = checkpoint.own_of
        self._add_residuals(lambda rank: owns(rank)["reducer"], checkpoint.world_size)
        now = self.gradients.topology.world.size
        lines = [
            f"{checkpoint.world_size} ranks have become {now}: what they held back goes into the next step, "
            "and random states of the model begin again"
        ]
        if self.local is not None and self.local.restore_elsewhere(local_steps):
            lines.append("local steps: the mean of the fragment that was under way is applied")
        if local_steps is not None:
            lost = ", and the local steps of the round that was under way are lost"
            more = lost if local_steps["in_round"] else ""
            lines.append(f"local steps: all ranks begin with the optimizer state of rank 0{more}")
        return lines

    def _add_residuals(self, state_of: Callable[[int], Any], world_size: int) -> None:
        """Add to the reducer the residuals of the ranks of ``world_size`` that this rank takes over."""
        size, world = self.gradients.size, self.gradients.topology.world
        ranks = taken_over(world_size, world.rank, world.size)
        residual = merged(lambda rank: dense_residual(state_of(rank), size), size, ranks)
        self.gradients.exchange.add_residual(residual)


def dense_residual(state: Any, size: int) -> Float32:
    """Return the residual in a reducer's state, as a dense vector of ``size`` entries."""
    if "buckets" in state:
        return np.concatenate([dense_residual(each, each["settings"]["size"]) for each in state["buckets"]])
    vector = zeros(size)
    if state["carried"] is not None:
        vector += state["carried"]
    if "residual" in state:
        low = state["low"]
        vector[low : low + len(state["residual"])] += state["residual"]
    return vector
