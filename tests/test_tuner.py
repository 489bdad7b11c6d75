"""What the tuner measures, what it keeps, and what it picks."""

import dataclasses
import itertools
import json
import re
from collections import Counter
from statistics import median

import numpy as np
import pytest

from commlib import REDUCERS, InvalidArgument, Link, Network, Topology, bytes_of_nodes, make_reducer, predict
from commlib.reducers import reducer_options
from commlib.transport import machines, simulated
from commlib.tuning import probe, tuner
from commlib.tuning.probe import WIRES, Candidate, Gradients, Job, Profile, Trial, job_of
from commlib.tuning.tuner import Case, choose_buckets, try_out
from commlib.work import Speeds
from tests.processor_time import WORK_SECONDS, compute, processor_time
from tests.test_cost import layout

# A V100's speeds are far from this; the ratios between kernels are those of a processor.
SPEEDS = Speeds(
    add=0.3e-9,
    fill=0.1e-9,
    select=0.5e-9,
    keep=50e-9,
    place=10e-9,
    entry=10e-9,
    code=dict.fromkeys(WIRES, 4e-9),
)
JOB = Job(("node0", "node1"), ("2 cores of one", "2 cores of another"), (2, 2))


@pytest.fixture(autouse=True)
def small_kernels_and_few_runs(monkeypatch):
    monkeypatch.setattr(probe, "KERNEL_SIZE", 1 << 16)
    for name, number in {"RUNS": 2, "WARM_UP_RUNS": 1, "HOPS": 6}.items():
        monkeypatch.setattr(probe, name, number)  # each takes as long on a virtual clock


def profile(gbit, speeds=SPEEDS, microseconds=50):
    intra = Link.of(microseconds=5, gbit_per_second=400)
    inter = Link.of(microseconds=microseconds, gbit_per_second=gbit)
    return Profile(JOB, Network(intra, inter), speeds)


def choose(gbit, *, ranks=8, ranks_per_node=2, size=14_728_266, density=0.01, **options):
    return tuner.choose(profile(gbit, **options), layout(ranks, ranks_per_node), size, density)


def measured(network, ranks, ranks_per_node, cores=None):
    run = simulated.run(
        lambda comm: probe.measure(Topology(comm)), ranks, ranks_per_node, network, cores=cores
    )
    assert all(each == run[0] for each in run)
    return run[0]


@pytest.mark.parametrize("world_size, ranks_per_node", [(2, 1), (4, 2), (6, 3), (3, [2, 1])])
def test_the_links_of_a_cluster_are_found(world_size, ranks_per_node):
    network = Network(Link(3e-6, 1e-10), Link(40e-6, 2e-9))
    found = measured(network, world_size, ranks_per_node).network
    assert found.inter.alpha == pytest.approx(network.inter.alpha, rel=1e-3)
    assert found.inter.beta == pytest.approx(network.inter.beta, rel=1e-3)
    if ranks_per_node != 1:
        assert found.intra.alpha == pytest.approx(network.intra.alpha, rel=1e-3)
        assert found.intra.beta == pytest.approx(network.intra.beta, rel=1e-3)


@pytest.mark.parametrize("gap", [0.0, 10e-6])
def test_the_gap_between_messages_that_are_on_their_way_together_is_found(gap):
    network = Network(Link(3e-6, 1e-10), Link(40e-6, 2e-9, gap=gap))
    found = measured(network, 4, 1).network.inter
    # the card sends one short message after the other
    expected = max(gap, probe.MESSAGE_BYTES[0] * network.inter.beta)
    assert (found.gap, found.busy) == (pytest.approx(expected), pytest.approx(0, abs=1e-9))


def test_what_two_ranks_alone_do_not_wait_for_is_waiting_for_processors(monkeypatch):
    monkeypatch.setattr(probe, "_to_and_fro", lambda comm, message: comm.compute(30e-6))
    found = measured(Network(inter=Link(40e-6, 2e-9)), 4, 1).network.inter
    assert found.busy == pytest.approx(40e-6 - 15e-6 + probe.MESSAGE_BYTES[0] * 2e-9)


