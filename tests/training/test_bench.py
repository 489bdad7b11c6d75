"""The benches: what they print, that they measure fairly, and that they refuse to time what is wrong."""

import json
import sys
from itertools import product

import numpy as np
import pytest
from PIL import Image

from commlib import REDUCERS, SELECTORS, LinkBytes, SparseVector, Topology, bytes_sent, predict
from commlib.reducers.dense import Dense
from commlib.selection import Selector
from commlib.transport import simulated
from tests.launching import DIGITS
from tests.training.refusal import invoke, refusal
from tests.training.small import LINEAR
from training.bench import train
from training.bench.record import WARM_UP_RUNS, Record, Seconds, WrongResult, alternate, report
from training.bench.selection import check_selection
from training.commands.printing import Table
from training.config.config import load
from training.source import source

TIMES = {"seconds", "peer_seconds", "ratio"}
KEYS = {"bench", "case", "subject", "peer", "bytes", "machine", "settings", "code", "command"} | TIMES
REDUCERS_KEYS = KEYS | {"bytes_of_all_ranks", "entries", "stages", "prediction"}
SMALL = ("--size", "5003", "--density", "0.01")


def lines(*words: str) -> list[dict]:
    result = invoke("bench", *words, "--json")
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_candidates_alternate_and_each_call_gets_the_next_input():
    calls = []
    candidates = {name: lambda given, name=name: calls.append((name, given)) for name in "ABC"}
    alternate(candidates, [10, 20], runs=2)
    rounds = WARM_UP_RUNS + 2
    assert "".join(name for name, _ in calls) == "ABC" * rounds
    assert [given for _, given in calls] == ([10, 20] * 3 * rounds)[: 3 * rounds]


def test_the_first_runs_do_not_count():
    durations = iter([50, 50, 3, 1, 8])  # two to warm up
    (seconds,) = alternate({"A": None}, [None], 3, lambda *_: next(durations)).values()
    assert seconds == Seconds(median=3, min=1, max=8, runs=3)


def test_a_record_is_one_line_of_the_design_s_keys(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/somewhere/cloudtrain", "bench", "selection", "--size", "a b"])
    seconds = Seconds(2.0, 1.0, 4.0, 5), Seconds(5.0, 4.0, 6.0, 5)
    line = Record("selection", {"size": 3}, "s", seconds[0], "p", seconds[1], bytes=LinkBytes(1, 2)).line()
    assert "\n" not in line
    told = json.loads(line)
    assert set(told) == KEYS
    assert told["seconds"] == {"median": 2.0, "min": 1.0, "max": 4.0, "runs": 5}
    assert told["ratio"] == 2.5  # 5.0 / 2.0: the subject is the faster one
    assert told["bytes"] == {"intra": 1, "inter": 2}
    assert told["command"] == "cloudtrain bench selection --size 'a b'"
    assert (told["machine"]["commit"] or "").rstrip("+") == (source().commit or "")


def test_a_table_has_its_texts_as_they_are_though_they_look_like_markup(capsys):
    Table("t:a:", ["[b]", "x"], [["[/b]", "y:x:z"]], ["n [i]"]).print()
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        *(["t:a:"], ["[b]", "x"], ["[/b]", "y:x:z"], ["n", "[i]"], [])
    ]


def test_bench_selection_prints_every_selector_with_every_peer(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)  # as where it is not installed
    told = lines("selection", *SMALL)
    laws, peers = ("gaussian", "student-t, 2 degrees"), ("torch.topk", "np.partition", "read")
    assert [(line["case"]["input"], line["subject"], line["peer"]) for line in told] == [
        *product(laws, SELECTORS, peers)
    ]
    for line in told:
        is_missing = line["peer"] == "torch.topk"
        assert set(line) == (KEYS | {"missing"} if is_missing else KEYS)
        assert (line["peer_seconds"] is None) == (line["ratio"] is None) == is_missing
        case = line["case"]
        assert (case["size"], case["k"], case["quick"]) == (5003, 50, False)
        assert case.get("state") == ("reused threshold" if line["subject"] == "reused" else None)
        assert line["seconds"]["runs"] == 11
    assert {line["missing"] for line in told if "missing" in line} == {"torch is not installed"}


