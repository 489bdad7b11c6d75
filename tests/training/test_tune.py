"""``cloudtrain tune`` writes a profile, and ``reducer: auto`` picks from the one that fits."""

import dataclasses
import json
import re
import threading

import pytest
import yaml

from commlib import REDUCERS, Link, Network, Topology, transport
from commlib.tuning import probe
from commlib.tuning.probe import Profile, job_of
from commlib.tuning.tuner import Case, settings
from tests.launching import DIGITS, errors, run, tail
from tests.test_tuner import SPEEDS
from tests.training.refusal import invoke, refusal, refused
from tests.training.small import on_ranks, phase, records_of
from training.commands import tune
from training.commands.tune import Request
from training.config.config import load
from training.process.devices import gpus_here
from training.process.hosts import Ranks
from training.process.launch import cloudtrain
from training.run import autotune
from training.run.autotune import choose_reducers, profile_for, profile_path

FAST = Link.of(microseconds=1, gbit_per_second=400)
SLOW = Link.of(microseconds=50, gbit_per_second=0.1)
BOTH_AUTO = ("reducer=auto", "phases.1.reducer=auto")


def profile_of(topology, inter=SLOW):
    return Profile(job_of(topology), Network(FAST, inter), SPEEDS)


def chosen(*words, inter=SLOW, ranks=4, size=1_000_000):
    """Return what each rank, on nodes of two, holds to be chosen for the phases of a configuration."""
    config = load(DIGITS, words)

    def choose(comm):
        topology = Topology(comm, ranks_per_node=2)
        profile = profile_of(topology, inter)  # all ranks take part in it
        return choose_reducers(config, topology, profile if comm.rank == 0 else None, size)

    return transport.simulated.run(choose, ranks)


def test_all_ranks_hold_what_rank_0_chose_for_the_phases_that_name_no_reducer():
    first, *others = chosen(*BOTH_AUTO)
    assert list(first) == [0, 1]
    assert others == [first] * 3
    assert list(chosen("reducer=auto")[0]) == [0]
    assert chosen() == [{}] * 4


def test_each_phase_is_chosen_for_at_its_own_density():
    choices = chosen(*BOTH_AUTO, "phases.0.reducer.density=0.25", size=777_777)[0]
    assert "777,777 entries at density 0.25" in choices[0].reason
    assert "777,777 entries at density 0.01" in choices[1].reason


def test_one_rank_needs_no_profile(tmp_path):
    config = load(DIGITS, [*BOTH_AUTO, f"profile={tmp_path / 'none.json'}"])

    def choose(comm):
        topology = Topology(comm)
        return profile_for(config, topology), choose_reducers(config, topology, None, 10)

    ((profile, choice),) = transport.simulated.run(choose, 1)
    assert profile is None
    assert [each.reducer for each in choice.values()] == ["dense", "dense"]
    assert choice[0].reason == "dense: one rank has no other to exchange with"


@pytest.mark.parametrize("inter", [SLOW, FAST], ids=["slow", "fast"])
def test_the_configuration_names_the_sparse_or_dense_reducer_that_the_link_calls_for(tmp_path, inter):
    config = load(DIGITS, ["reducer=auto", "phases.0.reducer.density=0.02"])
    (picks, *_) = chosen("reducer=auto", "phases.0.reducer.density=0.02", inter=inter)
    written = config.with_choices(picks)
    options = written.reducer_config(written.phases[0])
    is_sparse = inter is SLOW
    assert REDUCERS[picks[0].reducer].sparse == is_sparse
    assert options["name"] == picks[0].reducer
    assert options.get("density") == (0.02 if is_sparse else None)
    assert options.get("wire") == picks[0].options.get("wire")
    assert written.phases[1] == config.phases[1]
    (tmp_path / "config.yaml").write_text(written.to_yaml())
    assert load(tmp_path / "config.yaml") == written


def test_what_is_picked_owes_nothing_to_what_other_phases_take_from_the_configuration():
    words = ["reducer={selector: exact, wire: fp16}", "phases.0.reducer=auto", "phases.1.reducer=hitopk"]
    config = load(DIGITS, words)
    picks = chosen(*words)[0]
    written = config.with_choices(picks)
    first, second = map(written.reducer_config, written.phases)
    assert (first["selector"], first["wire"]) == ("mstopk", picks[0].options["wire"])
    assert (second["selector"], second["wire"]) == ("exact", "fp16")


def paths(world_size, ranks_per_node):
    return transport.simulated.run(
        lambda comm: profile_path(None, Topology(comm, ranks_per_node=ranks_per_node)), world_size
    )


