"""``cloudtrain bench pto``: right sums are timed and wrong ones refused, on ranks that it starts and ends."""

import json
import subprocess

import numpy as np
import pytest
from typer.testing import CliRunner

from benchmarks import interleaved, jobs, pto
from benchmarks.interleaved import Call, Interleaved, interleave
from benchmarks.norms import Tensors, check_squares
from benchmarks.pto import Sweep, measure
from benchmarks.shapes import SHAPES, entries_of, vgg19
from commlib import LinkBytes, Topology
from commlib.transport import simulated
from pto import Norms, by_layer, by_slices
from tests.launching import mpirun, run, tail
from training.bench.checks import WrongResult
from training.bench.record import Record
from training.bench.timing import Seconds
from training.commands.main import app

SHAPES_OF_TINY = [(4, 5), (4,), (7,), (3, 1)]  # 20, 4, 7 and 3 entries
KEYS = {
    *("bench", "case", "subject", "peer", "seconds", "peer_seconds", "ratio", "bytes"),
    *("machine", "settings", "command", "cpu_ratio"),
    *("cpu_seconds", "cpu_seconds_of_busiest", "peer_cpu_seconds", "peer_cpu_seconds_of_busiest"),
}


def bench(*words: str):
    """Run ``cloudtrain bench pto`` in this process."""
    return CliRunner().invoke(app, ["bench", "pto", *words])


@pytest.fixture
def tiny(monkeypatch):
    """A network of a few entries, and no caches to fill."""
    monkeypatch.setitem(SHAPES, "tiny", lambda: SHAPES_OF_TINY)
    monkeypatch.setattr(interleaved, "cache_bytes", lambda: 64)


# ------------------------------------------------------------- interleaved calls


def test_candidates_alternate_and_the_first_calls_do_not_count(tiny):
    def body(comm):
        called = []
        candidates = {name: lambda name=name: called.append(name) for name in "ABC"}
        return "".join(called), interleave(Topology(comm), candidates, calls=3), "".join(called)

    for before, taken, after in simulated.run(body, world_size=2):
        assert before == ""
        assert after == "ABC" * (interleaved.WARM_UP_RUNS + 3)
        assert {name: (len(own.calls), len(own.calls[0])) for name, own in taken.items()} == {
            name: (3, 2) for name in "ABC"
        }


def test_wall_time_is_of_the_slowest_rank_and_the_processor_s_the_mean_and_the_largest():
    def call(wall, cpu, intra=0, inter=0):
        return Call(wall, cpu, LinkBytes(intra, inter))

    taken = Interleaved(
        [
            [call(4.0, 1.0), call(5.0, 3.0)],
            [call(7.0, 2.0), call(6.0, 4.0)],
            [call(1.0, 5.0, intra=8, inter=1), call(2.0, 7.0, intra=0, inter=2)],
        ]
    )
    assert taken.wall == Seconds(median=5.0, min=2.0, max=7.0, runs=3)
    assert taken.cpu == Seconds(median=3.0, min=2.0, max=6.0, runs=3)
    assert taken.cpu_of_busiest == Seconds(median=4.0, min=3.0, max=7.0, runs=3)
    assert taken.bytes == LinkBytes(intra=0, inter=2)


# ------------------------------------------------------------- norms


def test_every_way_is_measured_beside_local_with_its_balance_and_its_choice(tiny):
    sweep = Sweep.of((), ("tiny",), steps=2, quick=False)
    everywhere = simulated.run(lambda comm: list(measure(sweep, Topology(comm))), world_size=2)
    records = everywhere[0]
    assert [(each.subject, each.peer) for each in records] == [
        ("slices", "local"),
        ("layers", "local"),
        ("auto", "local"),
    ]
    for record in records:
        case = {"operation": "norms", "network": "tiny", "tensors": 4, "size": 34, "ranks": 2}
        assert record.case == case | {"ranks_of_nodes": [2], "warm_up_steps": 2, "quick": False}
        assert record.seconds.runs == record.peer_seconds.runs == 2
        # Of 34 entries: 17 a slice; 20 alone, beside 7 + 4 + 3; the paper's first two tensors have 24.
        assert record.more["balance"] == pytest.approx({"slices": 1, "layers": 20 / 17, "by layer": 24 / 17})
    assert [record.more["choice"]["in_parts"] for record in records] == [True, True, False]
    assert "of computing would become" in records[2].more["choice"]["reason"]


