"""Record stores: filled together, sealed once, joined or dropped, and never a record that was not put."""

import json
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from datacache import capacity
from datacache.capacity import in_memory
from datacache.errors import CacheFull, Damaged
from datacache.order import Ids
from datacache.store import folders
from datacache.store.record_store import Misses, RecordStore
from datacache.store.records import unpack
from tests.datacache.processes import FORK, in_child
from tests.datacache.stores import SHM, Samples

SAMPLES = Samples("0123456789abcdef", np.arange(0, 900, 3), 5000)
IDS, FINGERPRINT, SEED = SAMPLES.ids, SAMPLES.fingerprint, SAMPLES.seed
make, put, records = SAMPLES.make, SAMPLES.put, SAMPLES.records
sealed, read_right = SAMPLES.sealed, SAMPLES.read_right
OTHER = Samples("another", IDS, 5000)
NOT_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="mounting a filesystem takes root")


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
    with make(root) as store:
        put(store, IDS[5:2:-1])
        assert read_right(store, IDS[:8]) == Misses([0, 1, 2, 6, 7], [])
        assert store.stored() == 3
        assert store.missing_ids().tolist() == [*IDS[:3], *IDS[6:]]
        assert not store.seal()
        assert not store.is_sealed


def test_sealed_it_is_found_by_the_next_and_not_changed(root: Path) -> None:
    folder = sealed(root)
    before = (folder / "records").read_bytes()
    with make(root) as store:
        assert store.is_sealed and store.seal()
        store.put_many(IDS[:3], [b"other"] * 3)
        assert read_right(store, IDS[::-1]) == Misses([], [])
        assert (store.stored(), store.missing_ids().tolist()) == (len(IDS), [])
    assert (folder / "records").read_bytes() == before


def test_the_same_id_may_be_asked_for_twice(root: Path) -> None:
    ids = np.array([3, 0, 3, 4, 3, 0])
    with make(root) as store:
        put(store, ids[:3])
        assert read_right(store, ids) == Misses([3], [])
    shutil.rmtree(root)
    sealed(root)
    with make(root) as store:
        assert read_right(store, ids) == Misses([3], [])


def test_what_is_there_stays(root: Path) -> None:
    with make(root) as store:
        put(store, IDS[:10])
        store.put_many(IDS[:20], [b"wrong"] * 10 + records(IDS[10:20]))
        assert read_right(store, IDS[:20]) == Misses([], [])


def test_ids_that_do_not_belong_are_not_found_and_not_put(root: Path) -> None:
    others = np.array([1, 3, 10_000, -1])
    with make(root) as store:
        with pytest.raises(ValueError, match="ids: 1 does not belong"):
            store.put_many(others, [b""] * len(others))
        put(store)
        assert read_right(store, others) == Misses([0, 2, 3], [])
        assert store.seal()
        assert read_right(store, others) == Misses([0, 2, 3], [])


def test_no_ids_are_complete_at_once(root: Path) -> None:
    with make(root, IDS[:0]) as store:
        assert store.seal()
        assert read_right(store, np.array([1])) == Misses([0], [])


@pytest.mark.parametrize("ids", [np.array([3, 2]), np.array([2, 2])])
def test_ids_must_be_sorted_and_different(tmp_path: Path, ids: Ids) -> None:
    with pytest.raises(ValueError, match="sorted and different"):
        RecordStore(tmp_path, FINGERPRINT, ids, ids)


@pytest.mark.parametrize("others", [IDS[1:], IDS + 1], ids=["fewer", "as-many"])
def test_a_fingerprint_stands_for_one_set_of_ids(root: Path, others: Ids) -> None:
    with make(root) as store:
        put(store)
    with pytest.raises(ValueError, match="which samples"):
        RecordStore(root, FINGERPRINT, others, others)
    with make(root) as store:
        assert read_right(store) == Misses([], [])


def test_two_fingerprints_stay_apart(root: Path) -> None:
    with make(root) as first, OTHER.make(root) as second:
        put(first)
        assert first.seal()
        assert second.stored() == 0
        assert [path.name for path in folders.all_folders(root)] == [f"gen-{FINGERPRINT}", "gen-another"]


def test_unfinished_it_is_joined_and_only_the_rest_is_put(root: Path) -> None:
    with make(root) as store:
        put(store, IDS[:100])
    with make(root) as store:
        assert store.missing_ids().tolist() == IDS[100:].tolist()
        put(store, IDS[100:-1])
        assert not store.seal()
        put(store, IDS[-1:])
        assert store.seal()
        assert read_right(store) == Misses([], [])