@pytest.mark.parametrize("incast", [1.0, 1.6])
def test_an_incast_is_found(incast):
    network = Network(Link(0.0, 1e-12), Link(1e-6, 1e-9, incast))
    # the closed form of an exchange leaves out what the first message of each rank may be ahead
    assert measured(network, 8, 2).network.inter.incast == pytest.approx(incast, rel=0.1)


def test_links_that_a_job_does_not_have_are_those_of_the_default_network():
    network = Network(Link(3e-6, 1e-10), Link(40e-6, 2e-9))
    assert measured(network, 2, 1).network.intra == Network().intra
    assert measured(network, 2, 2).network.inter == Network().inter
    assert measured(network, 1, 1).network == Network()


@pytest.mark.parametrize("world_size", [1, 4])
def test_a_kernel_takes_as_long_as_on_all_ranks_that_share_the_cores(monkeypatch, world_size):
    monkeypatch.setattr(machines, "time", processor_time)
    seconds = simulated.run(lambda comm: probe.slowest(comm, compute), world_size, cores=1)
    assert seconds == pytest.approx([world_size * WORK_SECONDS] * world_size)


def test_a_short_kernel_is_called_several_times_in_a_run():
    def body(comm):
        times = probe.calls_of_run(comm, lambda: comm.compute(3e-3 + comm.rank * 1e-3))
        calls = []

        def action():
            calls.append(comm.compute(5e-6))

        return times, probe.slowest(comm, action, times), len(calls)

    # the slowest of three ranks takes 5 ms
    found = simulated.run(body, 3)
    assert found == [(4, pytest.approx(5e-6), 4 * (probe.WARM_UP_RUNS + probe.RUNS))] * 3


def test_actions_in_turns_differ_by_the_same_in_each_run_while_the_machine_gets_slower():
    def body(comm):
        seconds = itertools.count(1)
        long, short = 3e-6 * (1 + comm.rank), 1e-6
        return probe.in_turns(
            comm, lambda: comm.compute(next(seconds) + short), lambda: comm.compute(next(seconds) + long)
        )

    for found in simulated.run(body, 2):
        assert found.shape == (probe.RUNS, 2)
        assert found[:, 1] - found[:, 0] == pytest.approx(np.full(probe.RUNS, 1 + 5e-6), rel=1e-9)


@pytest.mark.parametrize("crowded", [(), (2,)])
def test_all_ranks_know_how_many_share_a_core_where_any_of_them_does(monkeypatch, crowded):
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {3, 5})

    def body(comm):
        comm.shares_cores = comm.rank in crowded
        return probe.measure(Topology(comm)).speeds

    first, *others = simulated.run(body, 3)
    assert first.ranks_per_core == (1.5 if crowded else 1)
    assert all(each == first for each in others)


def test_every_kernel_and_codec_has_a_speed():
    speeds = measured(Network(), 2, 2, cores=1).speeds
    assert speeds.code.keys() == set(WIRES)
    assert min(*speeds.code.values(), speeds.add, speeds.fill, speeds.place, speeds.entry) > 0


def test_a_slow_network_calls_for_sparse_and_short_messages_and_a_fast_one_for_dense():
    slow, fast = choose(1), choose(800)
    assert REDUCERS[slow.reducer].sparse
    assert not REDUCERS[fast.reducer].sparse
    assert fast.options == {}
    assert choose(0.05).options["wire"] == "gap+fp16"


@pytest.mark.parametrize("gbit", [0.1, 1, 100])
@pytest.mark.parametrize("world_size, ranks_per_node", [(2, 1), (12, 3), (64, 8)])
@pytest.mark.parametrize("density", [0.001, 1.0])
def test_nothing_is_predicted_to_be_a_tenth_faster_than_what_is_picked(
    gbit, world_size, ranks_per_node, density
):
    nodes, size = layout(world_size, ranks_per_node), 1_000_003
    given = profile(gbit)
    choice = tuner.choose(given, nodes, size, density)

    def seconds(name, **settings):
        return predict(name, nodes, size, network=given.network, speeds=SPEEDS, **settings).seconds

    for name, kind in REDUCERS.items():
        if kind.approximates:
            continue
        for wire in WIRES if "wire" in reducer_options(name) else [None]:
            settings = ({"density": density} if kind.sparse else {}) | ({"wire": wire} if wire else {})
            assert choice.seconds <= seconds(name, **settings) or (
                choice.reducer == "dense" and 0.9 * choice.seconds < seconds(name, **settings)
            )
    assert choice.dense_seconds == seconds("dense")
    settings = {"density": density} | choice.options if REDUCERS[choice.reducer].sparse else {}
    assert choice.seconds == seconds(choice.reducer, **settings)


