"""Checkpoints: exact to the bit, whole or not there, whatever is killed, full, damaged or mutated.

The tests of ``ranks`` are also run under mpirun, by tests/test_under_mpirun.py.
"""

import builtins
import json
import math
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import struct
import subprocess
import sys
import tracemalloc
from contextlib import contextmanager

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from xxhash import xxh3_128_hexdigest

from commlib import InvalidArgument, RanksDisagree, transport
from tests.extent import ALL, examples
from tests.training.refusal import refused
from tests.training.stored import COMPLETE, OWN, SHARED, manifest_of, newest, save_whole, write_manifest
from training.checkpoint import folders as checkpoints
from training.checkpoint import serialization as trees
from training.checkpoint.folders import CheckpointFailed, Checkpoints, merged, taken_over
from training.checkpoint.places import Folder
from training.checkpoint.serialization import Damaged, check_file, read_tree, write_tree

FORK = multiprocessing.get_context("fork")


def same(one, other):
    """Tell whether two trees are equal in every type, key order and bit."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, (np.ndarray, np.generic)):
        return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    if isinstance(one, float):
        return struct.pack(">d", one) == struct.pack(">d", other)
    return one == other


def round_trip(path, tree):
    written = write_tree(path, tree)
    assert path.stat().st_size == written.bytes
    return read_tree(path, written)


ODD_NAN = struct.unpack(">d", bytes.fromhex("fff8000000000123"))[0]

PLAIN = {
    "None": None,
    "booleans": [True, False, 1, 0],
    "floats": [0.1, -0.0, 5e-324, 1.7976931348623157e308],
    "not finite": [math.inf, -math.inf, math.nan, ODD_NAN],
    "text": ["ρ", "\ud800", "~0/~1"],
    "tuples": ((), [({},)]),
    "empty": {},
    "": {"": 1},
}
ARRAYS = {
    "0-d": np.array(2.5, np.float32),
    "transposed": np.arange(6, dtype=np.float32).reshape(2, 3).T,
    "bfloat16": np.arange(5).astype(ml_dtypes.bfloat16),
    "float8": np.arange(5).astype(ml_dtypes.float8_e5m2),
    "NaNs": np.array([0x7FC00001, 0xFF800000], np.uint32).view(np.float32),
    "scalars": [np.float64(0.1), np.int32(-3), np.bool_(True), ml_dtypes.bfloat16(1.5)],
    "a/b": {"c": np.zeros(1)},
    "a": {"b/c": np.ones(1), "b": {"c": np.full(1, 2.0)}, "b~1c": np.full(1, 3.0)},
    "__metadata__": np.full(1, 4.0),
}


@pytest.mark.parametrize("tree", [PLAIN, ARRAYS, None, ARRAYS["scalars"]])
def test_a_tree_comes_back_equal_in_every_bit_and_type(tmp_path, tree):
    assert same(round_trip(tmp_path / "tree", tree), tree)


LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | hnp.arrays(hnp.scalar_dtypes(), hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3))
)
TREES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=4), inner, max_size=4)
    ),
    max_leaves=10,
)


@given(tree=TREES)
@settings(max_examples=examples(100))
def test_any_tree_comes_back(tmp_path_factory, tree):
    assert same(round_trip(tmp_path_factory.mktemp("any") / "tree", tree), tree)


def test_what_comes_back_is_new_writable_memory(tmp_path):
    array = round_trip(tmp_path / "tree", {"a": np.arange(3)})["a"]
    array += 1
    assert array.tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"a": {3: 1}}, "/a: expected keys of str, got 3"),
        ([(0, {1, 2})], r"/0/1: expected None, .*, got builtins\.set"),
        ({"x": np.array([None])}, "/x: expected an array of numbers or text, got one of object"),
        (b"bytes", r"/: .*builtins\.bytes"),
    ],
)
def test_what_would_not_come_back_equal_is_refused_and_nothing_is_written(tmp_path, tree, message):
    with pytest.raises(InvalidArgument, match=message):
        write_tree(tmp_path / "tree", tree)
    assert list(tmp_path.iterdir()) == []


def test_readers_of_safetensors_find_the_arrays_under_their_places(tmp_path):
    from safetensors.numpy import load_file

    tree = {
        "weights": {"conv/kernel": np.arange(6, dtype=np.float32).reshape(2, 3).T, "step": np.array(7)},
        "momentum": (np.arange(4).astype(ml_dtypes.bfloat16), np.array([True, False])),
    }
    write_tree(tmp_path / "tree", tree)
    found = load_file(tmp_path / "tree")
    expected = {
        "/weights/conv~1kernel": tree["weights"]["conv/kernel"],
        "/weights/step": tree["weights"]["step"],
        "/momentum/0": tree["momentum"][0],
        "/momentum/1": tree["momentum"][1],
    }
    assert same(dict(sorted(found.items())), dict(sorted(expected.items())))


def test_a_large_array_is_written_without_a_copy_and_read_with_one(tmp_path):
    tree = {"weights": np.arange(1 << 23, dtype=np.float64)}  # 64 MiB
    size = tree["weights"].nbytes
    tracemalloc.start()
    try:
        written = write_tree(tmp_path / "tree", tree)
        _, writing = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        restored = read_tree(tmp_path / "tree", written)
        _, reading = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert writing < size / 4
    assert reading < size * 5 / 4
    assert same(restored, tree)


def shared_tree(step):
    return {
        "step": step,
        "weights": {"dense/kernel": np.arange(40, dtype=np.float32) * step},
        "random": (2**127 + step, None),
    }


def own_tree(step, rank):
    return {"residual": np.arange(30, dtype=np.float32) + 100 * rank + step, "nodes": ((0, 1), (2,))}


def save(store, comm, step, **options):
    """Save trees that tell their step and rank; only rank 0's ``shared`` may count."""
    save_whole(store, step, shared_tree(step if comm.rank == 0 else -1), own_tree(step, comm.rank), **options)