def test_damaged_records_are_named_and_replaced(root: Path) -> None:
    spoilt = records(IDS)
    spoilt[7] = spoilt[7][:-1] + b"?"
    with make(root) as store:
        store.put_many(IDS, spoilt)
        for _ in ("open", "sealed"):
            assert read_right(store) == Misses([], [7])
            assert store.seal()
        store.replace(IDS[7:8], spoilt[7:8])
        assert read_right(store) == Misses([], [7])
        store.replace(IDS[7:8], records(IDS[7:8]))
        assert read_right(store) == Misses([], [])
    with make(root) as store:
        assert read_right(store) == Misses([], [])


def test_an_error_of_the_user_is_not_swallowed(root: Path) -> None:
    def fail(position: int, record: memoryview) -> None:
        raise KeyError(position)

    with make(root) as store:
        put(store)
        for _ in ("open", "sealed"):
            with pytest.raises(KeyError):
                store.read_many(IDS[:2], fail)
            assert read_right(store) == Misses([], [])
            assert store.seal()


def change(path: Path, **values: object) -> None:
    """Write facts with other values, and with the checksum of these."""
    folders.write_facts(path, folders.read_facts(path, SEED) | values, SEED)


def test_another_format_is_dropped(root: Path) -> None:
    folder = sealed(root)
    change(folder / "generation.json", format=folders.FORMAT + 1)
    assert folders.describe(folder) is None
    with make(root) as store:
        assert store.stored() == 0
        put(store)
        assert store.seal()
        assert read_right(store) == Misses([], [])


def test_another_format_that_a_job_uses_is_left_to_it(root: Path) -> None:
    with make(root) as store:
        put(store)
        change(store.folder / "generation.json", format=folders.FORMAT + 1)
        with pytest.raises(RuntimeError, match="another job uses it"):
            make(root)
        assert read_right(store) == Misses([], [])


def test_facts_other_than_those_written_are_damaged_though_they_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "facts"
    facts = {"samples": 300, "note": {"of": "tests"}}
    folders.write_facts(path, facts, SEED)
    assert folders.read_facts(path, SEED) == facts
    written = json.loads(path.read_text())
    path.write_text(json.dumps(written | {"samples": 301}))
    with pytest.raises(Damaged, match="not what was written"):
        folders.read_facts(path, SEED)
    path.write_text(json.dumps(written))
    with pytest.raises(Damaged, match="not what was written"):
        folders.read_facts(path, SEED + 1)


def test_of_facts_without_an_end_only_a_part_is_read(root: Path) -> None:
    path = sealed(root) / "generation.json"
    os.truncate(path, 1 << 40)  # sparse; as a whole it fits into no memory
    assert folders.describe(path.parent) is None
    with make(root) as store:
        assert store.stored() == 0


