"""The race: who races whom, what jobs are told, and the records made of what they print."""

import json
from pathlib import Path

import pytest

from benchmarks import jobs
from benchmarks.jobs import Failed
from benchmarks.race import measured
from benchmarks.race_plan import RACED, Race
from commlib import REDUCERS
from tests.launching import ROOT, python_on_ranks, run, tail
from tests.test_cluster import commands, skip_where_no_cluster_can_be_made
from training.config.config import Config

DENSE_ONES = [name for name in REDUCERS if not REDUCERS[name].sparse]
plan = Race.of


def names(subjects) -> list[str]:
    return [subject.name for subject in subjects]


# ------------------------------------------------------------- the plan


@pytest.mark.parametrize("quick", [False, True])
def test_what_a_run_is_told_is_a_configuration(quick):
    every_model = {} if quick else {"models": [*RACED], "rates": ["1gbit"], "layouts": ["4x1"]}
    race = plan(quick=quick, density=0.02, **every_model)
    for cell in race.cells:
        for subject in race.subjects:
            phases = {"phases": [race.stepping(cell, subject)]}
            for told in (phases, *([race.running(cell, subject)] if subject in race.raced(cell) else ())):
                config = Config.model_validate(race.config(cell, seed=7) | told).resolved()
                assert len(config.phases) == (1 if told is phases else subject.phases)
                assert config.seed == 7
                first, last = config.phases[0], config.phases[-1]
                assert (first.reducer.density == 0.02) == subject.is_sparse
                for key, value in cell.model.sizes.items():
                    assert getattr(first, key) == getattr(last, key) == value
                if len(config.phases) == 2:  # one straight line, which is cut where the phases meet
                    assert (first.epochs, last.epochs) == (6, 1)
                    assert first.learning_rate.end == last.learning_rate.start == pytest.approx(0.1 / 7)
                assert last.reducer.name == ("dense" if len(config.phases) == 2 else subject.reducer)
                assert config.target is None  # each runs to its end: its last accuracy counts, too


# ------------------------------------------------------------- jobs, and what they tell

STEP_SECONDS = {"horovod": 4.0, "horovod, ring": 2.0, "dense": 3.0, "hitopk": 0.5}


class FakeCluster:
    """Tells what jobs tell, and keeps what was asked for."""

    calls: list[tuple]
    fails_at: int | None = None
    late: str | None = None  # the subject that reaches the accuracy with the first seed only
    error: BaseException = Failed("status 1: node3 is on fire")

    def __init__(self, state: Path) -> None:
        assert not state.exists()

    def up(self, nodes, rate):
        self.calls.append(("up", nodes, rate))

    def down(self):
        self.calls.append(("down",))

    def records(self, layout, words, environment, timeout, what):
        file = words[-1]
        algorithm = environment.get("OMPI_MCA_coll_tuned_allreduce_algorithm")
        if "tune" in words:
            self.calls.append(("tune", json.loads(Path(file).read_text())["phases"]))
            return
        asked = json.loads(Path(file).read_text())
        assert int(environment["TF_NUM_INTEROP_THREADS"]) > 1  # with one, nothing overlaps
        self.calls.append((algorithm, names_of(asked["steps"]), names_of(asked["runs"])))
        for subject in asked["steps"]:
            yield step_told(subject["name"])
        if self.fails_at == asked["config"]["seed"]:
            raise self.error
        for subject in asked["runs"]:
            yield run_told(subject["name"], asked["config"]["seed"], late=self.late)


def names_of(told: list[dict]) -> list[str]:
    return [subject["name"] for subject in told]


COMMON = {"weights": 10, "nodes": [1, 1], "machine": {"cpu": "abacus"}, "settings": {"allocator": "x"}}


def step_told(name: str) -> dict:
    """Return what a job tells of the steps of a subject: two turns."""
    seconds = STEP_SECONDS.get(name, 1.0)
    own = not name.startswith("horovod")
    return COMMON | {
        "part": "steps",
        "subject": name,
        "seconds": [seconds, 1.5 * seconds],
        "bytes": {"intra": 0, "inter": 800} if own else None,
        "card_bytes": 900.0,
        "stages": dict.fromkeys(("select", "intra", "inter", "combine"), 0.1) if own else None,
        "hidden_share": 0.5 if own else None,
        "overlaps": "off" not in name,
        "buckets": 2,
        "reducer": {"name": name},
    }


