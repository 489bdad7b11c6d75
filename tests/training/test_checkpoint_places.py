"""Checkpoints elsewhere than in the run's folder: on a storage of objects, and on each host's own disk."""

import os
import random
import uuid

import numpy as np
import pytest

from commlib import transport
from datacache.storage import Storage
from tests.s3_server import BUCKET, s3_server
from tests.training import small
from tests.training.stored import OWN, SHARED, newest, save_whole
from tests.training.test_checkpoints import (
    finds_a_run_that_went_back,
    is_right,
    keeps_the_last_and_the_best,
    own_tree,
    same,
    save,
    shared_tree,
)
from tests.training.test_receipt import replayed
from training.checkpoint.folders import CheckpointFailed, Checkpoints
from training.checkpoint.places import COMPLETE, Folder, Objects
from training.process.supervisor import Progress


@pytest.fixture
def s3():
    pytest.importorskip("s3fs", reason="it is in the extra s3")
    with s3_server() as server:
        yield server


def in_memory():
    return Storage(f"memory://{uuid.uuid4().hex}", first_wait_seconds=0.001, attempts=2)


@pytest.fixture(params=["memory", "s3"])
def storage(request):
    """Return a storage of objects with nothing in it."""
    if request.param == "memory":
        return in_memory()
    server = request.getfixturevalue("s3")
    return Storage(f"s3://{BUCKET}/run", **server.storage, attempts=2)


def names(storage):
    """Return the names of all checkpoints of which there is an object, and check that all are whole."""
    try:
        found = {}
        for each in storage.files():
            name, _, file = each.path.partition("/")
            found.setdefault(name, set()).add(file)
    except FileNotFoundError:
        return []
    assert all(files >= {COMPLETE, SHARED, OWN.format(0)} for files in found.values()), found
    return sorted(found)


def steps(storage):
    return [int(name.split("-")[1]) for name in names(storage)]


def test_all_ranks_find_what_they_saved_last_and_the_best_is_kept(storage):
    def body(comm):
        return keeps_the_last_and_the_best(Objects(storage), lambda: steps(storage), comm)

    assert all(transport.simulated.run(body, 3, 2))


def test_a_run_that_went_back_is_found_where_it_is_also_by_another_process(storage):
    assert all(transport.simulated.run(lambda comm: finds_a_run_that_went_back(Objects(storage), comm), 2))


class Crash(BaseException):
    """A process ends here."""


class Crashing(Storage):
    """A storage whose process ends after ``left`` changes."""

    left = NEVER = 10**9

    def change(self):
        self.left -= 1
        if self.left < 0:
            raise Crash

    def writing(self, path):
        self.change()
        return super().writing(path)

    def remove(self, path):
        self.change()
        super().remove(path)


def test_what_is_half_written_is_never_taken_and_is_removed_by_the_next(capsys, alone):
    """A process that ends at any change of the storage: the checkpoint before is found."""
    storage = Crashing(f"memory://{uuid.uuid4().hex}")
    save(Checkpoints(Objects(storage), alone, keep=1), alone, 1)
    taken = []
    for changes in range(100):
        before = newest(Checkpoints(Objects(storage), alone)).step
        storage.left = changes
        try:
            save(Checkpoints(Objects(storage), alone, keep=1), alone, before + 1)
        except Crash:
            storage.left = storage.NEVER
        else:
            break
        found = newest(Checkpoints(Objects(storage), alone))
        assert found.step in (before, before + 1)
        assert is_right(found, alone, found.step)
        taken.append(found.step - before)
    assert taken[:3] == [0, 0, 0]  # two files of the state, and the manifest
    assert taken[3:] == [1] * (len(taken) - 3)
    storage.left = storage.NEVER
    save(Checkpoints(Objects(storage), alone, keep=1), alone, 1000)
    assert steps(storage) == [1000]
    assert capsys.readouterr().err == ""  # half a checkpoint is none, and no damaged one


def test_objects_of_others_stay(alone):
    storage = in_memory()
    with storage.writing("notes/why.txt") as file:
        file.write(b"mine")
    for step in (1, 2):
        save(Checkpoints(Objects(storage), alone, keep=1), alone, step)
    assert storage.read("notes/why.txt") == b"mine"


DAMAGED = [("memory", COMPLETE), ("memory", SHARED), ("s3", OWN.format(1))]