def steps(folder):
    """Return the steps of the folders there, and check that nothing else is there."""
    names = sorted(path.name for path in folder.iterdir())
    assert all(name.startswith("step-") for name in names), names
    return [int(name.split("-")[1]) for name in names]


def is_right(checkpoint, comm, step):
    """Tell whether all of a checkpoint is what ``save`` saved at ``step`` from as many ranks."""
    return (
        (checkpoint.step, checkpoint.world_size) == (step, comm.size)
        and same(checkpoint.shared, shared_tree(step))
        and same(checkpoint.own, own_tree(step, comm.rank))
        and all(same(checkpoint.own_of(rank), own_tree(step, rank)) for rank in range(comm.size))
    )


def fill(folder, ranks, run=""):
    """Save steps 1 and 2 from so many ranks; return the folder of the second."""

    def body(comm):
        store = Checkpoints(Folder(folder), comm, run=run)
        save(store, comm, 1)
        save(store, comm, 2)

    transport.simulated.run(body, ranks)
    return folder / "step-00000002"


def newest_steps(folder, ranks, run=""):
    return transport.simulated.run(
        lambda comm: newest(Checkpoints(Folder(folder), comm, run=run)).step, ranks
    )


def common(comm, path):
    """Return rank 0's path: under mpirun every rank's test has a folder of its own."""
    return comm.allgather_objects(path)[0]


def keeps_the_last_and_the_best(place, steps_there, comm):
    """Tell what is there after each of seven steps, and whether the last and the best are right."""
    store, kept = Checkpoints(place, comm, keep=2), []
    assert newest(store) is None
    for step in range(1, 8):
        save(store, comm, step, best=step in (2, 5))
        comm.barrier()
        kept.append(steps_there())
        comm.barrier()
    again = Checkpoints(place, comm, keep=2)
    assert again.count() == 3
    expected = [[1], [1, 2], [2, 3], [2, 3, 4], [4, 5], [5, 6], [5, 6, 7]]
    best = next(each for each in again.complete() if each.step == 5)
    return kept == expected and is_right(best, comm, 5) and is_right(newest(store), comm, 7)


def finds_a_run_that_went_back(place, comm):
    """Tell whether what is saved last counts: a step that is there already, or one before others."""
    found = []
    for step in (10, 20, 20, 10):
        store = Checkpoints(place, comm, keep=2)  # as another process does
        save(store, comm, step)
        found.append(is_right(newest(store), comm, step))
    return found == [True] * 4


def test_the_last_and_the_best_are_kept_and_found_by_every_rank(ranks, tmp_path):
    def body(comm):
        folder = common(comm, tmp_path / "new" / "checkpoints")
        return keeps_the_last_and_the_best(Folder(folder), lambda: steps(folder), comm)

    assert all(ranks.run(body))


