"""Trees of arrays and plain values in files: exact to the bit, without pickle, with a digest.

The files are in the safetensors format, so other programs can open their arrays. Its library does not write
them: it has fewer types, writes non-contiguous arrays in the wrong order, and computes no digest.

A file: 8 bytes, little-endian, the length of the header; the header, JSON; the bytes of the arrays, in the
order of a walk through the tree. The header's ``__metadata__`` holds the tree with ``{"array": [type,
shape]}`` in place of an array, and similar marks for values that JSON does not have.
"""

import io
import json
import math
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any, BinaryIO, TypeAlias, TypeVar

import ml_dtypes
import numpy as np
import numpy.typing as npt
from pydantic import TypeAdapter, ValidationError
from xxhash import xxh3_128

from commlib.errors import InvalidArgument, one_line, shown
from training.checkpoint.places import Location
from training.config.schema import describe

Array = npt.NDArray[Any]
Leaf: TypeAlias = None | bool | int | float | str | np.generic | Array
Tree: TypeAlias = Leaf | list["Tree"] | tuple["Tree", ...] | dict[str, "Tree"]

Kind = TypeVar("Kind")

_PIECE_BYTES = 8 << 20  # digested while the piece is still in the processor's cache
_LENGTH_BYTES = 8
_ALIGNMENT = 8  # of the first array, as the format asks

# The format's names of types; arrays of all other types are bytes in it.
_CODES = {
    "|b1": "BOOL",
    "|i1": "I8",
    "<i2": "I16",
    "<i4": "I32",
    "<i8": "I64",
    "|u1": "U8",
    "<u2": "U16",
    "<u4": "U32",
    "<u8": "U64",
    "<f2": "F16",
    "<f4": "F32",
    "<f8": "F64",
    "<c8": "C64",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}


class Damaged(ValueError):
    """A file is not what was written, or cannot be read; the message names it."""


@dataclass(frozen=True)
class Written:
    """What a file held when it was written. ``digest``: its xxh3_128, 32 hexadecimal digits."""

    bytes: int
    digest: str


@dataclass(frozen=True)
class Version:
    """The version of a file's format."""

    format: int


def write_tree(path: Location, tree: Tree) -> Written:
    """Write a new file, synced; contiguous arrays are not copied.

    Raises :class:`commlib.errors.InvalidArgument`, with nothing written, where the tree holds anything but
    ``None``, bool, int, float, str, NumPy's arrays and scalars, and lists, tuples and dictionaries with keys
    of str; ``OSError`` where the disk is full.
    """
    arrays: dict[str, Array] = {}
    header = _header(_describe(tree, "", arrays), arrays)
    views = (_bytes_of(np.ascontiguousarray(array)) for array in arrays.values())
    digest = xxh3_128()
    with path.open("xb") as file:
        for content in chain([memoryview(header)], views):
            for begin in range(0, len(content), _PIECE_BYTES):
                piece = content[begin : begin + _PIECE_BYTES]
                file.write(piece)
                digest.update(piece)
        size = file.tell()
        sync(file)
    return Written(size, digest.hexdigest())


def sync(file: BinaryIO) -> None:
    """Sync a file to the disk; an object survives a crash once it is closed."""
    file.flush()
    if isinstance(file, io.BufferedWriter):
        os.fsync(file.fileno())


def reason(error: OSError) -> str:
    """Return why a file could not be read, in the system's few words if there are any."""
    return error.strerror or str(error)


def check_file(path: Location, written: Written) -> None:
    """Raise :class:`Damaged` unless the file holds what was written, by its length and its digest."""
    with _checked(path, written):
        pass


def read_tree(path: Location, written: Written) -> Tree:
    """Return the tree of a file in new memory, equal to the one that was written in every bit and type.

    Raises :class:`Damaged` unless the file holds what was written, and where that is no tree.
    """
    with _checked(path, written) as file:  # only bytes that are known to be right are parsed
        try:
            return _read(file, written.bytes)
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError, struct.error) as error:
            found = one_line(f"{type(error).__name__}: {error}")
            raise Damaged(f"{path}: expected a tree as write_tree writes it, got {found}") from error


