"""An engine whose device is this processor: the kernels as they are, compiled by g++, thread by thread."""

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import weakref
from functools import cache
from pathlib import Path

import numpy as np

from commlib.gpu.engine import THREADS, Engine

HEADER = Path(__file__).with_name("cuda.h")
COMPILER = shutil.which("g++")
# No vector instructions of this machine alone, no contraction of products and sums: what the GPU computes.
FLAGS = ["-std=c++17", "-O1", "-fPIC", "-shared", "-fvisibility=hidden", "-ffp-contract=off"]
FLAGS += ["-fsanitize=alignment", "-fsanitize-undefined-trap-on-error"]
FLAGS += ["-fno-strict-aliasing", "-U_FORTIFY_SOURCE", "-Wno-unknown-pragmas", "-w"]
GUARD = (
    64  # bytes before and after each array; as floats they are larger than all others, and noticed if read
)
GUARDED_BY = 0x7F


class Argument(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_char), ("bytes", ctypes.c_uint))


class EmulatedEngine(Engine):
    """``seed`` decides the order of blocks and warps; ``memory``: bytes that one array may have."""

    def __init__(self, seed, multiprocessors=1, under_way=3, memory=1 << 40):
        self.seed, self.multiprocessors = seed, multiprocessors
        self._under_way, self._memory = under_way, memory
        self._guarded = []

    def empty(self, size, dtype):
        length = size * np.dtype(dtype).itemsize
        if length > self._memory:
            raise MemoryError(f"{length} bytes")
        whole = np.full(length + 2 * GUARD + 64, GUARDED_BY, np.uint8)
        first = GUARD + -(whole.ctypes.data + GUARD) % 64
        array = whole[first : first + length]
        array[:] = 0xA5  # whatever a kernel forgets to write shows
        self._guarded.append((weakref.ref(whole), first, length))
        return array.view(dtype)

    def clear(self, array):
        array.view(np.uint8)[:] = 0

    def launch(self, source, kernel, blocks, *arguments, threads=THREADS):
        described = (Argument * len(arguments))(*map(_described, arguments))
        held = [_held(argument) for argument in arguments]
        pointers = (ctypes.c_void_p * len(held))(*(ctypes.addressof(each) for each in held))
        self.seed += 1
        given = len(arguments), described, pointers, self.seed, self._under_way
        failure = _library(source).emulate(kernel.encode(), blocks, threads, *given)
        assert not failure, f"{source.name}.{kernel}: {failure.decode()}"
        self._check_guards(kernel)

    def from_host(self, array):
        copy = self.empty(array.size, array.dtype)
        copy[:] = array
        return copy

    def to_host(self, array):
        return array.copy()

    def address(self, array):
        return array.ctypes.data

    def _check_guards(self, kernel):
        self._guarded = [each for each in self._guarded if each[0]() is not None]
        for reference, first, length in self._guarded:
            whole = reference()
            around = np.concatenate([whole[:first], whole[first + length :]])
            assert (around == GUARDED_BY).all(), f"{kernel} wrote beside an array of {length} bytes"


def _described(argument):
    if isinstance(argument, np.ndarray):
        assert argument.flags.c_contiguous
        return Argument(b"p", argument.dtype.itemsize)
    if argument is None:
        return Argument(b"p", 0)
    return Argument(b"f" if isinstance(argument, np.floating) else b"i", argument.dtype.itemsize)


def _held(argument):
    if isinstance(argument, np.ndarray):
        return ctypes.c_void_p(argument.ctypes.data)
    if argument is None:
        return ctypes.c_void_p(None)
    return ctypes.create_string_buffer(argument.tobytes(), argument.dtype.itemsize)


@cache
def _library(source):
    """Compile the kernels once for all runs of the tests."""
    text = f'#include "{HEADER}"\n{source.text}'
    macros = [f"-D{macro}" for macro in source.macros]
    known = hashlib.sha256("\n".join([HEADER.read_text(), text, *macros, *FLAGS]).encode()).hexdigest()[:20]
    folder = Path(tempfile.gettempdir()) / f"cloudtrain-emulator-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    library = folder / f"{source.name}-{source.index_bits}-{known}.so"
    if not library.exists():
        _compile(text, macros, library)
    loaded = ctypes.CDLL(str(library), mode=os.RTLD_LOCAL)
    loaded.emulate.restype = ctypes.c_char_p
    return loaded


def _compile(text, macros, library):
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        written = Path(folder) / "kernels.cpp"
        written.write_text(text)
        plain = _run([COMPILER, "-E", "-P", *macros, str(written)])
        names = re.findall(r'extern "C"\s+void (\w+)\(', plain)  # those made by macros, too
        calls = ", ".join(f'{{"{each}", Call<&::{each}>::run, Call<&::{each}>::arguments}}' for each in names)
        written.write_text(f"{text}\n{REGISTRY.replace('KERNELS', calls)}")
        made = Path(folder) / "kernels.so"
        _run([COMPILER, *FLAGS, *macros, str(written), "-o", str(made)])
        made.rename(library)  # complete, also where others compile the same


def _run(command):
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr[-4000:]
    return finished.stdout


REGISTRY = """
namespace emulator {
static const Kernel* find(const char* name) {
    static const Kernel kernels[] = {KERNELS};
    for (const Kernel& each : kernels)
        if (!strcmp(each.name, name)) return &each;
    return nullptr;
}
}
"""
