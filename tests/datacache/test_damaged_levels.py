"""Every file of a level damaged in every way: no process ends, no sample is wrong, no start is refused."""

import os
import random
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from datacache.capacity import in_memory
from datacache.store.record_store import Misses, RecordStore
from tests.datacache.processes import FORK
from tests.datacache.stores import Samples
from tests.extent import ALL

SAMPLES = Samples("damage", np.arange(3, 123, 2), 3000)
IDS, FINGERPRINT = SAMPLES.ids, SAMPLES.fingerprint
make, put, read_right = SAMPLES.make, SAMPLES.put, SAMPLES.read_right
ROUNDS = {"memory": 12 if ALL else 3, "disk": 3 if ALL else 1}  # a disk is synced in each


def flip(content: bytes, generator: random.Random) -> bytes:
    changed, bit = bytearray(content), generator.randrange(8 * len(content))
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def shorten(content: bytes, generator: random.Random) -> bytes:
    return content[: generator.randrange(len(content))]


def zero(content: bytes, generator: random.Random) -> bytes:
    start = generator.randrange(len(content))
    size = min(generator.choice([1, 32, 4096]), len(content) - start)
    return content[:start] + bytes(size) + content[start + size :]


def garble(content: bytes, generator: random.Random) -> bytes:
    return generator.randbytes(len(content))


def lengthen(content: bytes, generator: random.Random) -> bytes:
    return content + generator.randbytes(generator.choice([1, 32, 5000]))


CHANGES: dict[str, Callable[[bytes, random.Random], bytes] | None] = {
    "flipped": flip,
    "shortened": shorten,
    "zeroed": zero,
    "garbled": garble,
    "lengthened": lengthen,
    "deleted": None,
}


def damage(path: Path, change: str, generator: random.Random) -> None:
    """Change a file where it is, as those who have it open see it, too."""
    function = CHANGES[change]
    if function is None:
        path.unlink()
        return
    content = path.read_bytes()
    if content:
        path.write_bytes(function(content, generator))


def recover(cache: RecordStore) -> None:
    """Do what training does: put what is missing, replace what is damaged."""
    misses = read_right(cache)
    damaged = IDS[misses.damaged]
    cache.replace(damaged, SAMPLES.records(damaged))
    put(cache, IDS[misses.missing])
    cache.seal()


def survive(whole: Path, root: Path, name: str, change: str, number: int, is_open: bool) -> None:
    """Damage a copy of a level before it is opened or while it is read, and see that training goes on."""
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(whole, root)
    path = root / f"gen-{FINGERPRINT}" / name
    generator = random.Random(f"{name} {change} {number}")
    if is_open:
        with make(root) as cache:
            read_right(cache)
            damage(path, change, generator)
            recover(cache)
            read_right(cache)
    else:
        damage(path, change, generator)
    with make(root) as cache:
        recover(cache)
        assert read_right(cache) == Misses([], [])
    with make(root) as cache:
        assert cache.is_sealed
        assert read_right(cache) == Misses([], [])


@pytest.mark.parametrize("is_open", [False, True], ids=["before-it-is-opened", "while-it-is-read"])
@pytest.mark.parametrize("stored", [len(IDS) // 2, len(IDS)], ids=["unfinished", "complete"])
def test_whatever_happens_to_a_file_of_a_level_no_process_ends_and_no_sample_is_wrong(
    root: Path, stored: int, is_open: bool
) -> None:
    with make(root / "whole") as cache:
        put(cache, IDS[:stored])
        assert cache.seal() == (stored == len(IDS))
    names = sorted(path.name for path in (root / "whole" / f"gen-{FINGERPRINT}").iterdir())
    rounds = range(ROUNDS["memory" if in_memory(root) else "disk"])
    cases = [(name, change, number) for name in names for change in CHANGES for number in rounds]
    assert len(cases) >= 30 * len(rounds)

    def survive_all() -> None:
        warnings.simplefilter("ignore")
        for case in cases:
            (root / "case").write_text(" ".join(map(str, case)))
            survive(root / "whole", root / "cache", *case, is_open)
        os._exit(0)

    process = FORK.Process(target=survive_all)  # what a signal ends must not be the tests
    process.start()
    process.join(240)
    assert process.exitcode == 0, f"ended by {(root / 'case').read_text()}"
