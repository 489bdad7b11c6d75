"""The emulated central storage: right bytes, the promised slowness and failures, an end for sure."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import pytest

from benchmarks import throttled
from benchmarks.throttled import Limits, bytes_per_second, counts, serve

SAMPLE_BYTES = 110_000


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


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """200 files of 110 KB."""
    root = tmp_path_factory.mktemp("samples")
    for number in range(200):
        (root / f"{number:03}.jpg").write_bytes(os.urandom(SAMPLE_BYTES))
    return root


def test_every_file_is_found_with_size_and_version_by_one_request_a_folder(folder):
    with serve(folder) as url:
        fs, root = fsspec.url_to_fs(url)
        found = fs.find(root, detail=True)
        assert counts(url) == throttled.Counts(listings=5)  # the root, train and three classes
    there = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    assert {name.removeprefix(f"{root}/") for name in found} == set(there)
    for name, facts in found.items():
        path = there[name.removeprefix(f"{root}/")]
        assert facts["size"] == path.stat().st_size
        assert facts["type"] == "file"
        assert facts["mtime"] == path.stat().st_mtime
    assert len({facts["ETag"] for facts in found.values()}) == len(found)


def test_one_file_is_looked_up_by_one_request(folder):
    with serve(folder) as url:
        fs, root = fsspec.url_to_fs(url)
        assert fs.info(f"{root}/large.bin") == fs.find(root, detail=True)[f"{root}/large.bin"]
        assert fs.info(f"{root}/train")["type"] == fs.info(root)["type"] == "directory"
        assert counts(url).listings == 1 + 5 + 2
        with pytest.raises(FileNotFoundError):
            fs.info(f"{root}/missing.bin")


def test_a_changed_file_has_another_version(tmp_path):
    (tmp_path / "a").write_bytes(b"before")
    with serve(tmp_path) as url:
        fs, root = fsspec.url_to_fs(url)
        before = fs.find(root, detail=True)[f"{root}/a"]["ETag"]
        (tmp_path / "a").write_bytes(b"behind")
        assert fs.find(root, detail=True)[f"{root}/a"]["ETag"] != before


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
        assert fs.cat_file(f"{root}/large.bin", end=300_000) == large[:300_000]
        assert fs.cat_file(f"{root}/large.bin", start=17, end=400_000) == large[17:400_000]
        assert fs.cat_file(f"{root}/large.bin", start=999_000, end=2_000_000) == large[999_000:]
        assert fs.cat_file(f"{root}/large.bin", start=2_000_000) == b""
        done = counts(url)
    assert done.requests == 12 + 1 + 6
    assert done.bytes == 12_000 + 1_000_000 + 10 + 300_000 + 399_983 + 1000
    assert done.reads["large.bin"] == 6
    assert done.reads["train/class 1 & 100%/größe 4?.bin"] == 1


def test_what_is_not_there_is_a_file_not_found_error(folder):
    with serve(folder) as url:
        fs, root = fsspec.url_to_fs(url)
        for path in ("missing.bin", "train/missing.bin", "../storage/large.bin", "train/../large.bin"):
            with pytest.raises(FileNotFoundError, match=f"throttled://{root}/{path}"):
                fs.cat_file(f"{root}/{path}")
        with pytest.raises(FileNotFoundError):
            fs.find(f"{root}/missing", detail=True)


def test_ranges_that_make_no_sense_are_refused(folder):
    with serve(folder) as url:
        fs, root = fsspec.url_to_fs(url)
        with pytest.raises(ValueError, match="expected 0 ≤ start ≤ end, got 5 and 3"):
            fs.cat_file(f"{root}/large.bin", start=5, end=3)


@pytest.mark.parametrize("clients", [1, 4])
def test_all_clients_together_get_the_rate_of_one_link(samples, clients):
    with serve(samples, rate="1gbit") as url, ThreadPoolExecutor(clients) as threads:
        fs, root = fsspec.url_to_fs(url)
        list(threads.map(lambda _: fs.exists(root), range(clients)))
        begun = time.perf_counter()
        read = list(threads.map(lambda number: fs.cat_file(f"{root}/{number:03}.jpg"), range(200)))
        seconds = time.perf_counter() - begun
        assert sum(map(len, read)) == counts(url).bytes == 200 * SAMPLE_BYTES
    # never faster, whatever else the machine does; the last bytes need no further wait
    assert seconds > 0.99 * 200 * SAMPLE_BYTES / bytes_per_second("1gbit")


_FORKING = """
import os, sys, fsspec, benchmarks.throttled
fs, root = fsspec.url_to_fs(sys.argv[1])
expected = {number: fs.cat_file(f"{root}/{number:03}.jpg") for number in range(4)}
children = []
for number in range(4):
    children.append(os.fork())
    if not children[-1]:
        right = all(fs.cat_file(f"{root}/{number:03}.jpg") == expected[number] for _ in range(50))
        os._exit(0 if right else 1)
