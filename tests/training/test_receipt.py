"""The receipt of a run: what it holds, what ``verify`` finds, and steps that ``replay`` makes again."""

import hashlib
import json
import re
import shutil
import subprocess
from dataclasses import replace

import keras
import pytest

from tests.launching import DIGITS, launch, run, tail
from tests.training.refusal import refused
from tests.training.small import LINEAR, crash_after, phase, trainer
from training.callbacks.digests import digest_of
from training.commands import receipt as commands
from training.config.run_files import FILES
from training.receipt import Job, Part, Process, Receipt, Recorded, _made_by, config_digest, file_of, problems
from training.source import Source, source

WORDS = ("digest_every=2", "checkpoints={every_steps: 3, every_epochs: null}", "log_every=1")
PHASES = (phase(steps=6), phase(steps=4, batch=32))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Return the folder of a run of ten steps in two phases, and its trainer."""
    parent = tmp_path_factory.mktemp("made")
    trained = trainer(parent, *WORDS, "callbacks=[mllog]", phases=PHASES)
    trained.fit()
    (folder,) = parent.iterdir()
    return folder, trained


@pytest.fixture
def folder(made, tmp_path):
    return shutil.copytree(made[0], tmp_path / "run")


def forge(folder):
    """Give a run's receipt the digests of its files as they are now, as who altered them would."""
    receipt = Receipt.read(folder)
    files = {name: file_of(folder / name) for name in receipt.end.files}
    end = replace(receipt.end, files=files)
    (folder / "receipt.json").write_text(replace(receipt, end=end).text())


def lines_of(folder):
    return (folder / "metrics.jsonl").read_text().splitlines()


def edited(kind, number, edit):
    """Return a function that replaces the record of a kind with this number by the lines of ``edit``."""

    def change(folder):
        lines = lines_of(folder)
        place = [place for place, line in enumerate(lines) if json.loads(line)["kind"] == kind][number]
        lines[place : place + 1] = edit(lines[place])
        (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))

    return change


def altered(kind, number, **values):
    return edited(kind, number, lambda line: [json.dumps(json.loads(line) | values)])


def without(kind, number):
    return edited(kind, number, lambda line: [])


def test_the_receipt_holds_what_a_run_was_made_of_and_digests_of_what_it_left(made):
    folder, trained = made
    receipt = Receipt.read(folder)
    (process,) = receipt.processes
    assert receipt.identity == json.loads((folder / "run.json").read_text())["identity"]
    assert process.config == config_digest(folder)
    parts = {name: (part.samples, part.fingerprint) for name, part in process.data.items()}
    assert parts == trained.data.fingerprints()
    assert (process.from_step, process.seed, process.digest_every) == (0, trained.config.seed, 2)
    job = process.job
    assert (job.ranks, job.nodes, job.hosts) == (1, [1], [trained.topology.world.host])
    assert process.versions["tensorflow"].startswith("2.")
    assert receipt.end.steps == 10
    assert receipt.end.weights == digest_of(each.numpy() for each in trained.model.trainable_variables)
    assert set(receipt.end.files) == set(FILES) - {"dawnbench.json", "dawnbench.tsv"}
    for name, file in receipt.end.files.items():
        content = (folder / name).read_bytes()
        assert (file.bytes, file.sha256) == (len(content), hashlib.sha256(content).hexdigest())


def test_a_checkout_has_its_commit_and_whether_it_was_changed(tmp_path, monkeypatch):
    assert (source(tmp_path).commit, source(tmp_path).dirty) == (None, None)
    for name in ("GIT_AUTHOR_NAME", "GIT_AUTHOR_EMAIL", "GIT_COMMITTER_NAME", "GIT_COMMITTER_EMAIL"):
        monkeypatch.setenv(name, "a@example.org")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")

    def git(*words):
        return subprocess.run(("git", "-C", tmp_path, *words), check=True, capture_output=True, text=True)

    git("init", "-q")
    assert source(tmp_path).commit is None  # there is none yet
    (tmp_path / "module.py").write_text("a = 1\n")
    git("add", ".")
    git("commit", "-qm", "first")
    monkeypatch.setenv("GIT_DIR", "/elsewhere")  # as a hook of git sets it
    found = source(tmp_path)
    monkeypatch.delenv("GIT_DIR")
    assert (found.commit, found.dirty) == (git("rev-parse", "HEAD").stdout.strip(), False)
    (tmp_path / "module.py").write_text("a = 2\n")
    assert source(tmp_path).dirty is True


