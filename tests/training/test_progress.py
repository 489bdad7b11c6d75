"""What rank 0 says, and when."""

import io

import pytest
from rich.console import Console

from training.process import progress
from training.process.job import log_error
from training.process.launch import Output


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 100.0

    monkeypatch.setattr(progress.time, "monotonic", lambda: Clock.now)
    return Clock


def test_plain_lines_come_every_few_seconds_and_permanent_ones_always(capsys, clock):
    lines = progress.Progress(silent=False)
    for second in range(11):
        clock.now = 100.0 + second
        lines.update(f"at {second}")
    lines.say("one [red]")
    lines.say("two")
    assert capsys.readouterr().out.splitlines() == ["at 5", "at 10", "one [red]", "two"]


def test_for_a_launcher_with_a_terminal_live_lines_are_marked_and_removed_at_the_end(
    capsys, clock, monkeypatch
):
    monkeypatch.setenv(progress.LIVE_VARIABLE, "1")
    with progress.Progress(silent=False) as lines:
        clock.now += 1
        lines.update("now")
        lines.say("stays")
    assert capsys.readouterr().out == f"{progress.LIVE_MARK}now\nstays\n{progress.LIVE_MARK}\n"
    with progress.Progress(silent=False):
        pass
    assert capsys.readouterr().out == ""  # there was no live line


def test_a_terminal_shows_no_live_line_below_the_lines_that_come_after_it(monkeypatch):
    output = io.StringIO()
    monkeypatch.setattr(
        progress, "Console", lambda **words: Console(file=output, force_terminal=True, **words)
    )
    with progress.Screen() as screen:
        screen.update("step 7")
        screen.say("epoch:a:1 [red]")  # rich would make a picture and a colour of it
        assert output.getvalue().endswith("epoch:a:1 [red]\nstep 7")
        screen.update("")
        assert output.getvalue().endswith("\x1b[1A\x1b[2K")  # of the line above, where the live one was
        screen.say("the end")
    assert output.getvalue().endswith("\x1b[2Kthe end\n")


def test_the_time_left_is_that_of_the_median_step():
    left = progress.TimeLeft()
    assert left.of(10) is None
    for seconds in (30.0, 0.2, 0.4):
        left.add(seconds)
    assert left.of(10) == pytest.approx(4.0)
    for _ in range(progress.STEPS_MEASURED):
        left.add(2.0)
    assert left.of(10) == 20.0  # the first are forgotten


def test_names_that_are_no_text_are_printed_escaped(capsys):
    name = b"caf\xe9\x1b[2J.png".decode(errors="surrogateescape")
    progress.Progress(silent=False).say(f"{name} is gone")
    log_error(f"{name} is gone")
    said = capsys.readouterr()
    assert said.out == "caf\\xe9\\x1b[2J.png is gone\n"
    assert said.err == "cloudtrain: caf\\xe9\\x1b[2J.png is gone\n"


def test_the_launcher_takes_the_tags_of_ranks_away(capsys):
    Output().forward_output(["[1,0]<stdout>: epoch 1\n", "[1,0]<stdout>:   phase 1\n", "no tag\n"])
    assert capsys.readouterr().out.splitlines() == ["epoch 1", "  phase 1", "no tag"]


RULE = "-" * 74 + "\n"
ACCOUNT = "prterun detected that one or more processes exited with non-zero status,\n"
SIGNAL = "prterun noticed that process rank 1 exited on signal 9\n"
UNREACHABLE = "[vm:01614] PMIX ERROR: PMIX_ERR_UNREACH in file pmix_server.c at line 3146\n"
OF_RANK, END = "[1,2]<stderr>: ", "[1,2]<stderr>: \0"


@pytest.mark.parametrize(
    ("printed", "shown"),
    [
        ([OF_RANK + RULE, OF_RANK + "step 3 exited\n", OF_RANK + RULE], f"{RULE}step 3 exited\n{RULE}"),
        ([OF_RANK + RULE, f"{OF_RANK}MPI_ABORT was invoked on rank 2\n", RULE, END, UNREACHABLE], ""),
        ([END + "[1,0]<stderr>: \0[1,0]<stderr>: "], ""),
        ([RULE, UNREACHABLE, END, ACCOUNT, RULE], ""),
        ([f"{OF_RANK}failed\n", RULE, ACCOUNT, RULE, RULE, SIGNAL, RULE], f"failed\n{RULE}{SIGNAL}{RULE}"),
    ],
    ids=["words of a rank", "abort", "ends", "noise in a banner", "signal"],
)
def test_the_launcher_drops_noise_and_the_account_of_what_a_rank_said_itself(capsys, printed, shown):
    Output().forward_errors(printed)
    assert capsys.readouterr().err == shown
