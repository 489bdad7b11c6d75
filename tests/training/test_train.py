"""Training runs as users start them: real processes, real data."""

import re
import shlex

import pytest
import yaml

from tests.launching import DIGITS, ENVIRONMENT, ROOT, errors, launch, python_on_ranks, run, tail
from tests.training.small import LINEAR, metrics_of, phase, records_of
from tests.training.test_tune import save

pytestmark = pytest.mark.launch

BRIEF = ("phases.0.epochs=1", "phases.1.epochs=1")
PARAMETERS = 77_754  # of resnet8 with one channel and ten classes


@pytest.mark.large
@pytest.mark.parametrize(
    ("name", "percent", "data"),
    [
        ("digits", 97, None),
        ("digits_lars", 97, None),
        ("intents_lstm", 97, "intents"),
        ("mnist5k", 96, None),
        ("spam_logistic", 97, "spam"),
        ("url_logistic", 70, None),
        ("webspam_svm", 63, None),
    ],
)
def test_a_shipped_configuration_reaches_its_figure_on_one_rank(tmp_path, monkeypatch, name, percent, data):
    monkeypatch.setitem(ENVIRONMENT, "XDG_DATA_HOME", str(tmp_path / "data"))
    if data is not None:
        made = run("cloudtrain", "data", data, cwd=tmp_path)
        assert made.returncode == 0, tail(made)
    result = run("cloudtrain", "train", str(ROOT / "configs" / f"{name}.yaml"), cwd=tmp_path)
    assert result.returncode == 0, tail(result)
    assert float(re.findall(r"accuracy +(\S+?) ?%", result.stdout)[-1]) >= percent


@pytest.mark.parametrize(
    ("program", "words", "epochs", "top1"),
    [
        pytest.param("cloudtrain launch", (), (12, 8), 0.96, marks=pytest.mark.large, id="quickstart"),
        pytest.param("cloudtrain launch", BRIEF, (1, 1), 0.5, id="brief"),
        pytest.param("horovodrun", BRIEF, (1, 1), 0.5, marks=pytest.mark.slow, id="brief, by horovodrun"),
    ],
)
def test_a_run_says_what_it_does_reaches_its_accuracy_and_sends_less(tmp_path, program, words, epochs, top1):
    nodes = [1, 1] if words else [2, 2]
    shown = re.search(rf"^{program} .*-np 4 .*digits\b", (ROOT / "README.md").read_text(), re.MULTILINE)[0]
    command = shlex.split(shown.replace("-np 4", f"-np {sum(nodes)}"))
    result = run(*command, f"ranks_per_node={nodes[0]}", *words, cwd=tmp_path)
    assert result.returncode == 0, tail(result)
    assert program == "horovodrun" or errors(result) == ""  # which prints TensorFlow's own lines
    (folder,) = (tmp_path / "runs").iterdir()
    assert sorted(path.name for path in folder.iterdir()) == [
        *("config.yaml", "lock", "metrics.jsonl", "model.weights.h5"),
        *("receipt.json", "run.json", "summary.json"),
    ]
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert [phase["reducer"]["name"] for phase in config["phases"]] == ["hitopk", "dense"]

    lines, ranks = metrics_of(tmp_path / "runs"), sum(nodes)
    assert (lines[0]["kind"], lines[0]["ranks"], lines[0]["nodes"]) == ("run", ranks, nodes)
    assert [reducer["name"] for reducer in lines[0]["reducers"]] == ["hitopk", "dense"]
    assert f"by {ranks} ranks on 2 nodes ({', '.join(lines[0]['hosts'])})" in result.stdout
    of_epochs = [line for line in lines if line["kind"] == "epoch"]
    assert [line["input"] for line in of_epochs] == ["6 px"] * epochs[0] + ["8 px"] * epochs[1]
    # the ring's two links between nodes carry 2·d·(P − 1)/P values each, to the rounding of d/P
    dense = 2 * 2 * PARAMETERS * 4 * (ranks - 1) / ranks
    for line in of_epochs:
        assert line["dense_inter_bytes"] == pytest.approx(line["steps"] * dense, rel=1e-4)
        # Σ over ranks of (m − 1)·k̃ entries of 8 bytes, k̃ = round(0.01·d/n)
        sparse = line["steps"] * ranks * round(0.01 * PARAMETERS / nodes[0]) * 8
        assert line["sent_inter_bytes"] == (
            sparse if line["reducer"] == "hitopk" else line["dense_inter_bytes"]
        )

    (switch,) = [line for line in lines if line["kind"] == "switch"]
    assert (switch["before"], switch["after"]) == ("hitopk", "dense")
    assert switch["residual_norm"] > 0
    (summary,) = [line for line in lines if line["kind"] == "summary"]
    assert summary["top1"] >= top1
    assert summary["tested"] == 360
    assert f"test accuracy {summary['top1']:.1%}" in result.stdout
    assert f"files: runs/{folder.name}" in result.stdout