def test_a_run_that_went_on_has_both_processes_and_is_verified_and_made_again(tmp_path, capsys):
    crashing = trainer(tmp_path, *WORDS, phases=PHASES)
    crash_after(crashing, 5)
    (folder,) = tmp_path.iterdir()
    (found,) = problems(folder)
    assert found.startswith(f"{folder}/receipt.json: expected the end of the run")
    trainer(tmp_path, *WORDS, "resume=auto", phases=PHASES).fit()
    receipt = Receipt.read(folder)
    assert [each.from_step for each in receipt.processes] == [0, 3]
    assert receipt.processes[0].config == receipt.processes[1].config
    assert list(problems(folder)) == []
    digests = [json.loads(line) for line in lines_of(folder) if '"digest"' in line]
    assert [each["steps"] for each in digests] == [2, 4, 4, 6, 8, 10]
    assert replayed(folder, "1:5") == 0  # over the step with which the second process began
    assert "2 of 2 digests agree" in capsys.readouterr().out


def test_a_run_as_it_was_written_is_right(folder, capsys):
    (folder / "dawnbench.json").write_text("{}")  # which the receipt does not know
    assert commands.verify([folder]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == f"{folder}: 6 files are as they were written, 5 digests of weights and all records agree"
    assert second == f"its receipt: {Receipt.read(folder).digest}"


@pytest.mark.parametrize("name", [*sorted(set(FILES) - {"dawnbench.json", "dawnbench.tsv"}), "receipt.json"])
@pytest.mark.parametrize("how", ["altered", "longer", "removed"])
def test_a_file_that_is_otherwise_is_named(folder, capsys, name, how):
    path = folder / name
    content = bytearray(path.read_bytes())
    if how == "removed":
        path.unlink()
    else:
        content[len(content) // 2] ^= 1
        path.write_bytes(content if how == "altered" else path.read_bytes() + b" \n")
    assert commands.verify([folder]) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith(f"{path}: ")
    assert all(line.startswith(str(folder)) for line in said)


RECORDS = [
    (altered("digest", -1, digest="0" * 16), "metrics.jsonl: digest after step 10: expected "),
    (without("digest", 1), "metrics.jsonl: expected the digest of the weights after step 4, got none"),
    (altered("step", 3, step=3), ": step: expected one after 0, 3, got 0, 3"),
    (altered("epoch", -1, top1=0.123), "summary.json: top1: expected 0.123 as in metrics.jsonl, got "),
    (without("summary", 0), "metrics.jsonl: expected the record of the summary, got none"),
    (altered("run", 0, identity="0" * 32), "metrics.jsonl: identity of the latest run: expected "),
    (edited("summary", 0, lambda line: [line, "[]"]), ": expected a record, got what is damaged"),
    (lambda run: (run / "config.yaml").write_text("seed: 9"), "config.yaml: expected the configuration"),
    *(
        (lambda run, text=text: (run / "config.yaml").write_text(text), "yaml: expected values that JSON has")
        for text in ("1: one\ntwo: 2", "seed: !!binary MQ==", "seed: &all [*all]")
    ),
]


@pytest.mark.parametrize(("change", "expected"), RECORDS)
def test_records_that_do_not_agree_are_found_though_the_files_have_their_digests(folder, change, expected):
    change(folder)
    forge(folder)
    found = list(problems(folder))
    assert any(expected in line for line in found), found
    assert all(line.startswith(str(folder)) and "\n" not in line for line in found)


def test_a_receipt_of_files_anywhere_is_found_and_they_are_not_read(folder):
    receipt = Receipt.read(folder)
    end = replace(receipt.end, files={"/dev/zero": receipt.end.files["run.json"]})
    (folder / "receipt.json").write_text(replace(receipt, end=end).text())
    (found,) = problems(folder)
    assert found.startswith(f"{folder}/receipt.json: expected digests of run.json, ")
    assert found.endswith(", got one of '/dev/zero'")


NO_RECEIPTS = {
    "another seed": lambda text: text.replace(b'"seed": 1', b'"seed": 2'),
    "no text": lambda text: b"\x80\x04.",
    "another format": lambda text: b'{"format": 2}',
    "of other kinds": lambda text: b'{"format": 1, "end": 3}',
}


@pytest.mark.parametrize("name", NO_RECEIPTS)
def test_what_is_no_receipt_or_an_altered_one_is_one_line(folder, name):
    path = folder / "receipt.json"
    path.write_bytes(NO_RECEIPTS[name](path.read_bytes()))
    (found,) = problems(folder)
    assert found.startswith(f"{path}: {'expected digest of the rest ' * (name == 'another seed')}")
    assert "\n" not in found


def replayed(folder, steps):
    keras.utils.clear_session()
    with pytest.raises(SystemExit) as caught:
        commands.replay(folder, steps)
    return caught.value.code


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_steps_that_are_made_again_agree_and_the_run_is_untouched(folder, capsys):
    before = contents(folder)
    assert replayed(folder, "6:10") == 0  # in the second phase
    records = map(json.loads, lines_of(folder))
    digests = {each["steps"]: each["digest"] for each in records if each["kind"] == "digest"}
    assert capsys.readouterr().out.splitlines() == [
        f"{folder}: steps 6 to 10, from the checkpoint of step 6",
        f"step 6: {digests[6]} agrees",
        f"step 8: {digests[8]} agrees",
        f"step 10: {digests[10]} agrees",
        "3 of 3 digests agree",
    ]
    assert contents(folder) == before


def test_a_digest_that_was_altered_is_found_from_the_beginning(folder, capsys):
    altered("digest", 0, digest="0" * 16)(folder)
    right = json.loads([line for line in lines_of(folder) if '"digest"' in line][1])["digest"]
    assert replayed(folder, "1:4") == 1
    first, second, third, last = capsys.readouterr().out.splitlines()
    assert first.endswith("steps 1 to 4, from the beginning")
    assert second.startswith(f"step 2: expected {'0' * 16}, got ")
    assert third == f"step 4: {right} agrees"
    assert last == "1 of 2 digests agree"


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("config.yaml", lambda old: old.replace(b"seed: 1", b"seed: 2")),
        ("receipt.json", lambda old: old[:99] + b"}" + old[100:]),
    ],
)
def test_a_run_whose_files_were_altered_is_not_made_again(folder, capsys, name, damage):
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(damage(content))
    assert (folder / name).read_bytes() != content
    assert replayed(folder, "6:10") == 2
    out, errors = capsys.readouterr()
    assert out == ""
    assert errors.startswith(f"cloudtrain: {folder}")
    assert name in errors
    assert len(errors.splitlines()) == 1


