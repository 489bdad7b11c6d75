"""Generations: filled together, frozen once, joined or dropped, and never a record that was not put."""

import json
import os
import shutil
import subprocess
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from datacache import capacity
from datacache.capacity import in_memory
from datacache.errors import CacheFull
from datacache.order import Ids
from datacache.store import folders
from datacache.store.record_store import Misses, RecordStore
from datacache.store.records import pack, seed_of, unpack
from tests.datacache.processes import FORK, in_child

IDS = np.arange(0, 900, 3)
SIZES = 20 + IDS * 7 % 5000  # some of them in pages of their own
FINGERPRINT = "0123456789abcdef"
SEED = seed_of(FINGERPRINT)
SHM = Path("/dev/shm")
NOT_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="mounting a filesystem takes root")


def payload(key: int) -> bytes:
    return bytes([key % 251]) * int(20 + key * 7 % 5000)


def records(ids: Ids) -> list[bytes]:
    return [pack(key, payload(key), (key,), seed=SEED) for key in ids.tolist()]


def make(root: Path, ids: Ids = IDS, fingerprint: str = FINGERPRINT) -> RecordStore:
    return RecordStore(root, fingerprint, ids, 20 + ids * 7 % 5000, note={"of": "tests"})


def fill(generation: RecordStore, ids: Ids = IDS, batch: int = 32) -> None:
    for start in range(0, len(ids), batch):
        generation.put_many(ids[start : start + batch], records(ids[start : start + batch]))


def frozen(root: Path) -> Path:
    """Make a complete generation and return its folder."""
    with make(root) as generation:
        fill(generation)
        assert generation.freeze()
        return generation.folder


def read_right(generation: RecordStore, ids: Ids = IDS) -> Misses:
    """Read the ids; everything that is delivered must be right."""

    def use(position: int, record: memoryview) -> None:
        key = int(ids[position])
        found, shape = unpack(key, record, verify=True, seed=SEED)
        assert (bytes(found), shape) == (payload(key), (key,))

    return generation.read_many(ids, use)


