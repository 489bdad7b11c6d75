"""The records and the receipt of a run, read strictly: its digests by step, and steps to replay."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from commlib.errors import shown
from training.config.run_files import CONFIG, METRICS
from training.config.schema import ConfigurationError
from training.receipt.receipt import Part, Process, Receipt, Source, config_digest_of

Record = Mapping[str, Any]
Kind = TypeVar("Kind", int, str)


def read_records(folder: Path) -> list[Record]:
    """Return the records of a run; ``ValueError`` names the file, and the line that is no record."""
    path = folder / METRICS
    try:
        with path.open("rb") as file:
            return [_record(path, number, line) for number, line in enumerate(file, 1)]
    except OSError as error:
        raise ValueError(f"{path}: expected the records of a run: {error.strerror}") from error


def _record(path: Path, number: int, line: bytes) -> Record:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict) or not isinstance(value.get("kind"), str):
        raise ValueError(f"{path}, line {number}: expected a record, got what is damaged")  # noqa: TRY004
    return value


def digests_of(folder: Path, records: list[Record]) -> dict[int, str]:
    """Return the digests of the weights by step, without those of steps that a later process made again.

    Raises ``ValueError`` for a record without step or digest.
    """
    found: dict[int, str] = {}
    from_step = 0
    for number, record in enumerate(records, 1):
        kind = record["kind"]
        if kind == "run":
            from_step = 0
        elif kind == "resume":
            from_step = value_of(folder, number, record, "steps", int)
        elif kind == "prepare":  # training begins
            found = {step: digest for step, digest in found.items() if step <= from_step}
        elif kind == "digest":
            step = value_of(folder, number, record, "steps", int)
            found[step] = value_of(folder, number, record, "digest", str)
    return found


def value_of(folder: Path, number: int, record: Record, key: str, kind: type[Kind]) -> Kind:
    """Return a value of the record in line ``number``, a text or a number from 0; else ``ValueError``."""
    value = record.get(key)
    if type(value) is not kind or (isinstance(value, int) and value < 0):
        expected = "a whole number" if kind is int else "a text"
        where = f"{folder / METRICS}, line {number}"
        raise ValueError(f"{where}: {key}: expected {expected}, got {shown(value)}")
    return value


@dataclass(frozen=True)
class Recorded:
    """Steps ``first`` to ``last`` of the run in ``folder``, with digests of the weights after some steps.

    ``process``, or several that were alike, made all steps after ``since``.
    """

    folder: Path
    identity: str
    first: int
    last: int
    digests: Mapping[int, str]
    process: Process
    since: int

    @classmethod
    def of(cls, folder: Path, steps: str | None) -> "Recorded":
        """Return the record of ``steps``, ``A:B``; ``ValueError`` if they cannot be replayed.

        ``None``: up to the first digest, of the process that ended the run or of others that were like it.
        """
        receipt = Receipt.read(folder)
        digests = digests_of(folder, read_records(folder))
        end = max(digests, default=0)
        if receipt.end is not None:
            end = receipt.end.steps
            digests.setdefault(end, receipt.end.weights)
        if steps is None:
            _, begin = _made_by(receipt.processes, end)
            steps = f"{begin}:{min((step for step in digests if step > begin), default=end)}"
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
        """Raise ``ValueError`` unless the ranks are placed on nodes as in the run."""
        if list(nodes) != list(self.process.job.nodes):
            job = self.process.job
            expected = f"{job.ranks} ranks, on nodes {list(job.nodes)} as in the run"
            raise ValueError(f"receipt: expected {expected}, got {sum(nodes)}, on nodes {list(nodes)}")

    def check_data(self, found: Mapping[str, tuple[int, str]]) -> None:
        """Raise ``ValueError`` unless the samples are those of the run, by their fingerprints."""
        for part, expected in self.process.data.items():
            if part not in found or Part(*found[part]) != expected:
                wanted = f"the {expected.samples} samples of the run, with fingerprint {expected.fingerprint}"
                raise ValueError(f"dataset: {part} samples: expected {wanted}, got {found.get(part)}")

    def differences(self, source: Source, versions: Mapping[str, str]) -> Iterator[str]:
        """Yield a line for each difference from the run that may change results."""
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
    """Return the process that made step ``last``, and the step after which all processes were like it.

    A process that resumed from an earlier step than the previous process made the steps in between again.
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
    """Raise ``ValueError`` unless ``config.yaml``, which the latest process wrote, is that of ``process``."""
    try:
        found = config_digest_of(folder)
    except ConfigurationError as error:
        raise ValueError(f"{folder / CONFIG}: {error}") from error
    if found != process.config:
        expected = f"the configuration of the steps, with the digest {process.config}"
        raise ValueError(f"{folder / CONFIG}: expected {expected}, got one with {found}")
