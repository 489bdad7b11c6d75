"""Files of any filesystem, also of ones that fail, stall and answer in part."""

import asyncio
import ftplib
import random
import subprocess
import sys
import threading
import time
import uuid

import fsspec
import pytest
from fsspec.asyn import AsyncFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from datacache.errors import SourceChanged, StorageFailed
from datacache.storage import JOINED_BYTES, JOINED_GAP, File, Range, Storage, joined
from tests.datacache.processes import in_child
from tests.datacache.test_sources import put

FAST = {"first_wait_seconds": 0.0005}
CONTENTS = bytes(range(256)) * 40


class FlakyFileSystem(MemoryFileSystem):
    """Files in memory; fails a share of the requests, or does with the next ones what ``faults`` say."""

    protocol = "flaky"
    store = {}
    pseudo_dirs = [""]
    cachable = False

    def __init__(self, share=0.0, seed=1, **options):
        super().__init__(**options)
        self.share = share
        self.chance = random.Random(seed)
        self.lock = threading.Lock()
        self.faults = []
        self.requests = []

    def _suffer(self, request):
        with self.lock:
            self.requests.append(request)
            fault = self.faults.pop(0) if self.faults else None
            if self.chance.random() < self.share:
                fault = OSError("503 Slow Down")
        if isinstance(fault, Exception):
            raise fault
        if isinstance(fault, threading.Event):
            fault.wait()
        return fault

    def ls(self, path, detail=True, **kwargs):
        self._suffer("ls")
        return super().ls(path, detail=detail, **kwargs)

    def info(self, path, **kwargs):
        self._suffer("info")
        return super().info(path, **kwargs)

    def cat_file(self, path, start=None, end=None, **kwargs):
        fault = self._suffer("cat_file")
        data = super().cat_file(path, start, end, **kwargs)
        return data[: len(data) // 2] if fault == "short" else data


class DozingFileSystem(AsyncFileSystem):
    """One file, read by coroutines, the first of which fall asleep."""

    protocol = "dozing"
    cachable = False

    def __init__(self, asleep=0, **options):
        super().__init__(**options)
        self.asleep = asleep
        self.woken = 0

    async def _info(self, path, **kwargs):
        return {"name": path, "size": len(CONTENTS), "type": "file"}

    async def _cat_file(self, path, start=None, end=None, **kwargs):
        self.asleep -= 1
        if self.asleep >= 0:
            try:
                await asyncio.sleep(60)
            finally:
                self.woken += 1
        return CONTENTS[start:end]


class ClosedFileSystem(MemoryFileSystem):
    """Lets nobody in, as a server of FTP that does not know the password."""

    protocol = "closed"

    def __init__(self, **options):
        raise ftplib.error_perm("530 Login incorrect.")


for filesystem in (FlakyFileSystem, DozingFileSystem, ClosedFileSystem):
    fsspec.register_implementation(filesystem.protocol, filesystem, clobber=True)


@pytest.fixture
def place():
    """A folder of its own in memory, with a file."""
    url = f"flaky://{uuid.uuid4().hex}"
    FlakyFileSystem().pipe_file(f"{url}/folder/file", CONTENTS)
    return url


def flaky(url, share=0.0, **options):
    storage = Storage(url, options={"share": share}, **{**FAST, **options})
    return storage, storage._filesystem


# listing


@pytest.fixture
def tree(url):
    """A URL with files at several depths, and what they hold."""
    contents = {"a/x": b"1", "a/deep/er/y": b"22", "a-b": b"333", "b/ ü#%20": b"4444", "z": b""}
    put(f"{url}-other", {"not-mine": b"-"})
    return put(url, contents), contents


def test_all_files_below_a_url_are_listed_by_path_with_their_bytes(tree):
    url, contents = tree
    told = []
    files = Storage(f"{url}/").files(lambda done, total: told.append((done, total)))
    assert [(file.path, file.size) for file in files] == sorted((p, len(d)) for p, d in contents.items())
    assert told == [(1, 3), (3, 4), (4, 5), (5, 5)]


def test_files_are_read_whole_in_part_and_from_somewhere(tree):
    url, contents = tree
    storage = Storage(url)
    for path, data in contents.items():
        assert storage.read(path) == data
        assert storage.read(path, 0, len(data)) == data
        assert storage.read(path, len(data)) == b""
    assert storage.read("b/ ü#%20", 1, 2) == b"44"
    assert storage.read("a-b", 2) == b"3"


def test_a_file_written_again_has_another_version(tree):
    url, _ = tree
    storage = Storage(url)
    before = {file.path: file.version for file in storage.files()}
    assert before == {file.path: file.version for file in Storage(url).files()}
    time.sleep(0.02)  # a file's time may advance in steps of a timer's tick
    storage._filesystem.pipe_file(storage._full("a/x"), b"9")
    after = {file.path: file.version for file in storage.files()}
    assert [path for path in before if before[path] != after[path]] == ["a/x"]
    assert storage.file("a/x") == File("a/x", 1, after["a/x"])


@pytest.mark.parametrize("key", ["modificationTime", "modify", "ETag", "mtime"])
def test_the_version_is_what_a_filesystem_reports(tmp_path, key):
    storage = Storage(str(tmp_path))
    assert storage._file({"size": 3, key: 7}, "x") == File("x", 3, "7")


def test_links_to_files_and_folders_are_followed(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "x.jpg").write_bytes(b"12345")
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "folder").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "root" / "file").symlink_to(tmp_path / "elsewhere" / "x.jpg")
    files = Storage(f"{tmp_path}/root").files()
    assert [(file.path, file.size) for file in files] == [("file", 5), ("folder/x.jpg", 5)]


