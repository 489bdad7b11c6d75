"""docs/convergence.md shows what its records hold."""

from scripts import convergence
from scripts.convergence import Case
from scripts.drawing.convergence import Row, table
from scripts.drawing.pages import with_block


def test_the_tables_are_those_of_the_records():
    content, records = convergence.plan(), convergence.recorded()
    page, found = convergence.PAGE.read_text(), convergence.blocks(content, records)
    assert found
    for name, text in found.items():
        assert with_block(page, name, text) == page


def test_every_record_is_of_a_case_of_the_plan_and_no_case_has_two():
    planned = set(convergence.cases(convergence.plan(), []))
    recorded = [convergence.case_of(record) for record in convergence.recorded()]
    assert set(recorded) <= planned
    assert len(set(recorded)) == len(recorded)


def test_a_variant_is_put_into_every_phase_and_the_last_one_may_differ():
    content = {
        "variants": {
            "switch": {"reducer": "hitopk", "last_phase": {"reducer": "dense"}, "optimizer": {"momentum": 0}}
        },
        "experiments": {
            "one": {"config": {"optimizer": {"name": "sgd"}, "phases": [{"epochs": 1}, {"epochs": 2}]}}
        },
    }
    config = convergence.configuration(content, Case("one", (2,), "switch", 3), "folder")
    assert config["phases"] == [{"epochs": 1, "reducer": "hitopk"}, {"epochs": 2, "reducer": "dense"}]
    assert config["optimizer"] == {"name": "sgd", "momentum": 0}
    assert (config["seed"], config["output"]) == (3, "folder")


def test_a_table_compares_shares_in_points_and_other_metrics_relatively():
    rows = [Row("dense", (2, 2), [0.9, 0.8], 0), Row("hitopk", (4,), [0.84], 0)]
    shares = table(rows, {"metric": "top1", "label": "accuracy"})
    assert "| hitopk | 4 | 1 | 84.00% | 84.00% … 84.00% | -1.00 points |" in shares
    others = table(
        [Row("dense", (2,), [100.0], 0), Row("oktopk", (2,), [102.0], 0)],
        {"metric": "perplexity", "label": "p"},
    )
    assert "| oktopk | 2 | 1 | 102.00 | 102.00 … 102.00 | +2.0% |" in others
