"""Whether a run's folder is what its receipt says, and whether its records agree with each other."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from commlib.errors import shown
from training.config.run_files import CONFIG, METRICS, RECEIPT, RUN, SUMMARY
from training.config.schema import ConfigurationError
from training.receipt.receipt import Receipt, config_digest_of, file_of
from training.receipt.records import Record, digests_of, latest_process, read_records, whole


def problems(folder: Path) -> Iterator[str]:
    """Yield a line for each problem of a run's folder, which begins with the file; none where it is right.

    What a damaged file does not say is not compared.
    """
    try:
        receipt = Receipt.read(folder)
    except ValueError as error:
        yield str(error)
        return
    yield from _of_files(folder, receipt)
    yield from _of_identity(folder, receipt)
    yield from _of_config(folder, receipt)
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


def _of_identity(folder: Path, receipt: Receipt) -> Iterator[str]:
    path = folder / RUN
    if (found := _json(path).get("identity")) != receipt.identity:
        yield f"{path}: expected identity {receipt.identity}, got {shown(found)}"


def _of_config(folder: Path, receipt: Receipt) -> Iterator[str]:
    path, expected = folder / CONFIG, receipt.processes[-1].config
    try:
        found = config_digest_of(folder)
    except ConfigurationError as error:
        yield f"{path}: {error}"
        return
    if found != expected:
        yield f"{path}: expected the configuration with the digest {expected}, got one with {found}"


def _of_order(folder: Path, records: list[Record]) -> Iterator[str]:
    """Yield what does not ascend: within a process, after the step that it begins with."""
    before = {"digest": (0,), "step": (0, 0), "epoch": (-1,)}
    for number, record in enumerate(records, 1):

        def at(*keys: str, number: int = number, record: Record = record) -> tuple[int, ...]:
            return tuple(whole(folder, number, record, key) for key in keys)

        kind = record["kind"]
        if kind == "run":
            before = {"digest": (0,), "step": (0, 0), "epoch": (-1,)}
        elif kind == "resume":
            (epoch,) = at("run_epoch")
            before = {"digest": at("steps"), "step": at("run_epoch", "phase_steps"), "epoch": (epoch - 1,)}
        elif kind in before:
            found = at(*{"digest": ("steps",), "step": ("epoch", "step"), "epoch": ("epoch",)}[kind])
            if found <= before[kind]:
                where = f"{folder / METRICS}, line {number}: {kind}"
                yield f"{where}: expected one after {_place(before[kind])}, got {_place(found)}"
            before[kind] = found


def _place(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers))


def _of_digests(folder: Path, receipt: Receipt, records: list[Record]) -> Iterator[str]:
    """Yield the digests of the latest process that are missing, and a last one that is another."""
    process, path, end = receipt.processes[-1], folder / METRICS, receipt.end
    found = digests_of(folder, latest_process(records))
    last = max(found, default=process.from_step) if end is None else end.steps
    every = process.digest_every
    if every:
        for steps in range(process.from_step // every * every + every, last + 1, every):
            if steps not in found:
                yield f"{path}: expected the digest of the weights after step {steps}, got none"
    if end is not None and end.steps in found and found[end.steps] != end.weights:
        yield f"{path}: digest after step {end.steps}: expected {end.weights}, got {found[end.steps]}"


def _of_processes(folder: Path, receipt: Receipt, records: list[Record]) -> Iterator[str]:
    """Yield what the records of processes say otherwise than the receipt does."""
    path, process = folder / METRICS, receipt.processes[-1]
    begun = [record for record in records if record["kind"] == "run"]
    if len(begun) < len(receipt.processes):
        yield f"{path}: expected {len(receipt.processes)} processes that began the run, got {len(begun)}"
        return
    job = process.job
    expected: Record = {
        "identity": receipt.identity,
        "versions": process.versions,
        "ranks": job.ranks,
        "nodes": job.nodes,
        "hosts": job.hosts,
    }
    for key, value in expected.items():
        if begun[-1].get(key) != value:
            yield f"{path}: {key} of the latest run: expected {shown(value)}, got {shown(begun[-1].get(key))}"


def _of_summary(folder: Path, records: list[Record]) -> Iterator[str]:
    """Yield what of the summary is otherwise than the last records; nothing where there is none yet."""
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
