"""docs/convergence.md shows what its records hold."""

import re

import numpy as np
import pytest

from benchmarks import convergence
from benchmarks.convergence import Case
from benchmarks.drawing.convergence import Row, draw_curves, metric_of, settings, table, verdict
from benchmarks.drawing.pages import with_block
from training.config.config import Config

CITED = r"(figure|section|assumption|theorem) [\d.]+"  # places in papers
ACCURACY = {"config": {}, "metric": "top1", "label": "accuracy"}
PERPLEXITY = {"config": {"task": {"name": "language_model"}}, "metric": "perplexity", "label": "perplexity"}


def test_the_tables_are_those_of_the_records():
    content, records = convergence.plan(), convergence.recorded()
    page, found = convergence.PAGE.read_text(), convergence.blocks(content, records)
    assert found
    for name, text in found.items():
        assert with_block(page, name, text) == page


def test_the_prose_has_no_number_besides_those_of_variants_layouts_and_papers():
    content = convergence.plan()
    names = {*content["variants"], *(each["title"] for each in content["experiments"].values())}
    for experiment in content["experiments"].values():
        names |= {" + ".join(map(str, runs["ranks"])) for runs in experiment["runs"]}
    for variant in content["variants"].values():
        if variant["reducer"] != "dense":
            names.add(f"{100 * variant['reducer']['density']:g} %")
    prose = re.sub(r"<!-- .*? -->\n.*?<!-- end -->", "", convergence.PAGE.read_text(), flags=re.DOTALL)
    prose = re.sub(rf"{CITED}|`[^`]*`|\]\([^)]*\)", "", prose, flags=re.IGNORECASE)
    for name in sorted(names, key=len, reverse=True):
        prose = prose.replace(name, "")
    assert re.findall(r"\S*\d\S*", prose) == []


def test_every_record_is_of_a_case_of_the_plan_and_no_case_has_two():
    planned = set(convergence.cases(convergence.plan(), []))
    recorded = [convergence.case_of(record) for record in convergence.recorded()]
    assert set(recorded) <= planned
    assert len(set(recorded)) == len(recorded)


