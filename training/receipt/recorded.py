"""What a run has recorded of some of its steps, for them to be made again."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from training.config.run_files import CONFIG
from training.config.schema import ConfigurationError
from training.receipt.receipt import Part, Process, Receipt, Source, config_digest_of
from training.receipt.records import digests_of, read_records


@dataclass(frozen=True)
class Recorded:
    """Steps ``first`` to ``last`` of the run in ``folder``: the digests of the weights after some of them.

    ``process`` made them, or several that were alike, after step ``since``.
    """

    folder: Path
    identity: str
    first: int
    last: int
    digests: Mapping[int, str]
    process: Process
    since: int

    @classmethod
    def of(cls, folder: Path, steps: str) -> "Recorded":
        """Return what is recorded of ``steps``, ``A:B``; ``ValueError`` if they cannot be made again."""
        receipt = Receipt.read(folder)
        digests = digests_of(folder, read_records(folder))
        end = max(digests, default=0)
        if receipt.end is not None:
            end = receipt.end.steps
            digests.setdefault(end, receipt.end.weights)
        first, last = _steps(steps, end)
        process, since = _made_by(receipt.processes, last)
        if first < since:
            job = f"{process.job.ranks} ranks on nodes {list(process.job.nodes)}, and one configuration"
            raise ValueError(f"--steps: expected steps after {since}, which have {job}, got {steps}")
        _check_config(folder, process)
        between = {step: digest for step, digest in digests.items() if first <= step <= last}
        if not between:
            known = ", ".join(map(str, sorted(digests)[:8])) or "none"
            more = ", …" if len(digests) > 8 else ""
            raise ValueError(f"--steps: expected steps with a digest ({known}{more}), got {steps}")
        return cls(folder, receipt.identity, first, last, between, process, since)

    def check_job(self, nodes: Sequence[int]) -> None:
        """Raise ``ValueError`` unless the ranks of these nodes are as those of the run."""
        if list(nodes) != list(self.process.job.nodes):
            expected = (
                f"{self.process.job.ranks} ranks, on nodes {list(self.process.job.nodes)} as in the run"
            )
            raise ValueError(f"receipt: expected {expected}, got {sum(nodes)}, on nodes {list(nodes)}")

    def check_data(self, found: Mapping[str, tuple[int, str]]) -> None:
        """Raise ``ValueError`` unless the samples are those of the run, by their fingerprints."""
        for part, expected in self.process.data.items():
            if part not in found or Part(*found[part]) != expected:
                wanted = f"the {expected.samples} samples of the run, with fingerprint {expected.fingerprint}"
                raise ValueError(f"dataset: {part} samples: expected {wanted}, got {found.get(part)}")

    def differences(self, source: Source, versions: Mapping[str, str]) -> Iterator[str]:
        """Yield a line for what is otherwise here than it was in the run, and may change results."""
        then = self.process
        for name in sorted({*then.versions, *versions}):
            if then.versions.get(name) != versions.get(name):
                yield f"{name}: the run had {then.versions.get(name)}, here is {versions.get(name)}"
        if (then.source.commit, then.source.dirty) != (source.commit, source.dirty):
            yield f"source: the run had {_shown(then.source)}, here is {_shown(source)}"


def _shown(source: Source) -> str:
    if source.commit is None:
        return f"version {source.version}"
    return f"commit {source.commit}{', with changes' if source.dirty else ''}"


def _steps(steps: str, end: int) -> tuple[int, int]:
    words = re.fullmatch(r"(\d{1,18}):(\d{1,18})", steps, re.ASCII)
    first, last = (int(words[1]), int(words[2])) if words else (0, 0)
    if not first < last <= end:
        raise ValueError(f"--steps: expected A:B, with A below B, and B at most {end}, got {steps}")
    return first, last


def _made_by(processes: Sequence[Process], last: int) -> tuple[Process, int]:
    """Return the process that made step ``last``, and the step after which all that lead to it were alike.

    A process that went on from an earlier step than the one before it made the steps in between again.
    """
    path: list[Process] = []
    for process in processes:
        while path and path[-1].from_step >= process.from_step:
            path.pop()
        path.append(process)
    made = [process for process in path if process.from_step < last]
    since = made[-1].from_step
    for process in reversed(made):
        if not _alike(process, made[-1]):
            break
        since = process.from_step
    return made[-1], since


def _alike(one: Process, other: Process) -> bool:
    return (one.config, one.job.nodes, one.data) == (other.config, other.job.nodes, other.data)


def _check_config(folder: Path, process: Process) -> None:
    """Raise ``ValueError`` unless ``config.yaml``, that of the latest process, is that of this one."""
    try:
        found = config_digest_of(folder)
    except ConfigurationError as error:
        raise ValueError(f"{folder / CONFIG}: {error}") from error
    if found != process.config:
        expected = f"the configuration of the steps, with the digest {process.config}"
        raise ValueError(f"{folder / CONFIG}: expected {expected}, got one with {found}")
