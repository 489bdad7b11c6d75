"""The callbacks of a run: those of the loop itself around those of its configuration."""

from training.callbacks.callback import Callback
from training.callbacks.calling import Callbacks
from training.callbacks.dawnbench import DawnBenchFiles
from training.callbacks.digests import Digests
from training.callbacks.metrics import Metrics
from training.callbacks.prometheus import Prometheus
from training.callbacks.skipped_steps import SkippedSteps
from training.callbacks.tracing import Profiler
from training.config.config import Config
from training.run.receipts import Receipts
from training.run.step_reports import StepReports


def callbacks_of(config: Config) -> Callbacks:
    """Return the callbacks of a run, in the order in which they are called."""
    return Callbacks(_first(config), [(each.name, each.make()) for each in config.callbacks], [Receipts()])


def _first(config: Config) -> list[Callback]:
    """Return those of the loop that are called before the configuration's; the last one ends the records."""
    profiler = [] if config.trace is None else [Profiler(config.trace)]
    digests = [Digests(config.digest_every)] if config.digest_every else []
    target = [] if config.target is None else [DawnBenchFiles()]
    served = [] if config.metrics_port is None else [Prometheus(config.metrics_port)]
    return [*profiler, SkippedSteps(), *digests, StepReports(), *target, *served, Metrics()]