def test_without_a_damaged_checkpoint_the_steps_are_made_again_from_the_beginning(folder, capsys):
    (checkpoint,) = folder.glob("checkpoints/*06")
    (checkpoint / "COMPLETE").write_bytes(b"")
    assert replayed(folder, "6:10") == 0
    out, errors = capsys.readouterr()
    assert out.splitlines()[0] == f"{folder}: steps 6 to 10, from the beginning"
    assert out.splitlines()[-1] == "3 of 3 digests agree"
    assert f"cloudtrain: warning: a checkpoint is left out: {checkpoint}" in errors


@pytest.mark.parametrize("steps", ["3", "4:4", "4:11", "-1:3", "0:1"])
def test_steps_that_cannot_be_compared_are_refused_in_one_line(made, capsys, steps):
    assert replayed(made[0], steps) == 2
    known = (
        r"steps with a digest \(2, 4, 6, 8, 10\)"
        if steps == "0:1"
        else "A:B, with A below B, and B at most 10"
    )
    assert re.search(rf"--steps: expected {known}, got {steps}\n$", capsys.readouterr().err)


def process(from_step, *nodes, config="a"):
    data = {"training": Part(1, "f")}
    job = Job(sum(nodes), list(nodes), ["h"], "", "")
    return Process("", from_step, config, Source("1"), {}, job, data, 1, True, 2)


def test_steps_of_processes_that_were_not_alike_have_a_first_that_can_be_made_again():
    two, one, again = process(0, 1, 1), process(4, 1), process(6, 1)
    assert _made_by([two], 3) == (two, 0)
    assert _made_by([two, one, again], 9) == (again, 4)  # four steps were of two ranks
    assert _made_by([two, one, again], 5) == (one, 4)
    assert _made_by([two, one, again], 4) == (two, 0)
    back = process(2, 1)
    assert _made_by([two, one, again, back], 9) == (back, 2)  # it made what the others had made again
    assert _made_by([process(0, 1), process(3, 1, config="b")], 9)[1] == 3