def labelled(choice):
    options = dict(choice.options)
    return str(Candidate(choice.reducer, options.pop("wire", None), json.dumps(options)))


def test_the_reason_is_one_line_with_the_pick_its_rival_and_the_case():
    choice = choose(1)
    assert "\n" not in choice.reason
    assert choice.reason.startswith(f"{labelled(choice)}: ")
    assert f"{choice.seconds * 1e3:.3g} ms" in choice.reason
    assert "the best dense one (torus2d)" in choice.reason
    assert "14,728,266 entries at density 0.01, 8 ranks on 4 nodes, 1 Gbit/s" in choice.reason


@pytest.mark.parametrize("name", ["dense", "hitopk", "oktopk"])
@pytest.mark.parametrize("microseconds", [0, 50, 5000])
def test_a_gradient_is_cut_into_as_many_buckets_as_hardly_cost_anything(name, microseconds):
    of, nodes = profile(1, microseconds=microseconds), [range(4), range(4, 8)]
    case = Case(nodes, 14_728_266, 0.01)
    options = {"density": 0.01} if name != "dense" else {}

    def seconds(buckets):
        each = case.size // buckets
        return buckets * predict(name, nodes, each, network=of.network, speeds=of.speeds, **options).seconds

    buckets = choose_buckets(of, case, name, options)
    assert buckets in (1, 2, 4, 8, 16)
    assert seconds(buckets) <= 1.1 * seconds(1)
    assert buckets == 16 or seconds(2 * buckets) > 1.1 * seconds(1)


def test_buckets_of_a_codec_that_was_not_measured_are_counted_by_messages_alone():
    case, free = Case(layout(8, 2), 1_000_000, 0.01), dict.fromkeys(("gap+bf16",), 0.0)
    found = choose_buckets(profile(10), case, "allgather", {"wire": "gap+bf16"})
    nothing = Speeds(add=0, fill=0, select=0, keep=0, place=0, entry=0, code=free)
    assert found == choose_buckets(profile(10, nothing), case, "allgather", {"wire": "gap+bf16"})


def test_one_rank_has_nobody_to_exchange_with_and_tries_nothing(alone):
    assert try_out(Topology(alone), profile(1), 1000, [0.1]) == profile(1)
    choice = choose(1, ranks=1, ranks_per_node=1)
    assert (choice.reducer, choice.options) == ("dense", {})
    assert choice.reason == "dense: one rank has no other to exchange with"


def test_a_codec_whose_speed_nobody_measured_is_refused():
    with pytest.raises(InvalidArgument, match=r"^wire: expected one whose speed is known .*got 'bf16'$"):
        predict("hitopk", layout(4, 2), 1000, 0.01, wire="bf16", speeds=SPEEDS)


def tried_out(network, speeds, densities=(0.01,), size=20_011):
    """Return the profile of four simulated ranks after trials, as all of them have it."""

    def body(comm):
        topology = Topology(comm)
        return try_out(topology, Profile(job_of(topology), network, speeds), size, densities)

    ranks = simulated.run(body, 4, 2, network)
    assert all(each == ranks[0] for each in ranks)
    return ranks[0]


SLOW = Network(Link(1e-6, 1e-11), Link(1e-3, 1e-6))  # so that computing counts for nothing


