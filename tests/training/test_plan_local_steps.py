"""The plan of a run with local steps: bytes, seconds and memory of an average step, by hand."""

import re

import pytest

from tests.launching import ROOT
from tests.training.test_plan import cluster as small_cluster
from tests.training.test_plan import planned, printed
from training.commands import plan
from training.plan.memory import Weights
from training.plan.samples import Epoch

SIZE, STEPS = 1000, 25
cluster = small_cluster
NODES = [[0, 1], [2, 3]]


def of_phases(cluster, *phases, words=(), sizes=(SIZE,)):
    listed = ", ".join(
        f"{{input_size: 6, batch_size: 48, learning_rate: 0.1, steps: {STEPS}, {each}}}" for each in phases
    )
    words = [f"phases=[{listed}]", "model=resnet8", "reducer=dense", *words]
    epochs = [Epoch(STEPS, 192, "samples")] * len(phases)
    return planned(words, cluster=cluster, ranks=4, sizes=list(sizes), epochs=epochs).phases


@pytest.mark.parametrize(("steps", "exchanges"), [(5, 5), (10, 3), (1, 25), (100, 1)])
@pytest.mark.parametrize("reducer", ["reducer: {name: hitopk, density: 0.1}", "reducer: dense"])
def test_a_step_has_its_share_of_the_exchanges(cluster, steps, exchanges, reducer):
    local = f"{reducer}, local_steps: {steps}"
    every, rounds, of_ranks = of_phases(cluster, reducer, local, f"{local}, local: rank")
    share = exchanges / STEPS
    for phase in (rounds, of_ranks):
        assert phase.local_steps == steps
        assert phase.slow_bytes == round(every.slow_bytes * share)
        assert phase.traffic_bytes == pytest.approx(every.traffic_bytes * share, abs=1)
        assert phase.dense_bytes == every.dense_bytes
    assert of_ranks.messages == pytest.approx(every.messages * share)
    # inside the node a ring of two ranks: two hops of half the vector
    assert rounds.messages - of_ranks.messages == pytest.approx(2 * (1e-6 + 2000e-9), rel=1e-6)
    for phase in (rounds, of_ranks):
        assert phase.step == pytest.approx(phase.computing + phase.messages)
        assert phase.seconds == pytest.approx(STEPS * phase.step)