def test_the_files_are_those_that_the_manifest_names(tmp_path):
    transport.simulated.run(
        lambda comm: save(Checkpoints(Folder(tmp_path), comm, run="a run"), comm, 40, best=True), 2
    )
    folder = tmp_path / "step-00000040"
    manifest = manifest_of(folder)
    files, run = manifest.pop("files"), manifest.pop("run")
    assert run == "a run"
    assert manifest == {"step": 40, "number": 1, "world_size": 2, "best": True, "format": 3}
    assert sorted([*files, COMPLETE]) == sorted(path.name for path in folder.iterdir())
    assert set(files) == {SHARED, OWN.format(0), OWN.format(1)}
    for name, entry in files.items():
        check_file(folder / name, trees.Written(**entry))


def test_a_run_that_went_back_is_found_where_it_is(ranks, tmp_path):
    assert all(ranks.run(lambda comm: finds_a_run_that_went_back(Folder(common(comm, tmp_path)), comm)))


def test_ranks_that_are_not_at_the_same_step_are_told(ranks, tmp_path):
    def body(comm):
        store = Checkpoints(Folder(common(comm, tmp_path)), comm)
        with pytest.raises(RanksDisagree, match=r"step is 1 on ranks \[0.*2 on ranks \["):
            save(store, comm, 1 + (comm.rank == comm.size - 1))
        return True

    if ranks.size > 1:
        assert all(ranks.run(body))


def flip(path, bit):
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def damages(path, seed):
    """Yield, one after another, the file with flipped bits, cut, longer, and removed; then heal it."""
    content, generator = path.read_bytes(), random.Random(seed)
    for bit in [0, 8 * len(content) - 1, *generator.sample(range(8 * len(content)), 12)]:
        flip(path, bit)
        yield
        path.write_bytes(content)
    for length in [0, 1, len(content) - 1, *generator.sample(range(len(content)), 4)]:
        path.write_bytes(content[:length])
        yield
    path.write_bytes(content + b"\n")
    yield
    path.unlink()
    yield
    path.write_bytes(content)


@pytest.mark.parametrize("name", [COMPLETE, SHARED, OWN.format(0), OWN.format(1)])
def test_instead_of_a_damaged_one_the_one_before_is_found_and_the_file_is_named(tmp_path, capsys, name):
    def find(comm):
        found = newest(Checkpoints(Folder(tmp_path), comm))
        return found.step if is_right(found, comm, found.step) else None

    path = fill(tmp_path, 2) / name
    assert transport.simulated.run(find, 2) == [2, 2]
    assert capsys.readouterr().err == ""
    count = 0
    for _ in damages(path, len(name)):
        assert transport.simulated.run(find, 2) == [1, 1]
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("cloudtrain: warning: ")
        assert str(path) in line
        count += 1
    assert count == 23
    assert transport.simulated.run(find, 2) == [2, 2]


def without(body, key):
    return {name: value for name, value in body.items() if name != key}


WRONG_MANIFESTS = {
    "no JSON": (lambda body: "a: 1", "invalid JSON"),
    "no step": (lambda body: without(body, "step"), "manifest.step: missing"),
    "a file less": (
        lambda body: body | {"files": without(body["files"], OWN.format(1))},
        "expected world_size 1, got 2",
    ),
    "another file": (
        lambda body: body | {"files": without(body["files"], SHARED) | {"other": body["files"][SHARED]}},
        "expected files ['own-00000.safetensors', 'own-00001.safetensors', 'shared.safetensors'], got",
    ),
    "another format": (lambda body: body | {"format": 4}, "expected format 3, got 4"),
    "another step": (lambda body: body | {"step": 3}, "expected step 00000002, got 00000003"),
}


@pytest.mark.parametrize("name", WRONG_MANIFESTS)
def test_a_wrong_manifest_is_one_line_and_the_checkpoint_before_is_found(tmp_path, capsys, name):
    change, expected = WRONG_MANIFESTS[name]
    last = fill(tmp_path, 2, run="this")
    write_manifest(last, change(manifest_of(last)))
    assert newest_steps(tmp_path, 2, run="this") == [1, 1]
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"cloudtrain: warning: a checkpoint is left out: {last / COMPLETE}: ")
    assert expected in line
    assert len(line) < 1000


def test_checkpoints_of_another_run_are_neither_found_nor_removed(tmp_path, capsys, alone):
    theirs, ours = (Checkpoints(Folder(tmp_path), alone, run=run, keep=1) for run in ("theirs", "ours"))
    for step in (7, 8, 9):
        save(theirs, alone, step)
    assert newest(ours) is None
    assert ours.count() == 1
    manifest = tmp_path / "step-00000009" / COMPLETE
    assert f"{manifest}: expected run ours, got theirs" in capsys.readouterr().err
    for step in (1, 2):
        save(ours, alone, step)
    assert steps(tmp_path) == [2, 9]
    assert is_right(newest(ours), alone, 2)