print([os.waitpid(child, 0)[1] for child in children])
"""


def test_forked_processes_do_not_talk_on_the_same_connection(samples):
    with serve(samples) as url:
        command = [sys.executable, "-W", "ignore", "-c", _FORKING, url]
        done = subprocess.run(command, cwd=_root(), capture_output=True, text=True, timeout=60)
        assert done.stdout == "[0, 0, 0, 0]\n", done.stderr
        assert counts(url).requests == 4 + 4 * 50


def _root() -> Path:
    return Path(throttled.__file__).parents[1]


def test_requests_wait_their_latency_at_the_same_time(folder):
    path = "train/class 0 & 100%/größe 0?.bin"
    with serve(folder, latency_seconds=1.0) as url, ThreadPoolExecutor(16) as threads:
        fs, root = fsspec.url_to_fs(url)

        begun = time.perf_counter()
        assert list(threads.map(lambda _: fs.cat_file(f"{root}/{path}"), range(16))) == [contents(0)] * 16
        seconds = time.perf_counter() - begun
    # One after the other could not be done before 16 s: a busy machine has 15 s of its own.
    assert 1.0 <= seconds < 16.0


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


def test_a_folder_that_cannot_be_listed_is_an_error_and_not_empty(folder):
    with serve(folder, failures=1) as url:
        fs, root = fsspec.url_to_fs(url)
        for _ in range(2):
            with pytest.raises(OSError, match=f"throttled://{root}/"):
                fs.find(root, detail=True)


def _children() -> set[int]:
    """Return the servers that this process has started and that still run."""
    return {int(pid) for pid in Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()}


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads /proc")
def test_the_server_ends_with_the_block_also_after_an_error(folder):
    before = _children()
    with pytest.raises(KeyError), serve(folder):
        assert len(_children() - before) == 1
        raise KeyError
    assert _children() == before


_OWNER = """
import os, sys
from benchmarks.throttled import serve
with serve(sys.argv[1]) as url:
    print(url, flush=True)
    sys.stdin.readline()
"""


def test_the_server_ends_when_its_owner_is_killed(folder):
    owner = subprocess.Popen(
        [sys.executable, "-c", _OWNER, str(folder)],
        cwd=_root(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    url = owner.stdout.readline().strip()
    assert counts(url).requests == 0
    owner.send_signal(signal.SIGKILL)
    owner.communicate()
    with pytest.raises(OSError, match="Connection"):
        while counts(url):  # the test's own timeout bounds it
            time.sleep(0.02)


@pytest.mark.parametrize(
    ("limits", "key"),
    [
        ({"rate": "1 Gb/s"}, "rate"),
        ({"rate": "0mbit"}, "rate"),
        ({"latency_seconds": -1.0}, "latency_seconds"),
        ({"failures": 1.5}, "failures"),
    ],
)
def test_limits_that_make_no_sense_are_refused(limits, key):
    with pytest.raises(ValueError, match=key):
        Limits(**limits)
