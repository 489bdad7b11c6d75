r"""Lines of UTF-8 text files: they end with ``\n``, the last one also with the file."""

import codecs
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from datacache.errors import BadSample
from datacache.order import Flags
from datacache.storage import File, Storage

BLOCK_BYTES = 8 << 20
Offsets = npt.NDArray[np.int64]

_IS_SPACE = np.zeros(256, bool)
_IS_SPACE[list(b" \t\n\v\f\r")] = True


@dataclass(frozen=True, eq=False)
class Lines:
    r"""For each line of a file its first byte, its bytes without the ``\n``, and whether it is blank."""

    path: str
    starts: Offsets
    sizes: Offsets
    blank: Flags

    def __len__(self) -> int:
        return len(self.starts)

    def check_none_blank(self, url: str) -> None:
        """Raise ``ValueError`` that names the first line that is empty or only white space."""
        if self.blank.any():
            number, found = int(self.blank.argmax()) + 1, f"{self.blank.sum()} of {len(self)} have none"
            raise ValueError(f"{url}/{self.path}: line {number} is empty: expected text in each, {found}")


def find_lines(storage: Storage, file: File, add: Callable[[int], None]) -> Lines:
    """Return the lines of a file; ``add`` gets the bytes read.

    Raises :class:`BadSample` with the offset of the first byte that is not UTF-8.
    """
    ends, solids = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    solid = 0  # bytes so far that are not white space
    last = b""
    for start, block in _blocks(storage, file):
        content = np.frombuffer(block, np.uint8)
        breaks = np.flatnonzero(content == ord("\n"))
        counted = solid + np.cumsum(~_IS_SPACE[content])
        ends.append(start + breaks)
        solids.append(counted[breaks])
        solid, last = int(counted[-1]), block[-1:]
        add(len(block))
    if last not in (b"", b"\n"):
        ends.append(np.array([file.size]))
        solids.append(np.array([solid]))
    stops = np.concatenate(ends)
    starts = np.concatenate([[0], stops[:-1] + 1]) if len(stops) else stops
    blank = np.diff(np.concatenate(solids), prepend=0) == 0
    return Lines(file.path, starts, stops - starts, blank)


def _blocks(storage: Storage, file: File) -> Iterator[tuple[int, bytes]]:
    """Yield the blocks of a file and where each begins, checked to be UTF-8."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    for start in range(0, file.size, BLOCK_BYTES):
        block = storage.read(file.path, start, min(BLOCK_BYTES, file.size - start))
        begun = len(decoder.getstate()[0])  # bytes of a character that began in the block before
        try:
            decoder.decode(block, final=start + len(block) == file.size)
        except UnicodeDecodeError as error:
            at = start - begun + error.start
            raise BadSample(f"{storage.url}/{file.path}: byte {at}: no UTF-8: {error.reason}") from error
        yield start, block
