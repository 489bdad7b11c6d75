"""The receipt of a run, which rank 0 writes when a process begins it, and completes at its end."""

import platform
from dataclasses import replace

from training.callbacks.callback import Callback, RunView
from training.callbacks.digests import digest_of
from training.config.run_files import RECEIPT
from training.receipt.receipt import FILES, End, Job, Part, Process, Receipt, config_digest, file_of
from training.run.data import Fingerprints
from training.run.provenance import now, source, versions
from training.run_folder import RunFolder, unwritable


class Receipts(Callback):
    """Writes the receipt of a run, with digests of the files that other callbacks write before.

    ``fingerprints``: of the samples.
    """

    def __init__(self, fingerprints: Fingerprints) -> None:
        self._fingerprints = fingerprints
        self._receipt: Receipt | None = None

    def on_run_begin(self, run: RunView) -> None:
        """Write what the run is made of; ``ValueError`` where its receipt is damaged, or has no room."""
        if run.folder is None:
            return
        folder = run.folder
        before = Receipt.read(folder.path).processes if (folder.path / RECEIPT).exists() else ()
        self._receipt = Receipt(folder.identity, [*before, process_of(run, self._fingerprints)])
        with unwritable(f"{folder.path / RECEIPT}: expected room for it"):
            folder.write_file(RECEIPT, self._receipt.text())

    def on_run_end(self, run: RunView) -> None:
        """Complete it; a warning says where there is no room for that."""
        if run.folder is not None and self._receipt is not None:
            folder, receipt = run.folder, self._receipt
            folder.attempt(RECEIPT, lambda: _complete(folder, receipt, run))


def process_of(run: RunView, fingerprints: Fingerprints) -> Process:
    """Return what a run of this process is made of."""
    parts = fingerprints.items()
    ranks = run.ranks
    return Process(
        begun=now(),
        from_step=run.position.steps,
        config=config_digest(run.config.to_yaml()),
        source=source(),
        versions=versions(),
        job=Job(ranks.count, ranks.nodes, ranks.hosts, ranks.hardware, platform.platform()),
        data={part: Part(samples, fingerprint) for part, (samples, fingerprint) in parts},
        seed=run.config.seed,
        deterministic=run.config.deterministic,
        digest_every=run.config.digest_every,
    )


def _complete(folder: RunFolder, receipt: Receipt, run: RunView) -> None:
    weights = digest_of(each.numpy() for each in run.model.trainable_variables)
    files = {name: file_of(folder.path / name) for name in FILES if (folder.path / name).exists()}
    end = End(now(), run.position.steps, weights, files)
    folder.write_file(RECEIPT, replace(receipt, end=end).text())
