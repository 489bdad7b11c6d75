"""The records of a run in its folder: ``config.yaml``, ``metrics.jsonl`` and ``summary.json``."""

from training.callbacks.callback import Callback, Event, RunView


class Metrics(Callback):
    """Writes them on rank 0, where the run has a folder."""

    def on_run_begin(self, run: RunView) -> None:
        """Write the configuration."""
        if run.folder is not None:
            run.folder.write_config(run.config)

    def on_event(self, run: RunView, event: Event) -> None:
        """Append the record of an event."""
        if run.folder is not None:
            run.folder.write(event.kind, **event.record())

    def on_run_end(self, run: RunView) -> None:
        """Write the summary: the run is not resumed any more."""
        if run.folder is not None:
            run.folder.end(run.summary, run.ranks)
