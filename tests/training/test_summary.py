"""The lines of a run, and what its summary keeps."""

import pytest

from training.config.records import Target
from training.results import EpochResult, PhaseResult, Ranks, Slowest, StageMeans, Summary
from training.run.events import closing_lines, epoch_line
from training.tasks.image_classification import ImageClassification
from training.tasks.task import Metric

TASK = ImageClassification()
RANKS = Ranks(4, [2, 2], ["node1", "node2"])


def epoch(**changes) -> EpochResult:
    values = {
        "epoch": 2,
        "reducer": "hitopk",
        "input": "6 px",
        "steps": 22,
        "loss": 0.25,
        "metrics": {"top1": 0.9, "top5": 0.99},
        "tested": 100,
        "train_seconds": 1.5,
        "run_seconds": 20.0,
        "throughput": 1234.5,
        "sent_intra_bytes": 10,
        "sent_inter_bytes": 270_000,
        "dense_inter_bytes": 27_000_000,
    }
    return EpochResult(**(values | changes))


LINE = "epoch  3/20  hitopk    6 px  loss 0.250  test accuracy  90.0%    1,234 images/s"
BETWEEN = "  between nodes 0.27 MB (dense 27.00 MB)"
ONE_NODE = {"dense_inter_bytes": 0, "sent_inter_bytes": 0}
STAGES = StageMeans(hidden_share=0.834, slowest=Slowest(3, 0.12))


@pytest.mark.parametrize(
    ("changes", "width", "line"),
    [
        ({}, 8, f"{LINE}{BETWEEN}"),
        (
            {"metrics": {}, "tested": 0},
            8,
            f"{LINE}{BETWEEN}".replace("test accuracy  90.0%", "not tested".ljust(20)),
        ),
        ({"stages": STAGES}, 8, f"{LINE}{BETWEEN}  hidden 83%  slowest rank 3 (+12%)"),
        ({"passed_over": 12}, 8, f"{LINE}{BETWEEN}  passed over 12 steps"),
        ({"reducer": None, **ONE_NODE}, 0, LINE.replace("hitopk    ", "")),
    ],
    ids=["plain", "not tested", "stages", "passed over", "one rank"],
)
def test_an_epoch_is_one_line(changes, width, line):
    assert epoch_line(epoch(**changes), TASK, epochs=20, width=width) == line


def judged(summary, target, *results, metrics=TASK.metrics):
    of_epochs = [epoch(metrics=values, tested=100 if values else 0) for values in results]
    return [summary.judge(each, metrics, target) for each in of_epochs]


def test_a_summary_keeps_the_last_test_and_the_best_of_what_counts():
    summary, target = Summary(), Target(metric="top5", at_least=0.995)
    shares = [(0.90, 0.99), (0.95, 0.98), None, (0.80, 0.99)]
    results = [{} if each is None else dict(zip(("top1", "top5"), each, strict=True)) for each in shares]
    assert judged(summary, target, *results) == [True, False, False, False]
    assert (summary.metrics, summary.tested, summary.best) == ({"top1": 0.8, "top5": 0.99}, 100, 0.99)
    assert not summary.reached
    assert judged(summary, target, {"top1": 0.5, "top5": 1.0}) == [True]
    assert summary.reached


def test_of_some_metrics_lower_values_are_better_and_none_is_no_number():
    metrics, nan = {"perplexity": Metric("test perplexity", "lower")}, float("nan")
    summary, target = Summary(), Target(metric="perplexity", at_most=20)
    results = [{"perplexity": value} for value in (nan, 40.0, 50.0, 30.0, nan, 30.0)]
    assert judged(summary, target, *results, metrics=metrics) == [False, True, False, True, False, False]
    assert (summary.best, summary.reached) == (30.0, False)
    assert judged(summary, target, {"perplexity": 20.0}, metrics=metrics) == [True]
    assert summary.reached


def test_the_end_names_accuracy_bytes_and_files():
    phases = [
        PhaseResult("hitopk", "6 px", 12, 3_290_000, 328_430_000),
        PhaseResult("dense", "8 px", 8, 218_960_000, 218_960_000, stall_seconds=0.104),
    ]
    summary = Summary({"top1": 353 / 360, "top5": 1.0}, 360, 10.4, phases=phases)
    lines = list(closing_lines(summary, TASK, RANKS, "runs/digits-1"))
    assert lines == [
        "test accuracy 98.1% (353 of 360), trained in 10 s by 4 ranks on 2 nodes (node1, node2)",
        "sent between nodes 222.25 MB; dense all the way would have sent 547.39 MB",
        "  phase 1, hitopk: 3.29 MB of 328.43 MB (1/100)",
        "  phase 2, dense: 218.96 MB of 218.96 MB (all)",
        "training stood still between phases: 0.1 s before phase 2",
        "files: runs/digits-1 (metrics.jsonl, config.yaml, model.weights.h5)",
    ]


@pytest.mark.parametrize(
    ("reached", "stopped", "is_told"), [(False, None, True), (True, None, False), (False, "x", False)]
)
def test_a_target_that_was_not_reached_is_told(reached, stopped, is_told):
    summary = Summary({"top1": 0.9}, 10, 1.0, best=0.95, reached=reached, stopped=stopped)
    lines = list(closing_lines(summary, TASK, RANKS, "runs/x", Target(metric="top1", at_least=0.99)))
    assert ("target not reached: test accuracy 99.0%; the best was 95.0%" in lines) == is_told


def closing(**values):
    return list(closing_lines(Summary(**values), TASK, RANKS, "runs/x"))


def test_skipped_steps_a_residual_left_and_a_phase_that_sent_nothing_are_told():
    lines = closing(residual_norm=0.5, phases=[PhaseResult("hitopk", "6 px", 1, 0, 1000, skipped_steps=5)])
    assert "  phase 1, hitopk: 0.00 MB of 0.00 MB (nothing)" in lines
    assert "5 steps were skipped: a NaN or an infinity in the gradients" in lines
    assert "unsent residual at the end: norm 0.5 on rank 0 (not applied)" in lines


@pytest.mark.parametrize(("count", "what"), [(1, "1 step was"), (12, "12 steps of ranks were")])
def test_steps_that_were_passed_over_are_told(count, what):
    line = f"{what} passed over: their rounds had lasted round_seconds"
    assert line in closing(phases=[PhaseResult("dense", "6 px", 1, passed_over=count)])


def test_of_many_hosts_the_first_are_named():
    assert str(Ranks(1, [1], ["here"])) == "1 rank on 1 node (here)"
    many = Ranks(20, [2] * 10, [f"n{number}" for number in range(10)])
    assert str(many) == "20 ranks on 10 nodes (n0, n1, n2, n3, n4, n5, n6, n7, and 2 more)"