class Smallest(Selector):
    """Selects what is not worth sending."""

    def select(self, vector, k):
        indices = np.sort(np.argsort(np.abs(vector), kind="stable")[:k]).astype(np.int32)
        return SparseVector(len(vector), indices, vector[indices])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mstopk", "expected the largest of every 5003 entries, got smaller ones in 1 of 1"),
        ("bucketed", "expected the largest of every 512 entries, got smaller ones in "),
    ],
)
def test_a_selector_that_selects_others_is_not_timed(monkeypatch, name, message):
    monkeypatch.setitem(SELECTORS, name, Smallest)
    result = invoke("bench", "selection", *SMALL, "--json")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith(f"cloudtrain: {name}: {message}")
    assert result.stderr.count("\n") == 1


def test_entries_with_other_values_than_the_vector_s_are_wrong():
    vector = np.arange(1, 101, dtype=np.float32)
    with pytest.raises(WrongResult, match="values of the vector"):
        check_selection("exact", 2, vector, np.array([98, 99]), np.array([99, 99], np.float32))


def test_bench_reducers_prints_every_reducer_beside_dense():
    told = lines("reducers", "-np", "4", "--ranks-per-node", "2", "--size", "4000", "--steps", "3")
    assert [line["subject"] for line in told] == list(REDUCERS)
    nodes = [[0, 1], [2, 3]]
    for line in told:
        name, sparse = line["subject"], REDUCERS[line["subject"]].sparse
        assert set(line) == REDUCERS_KEYS
        assert line["peer"] == (None if name == "dense" else "dense")
        assert (line["ratio"] is None) == (name == "dense")
        assert line["seconds"]["runs"] == 3
        case = line["case"]
        assert (case["clock"], case["ranks_of_nodes"]) == ("virtual", [2, 2])
        assert case["density"] == (0.01 if sparse else None)
        density = {"density": 0.01} if sparse else {}
        if REDUCERS[name].cost.is_exact:
            sent = [bytes_sent(name, nodes, rank, 4000, **density).inter for rank in range(4)]
            assert line["bytes"]["inter"] == max(sent)
            assert line["bytes_of_all_ranks"]["inter"] == sum(sent)
        assert line["entries"]["selected"] == 4000 or sparse
        assert set(line["stages"]) == {"select", "intra", "inter", "combine"}
        prediction = predict(name, nodes, 4000, **density)
        assert line["prediction"]["seconds"] == prediction.intra + prediction.inter


class Costless(Dense):
    cost = None


class Lossy(Dense):
    def reduce(self, gradient):
        mean = super().reduce(gradient).copy()
        mean[7] *= np.float32(1 + 1e-5)
        return mean