def test_weights_and_gradients_are_equal_on_all_ranks_and_unlike_each_other():
    one, other = Tensors.of(SHAPES_OF_TINY), Tensors.of(SHAPES_OF_TINY)
    assert [each.shape for each in one.weights] == [each.shape for each in one.gradients] == SHAPES_OF_TINY
    for here, there in zip([*one.weights, *one.gradients], [*other.weights, *other.gradients], strict=True):
        np.testing.assert_array_equal(here, there)
        assert here.dtype == np.float32
    assert one.sizes == [20, 4, 7, 3]
    exact = [np.square(each.astype(np.longdouble)).sum() for each in [*one.weights, *one.gradients]]
    assert len(set(exact)) == 8  # a sum in the wrong place is seen
    np.testing.assert_allclose(one.squares().reshape(-1), np.array(exact, np.float64), rtol=1e-15)


class Spoilt(Norms):
    """Right, but for what a test does to the sums."""

    spoil = staticmethod(lambda rank, sums: None)

    def __init__(self, sizes, comm):
        super().__init__(sizes, comm, partition="slices")
        self.rank = comm.rank

    def squares(self, *lists):
        sums = super().squares(*lists)
        self.spoil(self.rank, sums)
        return sums


def multiply(rank, sums):
    sums[1, 2] *= 1 + 1e-13


def poison(rank, sums):
    sums[0] = np.nan


def disagree(rank, sums):
    sums[0, 0] = np.nextafter(sums[0, 0], rank)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (multiply, "mine: 1 of 8 sums of squares are wrong"),
        (poison, "mine: 4 of 8 sums of squares are wrong"),
        (disagree, r"mine: ranks \[2\] hold other sums of squares than rank 0"),
    ],
)
def test_sums_that_are_wrong_or_not_the_same_everywhere_are_not_timed(monkeypatch, spoil, message):
    monkeypatch.setattr(Spoilt, "spoil", staticmethod(spoil))
    tensors = Tensors.of(SHAPES_OF_TINY)
    tensors.weights[0][...] = (
        0.5  # the sum is 5: towards ranks 0 and 1 it is one neighbour, towards 9 another
    )

    def body(comm):
        candidate = Spoilt(tensors.sizes, comm)
        candidate.rank = 9 if comm.rank == 2 else comm.rank
        with pytest.raises(WrongResult, match=message):
            check_squares(comm, {"mine": candidate}, tensors)
        return True

    assert simulated.run(body, world_size=3) == [True] * 3


@pytest.mark.parametrize("parts", [2, 4])
def test_slices_are_better_balanced_than_the_papers_partition_of_vgg19(parts):
    sizes = [entries_of(shape) for shape in vgg19()]
    assert by_layer(sizes, parts).balance() / by_slices(sizes, parts).balance() >= 1.5


# ------------------------------------------------------------- steps of LARS


def test_a_step_of_lars_that_moves_weights_otherwise_is_not_timed():
    from benchmarks.lars import lars_steps

    tensors = Tensors.of(SHAPES_OF_TINY)

    class Doubled(Norms):
        def squares(self, *lists):
            return super().squares(*lists) * [[4], [1]]  # weights of twice their norm

    def body(comm):
        right = {"in graph": None, "local": Norms(tensors.sizes, comm)}
        steps = lars_steps(comm, tensors, right)
        for step in steps.values():
            step()
        with pytest.raises(WrongResult, match="LARS, mine: 20 of 20 weights of tensor 0 are wrong after"):
            lars_steps(comm, tensors, {"mine": Doubled(tensors.sizes, comm)})
        return list(steps)

    assert simulated.run(body, world_size=1) == [["in graph", "local"]]


