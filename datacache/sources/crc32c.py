"""CRC-32C (Castagnoli), the checksum of TFRecord files."""

import numpy as np
import numpy.typing as npt

from datacache.compiled import compiled

Table = npt.NDArray[np.uint32]
POLYNOMIAL = 0x82F63B78  # bits reversed


def _tables() -> Table:
    """Return the tables of slicing-by-8: the CRC of each byte value followed by 0 … 7 zero bytes."""
    tables = np.zeros((8, 256), np.uint32)
    one = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        one = np.where(one & 1, one >> 1 ^ np.uint32(POLYNOMIAL), one >> 1)
    tables[0] = one
    for following in range(1, 8):
        before = tables[following - 1]
        tables[following] = before >> 8 ^ one[before & 0xFF]
    return tables


TABLES = _tables()


@compiled
def _crc32c(data: npt.NDArray[np.uint8], tables: Table) -> np.uint32:
    crc = np.uint32(0xFFFFFFFF)
    whole = len(data) // 8 * 8
    for at in range(0, whole, 8):
        crc = (
            tables[7, (crc ^ data[at]) & 0xFF]
            ^ tables[6, (crc >> np.uint32(8) ^ data[at + 1]) & 0xFF]
            ^ tables[5, (crc >> np.uint32(16) ^ data[at + 2]) & 0xFF]
            ^ tables[4, (crc >> np.uint32(24) ^ data[at + 3]) & 0xFF]
            ^ tables[3, data[at + 4]]
            ^ tables[2, data[at + 5]]
            ^ tables[1, data[at + 6]]
            ^ tables[0, data[at + 7]]
        )
    for at in range(whole, len(data)):
        crc = tables[0, (crc ^ data[at]) & 0xFF] ^ crc >> np.uint32(8)
    return crc ^ np.uint32(0xFFFFFFFF)


def crc32c(data: bytes | memoryview) -> int:
    """Return the CRC-32C of bytes.

    >>> hex(crc32c(b"123456789"))
    '0xe3069283'
    """
    return int(_crc32c(np.frombuffer(data, np.uint8), TABLES))


def masked_crc32c(data: bytes | memoryview) -> int:
    """Return the CRC as TFRecord stores it: rotated right by 15 bits, plus a constant."""
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