class Disagreeing(Dense):
    def reduce(self, gradient):
        mean = super().reduce(gradient).copy()
        mean[0] = np.nextafter(mean[0], np.float32(self.topology.world.rank // 2 * 2))
        return mean


@pytest.mark.parametrize(
    ("reducer", "message"),
    [
        (Lossy, "P·mean + Σ residual differs from Σ gradients in 1 of 999 entries"),
        (Disagreeing, "ranks [2] hold another mean than rank 0"),
    ],
)
def test_a_reducer_that_is_wrong_is_not_timed(monkeypatch, reducer, message):
    monkeypatch.setitem(REDUCERS, "new", reducer)
    result = invoke("bench", "reducers", "-np", "3", "--size", "999", "--reducer", "new")
    assert (result.exit_code, result.stdout, result.stderr) == (1, "", f"cloudtrain: new: {message}\n")


def test_a_reducer_that_declares_no_cost_has_no_prediction(monkeypatch):
    monkeypatch.setitem(REDUCERS, "new", Costless)
    (line,) = lines("reducers", "-np", "3", "--size", "999", "--reducer", "new")
    assert line["prediction"] is None
    result = invoke("bench", "reducers", "-np", "3", "--size", "999", "--reducer", "new", "--quick")
    assert result.exit_code == 0, result.output
    assert "999 entries, 3 ranks on 1 nodes, clock: virtual  (quick)" in result.stdout


@pytest.mark.parametrize(
    ("words", "word"),
    [
        (("selection", "--density", "2"), "density"),
        (("selection", "--size", "0"), "--size"),
        (("reducers", "--size", "0"), "--size"),
        (("reducers", "--reducer", "hitopkk"), '"hitopkk"'),
        (("reducers", "--wire", "gap", "--reducer", "dense"), "--wire"),
        (("cache", "/nowhere"), "/nowhere"),
        (("train", "imagenet_resnet50_dawnbench", "dataset.path=/none"), "/none: no such folder"),
        (("train", "digits", "ranks_per_node=[2,1]"), "expected counts that add to 1 ranks"),
        (("train", "digits", "model=nonesuch:linear"), "there is no module nonesuch"),
    ],
)
def test_a_bad_value_is_one_line_and_status_2(words, word):
    assert word in refusal("bench", *words)


def test_every_codec_is_measured_with_every_sparse_reducer():
    words = ("--reducer", "dense", "--reducer", "hitopk", "--wire", "fp32", "--wire", "gap+fp16")
    told = lines("reducers", "-np", "4", "--ranks-per-node", "2", "--size", "3001", "--steps", "1", *words)
    subjects = [(line["subject"], line["case"]["wire"]) for line in told]
    assert subjects == [("dense", None), ("hitopk", "fp32"), ("hitopk", "gap+fp16")]
    assert told[2]["bytes"]["inter"] < 0.6 * told[1]["bytes"]["inter"]


def test_the_levels_of_a_cache_are_measured_beside_its_storage(tmp_path):
    folder, pixels = tmp_path / "pictures" / "class", np.zeros((30, 40, 3), np.uint8)
    folder.mkdir(parents=True)
    for number in range(300):
        Image.fromarray(pixels + np.uint8(number % 256)).save(folder / f"{number:03}.jpg")
    levels, first = lines("cache", str(folder.parent), "--quick")
    assert (levels["subject"], levels["peer"]) == ("levels", "storage")
    assert (first["subject"], first["peer"]) == ("first epoch", "first epoch without a cache")
    assert levels["case"]["samples"] == 300
    assert levels["seconds"]["runs"] == 3


def test_steps_of_a_configuration_are_timed_with_each_reducer_and_rank_0_prints(capsys):
    words = ["model=vgg_tiny", "ranks_per_node=1"]
    configs = {name: load(DIGITS, [*words, f"phases.0.reducer={name}"]) for name in ("dense", "hitopk")}

    def body(comm):
        records = train.measure(Topology(comm, 1), configs, quick=True)
        return report([records], as_json=True, show=print, comm=comm)

    assert simulated.run(body, 2) == [0, 0]
    dense, hitopk = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert (dense["subject"], dense["peer"]) == ("dense", None)
    assert (hitopk["subject"], hitopk["peer"]) == ("hitopk", "dense")
    assert hitopk["peer_seconds"] == dense["seconds"]
    assert hitopk["bytes"]["inter"] < 0.1 * dense["bytes"]["inter"]
    assert hitopk["case"]["ranks_of_nodes"] == [1, 1]
    assert hitopk["weights"] > 10_000
    (alone,) = lines("train", "digits", LINEAR, "ranks_per_node=null", "--reducer", "dense", "--quick")
    assert (alone["case"]["ranks_of_nodes"], alone["weights"]) == ([1], 50)