@pytest.mark.parametrize(("begin", "last"), [(0, 0), (5, 4)])
def test_steps_that_no_process_of_the_receipt_made_are_refused(begin, last):
    with refused(f"--steps: expected steps after {begin}, got none up to {last}"):
        _made_by([process(begin, 1)], last)


def test_other_data_and_other_ranks_are_refused(folder):
    recorded = Recorded.of(folder, "2:4")
    found = {name: (part.samples, part.fingerprint) for name, part in recorded.process.data.items()}
    recorded.check_data(found)
    with refused("dataset: test samples: expected the 360 samples"):
        recorded.check_data(found | {"test": (360, "0" * 32)})
    with refused("expected 1 ranks, on nodes [1] as in the run, got 4, on nodes [2, 2]"):
        recorded.check_job([2, 2])


@pytest.mark.large
@pytest.mark.launch
def test_two_ranks_are_made_again_by_two_and_refused_by_one(tmp_path, capsys):
    small = (LINEAR, "ranks_per_node=1", "cache={}", "digest_every=2", "reducer={name: hitopk, density: 0.1}")
    words = [*small, f"phases=[{phase(steps=4, batch=32)}]", f"output={tmp_path}"]
    trained = launch(2, DIGITS, *words)
    assert trained.returncode == 0, tail(trained)
    (folder,) = tmp_path.iterdir()
    again = run("cloudtrain", "receipt", "replay", str(folder), "--steps", "1:4", "-np", "2")
    assert again.returncode == 0, tail(again)
    assert "2 of 2 digests agree" in again.stdout
    assert replayed(folder, "1:4") == 2  # this process is one rank
    expected = "receipt: expected 2 ranks, on nodes [1, 1] as in the run, got 1, on nodes [1]"
    assert expected in capsys.readouterr().err


def logged(folder):
    lines = (folder / "mllog.txt").read_text().splitlines()
    assert all(line.startswith(":::MLLOG ") for line in lines)
    return [json.loads(line.removeprefix(":::MLLOG ")) for line in lines]


def test_the_log_of_mlperf_has_the_intervals_of_the_run_in_order(made):
    folder, trained = made
    lines = logged(folder)
    keys = {"namespace", "time_ms", "event_type", "key", "value", "metadata"}
    assert all(set(line) == keys for line in lines)
    intervals = [line for line in lines if line["event_type"] != "POINT_IN_TIME"]
    epoch = ["epoch_start", "epoch_stop", "eval_start", "eval_stop"]
    expected = ["init_start", "init_stop", "run_start", *epoch, *epoch, "run_stop"]
    assert [line["key"] for line in intervals] == expected
    types = {"start": "INTERVAL_START", "stop": "INTERVAL_END"}
    assert all(line["event_type"] == types[line["key"].split("_")[1]] for line in intervals)
    assert [line["metadata"].get("epoch_num") for line in intervals[3:-1]] == [1] * 4 + [2] * 4
    times = {line["key"]: line["time_ms"] for line in lines}
    assert times["init_start"] <= times["init_stop"] <= times["run_start"] <= times["run_stop"]
    points = {line["key"]: line["value"] for line in lines if line["event_type"] == "POINT_IN_TIME"}
    assert (points["seed"], points["global_batch_size"], points["train_samples"]) == (1, 64, 1437)
    assert points["eval_accuracy"] == trained.summary.metrics["top1"]
    assert lines[-1]["metadata"] == {"status": "success"}


def test_the_log_of_a_run_that_fails_ends_aborted(tmp_path):
    words = (
        "callbacks=[{name: mllog, benchmark: resnet, division: open}]",
        "target={metric: top1, at_least: 1.0}",
    )
    crash_after(trainer(tmp_path / "broken", *words), 0)
    (folder,) = (tmp_path / "broken").iterdir()
    *_, last = lines = logged(folder)
    assert (last["key"], last["metadata"]) == ("run_stop", {"status": "aborted"})
    points = {line["key"]: line["value"] for line in lines if line["event_type"] == "POINT_IN_TIME"}
    assert (points["submission_benchmark"], points["submission_division"]) == ("resnet", "open")
    assert "submission_org" not in points
    trainer(tmp_path / "short", *words).fit()  # ends, and does not reach the target
    (folder,) = (tmp_path / "short").iterdir()
    assert logged(folder)[-1]["metadata"] == {"status": "aborted"}