def a_tree(header, arrays=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + arrays


def described(tree):
    return {"__metadata__": {"tree": tree if isinstance(tree, str) else json.dumps(tree)}}


WRONG_TREES = {
    "no JSON": a_tree(b"no JSON"),
    "nested": a_tree(described("[" * 200_000)),
    "two kinds": a_tree(described({"dict": {}, "tuple": []})),
    "array of objects": a_tree(described({"array": ["|O", [1]]}), bytes(8)),
    "larger than the file": a_tree(described({"array": ["<f4", [10**15]]}), bytes(8)),
    "too much": a_tree(described({"array": ["<f4", [2]]}), bytes(9)),
}


@pytest.mark.parametrize("name", WRONG_TREES)
def test_a_valid_digest_around_what_is_no_tree_is_one_line(tmp_path, name):
    path, content = tmp_path / "tree", WRONG_TREES[name]
    path.write_bytes(content)
    with refused(f"{path}: expected a tree", Damaged) as caught:
        read_tree(path, trees.Written(len(content), xxh3_128_hexdigest(content)))
    assert len(str(caught.value)) < 500


def test_damage_after_it_was_found_is_an_error(tmp_path, alone):
    store = Checkpoints(Folder(tmp_path), alone)
    save(store, alone, 1)
    found = newest(store)
    flip(found.path / OWN.format(0), 777)
    with pytest.raises(Damaged, match=OWN.format(0)):
        found.own_of(0)


@pytest.mark.parametrize(("before", "after"), [(4, 2), (5, 3), (2, 5), (3, 1), (1, 4)])
def test_another_world_takes_over_all_residuals(tmp_path, before, after):
    length = 1000

    def residual(rank):
        return np.random.default_rng(rank).standard_normal(length).astype(np.float32)

    def write(comm):
        save_whole(Checkpoints(Folder(tmp_path), comm), 3, {"a": 1}, {"residual": residual(comm.rank)})

    def read(comm):
        found = newest(Checkpoints(Folder(tmp_path), comm))
        assert (found.step, found.world_size, found.shared, found.own) == (3, before, {"a": 1}, None)
        ranks = taken_over(found.world_size, comm.rank, comm.size)
        return merged(lambda rank: found.own_of(rank)["residual"], length, ranks)

    transport.simulated.run(write, before)
    results = transport.simulated.run(read, after)
    exact = np.sum([residual(rank) for rank in range(before)], axis=0, dtype=np.float64)
    magnitude = np.sum([np.abs(each) for each in results], axis=0, dtype=np.float64)
    error = np.abs(np.sum(results, axis=0, dtype=np.float64) - exact)
    assert np.all(error <= magnitude * 2.0**-24)  # each result is rounded once, by half a unit at most
    for rank, result in enumerate(results):
        assert result.dtype == np.float32
        if rank >= before:
            assert not result.any()
        elif before <= after:
            assert same(result, residual(rank))


@pytest.mark.parametrize("rank", range(5))
def test_another_world_finds_damage_of_every_rank_of_then(tmp_path, capsys, rank):
    flip(fill(tmp_path, 5) / OWN.format(rank), 1500)
    assert newest_steps(tmp_path, 2) == [1, 1]
    assert OWN.format(rank) in capsys.readouterr().err


def kill_at(number, folder):
    """Save step 3, and kill this process before it changes the folder for the ``number``-th time."""
    changes = 0

    def change():
        nonlocal changes
        changes += 1
        if changes == number:
            os.kill(os.getpid(), signal.SIGKILL)

    def audit(event, arguments):
        is_write = event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir") or is_write:
            change()

    fsync = os.fsync
    os.fsync = lambda descriptor: (change(), fsync(descriptor))  # which has no audit event
    comm = transport.simulated.run(lambda comm: comm, 1)[0]
    sys.addaudithook(audit)
    save(Checkpoints(Folder(folder), comm, keep=2), comm, 3)
    os._exit(0)


def test_killed_before_any_change_of_the_folder_a_whole_one_is_there(tmp_path, capsys, alone):
    for number in range(1, 100):
        folder = tmp_path / str(number)
        store = Checkpoints(Folder(folder), alone, keep=2)
        for step in (1, 2):
            save(store, alone, step)
        process = FORK.Process(target=kill_at, args=(number, folder))
        process.start()
        process.join(100)
        found = newest(store)
        assert found.step in (2, 3)
        assert is_right(found, alone, found.step)
        save(store, alone, 4)
        assert steps(folder) == [found.step, 4]
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
    assert capsys.readouterr().err == ""
    # mkdir, three files opened and synced, two folders synced, two renames, and the oldest's removal
    assert number > 12


def test_everything_is_synced_before_it_is_renamed(tmp_path, monkeypatch, alone):
    """A power cut keeps what was synced: files and folder before the rename, the folder above after it."""
    done, fsync, rename = [], os.fsync, os.rename

    def record_sync(descriptor):
        done.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")).split("-step-")[0])
        fsync(descriptor)

    def record_rename(source, target, **folders):
        done.append("rename")
        rename(source, target, **folders)

    monkeypatch.setattr(os, "fsync", record_sync)
    monkeypatch.setattr(os, "rename", record_rename)
    save(Checkpoints(Folder(tmp_path / "store"), alone), alone, 1)
    above = tmp_path.name  # of which "store" is new
    assert done == [above, OWN.format(0), SHARED, COMPLETE, "unfinished", "rename", "store"]


@pytest.mark.parametrize("victim", [0, 1])
def test_where_one_rank_cannot_write_all_are_told_and_nothing_is_left(tmp_path, monkeypatch, victim):
    def full(path, tree):
        if path.name == OWN.format(victim):
            path.write_bytes(b"half")
            raise OSError(28, "No space left on device")
        return write_tree(path, tree)

    transport.simulated.run(lambda comm: save(Checkpoints(Folder(tmp_path), comm), comm, 1), 2)
    monkeypatch.setattr(checkpoints, "write_tree", full)

    def body(comm):
        store = Checkpoints(Folder(tmp_path), comm)
        with pytest.raises(CheckpointFailed, match=f"step 2 is not saved: rank {victim}: .*No space left"):
            save(store, comm, 2)
        comm.barrier()
        return steps(tmp_path), is_right(newest(store), comm, 1)

    assert transport.simulated.run(body, 2) == [([1], True)] * 2


def test_an_error_in_the_background_is_all_ranks_and_the_next_one_is_written(tmp_path):
    def broken(name, step):
        raise OSError(5, "Input/output error")

    def body(comm):
        store = Checkpoints(Folder(tmp_path), comm)
        save(store, comm, 1)
        complete, store.place.complete = store.place.complete, broken  # by rank 0, when all have written
        store.start(2, {}, {})
        assert store.proceed() is None
        with pytest.raises(CheckpointFailed, match="step 2 is not saved: rank 0: .*Input/output error"):
            store.proceed()
        assert not store.is_under_way
        left = steps(tmp_path)
        comm.barrier()
        store.place.complete = complete
        save(store, comm, 3)
        return left, is_right(newest(store), comm, 3)

    assert transport.simulated.run(body, 2) == [([1], True)] * 2


@pytest.fixture
def small(tmp_path):
    mount = tmp_path / "small"
    mount.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(mount)], check=True)
    yield mount
    subprocess.run(["umount", "-l", str(mount)], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a filesystem takes root")
def test_the_rest_of_a_crash_is_removed_first_and_a_full_disk_is_one_error(small):
    leftover = small / "unfinished-step-00000001-0123abcd"
    leftover.mkdir()
    (leftover / SHARED).write_bytes(bytes(5 << 19))  # of six

    def half_a_mib(step, rank):
        return {"array": np.random.default_rng([step, rank]).integers(0, 256, 1 << 19, np.uint8)}

    def body(comm):
        store = Checkpoints(Folder(small), comm)
        save_whole(store, 1, half_a_mib(1, 99), half_a_mib(1, comm.rank))
        with pytest.raises(CheckpointFailed, match="step 2 is not saved: .*No space left on device"):
            save_whole(store, 2, half_a_mib(2, 99), half_a_mib(2, comm.rank))
        comm.barrier()
        found = newest(store)
        return steps(small), same((found.shared, found.own), (half_a_mib(1, 99), half_a_mib(1, comm.rank)))

    assert transport.simulated.run(body, 2) == [([1], True)] * 2


def test_a_folder_that_cannot_be_made_is_one_error(ranks, tmp_path):
    def body(comm):
        parent = common(comm, tmp_path / "file")
        if comm.rank == 0:
            parent.write_text("no folder")
        comm.barrier()
        with pytest.raises(CheckpointFailed, match="rank 0: .*Not a directory"):
            save(Checkpoints(Folder(parent / "checkpoints"), comm), comm, 1)
        return True

    assert all(ranks.run(body))


def test_a_folder_that_others_do_not_see_is_one_error(tmp_path):
    def body(comm):
        own = tmp_path / f"host{comm.rank // 2}"  # as a disk of each node's own
        with pytest.raises(CheckpointFailed, match="rank 2 on node1 does not see it: choose a folder"):
            save(Checkpoints(Folder(own), comm), comm, 1)
        return True

    assert transport.simulated.run(body, 4, 2) == [True] * 4
    assert [path.name for path in tmp_path.rglob("*")] == ["host0"]


# Kinds of values that no test may reach, in a process that reads what a stranger could have written.
EXECUTING = [(builtins, "exec"), (builtins, "eval"), (os, "system"), (subprocess, "Popen")]
EXECUTING += [(pickle, "loads"), (pickle, "load"), (pickle, "Unpickler")]


@contextmanager
def nothing_is_executed(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("something was executed")

    "\0".encode("unicode_escape")  # imports the codec, which would be executed at the first line printed
    with monkeypatch.context() as patched:
        for module, name in EXECUTING:
            patched.setattr(module, name, refuse)
        yield


def changed(content, chance: random.Random):
    """Return a copy of what JSON holds with one value changed, lost or repeated."""
    if isinstance(content, dict) and content and chance.random() < 0.8:
        key = chance.choice(list(content))
        kind = chance.random()
        rest = {name: value for name, value in content.items() if name != key}
        if kind < 0.1:
            return rest
        return {**rest, key if kind < 0.9 else f"{key}\x1b": changed(content[key], chance)}
    if isinstance(content, list) and content and chance.random() < 0.8:
        at = chance.randrange(len(content))
        return [
            *content[:at],
            *chance.choice([[], [changed(content[at], chance)], content]),
            *content[at + 1 :],
        ]
    numbers = (-1, 0, 1e308, 10**400, 5e-324, float("nan"), float("inf"))
    return chance.choice([None, True, "x" * 5000, "\x1b[31m", *numbers, [], {}, [[]]])


def mutate_header(content: bytes, chance: random.Random) -> bytes:
    """Return a file of a tree with a value of its header changed, or of the tree that the header holds."""
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    if chance.random() < 0.5:
        tree = changed(json.loads(header["__metadata__"]["tree"]), chance)
        header["__metadata__"]["tree"] = json.dumps(tree)
    else:
        header = changed(header, chance)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + content[8 + length :]


def mutate(folder, chance):
    """Change one file of a checkpoint, and all digests with it."""
    name = chance.choice([COMPLETE, SHARED, OWN.format(0)])
    manifest = manifest_of(folder)
    if name == COMPLETE:
        manifest = changed(manifest, chance)
    else:
        content = mutate_header((folder / name).read_bytes(), chance)
        (folder / name).write_bytes(content)
        manifest["files"][name] = {"bytes": len(content), "digest": xxh3_128_hexdigest(content)}
    write_manifest(folder, json.dumps(manifest))


def test_mutated_checkpoints_are_left_out_or_whole_and_nothing_is_executed(
    tmp_path, capsys, monkeypatch, alone
):
    """With a right digest only the form is checked: a file without a tree is left out, any tree is taken."""
    whole, folder = tmp_path / "whole", tmp_path / "run"
    store = Checkpoints(Folder(whole), alone, run="this")
    for step in (1, 2):
        save_whole(store, step, shared_tree(step), own_tree(step, 0))
    shutil.copytree(whole, folder)
    last = "step-00000002"
    found = {1: 0, 2: 0}

    @given(chance=st.randoms(use_true_random=False))
    @settings(max_examples=10_000 if ALL else 150)
    def body(chance):
        for file in (whole / last).iterdir():
            (folder / last / file.name).write_bytes(file.read_bytes())
        mutate(folder / last, chance)
        capsys.readouterr()
        with nothing_is_executed(monkeypatch):
            checkpoint = newest(Checkpoints(Folder(folder), alone, run="this"))
        lines = capsys.readouterr().err.splitlines()
        found[checkpoint.step] += 1
        if checkpoint.step == 1:
            assert same(checkpoint.shared, shared_tree(1))
            assert same(checkpoint.own, own_tree(1, 0))
            (line,) = lines
            assert line.isprintable(), line
            assert " is left out: " in line

    body()
    assert min(found.values()) > 0
