"""Prefetching for kernels over rows: which weights a row needs is known long before it is computed.

Rows come in random order, and their weights lie anywhere in the model: without it a pass waits for memory.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

READ, KEEP, DATA = 0, 3, 1  # what LLVM's prefetch is told: to be read, in all levels of the data cache


def _prefetch(context: Any, array: Any, index: Any) -> Any:
    """Ask for the cache line of an entry of an array of one dimension; has no effect on what is computed."""

    def generate(target: Any, builder: Any, signature: Any, given: Any) -> Any:
        entries = target.make_array(signature.args[0])(target, builder, given[0]).data
        place = builder.bitcast(builder.gep(entries, [given[1]]), ir.IntType(8).as_pointer())
        number = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [place.type, number, number, number])
        function = builder.module.declare_intrinsic("llvm.prefetch", [place.type], kind)
        builder.call(function, [place, number(READ), number(KEEP), number(DATA)])
        return target.get_dummy_value()

    return types.void(array, index), generate


prefetch: Any = intrinsic(_prefetch)  # called as ``prefetch(array, index)``