def run_told(name: str, seed: int, late: str | None) -> dict:
    """Return what a job tells of a run: hitopk is there at once, ``late`` with the first seed only."""
    has_reached = name != late or seed == 1
    end = {"horovod": 80.0, "horovod, ring": 40.0, "hitopk": 10.0}.get(name, 60.0)
    return COMMON | {
        "part": "run",
        "subject": name,
        "seed": seed,
        "curve": [[end / 2, 0.5], [end + seed, 0.99 if has_reached else 0.5]],
        "steps": 62,
        "train_seconds": end,
        "sent_inter_bytes": 5000 * seed,
        "overlaps": True,
        "reducers": [{"name": name}],
    }


@pytest.fixture
def fake(monkeypatch):
    fake = type("Fake", (FakeCluster,), {"calls": []})
    monkeypatch.setattr(jobs, "EmulatedCluster", fake)
    return fake


def raced(*reducers: str, seeds: int = 0) -> list[dict]:
    """Return the records of a race of an mlp on two nodes."""
    return list(measured(plan(["1gbit"], ["2x1"], ["mlp"], reducers or ["hitopk"], seeds=seeds)))


def test_jobs_of_both_algorithms_alternate_and_each_seed_begins_with_another_subject(fake):
    raced(seeds=2)
    (up, *jobs, down) = fake.calls
    assert (up, down) == (("up", 2, "1gbit"), ("down",))
    ours = ["horovod", "dense", "hitopk", "dense, overlap off", "hitopk, overlap off"]
    assert [job[:2] for job in jobs] == [(None, ours), ("4", ["horovod, ring"])] * 3
    both, runs = ["hitopk", "hitopk then dense"], [job[2] for job in jobs]
    assert runs == [both, ["horovod, ring"], both[::-1], ["horovod, ring"], [], []]


def test_records_of_steps_are_beside_the_fastest_that_sends_all(fake):
    told = {record["subject"]: record for record in raced()}
    assert list(told) == [
        *("horovod", "horovod, ring", "dense", "hitopk", "dense, overlap off", "hitopk, overlap off")
    ]
    hitopk, best = told["hitopk"], told["dense, overlap off"]
    assert hitopk["seconds"] == {"median": 0.625, "min": 0.5, "max": 0.75, "runs": 6}
    assert (hitopk["peer"], hitopk["peer_seconds"]["median"]) == ("dense, overlap off", 1.25)
    assert hitopk["ratio"] == pytest.approx(2.0)
    assert (best["peer"], best["ratio"], best["of_best"]) == (None, None, 0.5)
    assert (told["horovod"]["bytes"], hitopk["bytes"]) == (None, {"intra": 0, "inter": 800})
    assert (hitopk["overlap"], hitopk["hidden_share"], hitopk["of_best"]) == (True, 0.5, 1.0)
    assert hitopk["steps_a_second"] == pytest.approx(1.6)
    assert hitopk["baselines"]["horovod"] == 5.0
    assert hitopk["case"] == {
        "unit": "seconds a step",
        "model": "mlp",
        "weights": 10,
        "batch": 32,
        "rate": "1gbit",
        "ranks_of_nodes": [1, 1],
        "density": 0.01,
        "mpi_algorithm": "default",
        "quick": False,
    }
    assert told["horovod, ring"]["case"]["mpi_algorithm"] == "ring"
    for record in told.values():
        assert (record["bench"], record["machine"]["cpu"]) == ("race", "abacus")
        assert record["settings"] == {"allocator": "x"}


def told_of_runs(*reducers: str) -> dict[str, dict]:
    """Return the records of runs with three seeds, by subject."""
    lines = raced(*reducers, seeds=3)
    return {line["subject"]: line for line in lines if line["case"]["unit"] == "seconds to the accuracy"}


def test_records_of_runs_are_beside_the_first_at_the_accuracy_with_all_seeds(fake):
    fake.late = "gtopk"
    told = told_of_runs("hitopk", "gtopk")
    hitopk, gtopk = told["hitopk"], told["gtopk"]
    assert hitopk["seconds"] == {"median": 12.0, "min": 11.0, "max": 13.0, "runs": 3}
    assert (hitopk["peer"], hitopk["ratio"]) == ("horovod, ring", 42.0 / 12.0)
    assert hitopk["sent_bytes_of_run"] == 10_000
    assert hitopk["final_accuracy"] == [0.99] * 3
    assert len(hitopk["curves"]) == hitopk["seeds"] == hitopk["reached"] == 3
    # two of its seeds have not reached it: it has a lower bound, and no ratio
    assert (gtopk["reached"], gtopk["peer"], gtopk["ratio"]) == (1, None, None)
    assert gtopk["seconds"]["median"] == 62.0
    switching = told["hitopk then dense"]
    assert (switching["peer"], switching["ratio"]) == ("horovod, ring", 42.0 / 62.0)
    assert told["horovod, ring"]["sent_bytes_of_run"] is None


