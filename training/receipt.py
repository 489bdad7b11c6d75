"""The receipt of a run: ``receipt.json`` in its folder, with its origin and digests of its files."""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from pydantic import NonNegativeInt, PositiveInt

from commlib.errors import shown
from training.checkpoint.serialization import check_format, expect_equal, parsed
from training.config.reading import mapping, mappings, parsed_file
from training.config.run_files import CONFIG, FILES, METRICS, RECEIPT, RUN, SUMMARY, object_in, object_of
from training.config.schema import ConfigurationError
from training.source import Source

FORMAT = 1


@dataclass(frozen=True)
class Job:
    """The ranks of a process of a run. ``nodes``: how many ranks each has; ``hosts``: each once."""

    ranks: PositiveInt
    nodes: Sequence[PositiveInt]
    hosts: Sequence[str]
    hardware: str
    platform: str


@dataclass(frozen=True)
class Part:
    """The samples of a part of the data."""

    samples: NonNegativeInt
    fingerprint: str


@dataclass(frozen=True)
class Process:
    """One launch of all ranks, which began the run, or resumed it after ``from_step`` steps.

    ``config``: see :func:`config_digest`. ``versions``: of packages. ``data``: by part. Rank ``r`` is seeded
    with ``seed + r``. ``digest_every``: steps between the digests of weights in ``metrics.jsonl``.
    """

    begun: str
    from_step: NonNegativeInt
    config: str
    source: Source
    versions: Mapping[str, str]
    job: Job
    data: Mapping[str, Part]
    seed: int
    deterministic: bool
    digest_every: NonNegativeInt


@dataclass(frozen=True)
class File:
    """A file as it was at the end of the run."""

    bytes: NonNegativeInt
    sha256: str


@dataclass(frozen=True)
class End:
    """The end of a run. ``weights``: digest of the trainable weights after the last of ``steps`` steps."""

    ended: str
    steps: NonNegativeInt
    weights: str
    files: Mapping[str, File]


@dataclass(frozen=True)
class Receipt:
    """The content of ``receipt.json``. ``end``: ``None`` until the run has ended.

    ``digest``: sha256 of all other fields, as :meth:`sealed` computes it.
    """

    identity: str
    processes: Sequence[Process]
    end: End | None = None
    digest: str = ""
    format: int = FORMAT

    def sealed(self) -> "Receipt":
        """Return the receipt with its own digest."""
        return replace(self, digest=_sha256_of_value(asdict(replace(self, digest=""))))

    def text(self) -> str:
        """Return the content of the file: the receipt with its own digest, as JSON."""
        return json.dumps(asdict(self.sealed()), indent=2) + "\n"

    @classmethod
    def read(cls, folder: Path) -> "Receipt":
        """Return the receipt of a run; ``ValueError`` names the file if it is missing or damaged."""
        path = folder / RECEIPT
        try:
            content = path.read_bytes()
        except OSError as error:
            raise ValueError(f"{path}: expected the receipt of a run: {error.strerror}") from error
        try:
            check_format(content, FORMAT)
            receipt = parsed(cls, content)
            expect_equal("digest of the rest", receipt.sealed().digest, receipt.digest)
            expect_equal("processes", True, bool(receipt.processes))
            is_as_written = content == receipt.text().encode()  # blanks appended, say, which no digest covers
            expect_equal("the text that was written", True, is_as_written)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        return receipt


def file_of(path: Path) -> File:
    """Return the length and the digest of a file; ``OSError`` where it cannot be read."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
        return File(file.tell(), digest.hexdigest())


def config_digest(folder: Path) -> str:
    """Return the sha256 of a run's configuration without ``resume``; ``ConfigurationError`` if damaged."""
    value = parsed_file(folder / CONFIG)
    keys = value if isinstance(value, dict) else {"": value}
    try:
        return _sha256_of_value({key: each for key, each in keys.items() if key != "resume"})
    except (TypeError, ValueError) as error:  # YAML has bytes, sets, and lists that hold themselves
        raise ConfigurationError(f"expected values that JSON has: {error}") from error