@pytest.fixture(params=["disk", "memory"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """Give a folder on a disk, whose records are read, and one in memory, whose records are views."""
    if request.param == "disk":
        if in_memory(tmp_path):
            pytest.skip("temporary files are in memory here")
        yield tmp_path / "cache"
        return
    if not SHM.is_dir():
        pytest.skip("no /dev/shm")
    folder = SHM / f"cloudtrain-test-{os.getpid()}-{tmp_path.name}"
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def test_what_was_put_is_read_and_the_rest_is_named(root: Path) -> None:
    with make(root) as generation:
        generation.put_many(IDS[5:2:-1], records(IDS[5:2:-1]))
        assert read_right(generation, IDS[:8]) == Misses([0, 1, 2, 6, 7], [])
        assert generation.stored() == 3
        assert generation.missing_ids().tolist() == [*IDS[:3], *IDS[6:]]
        assert not generation.freeze()
        assert not generation.is_frozen


def test_full_it_is_frozen_and_reads_the_same(root: Path) -> None:
    shuffled = np.random.default_rng(1).permutation(IDS)
    with make(root) as generation:
        fill(generation, shuffled)
        assert generation.freeze()
        assert generation.is_frozen
        assert generation.freeze()
        assert read_right(generation, shuffled) == Misses([], [])
        assert generation.missing_ids().tolist() == []
        assert generation.stored() == len(IDS)


def test_frozen_it_is_found_by_the_next_and_not_changed(root: Path) -> None:
    folder = frozen(root)
    before = (folder / "records").read_bytes()
    with make(root) as generation:
        assert generation.is_frozen
        generation.put_many(IDS[:3], [b"other"] * 3)
        assert read_right(generation) == Misses([], [])
    assert (folder / "records").read_bytes() == before


def test_others_see_that_it_was_frozen(root: Path) -> None:
    with make(root) as first, make(root) as second:
        fill(first)
        assert first.freeze()
        assert second.is_frozen
        assert read_right(second) == Misses([], [])


def test_the_same_id_may_be_asked_for_twice(root: Path) -> None:
    ids = np.array([3, 0, 3, 4, 3, 0])
    with make(root) as generation:
        generation.put_many(ids[:3], records(ids[:3]))
        assert read_right(generation, ids) == Misses([3], [])
    shutil.rmtree(root)
    frozen(root)
    with make(root) as generation:
        assert read_right(generation, ids) == Misses([3], [])


def test_what_is_there_stays(root: Path) -> None:
    with make(root) as generation:
        fill(generation, IDS[:10])
        generation.put_many(IDS[:20], [b"wrong"] * 10 + records(IDS[10:20]))
        assert read_right(generation, IDS[:20]) == Misses([], [])


def test_ids_that_do_not_belong_are_not_found_and_not_put(root: Path) -> None:
    others = np.array([1, 3, 10_000, -1])
    with make(root) as generation:
        with pytest.raises(ValueError, match="ids: 1 does not belong"):
            generation.put_many(others, records(np.abs(others)))
        fill(generation)
        assert read_right(generation, others) == Misses([0, 2, 3], [])
        assert generation.freeze()
        assert read_right(generation, others) == Misses([0, 2, 3], [])


def test_no_ids_are_complete_at_once(root: Path) -> None:
    with make(root, IDS[:0]) as generation:
        assert generation.freeze()
        assert read_right(generation, np.array([1])) == Misses([0], [])


@pytest.mark.parametrize("ids", [np.array([3, 2]), np.array([2, 2])])
def test_ids_must_be_sorted_and_different(tmp_path: Path, ids: Ids) -> None:
    with pytest.raises(ValueError, match="sorted and different"):
        make(tmp_path, ids)


def test_a_fingerprint_stands_for_one_set_of_ids(root: Path) -> None:
    with make(root) as generation:
        fill(generation)
    with pytest.raises(ValueError, match="which part"):
        make(root, IDS[1:])
    with make(root) as generation:
        assert read_right(generation) == Misses([], [])


def test_two_fingerprints_stay_apart(root: Path) -> None:
    with make(root) as first, make(root, IDS[1:], "another") as second:
        fill(first)
        assert first.freeze()
        assert second.stored() == 0
        assert [path.name for path in folders.all_folders(root)] == [f"gen-{FINGERPRINT}", "gen-another"]


def test_unfinished_it_is_joined_and_only_the_rest_is_put(root: Path) -> None:
    with make(root) as generation:
        fill(generation, IDS[:100])
    with make(root) as generation:
        assert generation.missing_ids().tolist() == IDS[100:].tolist()
        fill(generation, generation.missing_ids())
        assert generation.freeze()
        assert read_right(generation) == Misses([], [])


def test_damaged_records_are_named_and_replaced(root: Path) -> None:
    spoilt = records(IDS)
    spoilt[7] = spoilt[7][:-1] + b"?"
    with make(root) as generation:
        generation.put_many(IDS, spoilt)
        for _ in ("open", "frozen"):
            assert read_right(generation) == Misses([], [7])
            assert generation.freeze()
        generation.replace(IDS[7:8], spoilt[7:8])
        assert read_right(generation) == Misses([], [7])
        generation.replace(IDS[7:8], records(IDS[7:8]))
        assert read_right(generation) == Misses([], [])
    with make(root) as generation:
        assert read_right(generation) == Misses([], [])


def test_an_error_of_the_user_is_not_swallowed(root: Path) -> None:
    def fail(position: int, record: memoryview) -> None:
        raise KeyError(position)

    with make(root) as generation:
        fill(generation)
        for _ in ("open", "frozen"):
            with pytest.raises(KeyError):
                generation.read_many(IDS[:2], fail)
            assert read_right(generation) == Misses([], [])
            assert generation.freeze()


def change(path: Path, **values: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_another_format_is_dropped(root: Path) -> None:
    folder = frozen(root)
    change(folder / "generation.json", format=folders.FORMAT + 1)
    with make(root) as generation:
        assert generation.stored() == 0
        fill(generation)
        assert generation.freeze()
        assert read_right(generation) == Misses([], [])


def test_another_format_that_a_job_uses_is_left_to_it(root: Path) -> None:
    with make(root) as generation:
        fill(generation)
        change(generation.folder / "generation.json", format=folders.FORMAT + 1)
        with pytest.raises(RuntimeError, match="another job uses it"):
            make(root)
        assert read_right(generation) == Misses([], [])


def test_unfinished_before_a_restart_of_the_machine_it_is_dropped(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make(root) as generation:
        fill(generation, IDS[:50])
    monkeypatch.setattr("datacache.store.record_store.boot", lambda: "another")
    with make(root) as generation:
        assert generation.stored() == 0


def test_finished_before_a_restart_of_the_machine_it_is_kept(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen(root)
    monkeypatch.setattr("datacache.store.record_store.boot", lambda: "another")
    with make(root) as generation:
        assert generation.is_frozen


@pytest.mark.parametrize("name", ["COMPLETE", "index", "records"])
@pytest.mark.parametrize("change_bytes", [lambda old: old[:-1], lambda old: b"", lambda old: b"x" + old])
def test_a_file_that_is_not_what_was_written_costs_the_generation(
    root: Path, name: str, change_bytes: Callable[[bytes], bytes]
) -> None:
    folder = frozen(root)
    content = (folder / name).read_bytes()
    (folder / name).unlink()
    (folder / name).write_bytes(change_bytes(content))
    with pytest.warns(UserWarning, match="damaged, to be made again"):
        generation = make(root)
    assert generation.stored() == 0
    fill(generation)
    assert generation.freeze()
    assert read_right(generation) == Misses([], [])
    generation.close()


@pytest.mark.parametrize("name", ["index", "records", "generation.json"])
def test_a_file_that_is_gone_costs_the_generation(root: Path, name: str) -> None:
    (frozen(root) / name).unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        generation = make(root)
    assert generation.stored() == 0
    generation.close()


def test_what_a_crash_left_of_making_or_removing_is_removed(root: Path) -> None:
    for name in (".new-gen-x-1234", ".old-gen-y-1234"):
        (root / name).mkdir(parents=True)
        (root / name / "records").write_bytes(bytes(1000))
    make(root).close()
    assert sorted(path.name for path in root.iterdir()) == [f"gen-{FINGERPRINT}", "lock"]


def test_in_use_it_is_not_removed(root: Path) -> None:
    generation = make(root)
    assert folders.is_in_use(generation.folder)
    assert not folders.remove(generation.folder)
    assert generation.folder.is_dir()
    generation.close()
    assert not folders.is_in_use(generation.folder)
    assert folders.remove(generation.folder)
    assert not generation.folder.exists()
    assert folders.remove(generation.folder)


def test_in_use_by_another_process_it_is_not_removed_until_that_is_killed(root: Path) -> None:
    ready, folder = FORK.Event(), root / f"gen-{FINGERPRINT}"

    def use() -> None:
        with make(root):
            ready.set()
            threading.Event().wait(60)

    process = FORK.Process(target=use)
    process.start()
    assert ready.wait(20)
    assert not folders.remove(folder)
    process.kill()
    process.join(10)
    assert folders.remove(folder)


def test_it_is_described_to_those_who_list(root: Path) -> None:
    found = folders.describe(frozen(root))
    assert found is not None
    assert (found.samples, found.note, found.fingerprint) == (len(IDS), {"of": "tests"}, FINGERPRINT)
    assert folders.describe(root) is None
    data = int((20 + IDS * 7 % 5000).sum())
    assert data < folders.held_bytes(root / f"gen-{FINGERPRINT}") < 2 * data + (1 << 21)


def test_without_room_nothing_is_written(root: Path) -> None:
    with pytest.raises(CacheFull, match="300 samples: needs"):
        RecordStore(root, FINGERPRINT, IDS, np.full(len(IDS), 1 << 50))
    assert [path.name for path in root.rglob("*")] == ["lock"]


def test_room_that_others_are_filling_is_not_given_twice(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with make(root) as generation:
        expected = generation_bytes(generation)
        limit = capacity.Limit("a test", int(1.5 * expected), "more")
        monkeypatch.setattr(capacity, "tightest", lambda path: limit)
        with pytest.raises(CacheFull, match="a test"):
            make(root, IDS, "another")
    make(root, IDS, "another").close()  # nobody is filling the first any more


def generation_bytes(generation: RecordStore) -> int:
    found = folders.describe(generation.folder)
    assert found is not None
    return found.expected_bytes


def test_threads_read_while_it_is_filled_and_frozen(root: Path) -> None:
    problems: list[object] = []
    stop = threading.Event()

    with make(root) as generation:
        fill(generation, IDS[::2])

        def read() -> None:
            generator = np.random.default_rng(threading.get_ident() % 1000)
            while not stop.is_set():
                try:
                    ids = generator.choice(IDS[::2], 16)
                    misses = read_right(generation, ids)
                except BaseException as error:
                    problems.append(error)
                    return
                if misses != Misses([], []):
                    problems.append(misses)

        threads = [threading.Thread(target=read) for _ in range(3)]
        for thread in threads:
            thread.start()
        fill(generation, IDS[1::2], batch=8)
        assert generation.freeze()
        stop.wait(0.2)
        stop.set()
        for thread in threads:
            thread.join(20)
    assert problems == []


@pytest.mark.parametrize("complete", [False, True])
def test_closed_and_removed_while_a_thread_reads_it_delivers_to_the_end(root: Path, complete: bool) -> None:
    generation = make(root)
    fill(generation)
    if complete:
        assert generation.freeze()
    inside, go_on = threading.Event(), threading.Event()
    found: list[bytes] = []

    def use(position: int, record: memoryview) -> None:
        inside.set()
        go_on.wait(10)
        found.append(bytes(unpack(int(IDS[position]), record, verify=True, seed=SEED)[0]))

    thread = threading.Thread(target=generation.read_many, args=(IDS, use))
    thread.start()
    assert inside.wait(10)
    generation.close()
    assert folders.remove(generation.folder)
    go_on.set()
    thread.join(20)
    assert found == [payload(key) for key in IDS.tolist()]


def test_a_forked_child_reads_and_puts(root: Path) -> None:
    with make(root) as generation:
        fill(generation, IDS[:100])

        def child() -> bool:
            fill(generation, IDS[100:])
            return read_right(generation) == Misses([], []) and generation.freeze()

        assert in_child(child)
        assert generation.is_frozen
        assert in_child(lambda: read_right(generation) == Misses([], []))
        assert read_right(generation) == Misses([], [])


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """Give a folder with a complete generation on a filesystem that cannot be written."""
    mount = tmp_path / "mount"
    mount.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(mount)], check=True)
    try:
        frozen(mount / "cache")
        subprocess.run(["mount", "-o", "remount,ro", str(mount)], check=True)
        yield mount / "cache"
    finally:
        subprocess.run(["umount", "-l", str(mount)], check=True)


@NOT_ROOT
def test_a_read_only_cache_is_read(read_only: Path) -> None:
    with make(read_only) as generation:
        assert generation.is_frozen
        assert read_right(generation) == Misses([], [])
        with pytest.warns(UserWarning, match="repaired records cannot be kept"):
            generation.replace(IDS[:1], records(IDS[:1]))


@NOT_ROOT
def test_what_a_read_only_cache_lacks_cannot_be_made(read_only: Path) -> None:
    with pytest.raises(PermissionError, match="holds no gen-another, and it cannot be made"):
        make(read_only, IDS, "another")


def test_a_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("")
    with pytest.raises(PermissionError, match="cannot be made"):
        make(tmp_path / "cache")