def test_what_may_be_the_fastest_is_tried_in_each_case():
    given = tried_out(SLOW, SPEEDS, densities=(0.01, 0.1))
    for density in (0.01, 0.1):
        case = Case(layout(4, 2), 20_011, density)
        expected, there = tuner.expect(given, case), tuner.tried(given, case)
        assert there
        fastest = min(expected.values())
        everywhere = {each.candidate for each in given.trials if each.density == density}
        assert {each for each in expected if expected[each] <= 0.9 * tuner.PROMISING * fastest} <= everywhere
        of_case = [each for each in given.trials if each.density == density]
        assert set(Counter(each.candidate for each in of_case).values()) == {1}
        last = {each.candidate for each in of_case if each.spread is not None}
        assert (
            set(there)
            == last
            >= {tuner.DENSE} | {each.candidate for each in of_case if each.seconds <= tuner.CLOSE * fastest}
        )
        choice = tuner.choose(given, layout(4, 2), 20_011, density)
        assert choice.seconds == fastest
        assert f"{fastest * 1e3:.3g} ms measured a step" in choice.reason


def test_a_trial_takes_what_the_steps_take(monkeypatch):
    monkeypatch.setattr(tuner, "LEAST_SECONDS", 0.0)
    monkeypatch.setattr(tuner, "LAST_SECONDS", 0.0)
    given = tried_out(SLOW, SPEEDS)
    for trial in given.trials:

        def steps(comm, candidate=trial.candidate):
            options = tuner.settings(Case(layout(4, 2), 1000, 0.01), candidate)
            reducer, gradients = (
                make_reducer(candidate.reducer, Topology(comm), 20_011, **options),
                Gradients(20_011),
            )
            seconds = []
            for step in range(tuner.WARM_UP_STEPS + tuner.STEPS):
                comm.barrier()
                start = comm.now()
                reducer.reduce(gradients.of(comm.rank, step % tuner.GRADIENTS))
                seconds.append(comm.now() - start)
            return seconds[tuner.WARM_UP_STEPS :]

        of_ranks = simulated.run(steps, 4, 2, SLOW)
        assert trial.seconds == pytest.approx(median(map(max, zip(*of_ranks, strict=True))))


@pytest.mark.parametrize(
    ("size", "steps"), [(1000, range(10, 25)), (100_000, [tuner.STEPS]), (1_000_000, [1])]
)
def test_of_short_steps_more_are_taken_and_of_long_ones_fewer_whatever_others_take(size, steps):
    def body(comm):
        topology, gradients = Topology(comm), [Gradients(size).of(comm.rank, 0)]
        case, chosen = Case(layout(2, 1), size, 0.01), [Candidate("dense"), Candidate("hitopk", "fp32")]
        taken = tuner.seconds_in_turns(topology, case, chosen, gradients, least=tuner.LEAST_SECONDS)
        return list(map(len, taken))

    network = Network(inter=Link(8e-3, 1e-6))  # a dense step takes 16 ms and 4 µs an entry
    dense, sparse = simulated.run(body, 2, 1, network)[0]
    assert dense in steps
    assert sparse > dense


def test_slow_first_steps_do_not_count_as_time_that_was_tried(monkeypatch):
    def body(comm):
        seconds = iter([10.0] * tuner.WARM_UP_STEPS + [tuner.TRIAL_SECONDS / tuner.STEPS] * tuner.STEPS)
        monkeypatch.setattr(tuner, "step_seconds", lambda *_: next(seconds))
        gradients = [Gradients(1000).of(0, 0)]
        case = Case(layout(1, 1), 1000, 0.01)
        (taken,) = tuner.seconds_in_turns(Topology(comm), case, [Candidate("dense")], gradients, least=0.0)
        return len(taken)

    assert simulated.run(body, 1, 1, SLOW) == [tuner.STEPS]


def with_trial(given, reducer, wire, times, size=14_728_266, density=0.01, options="{}"):
    """Return the profile with a trial that took so many times what is predicted."""
    candidate = Candidate(reducer, wire, options)
    seconds = tuner.predicted(given, Case(layout(8, 2), size, density), candidate, settled=False)
    trial = Trial(candidate, size, density, times * seconds)
    return dataclasses.replace(given, trials=(*given.trials, trial))


CLOSE_TO_DENSE = {"dense": 1.0, "torus2d": 1.5, "hitopk": 0.95, "oktopk": 0.97}  # milliseconds