@pytest.mark.parametrize(("storage", "name"), DAMAGED, indirect=["storage"])
def test_instead_of_a_damaged_object_the_checkpoint_before_is_taken_and_it_is_named(storage, capsys, name):
    def fill(comm):
        for step in (1, 2):
            save(Checkpoints(Objects(storage), comm), comm, step)

    transport.simulated.run(fill, 2)
    last = names(storage)[-1]
    content = bytearray(storage.read(f"{last}/{name}"))
    generator = random.Random(len(content))
    for bit in (0, 8 * len(content) - 1, generator.randrange(8 * len(content))):
        content[bit // 8] ^= 1 << bit % 8
        with storage.writing(f"{last}/{name}") as file:
            file.write(content)
        found = transport.simulated.run(
            lambda comm: is_right(newest(Checkpoints(Objects(storage), comm)), comm, 1), 2
        )
        assert found == [True, True]
        (line,) = capsys.readouterr().err.splitlines()
        assert f"is left out: {storage.url}/{last}/{name}: " in line
        content[bit // 8] ^= 1 << bit % 8


def test_a_storage_that_refuses_is_one_line_on_all_ranks_and_no_new_beginning(s3):
    storage = Storage(f"s3://{BUCKET}/run", **s3.storage, attempts=1)

    def body(comm):
        store = Checkpoints(Objects(storage), comm)
        save(store, comm, 1)
        comm.barrier()
        s3.refuses = True
        with pytest.raises(CheckpointFailed, match=r"^s3://bucket/run: step 2 .* rank \d: s3://buck"):
            save(store, comm, 2)
        with pytest.raises(ValueError, match=r"^checkpoints: s3://bucket/run: expected a place"):
            newest(Checkpoints(Objects(storage), comm))
        comm.barrier()
        s3.refuses = False
        return is_right(newest(Checkpoints(Objects(storage), comm)), comm, 1)

    assert transport.simulated.run(body, 2) == [True] * 2


def test_a_server_that_fails_one_request_in_ten_and_parts_of_large_objects_give_the_same_state(s3):
    """12 MiB of an own tree are two parts of an upload of at least 5 MiB, and two requests to read."""
    s3.failing_share = 0.1
    settings = s3.storage
    settings["options"]["default_block_size"] = 6 << 20
    storage = Storage(f"s3://{BUCKET}/run", **settings)
    tree = {"residual": np.random.default_rng(1).integers(0, 256, 12 << 20, np.uint8)}

    def body(comm):
        store = Checkpoints(Objects(storage), comm)
        save_whole(store, 1, shared_tree(1), tree)
        return same(newest(store).own, tree)

    assert transport.simulated.run(body, 1) == [True]
    assert len({upload for upload, _ in s3.parts}) == 1
    assert len(s3.parts) >= 2


def on_disks(folder, comm, **options):
    """Return the checkpoints of ranks each of whose hosts has a disk of its own."""
    return Checkpoints(Folder(folder / comm.host), comm, per_host=True, **options)


def test_each_host_has_the_weights_and_the_state_of_its_own_ranks(tmp_path):
    def body(comm):
        store = on_disks(tmp_path, comm, keep=1)
        for step in (1, 2, 3):
            save_whole(store, step, shared_tree(step), own_tree(step, comm.rank))
        found = newest(on_disks(tmp_path, comm))
        return found.step, same(found.shared, shared_tree(3)), same(found.own, own_tree(3, comm.rank))

    assert transport.simulated.run(body, 5, [2, 3]) == [(3, True, True)] * 5
    files = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    ranks = {"node0": (0, 1), "node1": (2, 3, 4)}
    assert files == {
        f"{host}/step-0000000{step}/{name}"
        for step in (2, 3)  # two, though one is to be kept: a host may fail while others complete the third
        for host, own in ranks.items()
        for name in (COMPLETE, SHARED, *map(OWN.format, own))
    }


@pytest.mark.parametrize("victim", ["node0", "node1"])
def test_what_is_not_complete_on_all_hosts_is_not_taken(tmp_path, victim):
    """As where one host has lost its power while the manifests are written, and where its disk fails."""

    def body(comm):
        store = on_disks(tmp_path, comm, keep=1)
        save_whole(store, 1, shared_tree(1), own_tree(1, comm.rank))
        if comm.host == victim:
            store.place.complete = broken
        with pytest.raises(CheckpointFailed, match="step 2 is not saved: rank [02]: .*no disk"):
            save_whole(store, 2, shared_tree(2), own_tree(2, comm.rank))
        again = on_disks(tmp_path, comm)
        before = newest(again).step
        save_whole(again, 3, shared_tree(3), own_tree(3, comm.rank))
        return before, newest(again).step

    def broken(name, step):
        raise OSError(5, "no disk")

    assert transport.simulated.run(body, 4, 2) == [(1, 3)] * 4


def test_the_best_stays_until_all_hosts_have_a_better_one(tmp_path):
    def body(comm):
        store = on_disks(tmp_path, comm)
        for step in range(1, 6):
            save_whole(store, step, shared_tree(step), own_tree(step, comm.rank), best=step in (1, 5))
        return sorted(manifest.step for _, manifest in store._list().found)

    assert transport.simulated.run(body, 2, 1) == [[1, 3, 4, 5]] * 2


@pytest.mark.parametrize("nodes", [[2, 2, 1], [3, 2], [4], [1, 3]])
def test_other_hosts_or_ranks_do_not_find_what_they_have_not(tmp_path, capsys, nodes):
    transport.simulated.run(
        lambda comm: save_whole(on_disks(tmp_path, comm), 1, shared_tree(1), own_tree(1, comm.rank)), 4, 2
    )
    found = transport.simulated.run(lambda comm: newest(on_disks(tmp_path, comm)), sum(nodes), nodes)
    assert found == [None] * sum(nodes)
    if len(nodes) < 3:  # else one host has nothing at all
        assert "the checkpoint of step 1 is left out: " in capsys.readouterr().err


WORDS = ("digest_every=2", "log_every=1", "average=0.5")
PHASES = (small.phase(steps=8, batch=200),)


def checkpoints_of(s3):
    options = s3.storage["options"] | {"key": "${oc.env:S3_KEY}", "secret": "${oc.env:S3_SECRET}"}
    listed = ", ".join(f"{key}: '{value}'" for key, value in options.items())
    place = f"path: 's3://{BUCKET}/all', storage: {{options: {{{listed}}}}}"
    return f"checkpoints={{every_steps: 2, every_epochs: null, {place}}}"


def test_a_run_whose_checkpoints_are_objects_goes_on_to_the_bit_and_is_replayed(
    s3, tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv("S3_KEY", "a")
    monkeypatch.setenv("S3_SECRET", "b")
    elsewhere = checkpoints_of(s3)
    whole = small.trainer(tmp_path / "whole", *WORDS, phases=PHASES)
    whole.fit()
    small.crash_after(small.trainer(tmp_path / "runs", *WORDS, elsewhere, phases=PHASES), 5)
    (path,) = (tmp_path / "runs").iterdir()
    assert not (path / "checkpoints").exists()
    assert Progress.of(path).checkpoint == 2  # the last that was reported
    path = path.rename(path.with_name(path.name + "-1"))
    resumed = small.trainer(tmp_path / "runs", *WORDS, elsewhere, "resume=auto", phases=PHASES)
    resumed.fit()
    assert "resumed from step-00000004-" in capsys.readouterr().out
    small.assert_same_weights(resumed, whole)
    assert replayed(path, "6:8") == 0
    said = capsys.readouterr().out
    assert "steps 6 to 8, from the checkpoint of step 6" in said
    assert said.endswith("2 of 2 digests agree\n")
    assert "S3_SECRET" in (path / "config.yaml").read_text()
    assert {key.split("/")[0] for key in s3.objects} == {"all"}


def test_a_run_whose_checkpoints_are_lost_is_not_begun_again(tmp_path):
    def run(*words):
        place = f"path: {tmp_path / 'disk'}, per_node: true"
        checkpoints = f"checkpoints={{every_steps: 2, every_epochs: null, {place}}}"
        return small.trainer(tmp_path / "runs", *WORDS, checkpoints, *words, phases=PHASES)

    small.crash_after(run(), 5)
    (identity,) = (tmp_path / "disk").iterdir()
    assert [path.name for path in identity.iterdir()] == [os.uname().nodename]
    identity.rename(tmp_path / "gone")
    with pytest.raises(ValueError, match=r"^resume: .* checkpoint of step 2, .* in .*disk/.*, got none"):
        run("resume=auto").fit()
    (tmp_path / "gone").rename(identity)
    resumed = run("resume=auto")
    resumed.fit()
    assert resumed.position.steps == 8