# ------------------------------------------------------------- the ranks that it starts


def test_a_job_measures_what_the_command_was_asked_for():
    assert Sweep.of((), (), None, quick=False) == Sweep((2, 4), tuple(SHAPES), 21, False)
    assert Sweep.of((3,), (), 7, quick=True).arguments == (
        ["bench", "pto", "--json", "--network", "resnet50", "--steps", "7", "--quick"]
    )
    command = jobs.command_line(4, ["bench", "pto"])
    assert command[0].endswith("mpirun")
    assert command[-5:-3] == ["-np", "4"]
    assert command[-2:] == ["bench", "pto"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--ranks", "1"), "--ranks: expected at least 2, got 1"),
        (("--ranks", "2", "--ranks", "0"), "--ranks: expected at least 2, got 0"),
        (("--steps", "0"), "--steps: expected at least 1, got 0"),
        (("--network", "resnet5"), 'unknown network "resnet5"'),
    ],
)
def test_a_bad_value_is_one_line_and_status_2(words, message):
    result = bench(*words)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith(f"cloudtrain: {message}")
    assert result.stderr.count("\n") == 1


def told(subject: str, ranks: int, **keys) -> Record:
    """A record of norms: a call takes 2 ms, and 10 ms locally, on half the processor's time."""
    fast, slow = Seconds(2e-3, 2e-3, 2e-3, 21), Seconds(10e-3, 10e-3, 10e-3, 21)
    reason = "norms in parts by slices: 2 ms of computing becomes 1 ms, and their exchange takes 0.1 ms"
    return Record(
        bench="pto",
        case={"operation": "norms", "network": "tiny", "ranks": ranks, "quick": False},
        subject=subject,
        seconds=fast,
        peer="local",
        peer_seconds=slow,
        more={
            "cpu_seconds": {"median": 1e-3},
            "cpu_seconds_of_busiest": {"median": 1.5e-3},
            "cpu_ratio": 4.0,
            "balance": {"slices": 1.0, "layers": 1.25, "by layer": 1.5},
            "choice": {"in_parts": True, "reason": reason, "seconds": None},
            **keys,
        },
    )


def test_the_ranks_lines_are_passed_on_with_the_command_that_started_them(monkeypatch):
    asked = []

    def lines(ranks, words):
        asked.append((ranks, words))
        yield "a line of somebody else\n"
        yield told("slices", ranks).line() + "\n"

    monkeypatch.setattr(pto, "lines", lines)
    monkeypatch.setattr(pto, "command", lambda: "cloudtrain bench pto --mine")
    result = bench("--ranks", "2", "--ranks", "3", "--steps", "5", "--network", "vgg19", "--json")
    assert result.exit_code == 0, result.output
    words = ["bench", "pto", "--json", "--network", "vgg19", "--steps", "5"]
    assert asked == [(2, words), (3, words)]
    passed = [json.loads(line) for line in result.stdout.splitlines()]
    assert [each["case"]["ranks"] for each in passed] == [2, 3]
    assert {each["command"] for each in passed} == {"cloudtrain bench pto --mine"}
    assert passed[0]["ratio"] == 5


def test_without_json_there_is_a_table_a_number_of_ranks_and_what_auto_chose(monkeypatch):
    def lines(ranks, words):
        for subject in ("slices", "auto"):
            yield told(subject, ranks).line() + "\n"

    monkeypatch.setattr(pto, "lines", lines)
    result = bench("--ranks", "2", "--ranks", "3")
    assert result.exit_code == 0, result.output
    printed = result.stdout.splitlines()
    titles = [line for line in printed if line.startswith("norms of")]
    assert titles == [f"norms of weights and gradients, {ranks} ranks" for ranks in (2, 3)]
    rows = [line.split() for line in printed if line.startswith("tiny ")]
    numbers = ["1.000", "1.500", "local", "4", "2.000", "5"]
    assert rows == [["tiny", subject, *numbers] for subject in ("slices", "auto")] * 2
    assert printed.count(f"tiny: {told('auto', 2).more['choice']['reason']}") == 2
    assert printed.count("tiny: largest load over the mean: slices 1.000, layers 1.250, by layer 1.500") == 2