@pytest.mark.slow
def test_a_run_repeats_bitwise_rank_0_alone_speaks_and_local_steps_end_with_equal_weights(tmp_path):
    """A job of two ranks trains three times."""
    twice = (*BRIEF, "model=vgg_tiny", "log_every=1", "bucket_mib=0.02")
    outer = "{rate: 0.7, momentum: 0.9, fragments: 2, delay: 1}"
    phases = phase(steps=8, local_steps=4, round_seconds=1000, outer=outer)
    local = (LINEAR, "cache={}", "ranks_per_node=1", "reducer=dense", "digest_every=4", f"phases=[{phases}]")
    runs = {"plain": twice, "verified": (*twice, "verify=true"), "local": local}  # the messages with digests
    program = (
        "from training.commands.train import train\n"
        f"for name, words in {runs}.items():\n"
        f"    train({DIGITS!r}, [*words, f'output={tmp_path}/{{name}}'])"
    )
    result = launch(2, "--", "python", "-c", program)
    assert result.returncode == 0, tail(result)
    # of runs in one process
    assert all("triggered tf.function retracing" in line for line in errors(result).splitlines())
    said = result.stdout
    assert said.count("test accuracy") == 2 * 3 + 2  # the epochs of each run, and its end
    first, second = (
        [line["loss"] for line in records_of(tmp_path / name, "step")] for name in ("plain", "verified")
    )
    assert len(first) == 2 * (1437 // 32)
    assert first == second
    told = [line for line in said.splitlines() if line.startswith("epoch") and "accuracy" in line]
    assert all("  hidden " in line and "  slowest rank " in line for line in told[:4])
    assert records_of(tmp_path / "local", "digest")[-1]["steps"] == 8


def test_it_is_one_line_and_status_2_of_all_ranks_whatever_it_is(tmp_path):
    profile = tmp_path / "profile.json"
    save(profile, 4, 2)  # of four ranks
    tune = f"to measure again: cloudtrain tune -np 2 --ranks-per-node 1 --profile {profile}"
    problems = {
        ("ranks_per_node=[1,2]",): "ranks_per_node: expected counts that add to 2 ranks, got [1, 2]",
        ("phases.0.batch_size=800",): "phases[0].batch_size: expected at most the 1437 training samples",
        ("reducer.density=7",): f"{DIGITS}: reducer.density: expected a number in (0, 1], got 7",
        ("output=/proc/none",): "output: /proc/none: expected a folder that can be written",
        ("output=gone",): "output: gone: expected a folder that can be written",
        ("reducer=auto", "ranks_per_node=1", f"profile={profile}"): tune,
    }
    (tmp_path / "gone").symlink_to(tmp_path / "unmounted")
    program = (
        "import sys\n"
        "from training.commands.train import train\n"
        f"for words in {list(problems)}:\n"
        "    try:\n"
        f"        train({DIGITS!r}, list(words))\n"
        "    except SystemExit as end:\n"
        "        print('status', end.code, flush=True)"
    )
    result = python_on_ranks(2, program, cwd=tmp_path)
    assert result.returncode == 0, tail(result)
    assert result.stdout.splitlines() == ["status 2"] * 2 * len(problems)
    said = result.stderr.splitlines()
    assert len(said) == len(problems), tail(result)
    for line, message in zip(said, problems.values(), strict=True):
        assert line.startswith("cloudtrain: ")
        assert message in line
    assert said[-1].startswith(f"cloudtrain: {profile}: expected a profile of 2 ranks on 2 nodes of ")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gone", "profile.json"]


def test_an_error_that_one_rank_alone_has_ends_all_of_them_with_its_line():
    program = (
        "from commlib.transport.mpi import world\n"
        "from training.process.job import all_or_exit\n"
        "comm = world()\n"
        "def check():\n"
        "    if comm.rank == 2: raise ValueError('this node has no such file')\n"
        "all_or_exit(comm, check)\n"
        "print('went on')"
    )
    result = python_on_ranks(3, program)
    assert result.returncode != 0
    said = [line for line in result.stderr.splitlines() if line.startswith("cloudtrain: ")]
    assert len(said) == 1
    assert said[0].startswith("cloudtrain: this node has no such file (rank 2 on ")
    assert "went on" not in result.stdout


def test_an_exception_on_all_ranks_is_told_once():
    program = (
        "from commlib.transport import mpi\n"
        "comm = mpi.world()\n"
        "comm.barrier()\n"
        "raise RuntimeError('all of us')\n"
    )
    result = python_on_ranks(2, program)
    assert result.returncode != 0
    assert result.stderr.count("Traceback") == 1
    assert result.stderr.count("rank 0 of 2 on ") == 1