@pytest.mark.slow
def test_every_experiment_is_configured_for_each_of_its_variants(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    content = convergence.plan()
    for case in convergence.cases(content, []):
        config = Config.model_validate(convergence.configuration(content, case, "folder"))
        assert config.dataset.path in (None, *(f"{tmp_path}/cloudtrain/{name}" for name in ("brown", "ende")))
        assert metric_of(content["experiments"][case.experiment]).label


def test_all_experiments_have_their_first_seed_before_any_has_its_second():
    runs = [{"ranks": [2], "variants": ["dense", "sparse"]}]
    content = {"experiments": {"one": {"seeds": [1, 2], "runs": runs}, "two": {"seeds": [1], "runs": runs}}}
    found = [(case.seed, case.experiment, case.variant) for case in convergence.cases(content, [])]
    assert found == [
        (1, "one", "dense"),
        (1, "one", "sparse"),
        (1, "two", "dense"),
        (1, "two", "sparse"),
        (2, "one", "dense"),
        (2, "one", "sparse"),
    ]
    assert {case.experiment for case in convergence.cases(content, ["two"])} == {"two"}


def test_runs_may_have_seeds_of_their_own():
    runs = [{"ranks": [2], "seeds": [1, 3], "variants": ["dense"]}, {"ranks": [2], "variants": ["sparse"]}]
    content = {"experiments": {"one": {"seeds": [1, 2], "runs": runs}}}
    found = [(case.seed, case.variant) for case in convergence.cases(content, [])]
    assert found == [(1, "dense"), (1, "sparse"), (2, "sparse"), (3, "dense")]


def test_a_variant_is_put_into_every_phase_and_the_first_and_the_last_one_may_differ():
    content = {
        "variants": {
            "switch": {
                "reducer": "hitopk",
                "first_phase": {"reducer": "oktopk"},
                "last_phase": {"reducer": "dense"},
                "optimizer": {"momentum": 0},
            }
        },
        "experiments": {
            "one": {
                "config": {
                    "optimizer": {"name": "sgd"},
                    "phases": [{"epochs": 1}, {"epochs": 2}, {"epochs": 3}],
                }
            }
        },
    }
    config = convergence.configuration(content, Case("one", (2,), "switch", 3), "folder")
    assert config["phases"] == [
        {"epochs": 1, "reducer": "oktopk"},
        {"epochs": 2, "reducer": "hitopk"},
        {"epochs": 3, "reducer": "dense"},
    ]
    assert config["optimizer"] == {"name": "sgd", "momentum": 0}
    assert (config["seed"], config["output"]) == (3, "folder")


def test_a_table_compares_shares_in_points_and_other_metrics_relatively():
    rows = [Row("dense", (2, 2), [0.9, 0.8], 0), Row("hitopk", (4,), [0.84], 0)]
    assert "| hitopk | 4 | 1 | 84.00% | 84.00% … 84.00% | -1.00 points |" in table(rows, ACCURACY)
    others = table([Row("dense", (2,), [100.0], 0), Row("oktopk", (2,), [102.0, 104.0], 0)], PERPLEXITY)
    assert "| oktopk | 2 | 2 | 103 | 102 … 104 | +3.0% |" in others


@pytest.mark.parametrize(
    ("experiment", "dense", "close", "far", "limit"),
    [(ACCURACY, 0.97, 0.96, 0.9599, "1.0 points"), (PERPLEXITY, 100.0, 101.0, 101.01, "1.0%")],
)
def test_a_variant_reaches_a_goal_up_to_its_limit_and_where_it_is_better(
    experiment, dense, close, far, limit
):
    rows = [Row("dense", (2,), [dense], 0), Row("close", (2, 2), [close], 0), Row("far", (2,), [far], 0)]
    rows.append(Row("better", (4,), [0.99 if dense < 1 else 50.0], 0))
    goals = [{"within": 0.01, "variants": ["close", "far", "better"]}]
    assert verdict(rows, experiment | {"goals": goals}) == (
        f"- Worse than dense by at most {limit}: close on 2 + 2; better on 4.\n  By more: far on 2.\n"
    )


def test_settings_are_yaml_without_references_to_what_is_shared():
    phase = {"epochs": 1}
    assert settings({"config": {"model": "mlp", "phases": [phase, phase]}}) == (
        "```yaml\nmodel: mlp\nphases:\n- {epochs: 1}\n- {epochs: 1}\n```\n"
    )


def test_the_losses_of_a_run_are_means_over_equal_parts():
    steps = 3 * convergence.LOSSES
    means = convergence.loss_means([None if step == 4 else float(step) for step in range(steps)])
    expected = np.arange(convergence.LOSSES) * 3.0 + 1
    expected[1] = 4.0  # of 3 and 5
    assert means == expected.tolist()
    assert convergence.loss_means([None, 1.0]) == [None, 1.0]


@pytest.mark.parametrize("curve", [{"curve": "loss"}, {}])
def test_curves_are_those_of_the_variants_that_have_records(curve, tmp_path):
    record = {
        "case": {"variant": "dense", "layout": [2, 2]},
        "epochs": [{"steps": 4, "top1": 0.5}, {"steps": 4, "top1": 0.75}],
        "losses": [2.0, 1.0],
    }
    runs = [{"ranks": [2, 2], "variants": ["dense", "oktopk"]}]
    experiment = ACCURACY | curve | {"drawn": ["dense", "oktopk"], "runs": runs}
    draw_curves(tmp_path / "curves.svg", [record], experiment)
    drawn = (tmp_path / "curves.svg").read_text()
    assert ">dense<" in drawn
    assert ">oktopk<" not in drawn
    assert (">loss in training<" in drawn) == bool(curve)
