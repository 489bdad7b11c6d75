"""Checks a run's folder against its receipt, and its records against each other."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from commlib.errors import shown
from training.config.run_files import CONFIG, METRICS, RECEIPT, RUN, SUMMARY
from training.config.schema import ConfigurationError
from training.receipt.receipt import Receipt, config_digest_of, file_of
from training.receipt.recorded import Record, digests_of, read_records, value_of


def problems(folder: Path) -> Iterator[str]:
    """Yield a line, beginning with the file, for each problem of a run's folder.

    Values that a damaged file lacks are not compared.
    """
    try:
        receipt = Receipt.read(folder)
    except ValueError as error:
        yield str(error)
        return
    yield from _of_files(folder, receipt)
    yield from _of_run(folder, receipt)
    try:
        records = read_records(folder)
        yield from _of_order(folder, records)
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
    """Yield differences of identity and configuration."""
    if (identity := _json(folder / RUN).get("identity")) != receipt.identity:
        yield f"{folder / RUN}: expected identity {receipt.identity}, got {shown(identity)}"
    expected = receipt.processes[-1].config
    try:
        if (found := config_digest_of(folder)) != expected:
            problem = f"expected the configuration with the digest {expected}, got one with {found}"
            yield f"{folder / CONFIG}: {problem}"
    except ConfigurationError as error:
        yield f"{folder / CONFIG}: {error}"


def _of_order(folder: Path, records: list[Record]) -> Iterator[str]:
    """Yield records that do not ascend within a process, from the step with which it begins."""
    keys = {"digest": ("steps",), "step": ("epoch", "step"), "epoch": ("epoch",)}
    begin = {"digest": [0], "step": [0, 0], "epoch": [-1]}
    before = dict(begin)
    for number, record in enumerate(records, 1):
        kind = record["kind"]
        if kind == "run":
            before = dict(begin)
        elif kind == "resume":
            steps, epoch, step = _values(folder, number, record, "steps", "run_epoch", "phase_steps")
            before = {"digest": [steps], "step": [epoch, step], "epoch": [epoch - 1]}
        elif kind in keys:
            found = _values(folder, number, record, *keys[kind])
            if found <= before[kind]:
                after, got = (", ".join(map(str, each)) for each in (before[kind], found))
                yield f"{folder / METRICS}, line {number}: {kind}: expected one after {after}, got {got}"
            before[kind] = found


def _values(folder: Path, number: int, record: Record, *keys: str) -> list[int]:
    return [value_of(folder, number, record, key, int) for key in keys]


def _of_digests(folder: Path, receipt: Receipt, records: list[Record]) -> Iterator[str]:
    """Yield missing digests of the latest process, and a last digest that differs from the receipt's."""
    process, path, end = receipt.processes[-1], folder / METRICS, receipt.end
    first = max((number for number, each in enumerate(records) if each["kind"] == "run"), default=0)
    found = digests_of(folder, records[first:])
    last = max(found, default=process.from_step) if end is None else end.steps
    every = process.digest_every
    if every:
        for steps in range(process.from_step // every * every + every, last + 1, every):
            if steps not in found:
                yield f"{path}: expected the digest of the weights after step {steps}, got none"
    if end is not None and end.steps in found and found[end.steps] != end.weights:
        yield f"{path}: digest after step {end.steps}: expected {end.weights}, got {found[end.steps]}"


def _of_processes(folder: Path, receipt: Receipt, records: list[Record]) -> Iterator[str]:
    """Yield differences between the latest process in the records and in the receipt."""
    path, process = folder / METRICS, receipt.processes[-1]
    begun = [record for record in records if record["kind"] == "run"]
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
    summary = _json(path)
    last = next((each for each in reversed(records) if each["kind"] == "summary"), {})
    tested = next((each for each in reversed(records) if each["kind"] == "epoch" and each.get("tested")), {})
    ended = _differences(path, summary, {key: last[key] for key in last if key != "kind"})
    common = tested.keys() & summary.keys() - {"seconds"}  # that of an epoch's record is of its writing
    measured = _differences(path, summary, {key: tested[key] for key in tested if key in common})
    yield from dict.fromkeys((*ended, *measured))  # most keys are in both records
    if not last:
        yield f"{folder / METRICS}: expected the record of the summary, got none"


def _differences(path: Path, summary: Record, record: Record) -> Iterator[str]:
    for key, value in record.items():
        if summary.get(key) != value:
            yield f"{path}: {key}: expected {shown(value)} as in {METRICS}, got {shown(summary.get(key))}"


def _json(path: Path) -> dict[str, Any]:
    """Return a JSON object, an empty one for anything else; numbers that are not finite are ``None``."""
    try:
        value = json.loads(path.read_bytes(), parse_constant=lambda _: None)
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
