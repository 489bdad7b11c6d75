"""What launches the kernels: clear words where something is missing, and nothing compiled twice."""

import sys
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest

from commlib import CODECS, SELECTORS
from commlib.errors import InvalidArgument, OutOfDeviceMemory, UnknownName
from commlib.gpu import DEVICE_SELECTORS, DeviceCodec, GpuUnavailable, current_engine
from commlib.gpu.cupy_engine import CuPyEngine
from commlib.gpu.engine import BLOCKS_PER_MULTIPROCESSOR, Ranges, Source
from commlib.kernels import GPU
from commlib.selection.exact import Exact
from commlib.wire.base import Fp32
from tests.gpu.fake_cupy import FakeCuPy


class CompileException(Exception):
    pass


class Compiling(FakeCuPy):
    """CuPy that compiles nothing; ``launched`` tells what it was told to do."""

    def __init__(self, capability=(9, 0), gpus=1, compile_error=None):
        super().__init__(gpus)
        self.launched, self.compiled, self.compile_error = [], [], compile_error
        self.__version__ = "14.2.0"
        major, minor = capability
        properties = {"name": b"A Device", "major": major, "minor": minor, "multiProcessorCount": 3}
        self.cuda.runtime.getDeviceProperties = lambda number: properties
        self.cuda.compiler = SimpleNamespace(
            compile_using_nvrtc=self._compile, CompileException=CompileException
        )
        self.cuda.function = SimpleNamespace(Module=self._module)
        self.cuda.nvrtc = SimpleNamespace(getVersion=lambda: (12, 9))

    def _compile(self, code, options):
        self.compiled.append((code, options))
        if self.compile_error:
            raise self.compile_error
        return b"a cubin", {}

    def _module(self):
        def get_function(name):
            return lambda *launch: self.launched.append((name, *launch))

        return SimpleNamespace(load=lambda binary: None, get_function=get_function)


def without_driver():
    cupy = Compiling()
    cupy.cuda.runtime.getDeviceCount = Mock(side_effect=RuntimeError("cudaErrorInsufficientDriver"))
    return cupy


@pytest.mark.parametrize(
    ("cupy", "message"),
    [
        (None, r"CuPy is not installed .*pip install 'cloudtrain\[gpu\]'"),
        (without_driver(), "cudaErrorInsufficientDriver"),
        (Compiling(gpus=0), "finds no GPU"),
        (Compiling(capability=(6, 1)), "expected compute capability 7.0 or more, got 6.1"),
    ],
    ids=["CuPy", "driver", "device", "old"],
)
def test_the_error_says_what_is_missing(monkeypatch, cupy, message):
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    with pytest.raises(GpuUnavailable, match=message):
        current_engine(0)


@pytest.fixture(autouse=True)
def cache_of_its_own(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


COMPILING = {
    "RuntimeError: CuPy failed to load libnvrtc.so.12": GpuUnavailable,
    "CompileException: nvrtc: invalid value": GpuUnavailable,
    "RuntimeError: CUDA_ERROR_OUT_OF_MEMORY: out of memory": OutOfDeviceMemory,
}


@pytest.mark.parametrize("problem", COMPILING)
def test_a_kernel_that_cannot_be_compiled_is_one_line(monkeypatch, problem):
    kind, _, text = problem.partition(": ")
    error = CompileException(text) if kind == "CompileException" else RuntimeError(text)
    monkeypatch.setitem(sys.modules, "cupy", Compiling(compile_error=error))
    with pytest.raises(COMPILING[problem], match=f"kernels.*: {text}"):
        CuPyEngine(0).launch(Source("norms"), "add_chunks", 1)


def test_a_module_is_compiled_once_and_launched_as_asked(monkeypatch):
    cupy = Compiling()
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    engine = CuPyEngine(0)
    for _ in range(2):
        engine.launch(Source("select", index_bits=64), "emit", 7, None, np.int64(3), threads=64)
    [(code, options)] = cupy.compiled
    assert 'extern "C" __global__ void RESIDENT emit(' in code
    assert options == ("-std=c++14", "--fmad=false", "-DINDEX_64")
    (name, grid, block, given), again = cupy.launched
    assert (name, grid, block, given) == ("emit", (7,), (64,), (0, 3)) == again
    assert [type(each) for each in given] == [np.uintp, np.int64]


def test_memory_that_is_short_is_told_with_what_is_held(emulate):
    engine = emulate(1, memory=100_000)
    selector = DEVICE_SELECTORS["exact"](1_000_000, 50_000, engine=engine)
    vector = np.ones(1_000_000, np.float32)
    expected = r"50,000 of 1,000,000 entries: 800,256 bytes for candidates do not fit; held.*, maxima 62,500"
    with pytest.raises(OutOfDeviceMemory, match=expected) as caught:
        selector.select(vector)
    assert isinstance(caught.value, MemoryError)


@pytest.mark.parametrize("items", [0, 1, 31, 32, 33, 5000, 10**6, 10**9])
def test_ranges_hold_all_items_in_whole_multiples_of_32(emulate, items):
    ranges = Ranges.of(items, emulate(1, 5))
    assert ranges.per_warp % 32 == 0
    assert ranges.per_warp * ranges.warps >= items
    assert ranges.blocks <= 5 * BLOCKS_PER_MULTIPROCESSOR
    assert ranges.per_warp * (ranges.warps - 8) < max(items, 1)  # no block without items


@pytest.mark.parametrize(
    ("make", "given", "error", "message"),
    [
        (GPU.make_selector, "first", InvalidArgument, "selector: .*a GPU kernel"),
        (GPU.make_selector, {"name": "bucketed", "bucket": 4096}, InvalidArgument, "selector: .*no options"),
        (GPU.make_codec, "gap+fp33", InvalidArgument, "wire: .*GPU kernels"),
        (lambda name: DeviceCodec(name, 100), "gap+lloyd2", InvalidArgument, "wire: .*GPU kernels"),
        (GPU.make_selector, "frist", UnknownName, 'unknown selector "frist"'),
        (GPU.make_codec, "frist", UnknownName, 'unknown codec "frist"'),
    ],
)
def test_selectors_and_codecs_without_a_gpu_kernel_are_refused(monkeypatch, make, given, error, message):
    monkeypatch.setitem(SELECTORS, "first", type("First", (Exact,), {}))
    monkeypatch.setitem(CODECS, "fp33", type("Fp33", (Fp32,), {}))
    with pytest.raises(error, match=f"^{message}"):
        make(given)
