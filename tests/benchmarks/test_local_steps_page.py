"""docs/local_steps.md shows what its records hold."""

import re

from benchmarks import convergence, local_steps
from benchmarks.drawing import local_steps as local_step_times
from benchmarks.drawing.local_steps import Runs, steps_to
from benchmarks.drawing.pages import with_block
from training.config.config import Config


def test_the_tables_are_those_of_the_records():
    page, found = local_steps.PAGE.read_text(), local_steps.blocks(local_steps.plan())
    for name, text in found.items():
        assert with_block(page, name, text) == page


def test_every_record_is_of_a_case_of_the_plan_and_no_case_has_two():
    content = local_steps.plan()
    recorded = [convergence.case_of(each) for each in convergence.recorded(local_steps.RECORDS)]
    assert set(recorded) <= set(convergence.cases(content, []))
    assert len(set(recorded)) == len(recorded)


def test_every_variant_is_configured_and_what_is_compared_is_planned(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    content, variants = local_steps.plan(), set()
    for case in convergence.cases(content, []):
        config = Config.model_validate(convergence.configuration(content, case, "folder")).resolved()
        variants.add(case.variant)
        named = re.fullmatch(r".*, H = (\d+)", case.variant)
        assert config.phases[0].local_steps == (named and int(named[1]))
    assert variants == set(content["variants"])
    assert set(content["compared"].values()) <= variants
    assert {content["times"]["beside"], *content["times"]["subjects"]} <= variants


def record(variant, loss, sent, selected=100, tested=()):
    ranks = [{"exchanges": 1, "selected": selected, "sent": {"intra": 0, "inter": each}} for each in sent]
    case = {"experiment": "one", "variant": variant, "layout": [1] * len(sent), "seed": 1}
    return {
        "case": case,
        "loss": loss,
        "steps": 10,
        "weights": 1000,
        "ranks": ranks,
        "skipped_steps": 0,
        "tested": tested,
    }


CONTENT = {
    "methods": {"SparseLoCo": {}, "DiLoCo": {}},
    "local_steps": [1, 5],
    "compared": {1: "hitopk all", 5: "hitopk few"},
    "published": {"SparseLoCo": {"bytes": 0.0009, "bits": 14}, "DeMo": {"bytes": 0.094}},
    "fewer_bits": 1.4,
    "variants": {
        "dense": {"reducer": "dense"},
        "hitopk all": {"reducer": {"name": "hitopk", "wire": "gap"}},
        "hitopk few": {"reducer": {"name": "hitopk", "wire": "gap"}},
        "gtopk": {"reducer": {"name": "gtopk"}},
        "SparseLoCo, H = 1": {"reducer": {"name": "hitopk"}, "local_steps": 1},
        "SparseLoCo, H = 5": {"reducer": {"name": "hitopk"}, "local_steps": 5},
        "DiLoCo, H = 5": {"reducer": "torus2d", "local_steps": 5},
    },
    "times": {
        "target": 3.0,
        "rates": ["50mbit"],
        "layouts": ["4x1"],
        "dense": ["horovod, ring", "dense"],
        "beside": "hitopk all",
        "subjects": ["SparseLoCo, H = 5"],
        "goals": {"rate": "50mbit", "dense": 10, "beside": 2},
    },
}
RECORDS = [
    record("dense", 2.0, [8000, 8000], tested=[[10, 4.0], [20, 3.0]]),
    record("hitopk all", 2.2, [3000, 4000], tested=[[10, 4.0], [20, 2.0]]),
    record("SparseLoCo, H = 1", 2.1, [2500, 2500], selected=2000),
    record("SparseLoCo, H = 5", 2.5, [125, 125], tested=[[10, 3.5], [20, 2.5]]),
]


def runs():
    return Runs.of(CONTENT, RECORDS, "one")


def test_bytes_are_those_of_the_busiest_rank_and_bits_those_of_an_entry():
    table = runs().against_bytes()
    assert "| hitopk all | 0.004 | 0.40000 | 280.00 | 1 | 2.200 | +10.0 % |" in table
    assert "| dense | 0.008 | 0.80000 | – | 1 | 2.000 | – |" in table
    assert "| SparseLoCo, H = 1 | measured | 0.25 | 10.00 |" in runs().beside_published()
    # 1 of 10 bits, 1 of 10: the worst counts
    assert "10.00 to 10.00 bits" in runs().beside_published()
    assert "1.40 times" in runs().beside_published()


def test_the_time_to_a_loss_is_that_of_as_many_steps():
    assert steps_to(1.0, [[10, 4.0], [20, 2.0]]) is None
    assert steps_to(4.5, [[10, 4.0], [20, 2.0]]) == 10.0
    stages = {"select": 0.1, "inter": 0.4}
    times = [
        {"case": {"rate": "50mbit", "layout": "4x1", "variant": name}, "seconds": {"median": seconds}} | more
        for name, seconds, more in (
            ("horovod, ring", 1.0, {"stages": None}),
            ("dense", 2.0, {"stages": stages}),
            ("hitopk all", 0.25, {"stages": stages}),
            ("SparseLoCo, H = 5", 0.1, {"stages": stages}),
        )
    ]
    page = local_step_times.page(runs(), times)
    assert "| horovod, ring | 1,000.0 | – | 20 | 20.0 | 1 | 0.188 |" in page
    assert "| hitopk all | 250.0 | 500.0 | 15 | 3.8 | 5.33 | 1 |" in page
    assert "| SparseLoCo, H = 5 | 100.0 | 100.0 | 15 | 1.5 | 13.3 | 2.5 |" in page
    assert "13.3 times as fast as the fastest dense one, of which 10 was the goal: reached" in page
    assert "2.5 times as fast as `hitopk all`, of which 2 was the goal: reached" in page
