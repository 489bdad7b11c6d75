"""Record stores: filled together, sealed once, joined or dropped, and never a record that was not put."""

import json
import subprocess
from collections.abc import Callable
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from datacache import capacity
from datacache.errors import CacheFull, Damaged
from datacache.order import Ids
from datacache.store import folders
from datacache.store.record_store import Misses, RecordStore
from tests.datacache.processes import in_child
from tests.datacache.stores import Samples

SAMPLES = Samples("0123456789abcdef", np.arange(0, 900, 3), 5000)
IDS, FINGERPRINT, SEED = SAMPLES.ids, SAMPLES.fingerprint, SAMPLES.seed
make, put, records = SAMPLES.make, SAMPLES.put, SAMPLES.records
sealed, read_right = SAMPLES.sealed, SAMPLES.read_right
OTHER = Samples("another", IDS, 5000)


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
        store.put_many(IDS[:3], [(b"other",)] * 3)
        assert read_right(store, IDS[::-1]) == Misses([], [])
        assert (store.stored(), store.missing_ids().tolist()) == (len(IDS), [])
    assert (folder / "records").read_bytes() == before


def test_what_is_there_stays(root: Path) -> None:
    with make(root) as store:
        put(store, IDS[:10])
        store.put_many(IDS[:20], [(b"wrong",)] * 10 + records(IDS[10:20]))
        assert read_right(store, IDS[:20]) == Misses([], [])


def test_ids_that_do_not_belong_are_not_found_and_not_put(root: Path) -> None:
    others = np.array([1, 3, 10_000, -1])
    with make(root) as store:
        with pytest.raises(ValueError, match="ids: 1 does not belong"):
            store.put_many(others, [()] * len(others))
        put(store)
        assert read_right(store, others) == Misses([0, 2, 3], [])
        assert store.seal()
        assert read_right(store, others) == Misses([0, 2, 3], [])


@pytest.mark.parametrize("others", [IDS[1:], IDS + 1], ids=["fewer", "as-many"])
def test_a_fingerprint_stands_for_one_set_of_ids(root: Path, others: Ids) -> None:
    with make(root) as store:
        put(store)
    with pytest.raises(ValueError, match="which samples"):
        RecordStore(root, FINGERPRINT, others, others)
    with make(root) as store:
        assert read_right(store) == Misses([], [])


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
    head, payload = spoilt[7]
    spoilt[7] = head, bytes(payload)[:-1], b"?"
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


def test_another_format_is_dropped(root: Path) -> None:
    folder = sealed(root)
    path = folder / "generation.json"
    folders.write_facts(path, folders.read_facts(path, SEED) | {"format": folders.FORMAT + 1}, SEED)
    assert folders.describe(folder) is None
    with make(root) as store:
        assert store.stored() == 0
        put(store)
        assert store.seal()
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


def test_a_restart_of_the_machine_costs_what_was_unfinished(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make(root) as store:
        put(store, IDS[:50])
    monkeypatch.setattr("datacache.store.folders.boot", lambda: "another")
    with make(root) as store:
        assert store.stored() == 0
    sealed(root)
    monkeypatch.setattr("datacache.store.folders.boot", lambda: "a third")
    with make(root) as store:
        assert store.is_sealed


def names_other_places(index: bytes) -> bytes:
    starts, sizes = np.frombuffer(index, "<i8").reshape(2, len(IDS))
    return np.stack([starts[::-1], sizes]).tobytes()


@pytest.mark.parametrize(
    ("change_bytes", "name"),
    [
        *product([lambda old: old[:-1], lambda old: b"x" + old], ["COMPLETE", "index", "records"]),
        (names_other_places, "index"),
    ],
)
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


def test_what_a_crash_left_of_making_or_removing_is_removed(root: Path) -> None:
    for name in (".new-gen-x-1234", ".old-gen-y-1234"):
        (root / name).mkdir(parents=True)
        (root / name / "records").write_bytes(bytes(1000))
    make(root).close()
    assert sorted(path.name for path in root.iterdir()) == [f"gen-{FINGERPRINT}", "lock"]


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


def test_a_read_only_cache_is_read(tmpfs: Path) -> None:
    sealed(tmpfs / "cache")
    subprocess.run(["mount", "-o", "remount,ro", str(tmpfs)], check=True)
    with make(tmpfs / "cache") as store:
        assert store.is_sealed
        assert read_right(store) == Misses([], [])
        with pytest.warns(UserWarning, match="repaired records cannot be stored"):
            store.replace(IDS[:1], records(IDS[:1]))
