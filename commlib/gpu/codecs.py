"""Codecs on the device: the same bytes as those of :mod:`commlib.wire`. Kernels: ``kernels/codecs.cu``.

The host waits for the device only for what it must know: the length of ``gap``'s bits when encoding, the
number of entries when decoding ``gap`` and ``bitmap``.
"""

from typing import Any

import numpy as np

from commlib.errors import InvalidArgument, shown
from commlib.gpu.cupy_engine import current_engine
from commlib.gpu.engine import Array, Buffers, Engine, Ranges, Source, blocks_for, check_entries
from commlib.vectors import SparseVector, index_dtype
from commlib.wire import make_codec
from commlib.wire.base import Fp16, Fp32, Raw32
from commlib.wire.indices import Gap, bytes_of_bits, low_bits
from commlib.wire.qsgd import SCALE_BYTES, Qsgd

GPU_CODECS = ("raw32", "gap", "bitmap", "fp32", "fp16", "bf16", "qsgd8", "qsgd4", "qsgd2")
BUCKETS_PER_BLOCK = 8


def has_kernels(name: str) -> bool:
    """Return whether a codec has GPU kernels."""
    return set(name.split("+")) <= set(GPU_CODECS)


def check_has_kernels(name: str) -> None:
    """Raise ``InvalidArgument`` for the name of a codec without GPU kernels."""
    if not has_kernels(name):
        known = ", ".join(GPU_CODECS)
        raise InvalidArgument(f"wire: expected codecs with GPU kernels ({known}), got {shown(name)}")