def tried_with(monkeypatch, seconds, noise=lambda step: 1.0, own=(), ranks_per_node=1, last=0.0):
    """Return the profile of trials whose steps take these seconds times the noise then, and the reducers."""
    names = {reducer: name for name, reducer in REDUCERS.items()}
    steps, counts = [], Counter()

    def step_seconds(world, reducer, gradient):
        counts[world.rank] += 1
        if world.rank == 0:
            steps.append(names[type(reducer)])
        return 1e-3 * seconds.get(names[type(reducer)], 9.0) * noise(counts[world.rank])

    monkeypatch.setattr(tuner, "step_seconds", step_seconds)
    monkeypatch.setattr(tuner, "LEAST_SECONDS", 0.0)
    monkeypatch.setattr(tuner, "LAST_SECONDS", last)

    def body(comm):
        topology = Topology(comm, ranks_per_node=ranks_per_node)
        return try_out(topology, Profile(job_of(topology), SLOW, SPEEDS), 20_011, [0.01], {0.01: own})

    first, second = simulated.run(body, 2)
    assert first == second
    return first, steps


def pick(given, ranks_per_node=1):
    return tuner.choose(given, layout(2, ranks_per_node), 20_011, 0.01)


def test_the_last_measurements_of_all_take_turns_with_dense(monkeypatch):
    given, steps = tried_with(monkeypatch, CLOSE_TO_DENSE)
    last = [each.candidate.reducer for each in given.trials if each.spread is not None]
    assert {"dense", "hitopk"} <= set(last)
    turns = tuner.WARM_UP_STEPS + tuner.STEPS
    rounds = {tuple(steps[-each * len(last) :][: len(last)]) for each in range(1, turns + 1)}
    assert {tuple(sorted(each)) for each in rounds} == {tuple(sorted(last))}
    assert len(rounds) > 1  # in another order each time


def test_the_last_turns_are_longer_and_the_slowest_candidate_stops_first(monkeypatch):
    seconds = dict.fromkeys(REDUCERS, 1.0) | {"dense": 300.0}
    given, steps = tried_with(monkeypatch, seconds, last=0.0205)
    others = sum(each.spread is not None for each in given.trials) - 1
    slow, fast = tuner.WARM_UP_STEPS + tuner.STEPS, 21 * others  # of 1 ms, to more than 0.0205 s
    assert steps.count("dense") == steps[-slow - fast :].count("dense") == slow
    assert "dense" not in steps[-fast + slow * others :]


def test_at_most_so_many_take_the_last_turns():
    case = Case(layout(8, 2), 1000, 0.01)
    pickable = list(filter(tuner.is_pickable, tuner.candidates(case.nodes)))
    tried = [Trial(each, case.size, case.density, 1 + place / 100) for place, each in enumerate(pickable)]
    given = dataclasses.replace(profile(1), trials=tuple(tried[::-1]))
    assert tuner._close_to_the_fastest(given, case) == pickable[: tuner.MOST_CLOSE]


def test_a_tenth_of_a_step_is_not_worth_another_reducer_than_dense(monkeypatch):
    given, _ = tried_with(monkeypatch, CLOSE_TO_DENSE)
    choice = pick(given)
    assert choice.reducer == "dense"
    assert choice.seconds == choice.dense_seconds == pytest.approx(1e-3)
    assert re.search(r"; hitopk with \S+ would gain 5%, less than 10%$", choice.reason)
    given, _ = tried_with(monkeypatch, CLOSE_TO_DENSE | {"hitopk": 0.85})
    assert pick(given).reducer == "hitopk"


@pytest.mark.parametrize("density", [0, 1.5, float("nan")])
def test_a_density_that_cannot_be_is_refused(density):
    with pytest.raises(InvalidArgument, match="density"):
        choose(1, density=density)


def test_what_approximates_is_tried_only_where_it_is_named_and_never_picked(monkeypatch):
    seconds = CLOSE_TO_DENSE | {"hitopk": 0.8, "arctopk": 0.1, "powersgd": 0.2}
    given, steps = tried_with(monkeypatch, seconds)
    assert not {"arctopk", "powersgd"} & set(steps)
    assert pick(given).reducer == "hitopk"
    named, steps = tried_with(monkeypatch, seconds, own=[Candidate("arctopk")])
    assert "arctopk" in {each.candidate.reducer for each in named.trials}
    assert pick(named) == pick(given)
    known = tuner.DENSE, Candidate("arctopk")  # where nothing else was tried beside dense
    named = dataclasses.replace(named, trials=[each for each in named.trials if each.candidate in known])
    expected = tuner.expect(named, Case(layout(2, 1), 20_011, 0.01))
    assert pick(named).seconds == min(expected[each] for each in expected if tuner.is_pickable(each))