def test_profiles_are_kept_in_the_cache_of_the_user_by_ranks_and_nodes(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = tmp_path / "cloudtrain" / "profile-5ranks-3nodes.json"
    assert paths(5, 2) == [path] * 5
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert paths(1, None) == [tmp_path / ".cache" / "cloudtrain" / "profile-1ranks-1nodes.json"]


def refused_profile(monkeypatch, path, *words, ranks=4, hosts=None):
    """Return the line with which a profile is refused on simulated ranks."""
    monkeypatch.setattr(autotune, "all_or_exit", lambda comm, function: function())
    config = load(DIGITS, ["reducer=auto", f"profile={path}", *words])

    def read(comm):
        return profile_for(config, Topology(comm, ranks_per_node=config.ranks_per_node))

    with refused(str(path)) as caught:
        transport.simulated.run(read, ranks, hosts)
    return str(caught.value)


def save(path, ranks, ranks_per_node, change=lambda profile: profile):
    def write(comm):
        profile = change(profile_of(Topology(comm, ranks_per_node=ranks_per_node)))
        if comm.rank == 0:
            profile.save(path)

    transport.simulated.run(write, ranks)


def test_a_missing_profile_is_refused_with_how_to_measure_it(monkeypatch, tmp_path):
    path = tmp_path / "profile.json"
    line = refused_profile(monkeypatch, path)
    assert line.startswith(f"{path}: no such profile; reducer=auto expects one of 4 ranks on 2 nodes of ")
    assert line.endswith(f": cloudtrain tune -np 4 --ranks-per-node 2 --profile {path}")
    line = refused_profile(monkeypatch, path, "ranks_per_node=null", "transport=mpi", ranks=3, hosts=[2, 1])
    assert line.endswith(f"cloudtrain tune -np 3 -H node0:2,node1:1 --profile {path} --transport mpi")


@pytest.mark.parametrize("content", [None, "{}", "\0"])
def test_a_profile_of_another_machine_or_a_damaged_one_is_refused(monkeypatch, tmp_path, content):
    def of_another(profile):
        return dataclasses.replace(profile, job=dataclasses.replace(profile.job, hosts=("elsewhere",)))

    path = tmp_path / "profile.json"
    path.write_text(content) if content is not None else save(path, 4, 2, of_another)
    line = refused_profile(monkeypatch, path)
    got = "got something else" if content is not None else "got one of 4 ranks on 2 nodes of elsewhere"
    assert line.startswith(f"{path}: expected a profile of ")
    assert got in line
    assert "cloudtrain tune -np 4" in line


def tuned(monkeypatch, capsys, request, ranks, measure=None):
    """Run the command on simulated ranks, a host for each node, and return what was printed."""
    own = threading.local()
    monkeypatch.setattr(tune, "SIZES", (10_003, 70_001))
    monkeypatch.setattr(probe, "KERNEL_SIZE", 1 << 16)
    monkeypatch.setattr(transport.mpi, "world", lambda: own.comm)
    if measure is not None:
        monkeypatch.setattr(tune, "measure", measure)

    def rank(comm):
        own.comm = comm
        tune.tune(request)

    hosts, network = int(request.layout or ranks), Network(FAST, SLOW)
    cores = 1 if measure is None else None  # computing takes as long as here, or no time
    transport.simulated.run(rank, ranks, hosts, network, cores=cores)
    return capsys.readouterr().out


def test_rank_0_says_where_the_profile_is_what_the_links_are_and_what_auto_picks(
    monkeypatch, capsys, tmp_path
):
    path = tmp_path / "deep" / "profile.json"
    request = Request(None, [], "2", str(path))
    said = tuned(monkeypatch, capsys, request, 4, measure=profile_of)
    lines = said.splitlines()
    assert lines[:3] == [
        "measuring links and kernels …",
        "trying reducers on 10,003 entries at density 0.01 and 0.001 …",
        "trying reducers on 70,001 entries at density 0.01 and 0.001 …",
    ]
    assert lines[3].startswith("profile of 4 ranks on 2 nodes of ")
    assert lines[3].endswith(f": {path}")
    assert lines[4] == "inside a node:  1 µs and 400 Gbit/s"
    assert lines[5] == "between nodes:  50 µs and 0.1 Gbit/s"
    rows = [line for line in lines if re.match(r"[\d,]+ entries  ", line)]
    assert len(rows) == len(tune.SIZES) * len(tune.DENSITIES)
    picked = [row.split()[3] for row in rows]
    assert all(REDUCERS[name].sparse for name in picked)
    reasons = lines[-len(rows) :]
    assert [reason.split(" with ")[0] for reason in reasons] == picked
    assert Profile.load(path).network == Network(FAST, SLOW)


def test_one_rank_measures_itself_and_picks_dense(monkeypatch, capsys, tmp_path):
    path = tmp_path / "profile.json"
    said = tuned(monkeypatch, capsys, Request(None, [], None, str(path)), 1)
    assert said.splitlines()[2:] == ["reducer=auto picks dense: one rank has no other to exchange with"]
    assert Profile.load(path).speeds.add > 0


def test_the_request_travels_to_the_ranks_as_it_was_given(monkeypatch):
    started = []
    monkeypatch.setattr(
        "training.process.launch.launch", lambda ranks, words, check: started.append((ranks, words))
    )
    words = ["tune", "-np", "4", "-H", "a:2,b:2", "--network-interface", "eth0", "--profile", "p.json"]
    invoke(*words, DIGITS, "reducer.density=0.1")
    invoke("tune", "-np", "3", "--ranks-per-node", "2,1")
    assert started == [
        (
            Ranks(4, "a:2,b:2", "eth0"),
            cloudtrain("tune", "--profile", "p.json", DIGITS, "reducer.density=0.1"),
        ),
        (Ranks(3), cloudtrain("tune", "--ranks-per-node", "2,1")),
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-H", "a:2"], "-H: expected only with -np, got a:2"),
        (["--network-interface", "eth0"], "--network-interface: expected only with -np, got eth0"),
        (["-np", "2", "--ranks-per-node", "2,0"], "--ranks-per-node: expected a number of ranks, or"),
        (["-np", "2", "--ranks-per-node", "2", DIGITS], f"--ranks-per-node: expected none beside {DIGITS}"),
        (["-np", "2", "--transport", "ncl"], "--transport: expected one of auto, nccl, nccl+mpi, mpi, got "),
        (["imagenet_resnet50_dawnbench", "dataset.path=/none"], "dataset imagenet: /none: no such folder"),
    ],
)
def test_wrong_words_are_one_line_and_exit_status_2(words, message):
    assert refusal("tune", *words).startswith(message)