def test_a_link_in_a_circle_is_told_not_followed_for_ever(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "loop").symlink_to(tmp_path)
    with pytest.raises(ValueError, match="folders are nested deeper than 32.*does a link lead back"):
        Storage(str(tmp_path)).files()


def test_the_root_of_the_file_system_is_not_the_working_folder(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    storage, (_, first, *_) = Storage("/"), tmp_path.parts
    assert first in storage.top().folders
    assert "here" not in storage.top().folders
    (tmp_path / "file").write_bytes(b"12345")
    assert storage.read(f"{tmp_path}/file".lstrip("/"), 1, 2) == b"23"


def test_a_folder_that_is_not_there_or_is_a_file_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError):
        Storage(f"file://{tmp_path}/nothing").files()
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ValueError, match="expected a folder, got a file"):
        Storage(f"file://{tmp_path}/file").files()


def test_no_folder_is_left_out_because_listing_it_failed():
    url = f"flaky://{uuid.uuid4().hex}"
    for number in range(60):
        FlakyFileSystem().pipe_file(f"{url}/{number:02d}/file", b"x")
    storage, filesystem = flaky(url, share=0.2)
    assert len(storage.files()) == 60
    assert len(filesystem.requests) > 61


# failing


def test_a_storage_that_fails_one_request_in_five_gives_everything(place):
    storage, filesystem = flaky(place, share=0.2)
    ranges = [Range("folder/file", 7 * number, 7, whole=False) for number in range(0, 1000, 2)]
    for _ in range(4):
        assert storage.in_parallel(lambda each: storage.read(each.path, each.start, each.length), ranges) == [
            CONTENTS[each.start : each.start + 7] for each in ranges
        ]
    assert 2300 < len(filesystem.requests) < 2700  # 2,000 reads take 2,500 requests, give or take 25


def test_a_dead_storage_is_told_in_one_line_after_as_many_attempts_as_were_allowed(place):
    storage, filesystem = flaky(place, share=1.0, attempts=4)
    with pytest.raises(StorageFailed) as caught:
        storage.read("folder/file", 0, 10)
    message = "folder/file: 4 attempts failed, the last with OSError: 503 Slow Down"
    assert str(caught.value) == f"{place}: {message}"
    assert filesystem.requests == ["cat_file"] * 4


def test_a_login_that_is_refused_is_told_in_one_line_without_the_password():
    with pytest.raises(StorageFailed, match=r"^closed://me:\*\*\*@here: no connection: error_perm: 530 "):
        Storage("closed://me:1234@here")


def test_waits_double_and_vary(place, monkeypatch):
    waits = []
    monkeypatch.setattr(time, "sleep", waits.append)
    storage, _ = flaky(place, share=1.0, attempts=12, first_wait_seconds=0.1)
    for _ in range(20):
        with pytest.raises(StorageFailed):
            storage.read("folder/file", 0, 10)
    assert len(waits) == 20 * 11
    for attempt in range(11):
        nominal = min(0.1 * 2**attempt, 10)
        of_attempt = waits[attempt::11]
        assert nominal * 0.5 <= min(of_attempt) < max(of_attempt) <= nominal * 1.5


def test_an_answer_that_is_too_short_is_asked_for_again(place):
    storage, filesystem = flaky(place)
    filesystem.faults = ["short", None, "short", None]  # in between the file's size is asked for
    assert storage.read("folder/file", 100, 50) == CONTENTS[100:150]
    assert filesystem.requests == ["cat_file", "info", "cat_file", "info", "cat_file"]


def test_a_request_that_stalls_is_made_again(place):
    storage, filesystem = flaky(place, timeout_seconds=0.5)
    stall = threading.Event()
    filesystem.faults = [stall, stall]
    assert storage.read("folder/file", 0, 10) == CONTENTS[:10]
    assert len(filesystem.requests) == 3
    stall.set()


def test_a_coroutine_that_stalls_is_cancelled():
    storage = Storage("dozing://here", options={"asleep": 2}, timeout_seconds=0.5, **FAST)
    assert storage.read("file", 3, 5) == CONTENTS[3:8]
    assert storage._filesystem.woken == 2


