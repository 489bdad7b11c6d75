"""The receipt of a run: ``receipt.json`` in its folder, with its origin and digests of its files."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import NonNegativeInt, PositiveInt

from training.checkpoint.serialization import check_format, expect_equal, parsed
from training.config import run_files
from training.config.reading import parsed_file

FORMAT = 1
FILES = (
    *(run_files.RUN, run_files.CONFIG, run_files.METRICS, run_files.SUMMARY, run_files.WEIGHTS),
    *(run_files.DAWNBENCH, run_files.DAWNBENCH_LINES, run_files.MLLOG),
)
"""The files of a run's folder whose digests are in its receipt."""


@dataclass(frozen=True)
class Source:
    """The source tree of a process; of a git checkout its ``commit``, and whether a tracked file differs."""

    version: str
    commit: str | None = None
    dirty: bool | None = None


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
    """A process that began the run, or resumed it after ``from_step`` steps.

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
        path = folder / run_files.RECEIPT
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
    value = parsed_file(folder / run_files.CONFIG)
    keys = value if isinstance(value, dict) else {"": value}
    return _sha256_of_value({key: each for key, each in keys.items() if key != "resume"})


def _sha256_of_value(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
