"""``scripts/stages.sh``: all stages run, and the end says what failed and how to repeat it."""

from tests import launching


def run(*stages):
    """Run a script of these stages as ``scripts/test.sh`` is written."""
    lines = [each if each.startswith(("start ", "join")) else f"stage {each}" for each in stages]
    script = "\n".join(["set -euo pipefail", ". scripts/stages.sh", *lines])
    # A background job of a shell without job control ignores interrupts, and so would what it starts.
    return launching.run("env", "--default-signal=INT", "bash", "-c", f"{script}\nreport")


def test_all_stages_run_and_every_failure_is_reported_with_the_command_that_repeats_it():
    result = run("false", "sh -c 'echo 1 failed, 2 passed; exit 3' 'a b'", "no-such-command", "echo 3 passed")
    assert result.returncode == 1
    first, _, *rest = result.stdout.splitlines()  # what bash says of the unknown command is its own
    assert first == "1 failed, 2 passed"
    assert rest == [
        "3 passed",
        "cloudtrain: failed, to repeat: false",
        "cloudtrain: failed, to repeat: sh -c 'echo 1 failed, 2 passed; exit 3' 'a b'",
        "cloudtrain: failed, to repeat: no-such-command",
        "3 passed",
    ]


def test_a_stage_that_was_started_beside_others_is_shown_and_judged_where_it_is_waited_for():
    result = run("start sh -c 'echo beside; exit 3'", "echo checked", "join", "echo 3 passed")
    assert result.stdout.splitlines() == [
        *("checked", "beside", "3 passed"),
        "cloudtrain: failed, to repeat: sh -c 'echo beside; exit 3'",
        "3 passed",
    ]


def test_an_interrupt_ends_the_script_and_not_only_the_stage():
    # pytest ends by itself when it is interrupted, and bash would go on
    handled = "sh -c 'trap \"echo handled; exit 2\" INT; kill -INT $PPID $$; sleep 1'"
    result = run(handled, "echo went on")
    assert result.returncode == 130
    assert "went on" not in result.stdout