def _sha256_of_value(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Record:
    """A record of ``metrics.jsonl``. ``place``: the file and the line, for messages."""

    place: str
    values: Mapping[str, Any]

    @property
    def kind(self) -> str:
        return str(self.values["kind"])

    def read(self, key: str, kind: type) -> Any:
        """Return the value of a key, a string or an integer from 0 by ``kind``; ``ValueError`` for others."""
        value = self.values.get(key)
        if type(value) is not kind or (isinstance(value, int) and value < 0):
            expected = "a whole number" if kind is int else "a text"
            raise ValueError(f"{self.place}: {key}: expected {expected}, got {shown(value)}")
        return value

    def whole(self, *keys: str) -> list[int]:
        """Return whole numbers from 0; ``ValueError`` for any other value."""
        return [self.read(key, int) for key in keys]


def read_records(folder: Path) -> list[Record]:
    """Return the records of a run; ``ValueError`` names the file, and the line that is no record."""
    path = folder / METRICS
    try:
        with path.open("rb") as file:
            records = [Record(f"{path}, line {count}", object_of(line)) for count, line in enumerate(file, 1)]
    except OSError as error:
        raise ValueError(f"{path}: expected the records of a run: {error.strerror}") from error
    for record in records:
        if not isinstance(record.values.get("kind"), str):
            raise ValueError(f"{record.place}: expected a record, got what is damaged")  # noqa: TRY004
    return records


def digests_of(records: Sequence[Record]) -> dict[int, str]:
    """Return the latest digest of the weights at each step; ``ValueError`` for an incomplete record."""
    found: dict[int, str] = {}
    from_step = 0
    for record in records:
        if record.kind == "run":
            from_step = 0
        elif record.kind == "resume":
            from_step = record.read("steps", int)
        elif record.kind == "prepare":  # training begins
            found = {step: digest for step, digest in found.items() if step <= from_step}
        elif record.kind == "digest":
            found[record.read("steps", int)] = record.read("digest", str)
    return found


# ------------------------------------------------------------------------------------------- verification


def problems(folder: Path) -> Iterator[str]:
    """Yield a line, beginning with the file, for each problem of a run's folder.

    A damaged receipt or record ends the search: what would be compared after it is not.
    """
    try:
        receipt = Receipt.read(folder)
        yield from _of_files(folder, receipt)
        yield from _of_run(folder, receipt)
        records = read_records(folder)
        yield from _of_order(records)
        yield from _of_digests(folder, receipt, records)
        yield from _of_processes(folder, receipt, records)
        yield from _of_summary(folder, records)
    except ValueError as error:
        yield str(error)


def _of_files(folder: Path, receipt: Receipt) -> Iterator[str]:
    if receipt.end is None:
        yield f"{folder / RECEIPT}: expected the end of the run, with digests of its files, got none"
        return
    for name, written in receipt.end.files.items():
        path = folder / name
        if name not in FILES:  # it may lie anywhere, and have no end
            yield f"{folder / RECEIPT}: expected digests of {', '.join(FILES)}, got one of {shown(name)}"
            continue
        try:
            found = file_of(path)
        except OSError as error:
            yield f"{path}: cannot be read: {error.strerror}"
            continue
        if found.bytes != written.bytes:
            yield f"{path}: expected {written.bytes} bytes, got {found.bytes}"
        elif found.sha256 != written.sha256:
            yield f"{path}: expected sha256 {written.sha256}, got {found.sha256}"


def _of_run(folder: Path, receipt: Receipt) -> Iterator[str]:
    if (identity := object_in(folder / RUN).get("identity")) != receipt.identity:
        yield f"{folder / RUN}: expected identity {receipt.identity}, got {shown(identity)}"
    if (problem := _config_problem(folder, receipt.processes[-1])) is not None:
        yield problem


def _config_problem(folder: Path, process: Process) -> str | None:
    """Return why ``config.yaml``, which the latest process wrote, is not that of ``process``."""
    try:
        found = config_digest(folder)
    except ConfigurationError as error:
        return f"{folder / CONFIG}: {error}"
    expected = f"expected the configuration with the digest {process.config}"
    return None if found == process.config else f"{folder / CONFIG}: {expected}, got one with {found}"


def _of_order(records: list[Record]) -> Iterator[str]:
    """Yield a line for each record out of order: within a process, steps, epochs and digests ascend."""
    keys = {"digest": ("steps",), "step": ("epoch", "step"), "epoch": ("epoch",)}
    begin = {"digest": [0], "step": [0, 0], "epoch": [-1]}
    before = dict(begin)
    for record in records:
        kind = record.kind
        if kind == "run":
            before = dict(begin)
        elif kind == "resume":
            steps, epoch, step = record.whole("steps", "run_epoch", "phase_steps")
            before = {"digest": [steps], "step": [epoch, step], "epoch": [epoch - 1]}
        elif kind in keys:
            found = record.whole(*keys[kind])
            if found <= before[kind]:
                after, got = (", ".join(map(str, each)) for each in (before[kind], found))
                yield f"{record.place}: {kind}: expected one after {after}, got {got}"
            before[kind] = found


def _of_digests(folder: Path, receipt: Receipt, records: list[Record]) -> Iterator[str]:
    """Yield missing digests of the latest process, and a last digest that differs from the receipt's."""
    process, path, end = receipt.processes[-1], folder / METRICS, receipt.end
    first = max((number for number, each in enumerate(records) if each.kind == "run"), default=0)
    found = digests_of(records[first:])
    last = max(found, default=process.from_step) if end is None else end.steps
    every = process.digest_every
    if every and not _has_local_steps(folder):  # else at the ends of rounds
        for steps in range(process.from_step // every * every + every, last + 1, every):
            if steps not in found:
                yield f"{path}: expected the digest of the weights after step {steps}, got none"
    if end is not None and end.steps in found and found[end.steps] != end.weights:
        yield f"{path}: digest after step {end.steps}: expected {end.weights}, got {found[end.steps]}"


def _has_local_steps(folder: Path) -> bool:
    """Return whether a phase of the configuration has local steps; false for one that cannot be read."""
    try:
        phases = mappings(mapping(parsed_file(folder / CONFIG)).get("phases"))
    except ConfigurationError:
        return False
    return any(phase.get("local_steps") is not None for phase in phases)


def _of_processes(folder: Path, receipt: Receipt, records: list[Record]) -> Iterator[str]:
    """Yield differences between the latest process in the records and in the receipt."""
    path, process = folder / METRICS, receipt.processes[-1]
    begun = [record.values for record in records if record.kind == "run"]
    if len(begun) < len(receipt.processes):
        yield f"{path}: expected {len(receipt.processes)} processes that began the run, got {len(begun)}"
        return
    job = process.job
    expected: dict[str, Any] = {"identity": receipt.identity, "versions": process.versions}
    expected |= {"ranks": job.ranks, "nodes": job.nodes, "hosts": job.hosts}
    for key, value in expected.items():
        if begun[-1].get(key) != value:
            yield f"{path}: {key} of the latest run: expected {shown(value)}, got {shown(begun[-1].get(key))}"


def _of_summary(folder: Path, records: list[Record]) -> Iterator[str]:
    """Yield differences between the summary, if there is one, and the last records."""
    path = folder / SUMMARY
    if not path.exists():
        return
    summary = object_in(path)
    last = next((each.values for each in reversed(records) if each.kind == "summary"), {})
    epochs = (each.values for each in reversed(records) if each.kind == "epoch")
    tested = next((each for each in epochs if each.get("tested")), {})
    common = tested.keys() & summary.keys() - {"seconds"}  # that of an epoch's record is of its writing
    written = [(key, last[key]) for key in last if key != "kind"]
    written += [(key, tested[key]) for key in tested if key in common]
    differences = [
        f"{path}: {key}: expected {shown(value)} as in {METRICS}, got {shown(summary.get(key))}"
        for key, value in written
        if summary.get(key) != value
    ]
    yield from dict.fromkeys(differences)  # most keys are in both records
    if not last:
        yield f"{folder / METRICS}: expected the record of the summary, got none"


# ------------------------------------------------------------------------------------------------- replay


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

        ``None``: up to the first digest since the process that ended the run, or earlier ones like it, began.
        """
        receipt = Receipt.read(folder)
        digests = digests_of(read_records(folder))
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
        if (problem := _config_problem(folder, process)) is not None:
            raise ValueError(problem)
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
    ``ValueError`` where no process made the step, such as in a run that was killed before its first digest.
    """
    path: list[Process] = []
    for process in processes:
        while path and path[-1].from_step >= process.from_step:
            path.pop()
        path.append(process)
    made = [process for process in path if process.from_step < last]
    if not made:
        raise ValueError(f"--steps: expected steps after {path[0].from_step}, got none up to {last}")
    alike = takewhile(lambda each: _made_of(each) == _made_of(made[-1]), reversed(made))
    return made[-1], min(process.from_step for process in alike)


def _made_of(process: Process) -> tuple[Any, ...]:
    return process.config, process.job.nodes, process.data
