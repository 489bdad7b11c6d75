"""What a run says of itself."""

from training.config.records import Target
from training.run.stages import Slowest, StageMeans
from training.run.summary import EpochResult, PhaseResult, Ranks, Summary, closing_lines, epoch_line

RANKS = Ranks(4, [2, 2], ["node1", "node2"])


def epoch(**changes) -> EpochResult:
    values = {
        "epoch": 2,
        "reducer": "hitopk",
        "input_size": 6,
        "steps": 22,
        "loss": 0.25,
        "correct": 90,
        "correct_of_five": 99,
        "samples": 100,
        "train_seconds": 1.5,
        "run_seconds": 20.0,
        "images_per_second": 1234.5,
        "sent_intra_bytes": 10,
        "sent_inter_bytes": 270_000,
        "dense_inter_bytes": 27_000_000,
    }
    return EpochResult(**(values | changes))


def test_an_epoch_is_one_line():
    assert epoch_line(epoch(), epochs=20, width=8) == (
        "epoch  3/20  hitopk    6 px  loss 0.250  test accuracy  90.0%    1,234 images/s"
        "  between nodes 0.27 MB (dense 27.00 MB)"
    )


def test_an_epoch_that_was_not_tested_is_as_wide():
    line = epoch_line(epoch(correct=None, correct_of_five=None, samples=0), epochs=20, width=8)
    assert line == (
        "epoch  3/20  hitopk    6 px  loss 0.250  not tested              1,234 images/s"
        "  between nodes 0.27 MB (dense 27.00 MB)"
    )
    assert len(line) == len(epoch_line(epoch(), epochs=20, width=8))


def test_an_epoch_tells_what_was_hidden_and_who_was_the_slowest():
    line = epoch_line(
        epoch(stages=StageMeans(hidden_share=0.834, slowest=Slowest(3, 0.12))), epochs=20, width=8
    )
    assert line == f"{epoch_line(epoch(), epochs=20, width=8)}  hidden 83%  slowest rank 3 (+12%)"


def test_accuracies_are_shares_of_the_samples():
    assert (epoch().accuracy, epoch().accuracy_of_five) == (0.9, 0.99)
    untested = epoch(correct=None, correct_of_five=None, samples=0)
    assert (untested.accuracy, untested.accuracy_of_five) == (None, None)
    assert (Summary().accuracy, Summary().accuracy_of_five) == (0.0, 0.0)


def test_a_summary_takes_over_another_and_leaves_out_phases_that_are_gone():
    phases = [PhaseResult("hitopk", 6, 3, 1, 2, 3, 0.5), PhaseResult("dense", 8, 1)]
    before = Summary(3, 4, 5, 6.0, 0.75, True, 0.0, phases)
    summary = Summary(phases=[PhaseResult("gtopk", 6, 9)])
    summary.restore(before)
    assert summary == Summary(3, 4, 5, 6.0, 0.75, True, 0.0, [PhaseResult("gtopk", 6, 9, 1, 2, 3, 0.5)])


def test_a_summary_keeps_the_last_test_and_the_best_of_what_counts():
    summary = Summary()
    target = Target(metric="top5", at_least=0.995)
    shares = [(90, 99), (95, 98), (None, None), (80, 99)]
    results = [
        epoch(correct=first, correct_of_five=five, samples=0 if first is None else 100)
        for first, five in shares
    ]
    assert [summary.judge(result, target) for result in results] == [True, False, False, False]
    assert (summary.correct, summary.correct_of_five, summary.samples, summary.best) == (80, 99, 100, 0.99)
    assert not summary.reached
    assert summary.judge(epoch(correct=50, correct_of_five=100), target)
    assert summary.reached


def test_without_a_target_the_first_label_counts():
    summary = Summary()
    epochs = [epoch(correct=90, correct_of_five=99), epoch(correct=91, correct_of_five=95)]
    assert [summary.judge(result, None) for result in epochs] == [True, True]
    assert (summary.best, summary.reached) == (0.91, False)


def test_an_epoch_on_one_node_without_a_finite_loss_says_so():
    line = epoch_line(epoch(loss=None, dense_inter_bytes=0, sent_inter_bytes=0), epochs=3, width=6)
    assert line == "epoch  3/3  hitopk  6 px  loss nan  test accuracy  90.0%    1,234 images/s"


def test_the_end_names_accuracy_bytes_and_files():
    phases = [
        PhaseResult("hitopk", 6, 12, sent=3_290_000, dense=328_430_000),
        PhaseResult("dense", 8, 8, sent=218_960_000, dense=218_960_000, stall_seconds=0.104),
    ]
    lines = list(closing_lines(Summary(353, 360, 360, 10.4, phases=phases), RANKS, "runs/digits-1"))
    assert lines == [
        "test accuracy 98.1% (353 of 360), trained in 10 s by 4 ranks on 2 nodes (node1, node2)",
        "sent between nodes 222.25 MB; dense all the way would have sent 547.39 MB",
        "  phase 1, hitopk: 3.29 MB of 328.43 MB (1/100)",
        "  phase 2, dense: 218.96 MB of 218.96 MB (all)",
        "training stood still between phases: 0.1 s before phase 2",
        "files: runs/digits-1 (metrics.jsonl, config.yaml, model.weights.h5)",
    ]


def test_skipped_steps_a_residual_left_and_a_phase_that_sent_nothing_are_told():
    phases = [PhaseResult("hitopk", 6, 1, sent=0, dense=1000, skipped_steps=5)]
    lines = list(closing_lines(Summary(1, 2, 2, 3.0, residual_norm=0.5, phases=phases), RANKS, "runs/x"))
    assert "  phase 1, hitopk: 0.00 MB of 0.00 MB (nothing)" in lines
    assert "5 steps were skipped: a NaN or an infinity in the gradients" in lines
    assert "held back at the end, and not in the weights: a residual of norm 0.5 on rank 0" in lines


def test_one_skipped_step_is_one_step():
    phases = [PhaseResult("dense", 6, 1), PhaseResult("dense", 6, 1, skipped_steps=1)]
    lines = list(closing_lines(Summary(phases=phases), RANKS, "runs/x"))
    assert "1 step was skipped: a NaN or an infinity in the gradients" in lines


def test_of_short_stops_between_phases_nothing_is_said():
    phases = [PhaseResult("dense", 6, 1, stall_seconds=each) for each in (None, 0.0, 0.09, 2.34)]
    lines = [line for line in closing_lines(Summary(phases=phases), RANKS, "runs/x") if "stood still" in line]
    assert lines == ["training stood still between phases: 2.3 s before phase 4"]
    assert not any(
        "stood still" in line for line in closing_lines(Summary(phases=phases[:3]), RANKS, "runs/x")
    )


def test_on_one_rank_an_epoch_names_no_reducer():
    line = epoch_line(epoch(reducer=None, dense_inter_bytes=0, sent_inter_bytes=0), epochs=3, width=0)
    assert line == "epoch  3/3  6 px  loss 0.250  test accuracy  90.0%    1,234 images/s"


def test_of_many_hosts_the_first_are_named():
    assert str(Ranks(1, [1], ["here"])) == "1 rank on 1 node (here)"
    many = Ranks(20, [2] * 10, [f"n{number}" for number in range(10)])
    assert str(many) == "20 ranks on 10 nodes (n0, n1, n2, n3, n4, n5, n6, n7, and 2 more)"
