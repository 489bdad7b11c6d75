"""What writers have in common: the numbers of a run that rank 0 gives to another tool."""

import math
from abc import abstractmethod
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from training.callbacks.callback import Callback, RunView
from training.results import EpochResult, Step


class Writer(Callback):
    """A callback that writes numbers of every ``log_every``-th step and of every epoch, on rank 0."""

    @abstractmethod
    def write(self, numbers: Mapping[str, float], steps: int) -> None:
        """Write numbers by name, after ``steps`` of the run; only on rank 0, after ``on_run_begin``."""

    def on_step_end(self, run: RunView, step: Step) -> None:
        """Write the numbers of the step."""
        if run.folder is not None and run.position.steps % run.config.log_every == 0:
            self.write(numbers_of_step(run, step), run.position.steps)

    def on_epoch_end(self, run: RunView, result: EpochResult) -> None:
        """Write the numbers of the epoch."""
        if run.folder is not None:
            self.write(numbers_of_epoch(run, result), run.position.steps)


def numbers_of_step(run: RunView, step: Step) -> dict[str, float]:
    """Return the numbers of a step that are finite, as rank 0 has them; throughput is of all ranks."""
    report = step.report
    exchange = {
        "exchange/density": report.selected / run.gradient_size,
        "exchange/sent_intra_bytes": report.traffic.sent.intra,
        "exchange/sent_inter_bytes": report.traffic.sent.inter,
        "exchange/hidden_share": report.hidden / report.busy if report.busy else None,
    }
    return _finite(
        {
            "train/loss": step.loss,
            "train/learning_rate": step.hyperparameters.learning_rate,
            "train/momentum": step.hyperparameters.momentum,
            f"train/{run.task.unit}_per_second": run.size * step.size / step.seconds,
            "train/skipped_steps": sum(phase.result.skipped_steps for phase in run.phases),
            **(exchange if run.size > 1 and step.hyperparameters.round_steps else {}),
        }
    )


def numbers_of_epoch(run: RunView, result: EpochResult) -> dict[str, float]:
    """Return the numbers of an epoch that are finite, over all ranks."""
    exchange = {
        "epoch/sent_intra_bytes": result.sent_intra_bytes,
        "epoch/sent_inter_bytes": result.sent_inter_bytes,
        "epoch/hidden_share": result.stages.hidden_share,
    }
    return _finite(
        {
            "epoch/loss": result.loss,
            f"epoch/{run.task.unit}_per_second": result.throughput,
            **(exchange if run.size > 1 else {}),
            **{f"test/{name}": value for name, value in result.metrics.items()},
        }
    )


def _finite(numbers: Mapping[str, float | None]) -> dict[str, float]:
    return {name: float(each) for name, each in numbers.items() if each is not None and math.isfinite(each)}


def package(name: str) -> Any:
    """Import a package that is none of cloudtrain's own; ``ValueError`` says how to install it."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise ValueError(
            f"expected the package {name}, which is not installed: pip install {name}"
        ) from error