@contextmanager
def _checked(path: Location, written: Written) -> Iterator[BinaryIO]:
    """Open a file that holds what was written; raise :class:`Damaged` for any other."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            if size != written.bytes:
                raise Damaged(f"{path}: expected {written.bytes} bytes, got {size}")
            file.seek(0)
            if (found := _digest(file)) != written.digest:
                raise Damaged(f"{path}: expected xxh3_128 {written.digest}, got {found}")
            file.seek(0)
            yield file
    except OSError as error:
        raise Damaged(f"{path}: cannot be read: {reason(error)}") from error


def _read(file: BinaryIO, size: int) -> Tree:
    length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
    if length > size - _LENGTH_BYTES:
        raise ValueError(f"a header of {length} bytes in a file of {size}")
    header = json.loads(file.read(length))
    tree: Tree = _restore(json.loads(header["__metadata__"]["tree"]), file, size)
    if file.tell() != size:
        raise ValueError(f"{size - file.tell()} bytes behind the last array")
    return tree


def check_format(text: bytes, expected: int) -> None:
    """Raise ``ValueError`` unless a JSON text has this ``format``."""
    expect_equal("format", expected, parsed(Version, text).format)


def expect_equal(name: str, expected: object, found: object) -> None:
    """Raise ``ValueError``, with both values, unless they are equal."""
    if found != expected:
        raise ValueError(f"expected {name} {expected}, got {found}")


def parsed(kind: type[Kind], text: str | bytes) -> Kind:
    """Return the dataclass whose fields a JSON text holds; a ``ValueError`` says which of them is wrong."""
    try:
        return TypeAdapter(kind).validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        if not first["loc"]:
            found = "invalid JSON" if first["type"] == "json_invalid" else shown(first["input"])
            raise ValueError(one_line(f"expected the fields of a {kind.__name__}, got {found}")) from error
        raise ValueError(one_line(f"{kind.__name__.lower()}.{describe(first)}")) from error


def _describe(value: Any, place: str, arrays: dict[str, Array]) -> Any:
    """Return ``value`` as JSON values; put its arrays into ``arrays`` by their places in the whole tree."""
    kind = type(value)
    if value is None or kind in (bool, int, str) or (kind is float and math.isfinite(value)):
        return value
    if kind is float:  # JSON has no NaN or infinity, and NaNs differ in their bits
        return {"float": struct.pack(">d", value).hex()}
    if kind is dict:
        return {"dict": {key: _describe(value[key], _below(place, key), arrays) for key in value}}
    if kind in (list, tuple):
        items = [_describe(item, f"{place}/{number}", arrays) for number, item in enumerate(value)]
        return items if kind is list else {"tuple": items}
    if kind is np.ndarray or isinstance(value, np.generic):
        array = arrays[place] = np.asarray(value)
        return {"array" if kind is np.ndarray else "scalar": [_type_name(array.dtype, place), array.shape]}
    raise InvalidArgument(
        f"{place or '/'}: expected None, bool, int, float, str, list, tuple, dict or an array of NumPy, "
        f"got {kind.__module__}.{kind.__qualname__}"
    )


def _below(place: str, key: str) -> str:
    """Return the place of a dictionary's value, as a JSON pointer, which is unique."""
    if type(key) is not str:
        raise InvalidArgument(f"{place or '/'}: expected keys of str, got {key!r}")
    return f"{place}/{key.replace('~', '~0').replace('/', '~1')}"


def _type_name(dtype: np.dtype[Any], place: str) -> str:
    """Return the name of a type, which ``_type_named`` turns into the type."""
    name = dtype.name if hasattr(ml_dtypes, dtype.name) else dtype.str
    if dtype.hasobject or _type_named(name) != dtype:
        raise InvalidArgument(f"{place or '/'}: expected an array of numbers or text, got one of {dtype}")
    return name


def _type_named(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name, name))


def _header(structure: Any, arrays: dict[str, Array]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"tree": json.dumps(structure, allow_nan=False)}}
    end = 0
    for place, array in arrays.items():
        code = _CODES.get(_type_name(array.dtype, place))
        begin, end = end, end + array.nbytes
        entries[place] = {
            "dtype": code or "U8",
            "shape": array.shape if code else [array.nbytes],
            "data_offsets": [begin, end],
        }
    text = json.dumps(entries).encode()
    text += b" " * (-(_LENGTH_BYTES + len(text)) % _ALIGNMENT)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def _bytes_of(array: Array) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _digest(file: BinaryIO) -> str:
    digest, buffer = xxh3_128(), memoryview(bytearray(_PIECE_BYTES))
    while count := file.readinto(buffer):  # type: ignore[attr-defined]
        digest.update(buffer[:count])
    return digest.hexdigest()


def _restore(node: Any, file: BinaryIO, size: int) -> Any:
    """Return the value that ``_describe`` described; its arrays come next in the file, in order."""
    if isinstance(node, list):
        return [_restore(item, file, size) for item in node]
    if not isinstance(node, dict):
        return node
    ((kind, content),) = node.items()
    if kind == "dict":
        return {key: _restore(item, file, size) for key, item in content.items()}
    if kind == "tuple":
        return tuple(_restore(item, file, size) for item in content)
    if kind == "float":
        return struct.unpack(">d", bytes.fromhex(content))[0]
    if kind not in ("array", "scalar"):
        raise ValueError(f"a value of the unknown kind {kind!r}")
    array = _next_array(content, file, size)
    return array if kind == "array" else array[()]


def _next_array(content: Any, file: BinaryIO, size: int) -> Array:
    dtype, shape = _type_named(content[0]), tuple(content[1])
    if dtype.hasobject or any(type(each) is not int or each < 0 for each in shape):
        raise ValueError(f"an array of {dtype} and shape {shape}")
    needed = math.prod(shape) * dtype.itemsize
    if needed > (left := size - file.tell()):  # before memory is allocated
        raise ValueError(f"an array of {needed} bytes where {left} are left")
    array = np.empty(shape, dtype)
    file.readinto(_bytes_of(array))  # type: ignore[attr-defined]
    return array
