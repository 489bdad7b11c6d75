"""The plan of a run with local steps: bytes, seconds and memory of an average step, by hand."""

import re

import pytest

from tests.launching import ROOT
from tests.training.test_plan import cluster as small_cluster
from tests.training.test_plan import planned
from training.plan.samples import Epoch

SIZE, STEPS = 1000, 25
cluster = small_cluster
NODES = [[0, 1], [2, 3]]


def of_phases(cluster, *phases, words=()):
    listed = ", ".join(
        f"{{input_size: 6, batch_size: 48, learning_rate: 0.1, steps: {STEPS}, {each}}}" for each in phases
    )
    words = [f"phases=[{listed}]", "model=resnet8", "reducer=dense", *words]
    epochs = [Epoch(STEPS, 192, "samples")] * len(phases)
    return planned(words, cluster=cluster, ranks=4, sizes=[SIZE], epochs=epochs).phases


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


# ------------------------------------------------------------------------------------------ the page

PAGE = (ROOT / "docs" / "local_steps.md").read_text()
WEIGHTS = 5_273_088


def table():
    (body,) = re.findall(r"<!-- planned -->\n(.*?)<!-- end -->", PAGE, re.DOTALL)
    return [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in body.splitlines()[2:]]


@pytest.mark.parametrize("row", table(), ids=lambda row: row[0])
def test_the_table_of_the_page_is_what_is_planned(row, tmp_path):
    text = (ROOT / "clusters" / "tencent_v100.yaml").read_text()
    name, *words = row[0].split()
    phases = []
    for gbit_per_second in ("25", "1", "0.1"):
        path = tmp_path / "cluster.yaml"
        path.write_text(text.replace("gbit_per_second: 25}", f"gbit_per_second: {gbit_per_second}}}"))
        epochs = [Epoch(11, 2048, "windows")]
        plan = planned(words, cluster=str(path), config=name, sizes=[WEIGHTS], epochs=epochs)
        phases.append(plan.phases[0])
    assert [phase.steps for phase in phases] == [110] * 3
    first = phases[0]
    exchanges = -(-first.steps // (first.local_steps or 1))
    numbers = [first.slow_bytes / 1e6, first.traffic_bytes / 1e9, *(1e3 * each.messages for each in phases)]
    assert row[1] == str(exchanges)
    for shown, number in zip(row[2:], numbers, strict=True):
        assert float(shown) == pytest.approx(number, rel=6e-3)  # three digits
