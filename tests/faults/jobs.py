"""Runs of two ranks under ``cloudtrain launch`` that something happens to."""

import json
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import psutil

from tests.launching import DIGITS, ENVIRONMENT, ROOT, run, tail

SIZE = 2
BOUND_SECONDS = 240
WORDS = (
    *(DIGITS, "model=vgg_tiny", "phases.0.epochs=6", "phases.1.epochs=3", "ranks_per_node=1"),
    *("checkpoints={every_steps: 10}", "cache={}", "log_every=1"),
)


class Job:
    """A launch whose standard error goes to a file, and the ranks that it has now."""

    def __init__(self, process: "subprocess.Popen[bytes]", folder: Path) -> None:
        self.process, self.folder = process, folder

    def wait_until(self, is_so: Callable[[], Any]) -> Any:
        """Wait until something is true, and return it; the launch must not end before."""
        until = time.monotonic() + BOUND_SECONDS
        while not (found := is_so()):
            assert self.process.poll() is None, self.said
            assert time.monotonic() < until, self.said
            time.sleep(0.01)
        return found

    def rank(self, number: int) -> psutil.Process:
        return self.wait_until(lambda: next(self._ranks(number), None))

    def _ranks(self, number: int) -> Iterator[psutil.Process]:
        for each in psutil.Process(self.process.pid).children(recursive=True):
            try:
                if "train" in each.cmdline() and each.environ().get("OMPI_COMM_WORLD_RANK") == str(number):
                    yield each
            except psutil.NoSuchProcess:
                continue

    @property
    def steps(self) -> int:
        return sum(
            path.read_text().count('"kind": "step"') for path in self.folder.glob("runs/*/metrics.jsonl")
        )

    @property
    def said(self) -> str:
        return (self.folder / "errors").read_text()

    def end(self) -> int:
        return self.process.wait(BOUND_SECONDS)


@contextmanager
def started(
    folder: Path, *words: str, restarts: int = 3, environment: Mapping[str, str] | None = None
) -> Iterator[Job]:
    """Launch a run in a folder; nothing of it is left afterwards. ``environment``: what is added for it."""
    folder.mkdir(exist_ok=True)
    command = ["cloudtrain", "launch", "-np", str(SIZE), "--restarts", str(restarts), *WORDS, *words]
    # so that callbacks of ours are found
    added = {"PYTHONPATH": str(ROOT), **(environment or {})}
    with (folder / "errors").open("ab") as errors, (folder / "output").open("ab") as output:
        process = subprocess.Popen(command, cwd=folder, env=ENVIRONMENT | added, stdout=output, stderr=errors)
    with process:
        try:
            yield Job(process, folder)
        finally:
            family = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
            process.terminate() if process.poll() is None else None
            for each in family:
                each.kill()
            process.kill()


def weights_of(folder: Path) -> dict[str, Any]:
    """Return the weights with which the only run in a folder has ended."""
    (run,) = (folder / "runs").iterdir()
    found: dict[str, Any] = {}
    with h5py.File(run / "model.weights.h5") as file:
        file.visititems(
            lambda name, each: found.update({name: each[...]}) if isinstance(each, h5py.Dataset) else None
        )
    return found


def undisturbed(folder: Path, size: int = SIZE, words: Sequence[str] = ()) -> dict[str, Any]:
    """Return the weights of a run of so many ranks that is started once, on this machine."""
    folder.mkdir()
    # as on_cluster has it; where callbacks of ours are found
    environment = ("env", "TF_NUM_INTRAOP_THREADS=1", f"PYTHONPATH={ROOT}")
    result = run(*environment, "cloudtrain", "launch", "-np", str(size), *WORDS, *words, cwd=folder)
    assert result.returncode == 0, tail(result)
    return weights_of(folder)


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    assert expected
    for name, weights in expected.items():
        np.testing.assert_array_equal(found[name], weights)


def injected(name: str, **options: Any) -> str:
    """Return the word of a run that has a callback of :mod:`tests.faults.injected`."""
    return f"callbacks=[{json.dumps({'name': f'tests.faults.injected:{name}', **options})}]"


def failures(said: str) -> list[str]:
    """Return why the supervisor has started a job again, each time."""
    return re.findall(r"^cloudtrain: the job (.*)$", said, re.MULTILINE)