def test_fragments_send_as_much_in_parts_that_a_delay_hides(cluster):
    """Each fragment is exchanged three times, the last time with all others, where nothing hides it."""
    local = "reducer: dense, local: rank, local_steps: 10"
    whole, parts, delayed, late = of_phases(
        cluster,
        local,
        f"{local}, outer: {{fragments: 2}}",
        f"{local}, outer: {{fragments: 2, delay: 4}}",
        f"{local}, outer: {{delay: 6}}",
        sizes=(SIZE // 2, SIZE // 2),
    )
    assert whole.slow_bytes == parts.slow_bytes == delayed.slow_bytes
    assert whole.buckets == 2  # of all phases, since buckets do not change
    assert parts.messages == pytest.approx(whole.messages) == pytest.approx(delayed.messages)
    assert (whole.peak_bytes, parts.peak_bytes) == (whole.dense_bytes, whole.dense_bytes // 2)
    assert [each.exchange for each in (whole, parts)] == pytest.approx(
        [phase.messages * STEPS / 3 / of for phase, of in ((whole, 1), (parts, 2))]
    )
    assert (whole.room, delayed.room) == (0.0, pytest.approx(4 * delayed.computing))
    assert parts.step == pytest.approx(parts.computing + parts.messages)
    assert delayed.step == pytest.approx(delayed.computing + delayed.messages / 3)
    # what would leave after step 20 would arrive after the phase: that is exchanged at its end, after step 25
    assert late.messages == pytest.approx(whole.messages * 2 / 3)


def test_a_delay_hides_no_more_than_the_computing_of_its_steps(cluster):
    slow = "reducer: dense, local: rank, local_steps: 10, outer: {delay: 1}"
    (phase,) = of_phases(cluster, slow, sizes=(10**9,))
    seconds = phase.messages * STEPS / 3
    assert seconds > phase.computing
    assert phase.step == pytest.approx(phase.computing + (3 * seconds - 2 * phase.computing) / STEPS)
    (off,) = of_phases(cluster, slow, sizes=(10**9,), words=["overlap=false"])
    assert off.step == pytest.approx(off.computing + off.messages)


def test_the_plan_shows_fragments_their_bytes_and_whether_a_delay_hides_them(cluster, monkeypatch):
    phases = ("local_steps: 10", "local_steps: 10, outer: {fragments: 2, delay: 4}")
    keys = "batch_size: 4, input_size: 6, learning_rate: 0.1, steps: 25, local: rank"
    listed = ", ".join(f"{{{keys}, {each}}}" for each in phases)
    words = ["digits", f"phases=[{listed}]", "model=resnet8", "reducer=dense", "ranks_per_node=null"]

    def shown(*shape):
        monkeypatch.setattr(plan, "weights_of", lambda config, dataset: Weights([shape, (10,)]))
        return printed(*words, "cache={}", "--cluster", cluster)

    text = shown(10, 100)
    rows = [line.split()[-1] for line in text.splitlines() if line[:1] in ("1", "2")]
    assert rows[:2] == ["10", "10/2+4"]
    assert "local steps 10/2+4: each of 2 fragments leaves every 10 steps and arrives 4 later" in text
    # a ring of four ranks: three quarters of the vector, twice
    assert "phase 1: an exchange of all weights is 0.00606 MB at once, in " in text
    assert re.search(r"phase 2: .* of the largest fragment is 0.0030\d MB at once, in .* ms, beside 4 ", text)
    assert (text.count("which hides it"), text.count("which is too short")) == (1, 0)
    assert shown(1000, 1000).count("which is too short") == 1


def test_a_budget_says_the_local_steps_that_fragments_allow(cluster):
    budget = "reducer: auto, budget: {mbit_per_second: 0.00015, step_seconds: 0.5}"
    whole, parts = of_phases(
        cluster,
        budget,
        f"{budget}, outer: {{fragments: 4, delay: 1}}",
        sizes=(700, 100, 100, 100),
        words=["bucket_mib=25"],
    )
    assert whole.local_steps == 3
    assert parts.local_steps == 8
    assert parts.auto == f"{whole.auto}; 8 steps, for the fragments and their delay"


def test_a_phase_without_local_steps_has_the_buckets_of_the_fragments_of_others(cluster):
    every, _ = of_phases(
        cluster, "reducer: dense", "reducer: dense, local_steps: 4, outer: {fragments: 2}", sizes=(600, 400)
    )
    assert every.buckets == 2
    assert every.computing < every.step < every.computing + every.messages


def test_on_one_node_the_replica_is_all_ranks():
    (phase,) = of_phases(None, "local_steps: 5")
    assert phase.slow_bytes == round(phase.dense_bytes * (1 + 1 / 5))


def test_memory_has_what_a_round_keeps(cluster):
    every, mean, diloco = of_phases(
        cluster,
        "reducer: dense",
        "reducer: dense, local_steps: 5",
        "reducer: dense, local_steps: 5, outer: {momentum: 0.9}",
        words=["optimizer={name: adamw}"],
    )
    vector = 4 * SIZE
    for phase, velocity in ((mean, 0), (diloco, vector)):
        own, before = phase.memory, every.memory
        assert own.weights == before.weights + vector  # the common ones
        assert own.optimizer == 2 * before.optimizer + velocity
        assert own.gradient == before.gradient + vector


PAGE = (ROOT / "docs" / "local_steps.md").read_text()
WEIGHTS = 5_273_088


(TABLE,) = re.findall(r"<!-- planned -->\n(.*?)<!-- end -->", PAGE, re.DOTALL)
ROWS = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in TABLE.splitlines()[2:]]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_the_table_of_the_page_is_what_is_planned(row, tmp_path):
    text = (ROOT / "clusters" / "tencent_v100.yaml").read_text()
    name, *words = row[0].split()
    phases = []
    for gbit_per_second in ("25", "1", "0.1"):
        path = tmp_path / "cluster.yaml"
        path.write_text(text.replace("gbit_per_second: 25}", f"gbit_per_second: {gbit_per_second}}}"))
        epochs = [Epoch(11, 2048, "windows")]
        found = planned(words, cluster=str(path), config=name, sizes=[WEIGHTS], epochs=epochs)
        phases.append(found.phases[0])
    assert [phase.steps for phase in phases] == [110] * 3
    first = phases[0]
    exchanges = -(-first.steps // (first.local_steps or 1))
    numbers = [first.slow_bytes / 1e6, first.traffic_bytes / 1e9, *(1e3 * each.messages for each in phases)]
    assert row[1] == str(exchanges)
    for shown, number in zip(row[2:], numbers, strict=True):
        assert float(shown) == pytest.approx(number, rel=6e-3)  # three digits
