"""Kernels are compiled ahead, all of them, and who has to wait for the compiler is told."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.launching import COMPILING, ENVIRONMENT, run

TWO_KERNELS = (
    "import numpy as np; from training.process.compile_kernels import announce_compiling;"
    "from datacache.order import Permutation, hashed;"
    "announce_compiling(); announce_compiling(); hashed(np.arange(3), 1); Permutation(9, 1)[0]"
)
# What a run does with kernels: samples and crops, reducers on real types, norms of a model's tensors.
TRAIN = """
import sys
from pathlib import Path

import numpy as np

from commlib import REDUCERS, Topology, make_reducer, transport
from tests.training.small import phase, trainer

folder = Path(sys.argv[1])
words = f"cache={{disk: {folder}/disk, memory: {folder}/memory}}", "optimizer={name: lars}"
trainer(folder / "runs", *words, phases=(phase(size=6, steps=2),)).fit()


def step(comm):
    for name, kind in REDUCERS.items():
        options = {"density": 0.02} if kind.sparse else {}
        reducer = make_reducer(name, Topology(comm, 2), size=3001, **options)
        for number in range(2):
            reducer.reduce(np.random.default_rng([comm.rank, number]).standard_normal(3001, np.float32))


transport.simulated.run(step, 4)
"""


def python(cache: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run Python with a place of its own for kernels."""
    result = run(sys.executable, *words, env=ENVIRONMENT | {"NUMBA_CACHE_DIR": str(cache)})
    assert result.returncode == 0, result.stderr
    return result


@pytest.mark.slow
def test_cold_kernels_are_announced_in_one_line_and_warm_ones_not_at_all(tmp_path):
    assert python(tmp_path, "-c", TWO_KERNELS).stderr == COMPILING
    assert python(tmp_path, "-c", TWO_KERNELS).stderr == ""


@pytest.mark.large
def test_after_compiling_ahead_a_run_compiles_nothing(tmp_path):
    kernels = tmp_path / "kernels"
    python(kernels, "-m", "training.process.compile_kernels")
    before = sorted(kernels.rglob("*.nb[ic]"))
    assert len(before) > 2 * 40  # an index and code for each
    result = python(kernels, "-c", TRAIN, str(tmp_path))
    assert sorted(kernels.rglob("*.nb[ic]")) == before
    assert COMPILING not in result.stderr
