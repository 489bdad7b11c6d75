"""The numbers of a run for Weights & Biases, through its package wandb (0.19 or newer)."""

from collections.abc import Mapping
from typing import Any, Literal

from training.callbacks.callback import RunView
from training.callbacks.writer import Writer, package
from training.config.schema import ConfigurationError

# wandb would also send the command line, which may hold a secret, and wrap the terminal.
SETTINGS = {"console": "off", "x_disable_meta": True, "disable_code": True, "disable_git": True}


class WeightsAndBiases(Writer):
    """Sends numbers and the configuration, in which secrets are masked, to a project.

    Who may: as ``wandb login`` or ``WANDB_API_KEY`` say. ``mode``: ``offline`` sends nothing; by default as
    ``WANDB_MODE`` says. A run that goes on from a checkpoint goes on there, too.
    """

    def __init__(
        self,
        *,
        project: str = "cloudtrain",
        entity: str | None = None,
        mode: Literal["online", "offline"] | None = None,
    ) -> None:
        if mode not in (None, "online", "offline"):
            raise ConfigurationError(f"expected online or offline, got {mode!r}", key="mode")
        self._where: dict[str, Any] = {"project": project, "entity": entity, "mode": mode}
        self._run: Any = None

    def on_build(self, run: RunView) -> None:
        """Refuse to run without the package."""
        if run.rank == 0:
            package("wandb")

    def on_run_begin(self, run: RunView) -> None:
        """Begin the run there, or go on with it."""
        if run.folder is not None:
            self._run = package("wandb").init(
                **self._where,
                id=run.folder.identity,
                resume="allow",
                name=run.folder.path.name,
                dir=str(run.folder.path),
                config=run.config.model_dump(mode="json", exclude_none=True),
                settings=SETTINGS,
            )

    def write(self, numbers: Mapping[str, float], steps: int) -> None:
        """Send numbers."""
        self._run.log(dict(numbers), step=steps)

    def on_run_end(self, run: RunView) -> None:
        """End the run there."""
        if self._run is not None:
            self._run.finish()

    def on_error(self, run: RunView, error: BaseException) -> None:
        """Mark the run there as failed."""
        if self._run is not None:
            self._run.finish(exit_code=1)
