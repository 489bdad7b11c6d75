"""The provenance of a run, and the receipt that holds it.

Provenance: the command, the source tree, and the versions of the packages that a run uses.
"""

import platform
import shlex
import sys
from dataclasses import replace
from datetime import datetime, timezone
from importlib.metadata import version
from importlib.util import find_spec

import keras
import tensorflow as tf
from mpi4py import MPI

from commlib import __version__
from training.callbacks.callback import Callback, RunEvent, RunView
from training.callbacks.digests import digest_of
from training.config.config import Config
from training.config.run_files import FILES, RECEIPT
from training.config.secrets import mask
from training.receipt import End, Job, Part, Process, Receipt, config_digest, file_of
from training.results import Ranks
from training.run.data import Fingerprints
from training.run_folder import RunFolder, unwritable
from training.source import source


def command() -> str:
    """Return the shell command line of this process, its secrets masked."""
    return shlex.join(mask(sys.argv))


def now() -> str:
    """Return the time of now as records have it, in UTC."""
    return f"{datetime.now(timezone.utc):%Y-%m-%dT%H:%M:%SZ}"


def versions() -> dict[str, str]:
    """Return the versions of all packages that affect the results of a run, by name."""
    return {
        "cloudtrain": __version__,
        "python": platform.python_version(),
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        **{name: version(name) for name in ("numpy", "numba", "mpi4py")},
        "horovod": version("horovod") if find_spec("horovod") else "none",
        "mpi": MPI.Get_library_version().split(",")[0],
    }


def run_begun(identity: str, ranks: Ranks, config: Config, *, on_gpus: bool) -> RunEvent:
    """Return the event of a process that begins a run, or resumes one; ``on_gpus``: gradients stay on GPUs.

    Its ``transport`` is that of gradients: ``nccl``, ``nccl+mpi`` or ``mpi``; ``none`` on one rank. Its
    ``reducers`` are those of the phases, with their options.
    """
    transport = {"auto": "nccl"}.get(config.transport, config.transport) if on_gpus else "mpi"
    fields = {
        "identity": identity,
        "command": command(),
        "started": now(),
        "versions": versions(),
        "transport": transport if ranks.count > 1 else "none",
        "reducers": [config.reducer_config(phase) for phase in config.phases] if ranks.count > 1 else [],
        "ranks": ranks.count,
        "nodes": ranks.nodes,
        "hosts": ranks.hosts,
    }
    return RunEvent("run", fields)


class Receipts(Callback):
    """Writes the receipt of a run, with digests of the files that other callbacks write before."""

    def __init__(self, fingerprints: Fingerprints) -> None:
        self._fingerprints = fingerprints
        self._receipt: Receipt | None = None

    def on_run_begin(self, run: RunView) -> None:
        """Write what the run is made of; ``ValueError`` where its receipt is damaged, or has no room."""
        if run.folder is None:
            return
        folder = run.folder
        before = Receipt.read(folder.path).processes if (folder.path / RECEIPT).exists() else ()
        self._receipt = Receipt(folder.identity, [*before, process_of(run, folder, self._fingerprints)])
        with unwritable(f"{folder.path / RECEIPT}: expected room for it"):
            folder.write_file(RECEIPT, self._receipt.text())

    def on_run_end(self, run: RunView) -> None:
        if run.folder is not None and self._receipt is not None:
            folder, receipt = run.folder, self._receipt
            folder.attempt(RECEIPT, lambda: _complete(folder, receipt, run))


def process_of(run: RunView, folder: RunFolder, fingerprints: Fingerprints) -> Process:
    """Return what a run of this process is made of, whose ``config.yaml`` is in ``folder``."""
    ranks = run.ranks
    return Process(
        begun=now(),
        from_step=run.position.steps,
        config=config_digest(folder.path),
        source=source(),
        versions=versions(),
        job=Job(ranks.count, ranks.nodes, ranks.hosts, ranks.hardware, platform.platform()),
        data={part: Part(*found) for part, found in fingerprints.items()},
        seed=run.config.seed,
        deterministic=run.config.deterministic,
        digest_every=run.config.digest_every,
    )


def _complete(folder: RunFolder, receipt: Receipt, run: RunView) -> None:
    weights = digest_of(each.numpy() for each in run.model.trainable_variables)
    files = {name: file_of(folder.path / name) for name in FILES if (folder.path / name).exists()}
    end = End(now(), run.position.steps, weights, files)
    folder.write_file(RECEIPT, replace(receipt, end=end).text())
