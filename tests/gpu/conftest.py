"""Where the kernels run: emulated on the processor, in two orders of blocks; under ``-m gpu`` on a GPU."""

from importlib.util import find_spec

import pytest

from commlib.gpu import GpuUnavailable, current_engine
from tests.extent import more
from tests.gpu.emulator.engine import COMPILER, EmulatedEngine

# Seeds of the order in which blocks and warps go on, and as many multiprocessors.
ORDERS = {"one": (1, 1), "other": (1000, 3)}


# An image with CUDA and CuPy may lack TensorFlow and Horovod: the other tests run there all the same.
OF_TENSORFLOW = ["test_tensorflow.py", "test_training.py"]
collect_ignore = [] if find_spec("tensorflow") and find_spec("horovod") else OF_TENSORFLOW


def pytest_generate_tests(metafunc):
    if "engine" in metafunc.fixturenames:
        on_gpu = "gpu" in metafunc.config.option.markexpr
        places = [pytest.param("gpu", marks=pytest.mark.gpu)] if on_gpu else ["other", *more("one")]
        metafunc.parametrize("engine", places, indirect=True)


@pytest.fixture
def engine(request):
    if request.param == "gpu":
        try:
            return current_engine()
        except GpuUnavailable as error:
            pytest.skip(str(error))
    return emulated(*ORDERS[request.param])


@pytest.fixture
def emulate():
    """Return what makes an emulated engine, with a seed and multiprocessors."""
    return emulated


def emulated(seed, multiprocessors=1, **options):
    if COMPILER is None:
        pytest.skip("g++ is not installed")
    return EmulatedEngine(seed, multiprocessors, **options)