def test_a_job_that_fails_is_one_line_and_status_1(monkeypatch):
    def lines(ranks, words):
        yield told("slices", ranks).line() + "\n"
        raise jobs.Failed("slices: 1 of 8 sums of squares are wrong")

    monkeypatch.setattr(pto, "lines", lines)
    result = bench("--json")
    assert result.exit_code == 1
    assert result.stdout.count("\n") == 1
    assert result.stderr == "cloudtrain: slices: 1 of 8 sums of squares are wrong\n"


def started_instead(monkeypatch, program: str) -> list[subprocess.Popen]:
    """Let jobs be a shell's program; return what is started."""
    started, start = [], subprocess.Popen
    monkeypatch.setattr(jobs, "command_line", lambda ranks, words: ["sh", "-c", program])
    monkeypatch.setattr(
        subprocess, "Popen", lambda *args, **keys: started.append(start(*args, **keys)) or started[-1]
    )
    return started


def test_a_job_ends_with_who_reads_it(monkeypatch):
    (started, lines) = started_instead(monkeypatch, "echo first; exec sleep 60"), jobs.lines(2, [])
    assert next(lines) == "first\n"
    assert started[0].poll() is None
    lines.close()
    assert started[0].returncode == -15


def test_a_job_that_fails_has_given_its_lines_before(monkeypatch):
    started_instead(monkeypatch, "echo told; echo 'cloudtrain: slices: wrong' >&2; exit 3")
    lines = jobs.lines(2, [])
    assert next(lines) == "told\n"
    with pytest.raises(jobs.Failed, match="^status 3: slices: wrong$"):
        next(lines)


def test_where_there_is_no_mpirun_it_says_how_to_get_one(monkeypatch):
    monkeypatch.setattr(jobs, "command_line", lambda ranks, words: ["/nowhere/mpirun"])
    with pytest.raises(jobs.Failed, match=r"mpirun is not installed .* run ./scripts/install\.sh"):
        list(jobs.lines(2, []))


@pytest.mark.large
@pytest.mark.launch
def test_real_ranks_are_started_and_measured():
    words = ("bench", "pto", "--ranks", "2", "--network", "resnet50", "--steps", "1", "--json")
    result = run("cloudtrain", *words)
    assert result.returncode == 0, tail(result)
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [(line["case"]["operation"], line["subject"], line["peer"]) for line in lines] == [
        *(("norms", way, "local") for way in ("slices", "layers", "auto")),
        *(("lars", "slices", peer) for peer in ("local", "in graph")),
        ("lars", "local", "in graph"),
    ]
    for line in lines:
        more = {"balance", "choice"} if line["case"]["operation"] == "norms" else set()
        assert set(line) == KEYS | more
        assert line["case"]["ranks_of_nodes"] == [2]
        assert line["case"]["size"] == 25_557_032
        assert line["cpu_seconds_of_busiest"]["median"] >= line["cpu_seconds"]["median"] > 0
        assert line["cpu_ratio"] == line["peer_cpu_seconds"]["median"] / line["cpu_seconds"]["median"]
        assert line["command"] == " ".join(("cloudtrain", *words))
    assert lines[0]["bytes"] == {"intra": 0, "inter": 0}  # the sums travel as integers, which are no payload


@pytest.mark.slow
@pytest.mark.launch
def test_the_ranks_of_a_job_are_those_that_there_are():
    result = mpirun(2, "cloudtrain", "bench", "pto", "--ranks", "3")
    assert result.returncode == 2, tail(result)
    assert "cloudtrain: --ranks: expected the 2 ranks of this job, got 3\n" in result.stderr
