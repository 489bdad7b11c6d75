"""Local steps of any optimizer of torch: replicas exchange how far their weights have come (DiLoCo)."""

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from commlib.errors import InvalidArgument
from commlib.exchange import BucketExchange, check_config, pieces_of
from commlib.reducers import Report
from commlib.reducers.report import StageSeconds
from commlib.rounds import OuterSgd, Pace, Rounds, Schedule, entries_in, fragment_bounds
from commlib.topology import Topology, Traffic
from commlib.torch.gradients import broadcast, with_arrays, with_tensors
from commlib.transport.base import Closing
from commlib.vectors import Float32

ALL = slice(None)


class LocalSteps(Closing):
    """Lets each rank take ``steps`` steps alone, then exchanges the differences of their weights: a round.

    ``model``: not wrapped by DDP, of float32 parameters on the CPU; it gets rank 0's weights and buffers.
    ``optimizer``: one of ``torch.optim`` for its parameters; its state stays each rank's own. ``config``: the
    reducer of the differences and its options, as for ``commlib.make_reducer``. ``rate``, ``momentum``
    and ``nesterov``: of the outer optimizer; by default the weights become the mean of all ranks' weights.
    ``fragments``, ``delay``, ``mixing`` and ``eager``: of Streaming DiLoCo; during a delay the exchange runs
    in a thread. See ``commlib.rounds``. All ranks make it together.

    ``round_seconds``: once the steps since the latest exchange have taken so long, ``is_over`` is true, and
    the rank calls ``pass_over()`` in place of each step until the next exchange. A step lasts from one call
    of ``step()`` or ``pass_over()`` to the next, less the time in ``common_weights``. ``by_samples``:
    differences are weighted by the ``samples`` given to ``step``, as they always are with ``round_seconds``.

    After each ``optimizer.step()``, call ``step()``, and at the end of training ``settle()``. A round in
    which the weights of a rank are not finite is skipped on all ranks: weights, buffers and the optimizer's
    state are as at its begin.

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
        fragments: int = 1,
        delay: int = 0,
        mixing: float | None = None,
        eager: bool = False,
        round_seconds: float | None = None,
        by_samples: bool = False,
    ) -> None:
        if isinstance(model, DistributedDataParallel):
            raise InvalidArgument(
                "model: expected one that exchanges no gradients, got DistributedDataParallel"
            )
        if not isinstance(steps, int) or steps < 1:
            raise InvalidArgument(f"steps: expected a whole number from 1, got {steps!r}")
        if not 0 <= momentum < 1:
            raise InvalidArgument(f"momentum: expected a number in [0, 1), got {momentum!r}")
        if not isinstance(fragments, int) or fragments < 1:
            raise InvalidArgument(f"fragments: expected a whole number from 1, got {fragments!r}")
        if not isinstance(delay, int) or delay < 0:
            raise InvalidArgument(f"delay: expected a whole number from 0, got {delay!r}")
        if mixing is not None and not (0 <= mixing < 1 and delay and not eager):
            expected = "a number in [0, 1) with a delay and without eager"
            raise InvalidArgument(f"mixing: expected {expected}, got {mixing!r}")
        is_number = isinstance(round_seconds, int | float)
        if round_seconds is not None and not (is_number and 0 < round_seconds < math.inf):
            raise InvalidArgument(f"round_seconds: expected a number above 0, got {round_seconds!r}")
        if eager and not delay:
            raise InvalidArgument("eager: expected False without a delay, got True")
        self._weights = _FlatParameters([each for each in model.parameters() if each.requires_grad])
        for name, parameter in model.named_parameters():
            if parameter.dtype != torch.float32 or parameter.device.type != "cpu":
                got = f"{parameter.dtype} on {parameter.device}"
                raise InvalidArgument(f"{name}: expected float32 on the CPU, got {got}")
        self.config = check_config(config)
        broadcast(model, topology)
        self._schedule = Schedule(steps, fragments, delay)
        self.report: Report | None = None
        self._model, self._optimizer, self._taken = model, optimizer, 0
        shapes = [tuple(each.shape) for each in self._weights.parameters]
        bounds = fragment_bounds(shapes, fragments)
        pieces, parts = pieces_of(shapes, bounds), list(pairwise(bounds))
        shapes_of = [[each.shape for each in pieces if low <= each.start < high] for low, high in parts]
        sizes = [high - low for low, high in parts]
        self._topology = topology.copy() if delay else None  # the caller may exchange during a delay
        self.exchange = BucketExchange(
            self._topology or topology, sizes, config, shapes=shapes_of, overlap=delay > 0
        )
        mixing = 0.5 if mixing is None and delay else mixing or 0.0
        outer = OuterSgd(rate, momentum, nesterov=nesterov)
        self._pace = Pace(self.exchange.slices, round_seconds, weighs=by_samples)
        self._rounds = Rounds(outer, self._leave, self._wait, mixing=mixing, eager=eager)
        self._before: dict[str, Any] = {}  # the optimizer's state and the buffers at the begin of the round
        # A forward pass changes buffers, and the model may have been loaded since the last round.
        self._handles = [
            model.register_forward_pre_hook(self._before_forward),
            optimizer.register_step_pre_hook(self._begin),
        ]
        self._now = topology.world.now
        self._since = self._now()

    def step(self, samples: int = 1) -> bool:
        """Count a step of the optimizer on ``samples``; return whether it ended a round, which is collective.

        Of fragments a round ends where one arrives.
        """
        if not isinstance(samples, int) or samples < 0:
            raise InvalidArgument(f"samples: expected a whole number from 0, got {samples!r}")
        self._pace.took(self._now() - self._since, samples)
        return self.pass_over()

    @property
    def is_over(self) -> bool:
        """Whether the steps to the next exchange have taken ``round_seconds``: ``pass_over()`` the others."""
        return self._pace.is_over

    def pass_over(self) -> bool:
        """Count a step that was not taken; returns as ``step`` does."""
        self._taken += 1
        leaving = self._schedule.leaving(self._taken)
        fragment = None if leaving is None else self.exchange.slices[leaving]
        ended = self._end_step(fragment, arrives=self._schedule.arrives(self._taken))
        self._since = self._now()
        return ended

    def settle(self) -> None:
        """Exchange all fragments, unless all ranks have the same weights already; collective."""
        if self._rounds.common is not None:
            self._end_step(slice(0, self.exchange.size), arrives=True)

    def _end_step(self, leaving: slice | None, *, arrives: bool) -> bool:
        if leaving is not None:
            self._begin()  # where no step was taken, as a GradScaler decides
        report = self._rounds.end_step(self._weights, leaving, arrives=arrives)
        if report is None:
            return False
        self.report = report
        if not report.finite:
            self._restore()
            self._pace.restart()
        self._before = {}
        return True

    @property
    def finite(self) -> bool:
        """Whether the latest round counts."""
        return self.report is None or self.report.finite

    @contextmanager
    def common_weights(self) -> Iterator[None]:
        """Set the model to the weights with which the round began inside the block, equal on all ranks."""
        began, own = self._now(), None
        if self._rounds.common is not None:
            own = self._weights.read()
            self._weights.write(self._rounds.common)
        try:
            yield
        finally:
            if own is not None:
                self._weights.write(own)
            self._since += self._now() - began

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank, for ``torch.save`` beside its model's and its optimizer's.

        What is under way is waited for; all ranks call it together.
        """
        rounds = self._rounds
        rounds.finish()
        return copy.deepcopy(
            {
                "exchange": with_tensors(self.exchange.state_dict()),
                "velocity": with_tensors(rounds.outer.velocity),
                "taken": self._taken,
                "common": with_tensors(rounds.common),
                "leaving": None if rounds.leaving is None else [rounds.leaving.start, rounds.leaving.stop],
                "mean": None if rounds.arrived is None else with_tensors(rounds.arrived[0]),
                "finite": None if rounds.arrived is None else rounds.arrived[1].finite,
                "ahead": with_tensors(rounds.ahead),
                "before": self._before,
                "pace": self._pace.state_dict(),
            }
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what ``state_dict`` returned on this rank; the model's and the optimizer's are apart."""
        state = copy.deepcopy(dict(state))
        self.exchange.load_state_dict(with_arrays(state["exchange"]))
        rounds = self._rounds
        rounds.outer.velocity, rounds.common = with_arrays(state["velocity"]), with_arrays(state["common"])
        rounds.leaving = None if state["leaving"] is None else slice(*state["leaving"])
        rounds.arrived = None
        if state["mean"] is not None:  # its report has no bytes, which were sent before
            report = Report(state["finite"], 0, 0, Traffic(), StageSeconds())
            rounds.arrived = with_arrays(state["mean"]), report
        rounds.ahead = with_arrays(state["ahead"])
        self._taken, self._before = state["taken"], state["before"]
        self._pace.load_state_dict(state["pace"])

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._rounds.finish()
        self.exchange.close()
        if self._topology is not None:
            self._topology.close()
            self._topology.world.close()

    def _before_forward(self, model: torch.nn.Module, inputs: Any) -> None:
        if model.training:
            self._begin()

    def _begin(self, *_: Any) -> None:
        """Begin a round, unless one is under way."""
        if self._rounds.common is None:
            self._rounds.begin(self._weights.read())
        if not self._before:
            state = self._optimizer.state_dict()["state"]
            self._before = copy.deepcopy({"state": state, "buffers": dict(self._model.named_buffers())})

    def _restore(self) -> None:
        groups = self._optimizer.state_dict()["param_groups"]  # with the rates of a schedule
        self._optimizer.load_state_dict({"state": self._before["state"], "param_groups": groups})
        for name, buffer in self._model.named_buffers():
            buffer.copy_(self._before["buffers"][name])

    def _leave(self, fragment: slice, difference: Float32) -> None:
        self.exchange.submit_part(fragment, difference, self._pace.leaves(fragment))

    def _wait(self, fragment: slice) -> tuple[Float32, Report]:
        mean, report = self.exchange.wait()
        return mean[fragment], report


class _FlatParameters:
    """Parameters as one vector."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self.parameters = parameters
        self._sizes = [each.numel() for each in parameters]

    def read(self, part: slice = ALL) -> Float32:
        """Return a copy of the vector, or of a ``part``."""
        own = [self._flat(number)[entries] for number, entries in entries_in(part, self._sizes)]
        weights: Float32 = torch.cat(own).numpy()
        return weights

    def write(self, vector: Float32, part: slice = ALL) -> None:
        places = entries_in(part, self._sizes)
        values = torch.from_numpy(vector).split([entries.stop - entries.start for _, entries in places])
        with torch.no_grad():
            for (number, entries), own in zip(places, values, strict=True):
                flat = self._flat(number)  # a copy where the parameter is not contiguous
                flat[entries] = own
                self.parameters[number].copy_(flat.view(self.parameters[number].shape))

    def _flat(self, number: int) -> torch.Tensor:
        return self.parameters[number].detach().reshape(-1)