def test_nor_is_less_than_the_spread_of_the_measurements(monkeypatch):
    seconds = CLOSE_TO_DENSE | {"hitopk": 0.8}
    quiet, steps = tried_with(monkeypatch, seconds)
    together = sum(each.spread is not None for each in quiet.trials)
    apart = len(steps) - (tuner.WARM_UP_STEPS + tuner.STEPS) * together

    def busy_in_turns(step):  # a process beside it, in every other round
        return 1.0 + 0.5 * (step > apart and (step - apart - 1) // together % 2)

    given, steps = tried_with(monkeypatch, seconds, busy_in_turns)
    last = [each for each in given.trials if each.spread is not None]
    turns = (tuner.WARM_UP_STEPS + tuner.STEPS) * len(last)
    assert steps[-tuner.ATTEMPTS * turns : -turns] == (tuner.ATTEMPTS - 1) * steps[-turns:]
    spread = max(each.spread for each in last if each.candidate.reducer in ("dense", "hitopk"))
    assert spread > tuner.WIDE
    choice = pick(given)
    assert choice.reducer == "dense"
    assert f", less than the spread of {spread:.0%}" in choice.reason


def test_of_widely_spread_measurements_the_steadiest_count(monkeypatch):
    alone = len(tried_with(monkeypatch, CLOSE_TO_DENSE)[1])
    turns = [each for each in tried_with(monkeypatch, CLOSE_TO_DENSE)[0].trials if each.spread is not None]
    in_turns = (tuner.WARM_UP_STEPS + tuner.STEPS) * len(turns)

    def busy_until(step):
        return 1.0 + step % 3 if alone - in_turns < step <= alone else 1.0  # in the first attempt

    given, steps = tried_with(monkeypatch, CLOSE_TO_DENSE | {"hitopk": 0.5}, busy_until)
    assert {each.spread for each in given.trials} == {None, 0.0}
    assert len(steps) > alone
    assert pick(given).reducer == "hitopk"


def test_the_reducer_of_a_configuration_is_tried_beside_the_others(monkeypatch):
    own = Candidate("gtopk", "fp16", '{"selector": "exact"}')
    given, _ = tried_with(monkeypatch, CLOSE_TO_DENSE | {"gtopk": 0.5}, own=[own])
    choice = pick(given)
    assert (choice.reducer, choice.options) == ("gtopk", {"wire": "fp16", "selector": "exact"})
    assert choice.reason.startswith("gtopk with fp16, selector=exact: ")
    elsewhere = tuner.choose(given, layout(2, 1), 30_000, 0.01)  # where nobody can predict it
    assert elsewhere.reducer != "gtopk"


def test_on_one_node_none_is_picked_that_leaves_entries_out(monkeypatch):
    given, _ = tried_with(monkeypatch, CLOSE_TO_DENSE | {"hitopk": 0.01}, ranks_per_node=2)
    choice = pick(given, ranks_per_node=2)
    assert not REDUCERS[choice.reducer].sparse
    assert ", where no sparse one is picked" in choice.reason


def test_a_sparse_pick_of_a_few_entries_says_what_it_risks():
    few, many = choose(0.01, size=900, microseconds=1), choose(0.01, size=90_000, microseconds=1)
    assert "; with 9 of 900 entries a step it may learn less: compare the accuracy with dense's" in few.reason
    assert "learn less" not in many.reason


@pytest.mark.parametrize(
    ("intra", "inter", "said"),
    [
        (17e-3, 1e-4, "a latency of 17 ms inside a node"),
        (1e-5, 0.3, "a latency of 300 ms between nodes"),
        (1e-5, 0.02, None),
    ],
)
def test_a_latency_that_no_link_has_is_noticed(intra, inter, said):
    assert probe.implausible(Profile(JOB, Network(Link(intra, 1e-9), Link(inter, 1e-9)), SPEEDS)) == said
    alone = dataclasses.replace(JOB, ranks_of_nodes=(1, 1))  # which have no link inside a node
    if inter < 0.1:
        assert probe.implausible(Profile(alone, Network(Link(intra, 0), Link(inter, 0)), SPEEDS)) is None


def test_a_trial_overrules_the_prediction():
    first = choose(1)
    of_first = json.dumps({name: value for name, value in first.options.items() if name != "wire"})
    slower = with_trial(profile(1), first.reducer, first.options.get("wire"), 3.0, options=of_first)
    slower = with_trial(slower, "oktopk", "fp32", 0.1)
    second = tuner.choose(slower, layout(8, 2), 14_728_266, 0.01)
    assert (second.reducer, second.options) == ("oktopk", {"wire": "fp32"})


def test_where_candidates_were_tried_no_other_is_chosen():
    given = with_trial(profile(1), "torus2d", None, 1.0)
    assert choose(1).reducer != "torus2d"
    assert tuner.choose(given, layout(8, 2), 14_728_266, 0.01).reducer == "torus2d"


def test_elsewhere_the_nearest_trial_of_a_reducer_corrects_its_prediction():
    given = with_trial(profile(1), "hitopk", "fp32", 2.0)
    given = with_trial(given, "hitopk", "fp32", 5.0, size=1_000_000)
    case = Case(layout(8, 2), 2_000_000, 0.01)
    plain, corrected = tuner.expect(profile(1), case), tuner.expect(given, case)
    candidate = Candidate("hitopk", "fp32")
    assert corrected[candidate] == pytest.approx(5.0 * plain[candidate])


def test_a_reducer_that_was_never_tried_is_taken_to_be_as_wrong_as_the_others():
    given = with_trial(with_trial(profile(1), "hitopk", "fp32", 2.0), "oktopk", "fp32", 8.0)
    case = Case(layout(8, 2), 14_728_266, 0.01)
    plain, corrected = tuner.expect(profile(1), case), tuner.expect(given, case)
    assert corrected[Candidate("gtopk", "fp32")] == pytest.approx(4.0 * plain[Candidate("gtopk", "fp32")])


def test_a_saved_profile_is_the_same_one(tmp_path):
    path = tmp_path / "a folder" / "profile.json"
    profile(1).save(path)
    assert Profile.load(path) == profile(1)
    other = with_trial(with_trial(profile(2), "hitopk", "fp32", 2.0), "dense", None, 2.0)
    other.save(path)
    assert Profile.load(path) == other
    assert [each.name for each in path.parent.iterdir()] == ["profile.json"]


def damage(content, key, value):
    place = content
    for part in key[:-1]:
        place = place[part]
    place[key[-1]] = value
    return json.dumps(content)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (["format"], 1),
        (["speeds", "add"], "fast"),
        (["speeds", "add"], -1.0),
        (["speeds", "code"], {}),
        (["network", "inter", "beta"], -1.0),
        (["network", "more"], {}),
        (["job", "hosts"], 5),
        (["job", "ranks_of_nodes"], [float("inf")]),
        (["trials"], [{"size": 1}]),
        (None, None),  # half of the file is missing
    ],
)
def test_a_damaged_profile_is_refused_by_name(tmp_path, key, value):
    path = tmp_path / "profile.json"
    profile(1).save(path)
    text = path.read_text()
    path.write_text(damage(json.loads(text), key, value) if key else text[: len(text) // 2])
    with pytest.raises(InvalidArgument, match=r"profile\.json: expected a profile of format 3, got"):
        Profile.load(path)


@pytest.mark.parametrize(
    "other",
    [
        {"ranks_of_nodes": (4, 4)},
        {"hosts": ("node0", "node7")},
        {"processors": ("2 cores of one", "64 cores of another")},
    ],
)
def test_a_profile_of_another_job_is_refused(other):
    here = dataclasses.replace(JOB, **other)
    profile(1).check(JOB)
    with pytest.raises(InvalidArgument, match="expected a profile of") as caught:
        profile(1).check(here)
    expected, found = str(caught.value).split(", got one of ")
    assert str(here) in expected
    assert str(JOB) in found
    assert "processors" not in other or "64 cores of another" in found


# --------------------------------------------------------------- within a budget of bytes

EIGHT_NODES = [range(4 * node, 4 * node + 4) for node in range(8)]
BUDGET_SIZE, DENSITY = 1_000_000, 0.01


def bytes_of_rank(reducer, nodes=EIGHT_NODES, **options):
    """Return what a rank of the busiest node sends in an exchange."""
    own = {"density": DENSITY, **options} if REDUCERS[reducer].sparse else {}
    sent = bytes_of_nodes(reducer, nodes, BUDGET_SIZE, **own)
    link = "inter" if len(nodes) > 1 else "intra"
    return max(getattr(each, link) / len(node) for each, node in zip(sent, nodes, strict=True))


def every_candidate(nodes=EIGHT_NODES):
    for name, reducer in REDUCERS.items():
        if reducer.sparse and "wire" not in reducer_options(name):
            continue  # approximates otherwise than by entries
        for wire in tuner.SHORT_WIRES if reducer.sparse else ("",):
            yield bytes_of_rank(name, nodes, **({"wire": wire} if wire else {}))


@pytest.mark.parametrize("nodes", [EIGHT_NODES, [range(6)]], ids=["8 nodes", "1 node"])
@pytest.mark.parametrize("bytes_per_step", [10, 300, 7_000, 100_000, 10**7])
def test_no_candidate_needs_fewer_local_steps_and_of_those_with_as_many_the_choice_sends_most(
    bytes_per_step, nodes
):
    choice = tuner.choose_within(bytes_per_step, nodes, BUDGET_SIZE, DENSITY)
    sent = bytes_of_rank(choice.reducer, nodes, **choice.options)
    assert sent <= choice.local_steps * bytes_per_step
    assert choice.local_steps == 1 or sent > (choice.local_steps - 1) * bytes_per_step
    for other in every_candidate(nodes):
        assert other > (choice.local_steps - 1) * bytes_per_step or choice.local_steps == 1
        assert other <= sent or other > choice.local_steps * bytes_per_step


@pytest.mark.parametrize("pair", [("allgather", "hitopk"), ("hioktopk", "oktopk"), ("torus2d", "dense")])
def test_of_two_reducers_that_do_the_same_where_no_ranks_share_a_node_one_is_a_candidate(pair):
    def means(comm):
        topology, gradients = Topology(comm), Gradients(10_007)
        made = [make_reducer(each, topology, 10_007) for each in pair]
        return [[each.reduce(gradients.of(comm.rank, step)).copy() for step in range(3)] for each in made]

    for one, other in simulated.run(means, 4, 1):
        np.testing.assert_array_equal(one, other)
    assert len({str(bytes_of_nodes(each, layout(4, 1), 10_007)) for each in pair}) == 1
    alone, beside = ({each.reducer for each in tuner.candidates(layout(4, ranks))} for ranks in (1, 2))
    assert set(pair) - alone == {pair[0]}
    assert set(pair) <= beside


def test_on_gpus_only_reducers_that_take_their_arrays_and_codecs_with_kernels_are_picked():
    nodes = layout(8, 2)
    wires = {each.wire for each in tuner.candidates(nodes, tuner.SHORT_WIRES, on_gpus=True) if each.wire}
    assert wires == {"gap+fp16"}
    in_host_memory = {"arctopk", "exdyna", "powersgd", "spardl"}
    reducers = {each.reducer for each in tuner.candidates(nodes, on_gpus=True)}
    assert reducers == REDUCERS.keys() - in_host_memory
    for on_gpus in (False, True):
        within = tuner.choose_within(1_000, layout(128, 8), 1_000_000, 0.01, on_gpus=on_gpus)
        slow = profile(1, microseconds=20_000)
        for choice in (within, tuner.choose(slow, layout(64, 1), 14_728_266, 0.01, on_gpus=on_gpus)):
            assert (choice.reducer in in_host_memory) is not on_gpus, choice


def test_the_reason_names_choice_and_budget():
    choice = tuner.choose_within(1_000, EIGHT_NODES, BUDGET_SIZE, DENSITY)
    assert choice.reason.startswith(f"{labelled(choice)}: ")
    assert f"one every {choice.local_steps} steps" in choice.reason
    assert choice.reason.endswith("32 ranks on 8 nodes, at most 1 kB a step")
