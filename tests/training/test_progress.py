"""What rank 0 says, and when."""

import pytest

from training import launch, progress


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test moves."""

    class Clock:
        now = 100.0

    monkeypatch.setattr(progress.time, "monotonic", lambda: Clock.now)
    return Clock


def test_plain_lines_come_every_few_seconds(capsys, clock):
    lines = progress.Progress(silent=False)
    for second in range(11):
        clock.now = 100.0 + second
        lines.update(f"at {second}")
    assert capsys.readouterr().out.splitlines() == ["at 5", "at 10"]


def test_lines_that_stay_are_never_held_back(capsys, clock):
    lines = progress.Progress(silent=False)
    lines.say("one [red]")
    lines.say("two")
    assert capsys.readouterr().out.splitlines() == ["one [red]", "two"]


def test_other_ranks_are_silent(capsys, clock):
    lines = progress.Progress(silent=True)
    with lines:
        lines.say("one")
        clock.now += 60
        lines.update("two")
    assert capsys.readouterr().out == ""


def test_for_a_launcher_with_a_terminal_replaceable_lines_are_marked_and_frequent(capsys, clock, monkeypatch):
    monkeypatch.setenv(progress.LIVE_VARIABLE, "1")
    lines = progress.Progress(silent=False)
    clock.now += 1
    lines.update("now")
    lines.say("stays")
    assert capsys.readouterr().out == f"{progress.LIVE_MARK}now\nstays\n"


def test_the_launcher_takes_the_tags_of_ranks_away(capsys):
    launch._forward_output(["[1,0]<stdout>: epoch 1\n", "[1,0]<stdout>:   phase 1\n", "no tag\n"])
    assert capsys.readouterr().out.splitlines() == ["epoch 1", "  phase 1", "no tag"]


def test_the_launcher_drops_noise_and_the_account_of_what_a_rank_said_itself(capsys):
    rule = "-" * 74 + "\n"
    account = "prterun detected that one or more processes exited with non-zero status,\n"
    signal = "prterun noticed that process rank 1 exited on signal 9\n"
    lined = "[1,0]<stderr>: " + rule
    launch._forward_errors([lined, "[1,0]<stderr>: step 3 exited with non-zero status\n", lined])
    assert (
        capsys.readouterr().err == f"{rule}step 3 exited with non-zero status\n{rule}"
    )  # a rank's own words
    launch._forward_errors(
        [lined, "[1,2]<stderr>: MPI_ABORT was invoked on rank 2\n", lined, "[1,2]<stderr>: \0"]
        + ["[vm:01614] PMIX ERROR: PMIX_ERR_UNREACH in file pmix_server.c at line 3146\n"]
    )
    assert capsys.readouterr().err == ""
    launch._forward_errors(
        [
            "[1,2]<stderr>: rank 2 failed\n",
            rule,
            account,
            rule,
            rule,
            signal,
            rule,
            "E0 Unable to register cuDNN factory\n",
        ]
    )
    assert capsys.readouterr().err == f"rank 2 failed\n{rule}{signal}{rule}"
