"""The emulated central storage: right bytes, the promised slowness and failures."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import pytest

from benchmarks.throttled import bytes_per_second, counts, serve


def contents(number: int, size: int = 1000) -> bytes:
    return bytes((number * 7 + position) % 256 for position in range(size))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three classes of four files of 1,000 bytes, and names that have to be quoted."""
    root = tmp_path_factory.mktemp("storage")
    for number in range(12):
        place = root / "train" / f"class {number % 3} & 100%"
        place.mkdir(parents=True, exist_ok=True)
        (place / f"größe {number}?.bin").write_bytes(contents(number))
    (root / "empty.bin").write_bytes(b"")
    (root / "large.bin").write_bytes(os.urandom(1_000_000))
    return root


def test_files_and_ranges_are_read_byte_for_byte_and_counted(folder):
    large = (folder / "large.bin").read_bytes()
    with serve(folder) as url:
        fs, root = fsspec.url_to_fs(url)
        for number in range(12):
            path = f"{root}/train/class {number % 3} & 100%/größe {number}?.bin"
            assert fs.cat_file(path) == contents(number)
        assert fs.cat_file(f"{root}/empty.bin") == b""
        assert fs.cat_file(f"{root}/large.bin") == large
        assert fs.cat_file(f"{root}/large.bin", start=999_990) == large[-10:]
        assert fs.cat_file(f"{root}/large.bin", start=17, end=400_000) == large[17:400_000]
        assert fs.cat_file(f"{root}/large.bin", start=999_000, end=2_000_000) == large[999_000:]
        done = counts(url)
    assert done.requests == 12 + 1 + 4
    assert done.bytes == 12_000 + 1_000_000 + 10 + 399_983 + 1000
    assert done.reads["large.bin"] == 4
    assert done.reads["train/class 1 & 100%/größe 4?.bin"] == 1


def test_threads_share_the_rate_of_one_link_and_each_request_waits_its_latency(folder):
    with serve(folder, rate="100mbit", latency_seconds=0.1) as url, ThreadPoolExecutor(4) as threads:
        fs, root = fsspec.url_to_fs(url)
        begun = time.perf_counter()
        list(threads.map(lambda _: fs.cat_file(f"{root}/large.bin"), range(4)))
        seconds = time.perf_counter() - begun
    # never faster, whatever else the machine does
    assert seconds > 0.1 + 0.99 * 4_000_000 / bytes_per_second("100mbit")


def _outcomes(url: str, requests: int) -> list[str]:
    fs, root = fsspec.url_to_fs(url)
    outcomes = []
    for _ in range(requests):
        try:
            assert len(fs.cat_file(f"{root}/large.bin")) == 1_000_000
            outcomes.append("whole")
        except OSError as error:
            outcomes.append("refused" if "503" in str(error) else "cut")
            assert str(error).startswith(f"throttled://{root}/large.bin: ")
    return outcomes


def test_the_wanted_share_fails_in_both_ways_and_the_same_with_the_same_seed(folder):
    with serve(folder, failures=0.2, seed=1) as url:
        first = _outcomes(url, 200)
        done = counts(url)
    assert 20 <= 200 - first.count("whole") <= 60
    assert first.count("refused") - first.count("cut") in (0, 1)
    assert done.failures == 200 - first.count("whole")
    assert done.requests == first.count("whole")
    with serve(folder, failures=0.2, seed=1) as url:
        assert _outcomes(url, 200) == first
    with serve(folder, failures=0.2, seed=2) as url:
        assert _outcomes(url, 200) != first