class DeviceCodec:
    """A codec of ``commlib.wire.make_codec`` for vectors of ``size`` entries, on the device.

    Messages are uint8 arrays that begin at a multiple of four bytes. What ``encode`` and ``decode`` return
    is in the codec's buffers, which the next call of the same method overwrites, or in their arguments.
    """

    def __init__(self, name: str, size: int, *, engine: Engine | None = None) -> None:
        codec = make_codec(name)  # raises for unknown names
        check_has_kernels(name)
        self._indices, self._values = codec.indices, codec.values
        self._narrow = "float16" if isinstance(codec.values, Fp16) else "bfloat16"  # where it is one of these
        self.size = size
        self.engine = current_engine() if engine is None else engine
        self.buffers = Buffers(self.engine, f'codec "{name}" of {size:,} entries')
        self._index_dtype = index_dtype(size)
        bits = 8 * self._index_dtype.itemsize
        self._source, self._scatter = Source("codecs", index_bits=bits), Source("scatter", index_bits=bits)

    def encode(self, indices: Array, values: Array) -> Array:
        """Return the message of entries: ``indices`` ascending, ``values`` float32, as many.

        It is dense where the sparse one would not be shorter, as on the CPU. With ``gap`` this waits for the
        device and copies eight bytes: the length of the bits.
        """
        entries = indices.size
        check_entries("indices", indices, entries, self._index_dtype)
        check_entries("values", values, entries)
        if entries == 0:
            return self.buffers.get("message", 0, np.uint8)
        dense_bytes, value_bytes = (self._values.message_bytes(count) for count in (self.size, entries))
        most_bytes = self._indices.message_bytes(entries, self.size) + value_bytes
        message = self.buffers.get("message", -(-most_bytes // 8) * 8, np.uint8)
        index_bytes = self._encode_indices(indices, message)
        if index_bytes + value_bytes < dense_bytes:
            self._encode_values(values, message[index_bytes:])
            return message[: index_bytes + value_bytes]
        self._encode_values(self._dense(indices, values), message)
        return message[:dense_bytes]

    def decode(self, message: Array) -> SparseVector:
        """Return the vector of a message that ``encode`` has made, here or on the CPU.

        With ``gap`` and ``bitmap`` this waits for the device: how many entries there are. A length that no
        message has raises ``InvalidArgument``.
        """
        if self.engine.address(message) % 4:
            raise InvalidArgument("message: expected an address that is a multiple of 4 bytes")
        if message.size == self._values.message_bytes(self.size):
            return SparseVector.trusted(self.size, None, self._decode_values(message, self.size))
        if message.size == 0:
            no_indices = self.buffers.get("indices", 0, self._index_dtype)
            return SparseVector.trusted(self.size, no_indices, self.buffers.get("values", 0, np.float32))
        try:
            indices, values = self._decode_indices(message)
        except InvalidArgument as error:
            text = f"message: {message.size} bytes are no vector of {self.size} entries"
            raise InvalidArgument(text) from error
        return SparseVector.trusted(self.size, indices, self._decode_values(values, indices.size))

    # ---- Indices ----

    def _encode_indices(self, indices: Array, message: Array) -> int:
        """Write them to the start of ``message``; return how many bytes they take."""
        most_bytes = self._indices.message_bytes(indices.size, self.size)
        if isinstance(self._indices, Gap):
            return self._encode_gaps(indices, message[:most_bytes].view(np.uint32))
        if isinstance(self._indices, Raw32):
            message[:most_bytes].view(self._index_dtype)[:] = indices
            return most_bytes
        words = message[:most_bytes].view(np.uint32)
        self.engine.clear(words)
        entries = np.int64(indices.size)
        self._launch("write_bitmap", blocks_for(indices.size, self.engine), indices, entries, words)
        return most_bytes

    def _encode_gaps(self, indices: Array, words: Array) -> int:
        entries, shift = indices.size, low_bits(indices.size, self.size)
        header = self._index_dtype.itemsize // 4
        self.engine.clear(words)
        ranges, bits = Ranges.of(entries, self.engine), self.buffers.get("bits", 1, np.uint64)
        tallies = self.buffers.get("tallies", ranges.tallies, np.uint64)
        common = indices, np.int64(entries), np.int32(shift), np.int64(ranges.per_warp), tallies
        self._launch("tally_quotients", ranges.blocks, *common)
        self._launch("write_gaps", ranges.blocks, *common, np.int32(header), words, bits)
        return 4 * header + bytes_of_bits(int(self.engine.to_host(bits)[0]))

    def _decode_indices(self, message: Array) -> tuple[Array, Array]:
        if isinstance(self._indices, Gap):
            return self._decode_gaps(message)
        if isinstance(self._indices, Raw32):  # which reads the length alone
            indices, values = self._indices.decode(message, self.size, self._values.message_bytes)
        else:
            indices, values = self._decode_bitmap(message)
        if values.size != self._values.message_bytes(indices.size):
            raise InvalidArgument(f"values: expected those of {indices.size} entries, got another number")
        return indices, values

    def _decode_bitmap(self, message: Array) -> tuple[Array, Array]:
        length = bytes_of_bits(self.size)
        if message.size < length:
            raise InvalidArgument(f"bitmap: expected {length} bytes, got {message.size}")
        ranges, bits = self._ones(message[:length].view(np.uint32), 0)
        entries = int(self.engine.to_host(bits[-1][ranges.warps :]).sum())
        return self._write_ones(ranges, bits, entries), message[length:]

    def _decode_gaps(self, message: Array) -> tuple[Array, Array]:
        header = self._index_dtype.itemsize
        entries = int.from_bytes(self.engine.to_host(message[:header]).tobytes(), "little")
        values_from = message.size - self._values.message_bytes(entries)
        if not (0 < entries <= self.size and values_from <= self._indices.message_bytes(entries, self.size)):
            raise InvalidArgument(f"gap: expected at most {self.size} entries, got {entries}")
        shift = low_bits(entries, self.size)
        if values_from % 4 or values_from < header + bytes_of_bits(entries * (shift + 1)):
            raise InvalidArgument(f"gap: expected the bits of {entries} entries, got {values_from} bytes")
        words = message[header:values_from].view(np.uint32)
        indices = self._write_ones(*self._ones(words, entries * shift), entries)
        self._read_gaps(words, shift, indices)
        return indices, message[values_from:]

    def _read_gaps(self, words: Array, shift: int, indices: Array) -> None:
        ranges = Ranges.of(indices.size, self.engine)
        tallies = self.buffers.get("low bits", ranges.tallies, np.uint64)
        bits = words, np.int64(words.size), np.int64(indices.size), np.int32(shift), np.int64(ranges.per_warp)
        self._launch("tally_low_bits", ranges.blocks, *bits, tallies)
        self._launch("read_gaps", ranges.blocks, *bits, tallies, indices)

    def _ones(self, words: Array, first_bit: int) -> tuple[Ranges, tuple[Any, ...]]:
        """Launch the count of the ones from ``first_bit`` on; return ranges and arguments, tallies last."""
        ranges = Ranges.of(words.size - first_bit // 32, self.engine)
        tallies = self.buffers.get("tallies", ranges.tallies, np.uint64)
        bits = words, np.int64(words.size), np.uint64(first_bit), np.int64(ranges.per_warp), tallies
        self._launch("tally_ones", ranges.blocks, *bits)
        return ranges, bits

    def _write_ones(self, ranges: Ranges, bits: tuple[Any, ...], entries: int) -> Array:
        indices = self.buffers.get("indices", entries, self._index_dtype)
        self._launch("write_ones", ranges.blocks, *bits, np.int64(entries), indices)
        return indices

    # ---- Values ----

    def _encode_values(self, values: Array, message: Array) -> None:
        count, length = values.size, self._values.message_bytes(values.size)
        if isinstance(self._values, Qsgd):
            scales, levels = self._split(message, count)
            given = values.view(np.uint32), np.int64(count), np.int32(self._values.bits)
            self._launch("quantize", -(-scales.size // BUCKETS_PER_BLOCK), *given, scales, levels)
        elif isinstance(self._values, Fp32):
            message[:length].view(np.float32)[:] = values
        else:
            arguments = values.view(np.uint32), np.int64(count), message[:length].view(np.uint16)
            self._launch(f"write_{self._narrow}", blocks_for(count, self.engine), *arguments)

    def _decode_values(self, message: Array, count: int) -> Array:
        if isinstance(self._values, Fp32):
            return message.view(np.float32)
        values, blocks = self.buffers.get("values", count, np.float32), blocks_for(count, self.engine)
        if isinstance(self._values, Qsgd):
            given = *self._split(message, count), np.int64(count), np.int32(self._values.bits)
            self._launch("dequantize", blocks, *given, values)
        else:
            arguments = message.view(np.uint16), np.int64(count), values.view(np.uint32)
            self._launch(f"read_{self._narrow}", blocks, *arguments)
        return values

    def _split(self, message: Array, count: int) -> tuple[Array, Array]:
        """Return the scales and the levels of QSGD's part of a message."""
        length = self._values.message_bytes(count)
        levels_from = -(-count // 512) * SCALE_BYTES
        return message[:levels_from].view(np.float32), message[levels_from:length]

    def _dense(self, indices: Array, values: Array) -> Array:
        dense = self.buffers.get("dense", self.size, np.float32)
        self.engine.clear(dense)
        blocks = blocks_for(values.size, self.engine)
        self.engine.launch(self._scatter, "put", blocks, indices, values, np.int64(values.size), dense)
        return dense

    def _launch(self, kernel: str, blocks: int, *arguments: object) -> None:
        self.engine.launch(self._source, kernel, blocks, *arguments)
