"""The promises of every reducer with CuPy and a GPU: ranks are threads that share it.

``pytest -m gpu`` runs these alone. What goes through NCCL is checked by ``benchmarks/gpu_checks.py``.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from commlib import REDUCERS
from commlib.transport import nccl, simulated
from tests.extent import ALL
from tests.gpu import on_gpu
from tests.gpu.on_gpu import bodies_of
from tests.reducers import test_promises

NO_ARRAYS_OF_GPUS = ("test_a_wrong_shape_or_dtype_is_refused",)  # of text and objects
SAMPLING = ("-dgc", "-gaussian", "-bucketed")  # selectors that nothing here tells from the others
CASES = {
    label: case
    for label, case in test_promises.CASES.items()
    if label in (*REDUCERS, "dsar_split-qsgd8", "ssar_split-all") or (ALL and not label.endswith(SAMPLING))
}
MISSING = nccl.missing()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(MISSING is not None, reason=str(MISSING))]


class RanksOfOneGPU:
    """Runs ``function(comm)`` on simulated ranks whose arrays are CuPy's."""

    def __init__(self, size):
        self.size = size

    def run(self, function, ranks_per_node=None):
        import cupy

        return simulated.run(function, self.size, ranks_per_node, arrays=cupy)


@pytest.fixture(params=[1, 2, 3, 6], ids=lambda size: f"P{size}")
def gpu_ranks(request):
    return RanksOfOneGPU(request.param)


@pytest.fixture(params=CASES)
def case(request):
    return CASES[request.param]


way = kind = case


@pytest.fixture(autouse=True)
def gradients_of_the_host(monkeypatch):
    monkeypatch.setattr(test_promises, "make_reducer", on_gpu.make_reducer_from_host)


if MISSING is None:  # else one line says so, and not thousands
    globals().update(bodies_of(test_promises, "gpu_ranks", without=NO_ARRAYS_OF_GPUS))


def test_two_ranks_through_nccl_on_one_gpu_have_the_bits_of_the_cpu():
    script = Path(__file__).parents[2] / "benchmarks" / "gpu_checks.py"
    command = [sys.executable, str(script), "--sizes", "1", "1000", "1000003"]
    finished = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    last = json.loads(finished.stdout.splitlines()[-1])
    assert (finished.returncode, last) == (0, {"check": "all", "bitwise": True}), finished.stdout[-3000:]