def test_a_program_ends_though_a_request_still_stalls():
    program = """
import threading, fsspec
from fsspec.implementations.memory import MemoryFileSystem
from datacache.storage import Storage, StorageFailed
class Stalled(MemoryFileSystem):
    protocol = "stalled"
    def cat_file(self, path, start=None, end=None, **kwargs):
        threading.Event().wait()
fsspec.register_implementation("stalled", Stalled)
storage = Storage("stalled://here", timeout_seconds=0.05, attempts=1)
try:
    storage.read("file", 0, 1)
except StorageFailed:
    print("told")
"""
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (finished.returncode, finished.stdout) == (0, "told\n"), finished.stderr


@pytest.mark.parametrize("error", [FileNotFoundError("gone"), PermissionError("not yours")])
def test_what_no_patience_mends_is_not_asked_for_again(place, error):
    storage, filesystem = flaky(place)
    filesystem.faults = [error]
    with pytest.raises((FileNotFoundError, StorageFailed), match=str(error)):
        storage.read("folder/file", 0, 10)
    assert filesystem.requests == ["cat_file"]


def test_a_file_not_found_because_a_server_failed_is_asked_for_again(place):
    storage, filesystem = flaky(place)
    error = FileNotFoundError("by fsspec's HTTP")
    error.__cause__ = ConnectionError("503")
    filesystem.faults = [error]
    assert storage.file("folder/file").size == len(CONTENTS)


@pytest.mark.parametrize(
    ("start", "length", "whole"), [(10_000, 500, False), (0, 12_000, True), (0, 9, True)]
)
def test_a_file_of_another_size_than_expected_has_changed(place, start, length, whole):
    storage, filesystem = flaky(place)
    with pytest.raises(SourceChanged, match=r"file: has 10240 bytes, (at least )?\d+ expected: it changed"):
        storage.read_many([Range("folder/file", start, length, whole)])
    assert filesystem.requests == ["cat_file", "info"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("attempts", 0),
        ("attempts", "ten"),
        ("threads", 1.5),
        ("timeout_seconds", 0),
        ("timeout_seconds", None),
        ("first_wait_seconds", -1),
    ],
)
def test_impossible_settings_are_refused(name, value):
    with pytest.raises(ValueError, match=f"{name}: expected .*, got {value!r}"):
        Storage("memory://", **{name: value})


# many at once


def test_neighbours_share_a_request_and_others_do_not():
    ranges = [
        Range("b", 0, 10),
        Range("a", 30, 10),
        Range("a", 0, 20),
        Range("a", 0, 20),
        Range("a", 40 + JOINED_GAP, 5),
        Range("a", 46 + 2 * JOINED_GAP, 5),
        Range("c", 0, 10, whole=True),
        Range("c", 0, 10, whole=True),
        Range("c", 0, 10),
    ]
    assert joined(ranges) == [
        (Range("a", 0, 45 + JOINED_GAP), [2, 3, 1, 4]),
        (Range("a", 46 + 2 * JOINED_GAP, 5), [5]),
        (Range("b", 0, 10), [0]),
        (Range("c", 0, 10, whole=True), [6, 7]),
        (Range("c", 0, 10), [8]),
    ]


def test_a_range_within_another_is_read_with_it_and_both_whole(place):
    outer, inner, after = (Range("folder/file", *each) for each in [(100, 200), (150, 20), (300, 40)])
    assert [asked for asked, _ in joined([outer, inner, after])] == [Range("folder/file", 100, 240)]
    storage, filesystem = flaky(place)
    assert storage.read_many([inner, outer]) == [CONTENTS[150:170], CONTENTS[100:300]]
    assert filesystem.requests == ["cat_file"]


def test_shared_requests_stay_small():
    size = JOINED_BYTES // 4
    requests = joined([Range("a", number * size, size) for number in range(10)])
    assert [len(positions) for _, positions in requests] == [4, 4, 2]


def test_requests_run_at_once_but_no_more_than_allowed(place):
    storage, _ = flaky(place, threads=3)
    running, most = 0, 0
    lock, together = threading.Lock(), threading.Barrier(3)

    def work(item):
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        together.wait(10)  # breaks unless three are at it
        with lock:
            running -= 1
        return -item

    assert storage.in_parallel(work, list(range(12))) == [-item for item in range(12)]
    assert most == 3


def test_one_failure_ends_all_and_is_raised(place):
    storage, filesystem = flaky(place, threads=2)
    with pytest.raises(FileNotFoundError):
        storage.read_many([Range(f"missing-{number}", 0, 1) for number in range(1000)])
    assert len(filesystem.requests) < 10


@pytest.mark.parametrize("protocol", ["file", "dozing"])
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_storage_works_in_a_forked_process(protocol, tmp_path):
    (tmp_path / "file").write_bytes(CONTENTS)
    storage = Storage(f"{protocol}://{tmp_path}")

    def reads() -> bool:
        ranges = [Range("file", 1, 2), Range("file", 9000, 2), Range("file", 9900, 1)]
        return storage.read_many(ranges) == [CONTENTS[1:3], CONTENTS[9000:9002], CONTENTS[9900:9901]]

    assert reads()
    assert in_child(reads)
    assert reads()
