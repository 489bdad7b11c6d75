"""Local steps of any optimizer of torch: replicas exchange how far their weights have come (DiLoCo)."""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from commlib.errors import InvalidArgument
from commlib.exchange import BucketExchange, check_config
from commlib.reducers import Report
from commlib.rounds import OuterSgd, Rounds
from commlib.topology import Topology
from commlib.torch.gradients import with_arrays, with_tensors
from commlib.torch.ranks import broadcast
from commlib.transport.base import Closing
from commlib.vectors import Float32


class LocalSteps(Closing):
    """Lets each rank take ``steps`` steps alone, then exchanges the differences of their weights: a round.

    ``model``: not wrapped by DDP, of float32 parameters on the CPU; it gets rank 0's weights and buffers.
    ``optimizer``: one of ``torch.optim`` for its parameters; its state stays each rank's own. ``config``: the
    reducer of the differences and its options, as for ``commlib.make_reducer``. ``rate``, ``momentum``
    and ``nesterov``: of the outer optimizer; by default the weights become the mean of all ranks' weights.
    See ``commlib.rounds``. All ranks make it together.

    After each ``optimizer.step()``, call ``step()``. A round in which the weights of a rank are not finite is
    skipped on all ranks: weights, buffers and the optimizer's state are as at its begin.

    ``report``: of the latest exchange, ``None`` before the first.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        topology: Topology,
        config: Mapping[str, Any],
        *,
        steps: int,
        rate: float = 1.0,
        momentum: float = 0.0,
        nesterov: bool = False,
    ) -> None:
        if isinstance(model, DistributedDataParallel):
            raise InvalidArgument(
                "model: expected one that exchanges no gradients, got DistributedDataParallel"
            )
        if not isinstance(steps, int) or steps < 1:
            raise InvalidArgument(f"steps: expected a whole number from 1, got {steps!r}")
        if not 0 <= momentum < 1:
            raise InvalidArgument(f"momentum: expected a number in [0, 1), got {momentum!r}")
        self._parameters = [each for each in model.parameters() if each.requires_grad]
        for name, parameter in model.named_parameters():
            if parameter.dtype != torch.float32 or parameter.device.type != "cpu":
                got = f"{parameter.dtype} on {parameter.device}"
                raise InvalidArgument(f"{name}: expected float32 on the CPU, got {got}")
        self.config = check_config(config)
        broadcast(model, topology)
        self.steps = steps
        self.report: Report | None = None
        self._model, self._optimizer, self._taken = model, optimizer, 0
        size = sum(parameter.numel() for parameter in self._parameters)
        shapes = [tuple(parameter.shape) for parameter in self._parameters]
        self.exchange = BucketExchange(topology, [size], config, shapes=[shapes])
        self._rounds = Rounds(OuterSgd(rate, momentum, nesterov=nesterov), self._reduce)
        self._before: dict[str, Any] = {}  # the optimizer's state and the buffers at the begin of the round
        # A forward pass changes buffers, and the model may have been loaded since the last round.
        self._handles = [
            model.register_forward_pre_hook(self._before_forward),
            optimizer.register_step_pre_hook(self._begin),
        ]

    def step(self) -> bool:
        """Count a step of the optimizer; return whether it ended a round, which is collective."""
        self._taken += 1
        if self._taken < self.steps:
            return False
        self._begin()  # where no step was taken, as a GradScaler decides
        weights, self.report = self._rounds.end(self._read())
        self._write(weights)
        if not self.report.finite:
            self._restore()
        self._taken = 0
        return True

    @property
    def finite(self) -> bool:
        """Whether the latest round counts."""
        return self.report is None or self.report.finite

    @contextmanager
    def common_weights(self) -> Iterator[None]:
        """Set the model to the weights with which the round began inside the block, equal on all ranks."""
        if self._rounds.common is None:
            yield
            return
        own = self._read()
        self._write(self._rounds.common)
        try:
            yield
        finally:
            self._write(own)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank, for ``torch.save`` beside its model's and its optimizer's."""
        return copy.deepcopy(
            {
                "exchange": with_tensors(self.exchange.state_dict()),
                "velocity": with_tensors(self._rounds.outer.velocity),
                "taken": self._taken,
                "common": with_tensors(self._rounds.common),
                "before": self._before,
            }
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what ``state_dict`` returned on this rank; the model's and the optimizer's are apart."""
        state = copy.deepcopy(dict(state))
        self.exchange.load_state_dict(with_arrays(state["exchange"]))
        self._rounds.outer.velocity = with_arrays(state["velocity"])
        self._rounds.common = with_arrays(state["common"])
        self._taken, self._before = state["taken"], state["before"]

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self.exchange.close()

    def _before_forward(self, model: torch.nn.Module, inputs: Any) -> None:
        if model.training:
            self._begin()

    def _begin(self, *_: Any) -> None:
        """Begin a round, unless one is under way."""
        if self._rounds.common is None:
            self._rounds.begin(self._read())
            state = self._optimizer.state_dict()["state"]
            self._before = copy.deepcopy({"state": state, "buffers": dict(self._model.named_buffers())})

    def _restore(self) -> None:
        groups = self._optimizer.state_dict()["param_groups"]  # with the rates of a schedule
        self._optimizer.load_state_dict({"state": self._before["state"], "param_groups": groups})
        for name, buffer in self._model.named_buffers():
            buffer.copy_(self._before["buffers"][name])

    def _reduce(self, difference: Float32) -> tuple[Float32, Report]:
        self.exchange.submit(0, difference)
        return self.exchange.wait()

    def _read(self) -> Float32:
        """Return a copy of the weights as one vector."""
        weights: Float32 = torch.cat([each.detach().reshape(-1) for each in self._parameters]).numpy()
        return weights

    def _write(self, vector: Float32) -> None:
        parts = torch.from_numpy(vector).split([each.numel() for each in self._parameters])
        with torch.no_grad():
            for parameter, part in zip(self._parameters, parts, strict=True):
                parameter.copy_(part.view(parameter.shape))