@pytest.mark.parametrize("error", [Failed("node3 is on fire"), KeyboardInterrupt(), SystemExit(143)])
def test_what_was_measured_before_a_failure_is_kept(fake, error):
    fake.fails_at, fake.error = 2, error
    runs = {}
    with pytest.raises(type(error)):
        for record in measured(plan(["1gbit"], ["2x1"], ["mlp"], ["hitopk"], seeds=0)):
            runs[record["subject"]] = record["seconds"]["runs"]
    assert (runs["hitopk"], runs["horovod, ring"]) == (4, 2)
    assert fake.calls[-1] == ("down",)


# ------------------------------------------------------------- Horovod's own path

HOROVOD_AND_DENSE = """
import sys
from pathlib import Path
import numpy as np
from training.process.tf_logging import import_tensorflow
import_tensorflow()
import keras
from benchmarks.horovod_exchange import build_horovod
from training.config.config import Config
from training.run.build import build
from training.run.trainer import Trainer

phase = {"steps": 3, "input_size": 8, "batch_size": 16, "learning_rate": 0.1}
found = []
for parts in (build, build_horovod):
    keras.utils.clear_session()
    given = {"name": "x", "dataset": "digits", "model": "vgg_tiny", "output": sys.argv[1]}
    given["phases"] = [phase] * 2
    trainer = Trainer(Config.model_validate(given).resolved(), build=parts)
    before = np.concatenate([each.numpy().ravel() for each in trainer.parts.model.variables])
    trainer.fit()
    found.append(np.concatenate([each.numpy().ravel() for each in trainer.parts.model.variables]))
    assert np.abs(found[-1] - before).max() > 1e-3
if trainer.rank == 0:
    print("differ by", np.abs(found[0] - found[1]).max())
    print("overlaps", trainer.parts.exchange.gradients.overlaps)
"""


@pytest.mark.large
@pytest.mark.launch
def test_horovod_s_own_path_trains_as_dense_does(tmp_path):
    program = f"import sys; sys.argv[1:] = [{str(tmp_path)!r}]\n{HOROVOD_AND_DENSE}"
    result = python_on_ranks(2, program)
    assert result.returncode == 0, tail(result)
    (differ,) = (line for line in result.stdout.splitlines() if line.startswith("differ by"))
    assert float(differ.split()[-1]) < 1e-6
    assert "overlaps True" in result.stdout


# ------------------------------------------------------------- the whole of it


@pytest.mark.cluster
@pytest.mark.launch
def test_on_a_real_cluster_the_quick_race_ends_and_nothing_is_left(tmp_path):
    skip_where_no_cluster_can_be_made()
    result = run(
        *("env", f"TMPDIR={tmp_path}", "python", "-m", "benchmarks.race", "--quick", "--json"),
        *("--rate", "10gbit"),  # the links are not what is looked at
        cwd=ROOT,
    )
    assert result.returncode == 0, tail(result)
    told = [json.loads(line) for line in result.stdout.splitlines()]
    steps = {each["subject"]: each for each in told if each["case"]["unit"] == "seconds a step"}
    runs = {each["subject"]: each for each in told if each["case"]["unit"] != "seconds a step"}
    assert list(runs) == ["horovod", "horovod, ring", "dense", "hitopk"]
    assert list(steps) == [*runs, "dense, overlap off", "hitopk, overlap off"]
    for record in told:
        assert record["case"]["ranks_of_nodes"] == [1, 1]
        assert record["case"]["weights"] == 10_020_874
        is_ring = record["settings"]["environment"].get("OMPI_MCA_coll_tuned_allreduce_algorithm") == "4"
        assert is_ring == (record["subject"] == "horovod, ring")
    dense = 4 * 10_020_874  # one other rank: all entries once
    for name in ("horovod", "horovod, ring", "dense", "dense, overlap off"):
        assert dense < steps[name]["card_bytes"] < 1.1 * dense
    assert steps["dense"]["bytes"]["inter"] == pytest.approx(dense, rel=0.001)
    assert steps["hitopk"]["bytes"]["inter"] == pytest.approx(dense / 50, rel=0.001)
    assert steps["hitopk"]["card_bytes"] < dense / 10
    overlapping = {name for name, each in steps.items() if each["overlap"]}
    assert overlapping == {"horovod", "horovod, ring", "dense", "hitopk"}
    assert runs["dense"]["final_accuracy"] == runs["horovod"]["final_accuracy"]  # two ranks: the same sums
    assert RACED["mlp"].target > runs["dense"]["target"]
    assert not any(str(tmp_path) in command for command in commands().values())
    assert list(tmp_path.iterdir()) == []