def test_a_restart_of_the_machine_costs_what_was_unfinished(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make(root) as store:
        put(store, IDS[:50])
    monkeypatch.setattr("datacache.store.record_store.boot", lambda: "another")
    with make(root) as store:
        assert store.stored() == 0
    sealed(root)
    monkeypatch.setattr("datacache.store.record_store.boot", lambda: "a third")
    with make(root) as store:
        assert store.is_sealed


@pytest.mark.parametrize("name", ["COMPLETE", "index", "records"])
@pytest.mark.parametrize("change_bytes", [lambda old: old[:-1], lambda old: b"x" + old])
def test_a_file_that_is_not_what_was_written_costs_the_generation(
    root: Path, name: str, change_bytes: Callable[[bytes], bytes]
) -> None:
    folder = sealed(root)
    content = (folder / name).read_bytes()
    (folder / name).unlink()
    (folder / name).write_bytes(change_bytes(content))
    with pytest.warns(UserWarning, match="damaged, it is filled again"):
        store = make(root)
    assert store.stored() == 0
    put(store)
    assert store.seal()
    assert read_right(store) == Misses([], [])
    store.close()


def test_an_index_of_the_same_length_that_names_other_places_costs_the_generation(root: Path) -> None:
    path = sealed(root) / "index"
    starts, sizes = np.frombuffer(path.read_bytes(), "<i8").reshape(2, len(IDS))
    path.write_bytes(np.stack([starts[::-1], sizes]).tobytes())
    with pytest.warns(UserWarning, match="index: not what was written"), make(root) as store:
        assert store.stored() == 0


def test_what_a_crash_left_of_making_or_removing_is_removed(root: Path) -> None:
    for name in (".new-gen-x-1234", ".old-gen-y-1234"):
        (root / name).mkdir(parents=True)
        (root / name / "records").write_bytes(bytes(1000))
    make(root).close()
    assert sorted(path.name for path in root.iterdir()) == [f"gen-{FINGERPRINT}", "lock"]


def test_in_use_it_is_not_removed(root: Path) -> None:
    store = make(root)
    assert folders.is_in_use(store.folder)
    assert not folders.remove(store.folder)
    assert store.folder.is_dir()
    store.close()
    assert not folders.is_in_use(store.folder)
    assert folders.remove(store.folder)
    assert not store.folder.exists()
    assert folders.remove(store.folder)


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
    found = folders.describe(sealed(root))
    assert found is not None
    assert (found.samples, found.note, found.fingerprint) == (len(IDS), {"of": "tests"}, FINGERPRINT)
    assert folders.describe(root) is None
    data = int(SAMPLES.sizes.sum())
    assert data < folders.used_bytes(root / f"gen-{FINGERPRINT}") < 2 * data + (1 << 21)


def test_without_room_nothing_is_written(root: Path) -> None:
    with pytest.raises(CacheFull, match="300 samples: needs"):
        RecordStore(root, FINGERPRINT, IDS, np.full(len(IDS), 1 << 50))
    assert [path.name for path in root.rglob("*")] == ["lock"]


def test_room_that_others_are_filling_is_not_given_twice(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with make(root) as store:
        expected = folders.describe(store.folder).expected_bytes  # type: ignore[union-attr]
        limit = capacity.Limit("a test", int(1.5 * expected), "more")
        monkeypatch.setattr(capacity, "tightest", lambda path: limit)
        with pytest.raises(CacheFull, match="a test"):
            OTHER.make(root)
    OTHER.make(root).close()  # nobody is filling the first any more


def test_threads_read_while_it_is_filled_and_sealed(root: Path) -> None:
    problems: list[object] = []
    stop = threading.Event()

    with make(root) as store:
        put(store, IDS[::2])

        def read() -> None:
            generator = np.random.default_rng(threading.get_ident() % 1000)
            while not stop.is_set():
                try:
                    ids = generator.choice(IDS[::2], 16)
                    misses = read_right(store, ids)
                except BaseException as error:
                    problems.append(error)
                    return
                if misses != Misses([], []):
                    problems.append(misses)

        threads = [threading.Thread(target=read) for _ in range(3)]
        for thread in threads:
            thread.start()
        for start in range(1, len(IDS), 16):
            put(store, IDS[start : start + 16 : 2])
        assert store.seal()
        stop.wait(0.2)
        stop.set()
        for thread in threads:
            thread.join(20)
    assert problems == []


@pytest.mark.parametrize("complete", [False, True])
def test_closed_and_removed_while_a_thread_reads_it_delivers_to_the_end(root: Path, complete: bool) -> None:
    store = make(root)
    put(store)
    if complete:
        assert store.seal()
    inside, go_on = threading.Event(), threading.Event()
    found: list[bytes] = []

    def use(position: int, record: memoryview) -> None:
        inside.set()
        go_on.wait(10)
        found.append(bytes(unpack(int(IDS[position]), record, verify=True, seed=SEED)[0]))

    thread = threading.Thread(target=store.read_many, args=(IDS, use))
    thread.start()
    assert inside.wait(10)
    store.close()
    assert folders.remove(store.folder)
    go_on.set()
    thread.join(20)
    assert found == list(SAMPLES.payloads.values())


def test_a_forked_child_reads_and_puts(root: Path) -> None:
    with make(root) as store:
        put(store, IDS[:100])

        def child() -> bool:
            put(store, IDS[100:])
            return read_right(store) == Misses([], []) and store.seal()

        assert in_child(child)
        assert store.is_sealed
        assert in_child(lambda: read_right(store) == Misses([], []))
        assert read_right(store) == Misses([], [])


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """Give a folder with a complete store on a filesystem that cannot be written."""
    mount = tmp_path / "mount"
    mount.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(mount)], check=True)
    try:
        sealed(mount / "cache")
        subprocess.run(["mount", "-o", "remount,ro", str(mount)], check=True)
        yield mount / "cache"
    finally:
        subprocess.run(["umount", "-l", str(mount)], check=True)


@NOT_ROOT
def test_a_read_only_cache_is_read(read_only: Path) -> None:
    with make(read_only) as store:
        assert store.is_sealed
        assert read_right(store) == Misses([], [])
        with pytest.warns(UserWarning, match="repaired records cannot be stored"):
            store.replace(IDS[:1], records(IDS[:1]))


@NOT_ROOT
def test_what_a_read_only_cache_lacks_cannot_be_made(read_only: Path) -> None:
    with pytest.raises(PermissionError, match="has no gen-another, and it cannot be created"):
        OTHER.make(read_only)