def test_the_reducer_of_a_phase_is_a_candidate_with_its_options_but_for_what_is_usual():
    selector = {"name": "bucketed", "bucket": 8}
    words = ["reducer={wire: gap, selector: {name: bucketed, bucket: 8}}", "phases.1.reducer=auto"]
    config = load(DIGITS, ["phases.0.reducer=gtopk", *words])
    own, none = (tune._own(config, phase) for phase in config.phases)
    assert none is None
    assert (own.reducer, own.wire) == ("gtopk", "gap")
    assert settings(Case([[0], [1]], 10, 0.02), own) == {"density": 0.02, "wire": "gap", "selector": selector}
    assert len({own, own}) == 1  # it can be hashed


@pytest.mark.skipif(gpus_here() > 0, reason="TensorFlow is asked whether it sees this machine's GPUs")
@pytest.mark.slow
def test_tuning_loads_no_tensorflow(tmp_path):
    path = tmp_path / "profile.json"
    program = (
        "import sys; from training.commands.main import app; from commlib.tuning import probe\n"
        "probe.KERNEL_SIZE = 1 << 16\n"
        f"app(['tune', '--profile', {str(path)!r}], standalone_mode=False)\n"
        "print([name for name in ('tensorflow', 'keras', 'horovod') if name in sys.modules])"
    )
    result = run("python", "-c", program, cwd=tmp_path)
    assert result.returncode == 0, tail(result)
    assert result.stdout.splitlines()[-1] == "[]"
    assert path.is_file()


@pytest.mark.slow
@pytest.mark.launch
def test_two_ranks_tune_and_their_throughput_is_what_is_planned_with(tmp_path):
    path = tmp_path / "profile.json"
    small = ("model=vgg_tiny", "ranks_per_node=1")
    result = run("cloudtrain", "tune", "-np", "2", "--profile", str(path), DIGITS, *small, cwd=tmp_path)
    assert result.returncode == 0, tail(result)
    assert "between nodes:" in result.stdout
    assert "phase 1: 13,834 entries" in result.stdout
    first, second = Profile.load(path).throughput
    assert (first["phase"], first["unit"], first["input"]) == (1, "samples", "6 px")
    assert f"phase 1: {first['per_second']:,.4g} samples of 6 px a second on each rank" in result.stdout
    assert errors(result) == ""
    result = invoke("plan", DIGITS, *small, f"profile={path}", "--json")
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    planned = json.loads(result.stdout)["phases"]
    of_rank = [each["global_batch"] / 2 / each["computing"] for each in planned]
    assert of_rank == pytest.approx([first["per_second"], second["per_second"]])


def test_ranks_train_with_what_their_profile_calls_for(tmp_path, capsys):
    path = tmp_path / "profile.json"
    speeds = dataclasses.replace(SPEEDS, add=1e-8)  # which makes a reducer with a wire the fastest
    save(path, 4, 2, lambda profile: dataclasses.replace(profile, speeds=speeds))
    words = ("model=vgg_tiny", "evaluate_every=2", f"profile={path}")
    phases = (phase(steps=1, reducer="auto"), phase(steps=1))
    on_ranks(tmp_path / "runs", 4, *words, phases=phases, prepare=lambda run: None)
    (folder,) = (tmp_path / "runs").iterdir()
    first, second = yaml.safe_load((folder / "config.yaml").read_text())["phases"]
    (choice,) = records_of(tmp_path / "runs", "choice")
    assert REDUCERS[first["reducer"]["name"]].sparse
    assert (choice["phase"], choice["reducer"]) == (0, first["reducer"]["name"])
    assert choice["options"]["wire"] == first["reducer"]["wire"]
    assert choice["predicted_seconds"] < choice["predicted_dense_seconds"]
    assert f"phase 1: auto picks {choice['reason']}\n" in capsys.readouterr().out
    assert second["reducer"]["name"] == "dense"
    epochs = records_of(tmp_path / "runs", "epoch")
    assert [line["reducer"] for line in epochs] == [first["reducer"]["name"], "dense"]
    assert 0 < epochs[0]["sent_inter_bytes"] < epochs[0]["dense_inter_bytes"] / 10
