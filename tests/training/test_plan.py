"""``cloudtrain plan``: closed forms by hand, the papers' efficiencies, refusals, and what it prints."""

import importlib
import json
import re
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.memory import dense_vectors, traced
from benchmarks.shapes import resnet50
from commlib import REDUCERS, Link, Network, Topology, bytes_of_nodes, make_reducer, transport
from commlib.reducers.allgather import AllGather
from commlib.tuning.probe import Gradients, Job, Profile
from commlib.tuning.tuner import choose
from datacache import CacheDirs
from datacache.capacity import store_bytes
from tests.launching import DIGITS, ROOT
from tests.test_tuner import SPEEDS
from tests.training.refusal import invoke, refusal, refused
from training.commands import plan as command
from training.config.config import load
from training.config.schema import ConfigurationError
from training.plan import simulation
from training.plan.exchange import Exchange
from training.plan.memory import Weights, kept_by, weights_of
from training.plan.planner import check_room, make_plan
from training.plan.samples import Epoch, Listing, listing_of, load_countable
from training.plan.simulation import simulations
from training.plan.site import FOLDER, ClusterFile, Site, load_cluster, nodes_of, per_second, site_of

PAGE = (ROOT / "docs" / "plan.md").read_text()
ALONE = ("ranks_per_node=null", "cache={}")
LONG_WARMUP = "{start: 1, end: 0, warmup: {start: 0, epochs: 50}}"
INTRA, INTER = Link(1e-6, 1e-9), Link(1e-4, 1e-8)
SMALL = """
nodes: 2
ranks_per_node: 2
memory_gib: 1
disk_gib: 1
intra: {alpha: 1.0e-6, beta: 1.0e-9}
inter: {alpha: 1.0e-4, beta: 1.0e-8}
price_per_node_hour: 3
throughput:
  - {model: resnet8, input: 6 px, per_second: 1000}
  - {configuration: digits, phase: 2, unit: samples, per_second: 500}
"""


@pytest.fixture
def cluster(tmp_path):
    path = tmp_path / "small.yaml"
    path.write_text(SMALL)
    return str(path)


def planned(words=(), *, cluster=None, ranks=None, sizes=(1000,), epochs=None, config=DIGITS, listing=None):
    given = load_countable(str(config), [*ALONE, *words])[0].config
    site = site_of(given, cluster, ranks)
    epochs = epochs or [Epoch(10, 64, "samples")] * len(given.phases)
    listed = listing or Listing(None, epochs, 0, 0, CacheDirs())
    return make_plan(given, site, listed, Weights([(size,) for size in sizes]))


@pytest.fixture
def small_model(monkeypatch):
    """Let the model of any configuration have 1000 weights, unless a test says otherwise."""
    monkeypatch.setattr(command, "weights_of", lambda config, dataset: Weights([(1000,)]))


def table_3():
    """Return the rows of table 3 in docs/validation.md: training, scheme, and the predicted cells."""
    page = (ROOT / "docs" / "validation.md").read_text()
    (body,) = re.findall(r"<!-- table 3 -->\n(.*?)<!-- end -->", page, re.DOTALL)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in body.splitlines()[2:]]
    return [(row[0], row[1], row[3], row[6]) for row in rows if row[0] != "Transformer"]


@pytest.mark.parametrize(("training", "scheme", "throughput", "efficiency"), table_3())
def test_the_efficiencies_of_table_3_are_those_of_docs_validation(training, scheme, throughput, efficiency):
    reducer = {"Dense-SGD": "dense", "2DTAR-SGD": "torus2d", "MSTopK-SGD": "hitopk"}[scheme]
    model, side, size = {
        "ResNet-50 (224)": ("resnet50", 224, 25_000_000),
        "ResNet-50 (96)": ("resnet50", 96, 25_000_000),
        "VGG-19": ("vgg19", 224, 143_667_240),
    }[training]
    # Values of 16 bits: half as many of the 32 that dense reducers send.
    is_sparse = reducer == "hitopk"
    given = "reducer={name: hitopk, density: 0.01, wire: fp16}" if is_sparse else f"reducer={reducer}"
    phase = f"{{epochs: 1, input_size: {side}, batch_size: 256, learning_rate: 0.1}}"
    (found,) = planned(
        [given, f"model={model}", "precision=float16", f"phases=[{phase}]"],
        cluster="tencent_v100",
        config="imagenet_resnet50_90epochs",
        sizes=[size if is_sparse else size // 2],
        epochs=[Epoch(39, 128 * 256, "samples")],
    ).phases
    assert (f"{found.per_second:,.0f}", f"{found.efficiency:.1%}") == (throughput, efficiency)


def test_a_dense_phase_on_two_nodes_of_two(cluster):
    plan = planned(["phases.1.epochs=8"], cluster=cluster)
    dense = plan.phases[1]
    messages = 2 * 3 * (1e-4 + 4 * 1000 / 4 * 1e-8)  # 2·(P − 1)·(α + d/P·β)
    computing = 64 / 4 / 500
    assert dense.messages == pytest.approx(messages)
    assert dense.computing == pytest.approx(computing)
    assert dense.step == pytest.approx(computing + messages)  # one bucket: nothing overlaps
    assert dense.per_second == pytest.approx(64 / (computing + messages))
    assert dense.efficiency == pytest.approx(computing / (computing + messages))
    assert dense.slow_bytes == dense.dense_bytes == 2 * 3 * 1000  # 2·d·(P − 1)/P values by the last rank
    assert (dense.steps, dense.epochs) == (80, 8)
    assert dense.traffic_bytes == 80 * 2 * 6000
    assert dense.seconds == pytest.approx(80 * (computing + messages))


def test_a_sparse_phase_sends_k_entries_of_each_shard_to_the_other_node(cluster):
    sparse = planned(cluster=cluster).phases[0]
    assert sparse.slow_bytes == 2 * 5 * 8  # two ranks, k/n of an index and a value each
    assert sparse.dense_bytes == 6000
    # scatter inside, the streams share the card, one agreement; then the selected entries inside
    assert 1e-4 < sparse.messages < 3e-4
    assert sparse.computing == pytest.approx(64 / 4 / 1000)


def test_the_price_of_the_configuration_is_of_all_nodes(cluster, tmp_path):
    (tmp_path / "free.yaml").write_text(SMALL.replace("price_per_node_hour: 3\n", ""))
    plan = planned(["dawnbench.cost_per_hour=7"], cluster=str(tmp_path / "free.yaml"))
    assert plan.cost == pytest.approx(7 * plan.seconds / 3600)
    assert not any("cost" in line for line in plan.missing)


def test_traffic_counts_each_epoch_at_its_own_density(cluster):
    words = ["phases.0.density_warmup={start: 0.25, epochs: 2}", "phases.0.epochs=3"]
    sparse = planned([*words, "phases.0.reducer.density=0.01"], cluster=cluster).phases[0]

    def both_nodes(density):
        nodes = bytes_of_nodes("hitopk", [[0, 1], [2, 3]], 1000, density=density)
        return sum(each.inter for each in nodes)

    # from 0.25 in equal ratios to 0.01, which the third epoch has: 0.25, 0.05, 0.01
    assert sparse.traffic_bytes == 10 * (both_nodes(0.25) + both_nodes(0.05) + both_nodes(0.01))
    assert (sparse.density.start, sparse.density.end) == (0.25, 0.01)
    assert sparse.slow_bytes == both_nodes(0.01) / 2


def test_buckets_hide_their_messages_behind_the_layers_that_come_later(cluster):
    words = ["bucket_mib=0.0016", "phases.1.epochs=1"]  # 419 entries
    sizes = [100, 300, 400]
    dense = planned(words, cluster=cluster, sizes=sizes).phases[1]
    assert dense.buckets == 2  # of 400 entries each
    bucket = 6 * (1e-4 + 4 * 400 / 4 * 1e-8)
    computing = 64 / 4 / 500
    assert dense.messages == pytest.approx(2 * bucket)
    # The last bucket's messages pass while the backward pass computes the other half.
    assert dense.step == pytest.approx(computing + bucket)
    off = planned([*words, "overlap=false"], cluster=cluster, sizes=sizes).phases[1]
    assert off.step == pytest.approx(computing + 2 * bucket)


def test_gradients_on_gpus_are_one_bucket_unless_they_go_by_mpi(tmp_path):
    path = tmp_path / "gpus.yaml"
    path.write_text(f"{SMALL}gpu_memory_gib: 8\n")
    words = ["bucket_mib=0.0016"]
    assert planned(words, cluster=str(path), sizes=[400, 400]).phases[1].buckets == 1
    assert planned([*words, "transport=mpi"], cluster=str(path), sizes=[400, 400]).phases[1].buckets == 2


def test_the_peak_of_a_warm_up_is_seen_in_a_phase_of_many_steps():
    rate = "{start: 1.0, end: 0.0, warmup: {start: 0.0, steps: 7777}}"
    phase = f"{{steps: 1000000, input_size: 8, batch_size: 16, learning_rate: {rate}}}"
    curve = planned([f"phases=[{phase}]"]).phases[0].rate
    assert (curve.start, curve.peak, curve.end) == (0.0, 1.0, 0.0)


@pytest.mark.parametrize("name", ["oktopk", "ssar_split", "hioktopk"])
def test_bytes_of_reducers_whose_traffic_is_a_bound_are_about_those_that_they_send(name):
    size, nodes = 100_000, nodes_of(8, 2)

    def body(comm):
        reducer = make_reducer(name, Topology(comm), size, density=0.01)
        for step in range(2):  # thresholds of the first are used again in the second
            noise = np.random.default_rng([comm.rank, step]).standard_normal(size, np.float32)
            reducer.reduce(noise - reducer.residual)
        return reducer.last.traffic.sent.inter

    sent = transport.simulated.run(body, 8, 2)
    found = [sum(sent[rank] for rank in node) for node in nodes]
    expected = bytes_of_nodes(name, nodes, size, density=0.01)
    # ranges of entries are not equally full; the integers that ranks agree on are among what is expected
    assert max(each.inter for each in expected) == pytest.approx(max(found), rel=0.25)


@pytest.mark.parametrize(
    ("words", "weights", "optimizer"),
    [
        (["optimizer={name: sgd, momentum: 0.9}"], 1, 1),
        (["optimizer={name: sgd, momentum: 0}"], 1, 0),
        (["optimizer={name: sgd, momentum: 0}", "phases.1.momentum=0.5"], 1, 1),
        (["optimizer={name: lamb}"], 1, 2),
        (["optimizer={name: muon}"], 1, 2),
        (["optimizer=lars", "average=0.9"], 2, 1),
        (["optimizer={name: adam, sharded: true}"], 1, 2 / 4),
    ],
)
def test_weights_and_slots_of_the_optimizer(words, weights, optimizer, cluster):
    own = planned(words, cluster=cluster).phases[1].memory
    assert (own.weights, own.optimizer) == (4000 * weights, 4000 * optimizer)
    assert own.gradient == 8000
    assert own.residual == 0  # of dense
    assert own.total == own.weights + own.optimizer + own.gradient + own.reducer


@pytest.mark.parametrize(("name", "share"), [("oktopk", 1), ("hitopk", 1 / 2), ("torus2d", 0)])
def test_the_residual_is_that_of_what_a_rank_selects_from(name, share):
    assert kept_by(name, {}, nodes_of(4, 2), 1000, None).residual == 2 * 4000 * share


class Narrow(AllGather):
    """A reducer of a user's, with fewer options than what it is made of."""

    def __init__(self, topology, size, density=0.01):
        super().__init__(topology, size, density=density)


def test_what_a_reducer_with_options_of_its_own_keeps_is_estimated():
    nodes = nodes_of(4, 2)
    assert kept_by(f"{__name__}:Narrow", {}, nodes, 1000, None) == kept_by("allgather", {}, nodes, 1000, None)


PLAIN = [(name, {}) for name in ("allgather", "gtopk", "ssar_split", "oktopk", "hitopk")]


@pytest.mark.parametrize(
    ("name", "own", "density"),
    [
        *((*each, density) for each in PLAIN for density in (0.01, 0.1)),
        ("torus2d", {}, None),
        ("torus2d", {"values": "qsgd8"}, None),
        ("dense", {"values": "hadamard4"}, None),
        ("allgather", {"decay": 0.9}, 0.01),
    ],
)
def test_what_reducers_keep_is_estimated_within_a_factor_of_1_4(name, own, density):
    options = {"density": density} | own if REDUCERS[name].sparse else own
    noise, nodes = Gradients(50_000), nodes_of(8, 4)

    def body(comm):
        make = lambda own: make_reducer(name, Topology(own), noise.size, **options)  # noqa: E731
        make(comm).reduce(noise.of(comm.rank, 0))  # loads the kernels, which takes memory, too
        return dense_vectors(comm, make, noise)

    with traced():
        found = max(transport.simulated.run(body, 8, 4))
    exchange = Exchange(Site("here", nodes), [noise.size], name, options)
    kept = kept_by(name, options, nodes, noise.size, exchange.rank_bytes())
    estimate = (kept.residual + kept.reducer) / (4 * noise.size)
    assert found / 1.4 < estimate < found * 1.4


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.stem)
def test_clusters_that_ship_load_by_name(path):
    assert load_cluster(path.stem).ranks > 1
    assert f"`{path.stem}`" in PAGE


def test_the_first_throughput_that_fits_counts(cluster):
    throughput = load_cluster(cluster).throughput
    facts = {"model": "resnet8", "configuration": "digits", "unit": "samples"}
    assert per_second(throughput, **facts, phase=1, input="6 px") == 1000
    assert per_second(throughput, **facts, phase=2, input="8 px") == 500
    assert per_second(throughput, **facts, phase=2, input="6 px") == 1000  # both fit
    assert per_second(throughput, **facts, phase=1, input="8 px") is None


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        (("nodes: 2", "nodes: 0"), "nodes: expected a whole number from 1, got 0"),
        (("memory_gib", "memory_gb"), 'memory_gb: unknown key, did you mean "memory_gib"?'),
        (("inter: {alpha: 1.0e-4, beta: 1.0e-8}\n", ""), "inter: missing, expected a link"),
        (("model: resnet8", "precision: float16"), "throughput[0]: expected model or configuration"),
    ],
)
def test_a_wrong_cluster_file_is_refused_in_one_line(tmp_path, changed, line):
    path = tmp_path / "wrong.yaml"
    path.write_text(SMALL.replace(*changed, 1))
    with refused(f"{path}: {line}", ConfigurationError):
        load_cluster(path)


def test_fewer_ranks_fill_node_after_node(cluster):
    assert site_of(load(DIGITS, ALONE), cluster, 3).nodes == [[0, 1], [2]]


def profile_at(path, processor="2 cores of a processor", *throughput):
    job = Job(("node1", "node2"), (processor,), (2, 2))
    profile = Profile(job, Network(INTRA, INTER), SPEEDS, throughput=throughput)
    profile.save(path)
    return profile


def test_a_profile_gives_ranks_links_and_the_speeds_of_kernels(tmp_path):
    profile = profile_at(tmp_path / "profile.json")
    words = [f"profile={tmp_path / 'profile.json'}", "reducer=auto", "phases.0.reducer=auto"]
    plan = planned(words, sizes=[1_000_000])
    assert plan.site.nodes == [[0, 1], [2, 3]]
    choice = choose(profile, plan.site.nodes, 1_000_000, 0.01)
    assert plan.phases[0].reducer == choice.reducer
    assert plan.phases[0].auto == choice.reason
    one_piece = Exchange(plan.site, [1_000_000], choice.reducer, {"density": 0.01, **choice.options})
    assert one_piece.seconds()[0] > one_piece.messages_seconds()  # with the time of the kernels
    assert plan.phases[0].step is None
    assert any(line.startswith("no computing in phases [1, 2]") for line in plan.missing)


def test_a_profile_of_the_configuration_gives_the_computing_of_the_phases_whose_inputs_it_measured(tmp_path):
    measured = {"configuration": "digits", "phase": 1, "input": "6 px", "unit": "samples", "per_second": 640}
    profile_at(tmp_path / "profile.json", "2 cores", measured, measured | {"phase": 2, "input": "9 px"})
    plan = planned([f"profile={tmp_path / 'profile.json'}"])
    first, second = plan.phases
    assert first.computing == first.global_batch / 4 / 640
    exchange = Exchange(plan.site, [1000], first.reducer, {"density": 0.01, **first.options})
    assert first.step == pytest.approx(first.computing + exchange.seconds()[0])
    assert (second.computing, second.step) == (None, None)
    profile_at(tmp_path / "profile.json", "2 cores", {"phase": 1})
    with refused(f"{tmp_path / 'profile.json'}: per_second: missing", ConfigurationError):
        planned([f"profile={tmp_path / 'profile.json'}"])


@pytest.mark.parametrize(("sharing", "rate"), [(1, 640), (2, 640), (2, 6.4), (4, 640)])
def test_ranks_that_share_cores_wait_for_the_last_and_many_hide_no_messages(tmp_path, sharing, rate):
    path = tmp_path / "profile.json"
    profile = profile_at(path, "2 cores", {"configuration": "digits", "per_second": rate})
    replace(profile, speeds=replace(profile.speeds, ranks_per_core=sharing)).save(path)
    words = [f"profile={path}", "bucket_mib=0.0016", "reducer=dense", "phases.0.reducer=dense"]
    first = planned(words, sizes=[400, 400]).phases[0]
    off = planned([*words, "overlap=false"], sizes=[400, 400]).phases[0]
    lag = min(0.3 * first.computing, 0.06) if sharing > 1 else 0.0
    hidden = first.messages / 2 if sharing <= 2 else 0.0  # those of the first of two buckets
    assert first.buckets == 2
    assert off.step == pytest.approx(first.computing + first.messages + lag)
    assert first.step == pytest.approx(off.step - hidden)


@pytest.mark.parametrize(("processor", "buckets"), [("8 cores", 2), ("8 cores, V100 by nccl", 1)])
def test_gradients_of_a_profile_of_gpus_are_one_bucket(tmp_path, processor, buckets):
    profile_at(tmp_path / "profile.json", processor)
    words = [f"profile={tmp_path / 'profile.json'}", "phases.0.reducer=auto", "bucket_mib=0.0016"]
    assert planned(words, sizes=[400, 400]).phases[0].buckets == buckets


def test_without_cluster_and_profile_bytes_and_memory_are_there_and_one_line_says_what_is_missing():
    plan = planned(ranks=4)
    assert [phase.seconds for phase in plan.phases] == [None, None]
    assert plan.phases[0].dense_bytes == 4 * 6000  # all inside the only node
    assert plan.phases[0].memory.total > 0
    assert plan.missing[0].startswith("no seconds: expected --cluster, or a profile")


def test_a_reducer_that_declares_no_cost_has_no_bytes_and_seconds(cluster, monkeypatch, tmp_path):
    program = "from commlib import Reducer\nclass Mine(Reducer):\n    sparse = True\n    _reduce = None\n"
    (tmp_path / "my_costless.py").write_text(program)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("my_costless")
    plan = planned(["phases.0.reducer=my_costless:Mine"], cluster=cluster)
    first, second = plan.phases
    assert (first.slow_bytes, first.messages, first.density) == (None, None, None)
    assert first.memory.residual == 2 * 4000  # as of any that is sparse
    assert second.seconds is not None
    assert (plan.seconds, plan.traffic_bytes, plan.cost) == (None, None, None)
    assert "phase 1: my_costless:Mine declares no cost: no bytes and no seconds" in plan.missing


def test_one_rank_exchanges_nothing():
    plan = planned()
    assert [phase.slow_bytes for phase in plan.phases] == [0, 0]
    assert plan.phases[0].auto == "dense: one rank has no other to exchange with"


def test_steps_and_cache_are_those_of_the_list_of_samples(tmp_path):
    cache = f"cache={{disk: {tmp_path / 'disk'}, memory: {tmp_path / 'shm'}}}"
    config = load(DIGITS, ["ranks_per_node=null", cache])
    listing = listing_of(config, nodes_of(4, 2), is_counted=False)
    assert [(each.steps, each.global_batch) for each in listing.epochs] == [(1437 // 64, 64)] * 2
    # all samples to train on, and those that the two ranks of a node test on, half of 360; 64 bytes each

    def stored(sample_bytes):
        return sum(store_bytes(np.full(count, sample_bytes)) for count in (1437, 180))

    assert listing.disk == stored(64)
    assert listing.memory == stored(36) + stored(64)  # one phase's are 6 × 6 pixels, the other's as they come
    alike = load(DIGITS, ["ranks_per_node=null", cache, "phases.1.input_size=6"])
    assert listing_of(alike, nodes_of(4, 2), is_counted=False).memory == stored(36)  # phases share it
    assert not (tmp_path / "shm").exists()


def test_images_that_are_not_here_count_as_many_as_they_are_known_to_be():
    loaded, note = load_countable("imagenet_resnet50_dawnbench", [])
    listing = listing_of(loaded.config, nodes_of(128, 8), is_counted=note is not None)
    assert note == "dataset.path is not given: counted with the 1,281,167 training samples of imagenet"
    assert [each.steps for each in listing.epochs] == [1_281_167 // 32_768] * 3 + [1_281_167 // 16_384]
    assert listing.disk is None  # their files' sizes are not known
    assert (listing.dataset.channels, listing.dataset.classes) == (3, 1000)


def test_the_weights_are_those_of_the_model():
    config = load(DIGITS, ALONE)
    model = config.task.make().make_model(config, config.make_dataset())
    found = weights_of(config, config.make_dataset())
    assert found.size == sum(int(each.shape.num_elements()) for each in model.trainable_variables)
    assert found.size + found.others == model.count_params()


@pytest.mark.usefixtures("small_model")
@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["phases.0.batch_size=400", "-np", "4"], "phases[0].batch_size: expected at most the 1437 "),
        (["cache.shards=3", "-np", "4"], "cache.shards: expected a divisor of the 64 samples"),
        ([f"phases.0.learning_rate={LONG_WARMUP}"], "phases[0].learning_rate"),
        (["reducer=auto", "-np", "4"], "phases[0].reducer: expected a name, --cluster or a profile"),
        (["--cluster", "tencent_v100", "-np", "129"], "-np: expected at most the 128 ranks"),
        (["--cluster", "tencent"], "expected a YAML file or the name of one that ships"),
        (["ranks_per_node=4", "--cluster", "tencent_v100"], "ranks_per_node: expected 8 as on the nodes of "),
        (
            ["phases.0.reducer={name: spardl, teams: 3}", "-np", "8"],
            "teams: expected a divisor of the 8 ranks, got 3",
        ),
        (["profile=/no/such.json"], "/no/such.json: no such profile"),
        (
            ["phases.0.reducer={name: spardl, teams: 4}", "-np", "8", "--simulate", "6"],
            "teams: expected a divisor of the 6 ranks, got 4",
        ),
    ],
)
def test_a_run_that_cannot_be_is_refused_in_one_line(words, line):
    assert refusal("plan", DIGITS, *ALONE, *words).startswith(line)


def test_a_node_without_room_is_refused(cluster):
    def line(**listed):
        plan = planned(cluster=cluster, sizes=[listed.pop("size", 1000)])
        with pytest.raises(ValueError, match="expected at most") as refusal:
            check_room(replace(plan, **listed))
        return str(refusal.value)

    gib = 1 << 30
    assert line(disk=2 * gib).startswith("cache.disk: expected at most the 1.0 GiB")
    assert line(memory=gib).startswith("cache.memory: expected at most the 512.0 MiB")  # half of it
    assert line(size=50_000_000).startswith("phases[0]: memory of 2 ranks on a node")


def test_a_model_too_large_for_a_gpu_is_refused(tmp_path):
    path = tmp_path / "gpus.yaml"
    path.write_text(SMALL.replace("memory_gib: 1\n", "memory_gib: 0.5\ngpu_memory_gib: 0.5\n"))
    plan = planned(cluster=str(path), sizes=[50_000_000])
    with pytest.raises(ValueError, match="on its GPU"):
        check_room(plan)
    check_room(planned(cluster=str(path), sizes=[15_000_000]))  # not in the node's memory


def test_the_reducers_own_code_takes_as_long_as_the_closed_form(cluster):
    words = ["reducer={name: oktopk, density: 0.02}"]
    sparse, dense = simulations(planned(words, cluster=cluster, sizes=[20_000]), ranks=8)
    assert (sparse.phases, dense.phases) == ([1], [2])
    assert (dense.ranks, dense.nodes, dense.size) == (8, 4, 20_000)
    assert dense.seconds == pytest.approx(dense.expected_seconds, rel=1e-3)
    assert dense.sent == dense.expected_sent
    # its selections are real ones, of which the closed form has the expected number
    assert sparse.seconds == pytest.approx(sparse.expected_seconds, rel=0.1)
    assert sparse.sent == pytest.approx(sparse.expected_sent, rel=0.3)


def test_a_gradient_that_does_not_fit_is_cut_and_too_many_messages_take_fewer_ranks(cluster, monkeypatch):
    monkeypatch.setattr(simulation, "MOST_BYTES", 400_000)
    monkeypatch.setattr(simulation, "MOST_MESSAGES", 200)
    plan = planned(["reducer=dense"], cluster=cluster, sizes=[50_000])
    (found,) = simulations(plan, ranks=16)
    assert found.ranks == 8  # 2·15·16 messages are too many, 2·7·8 are not
    # eight ranks, each with a mean and as much on its way
    assert 8 * 8 * found.size <= 400_000 < 8 * 8 * found.size / 0.9


def printed(*words):
    result = invoke("plan", *words)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.usefixtures("small_model")
def test_json_is_one_object_with_the_numbers_of_the_tables(cluster):
    words = ["digits", "ranks_per_node=null", "cache={}", "--cluster", cluster]
    record = json.loads(printed(*words, "--json", "--simulate", "4"))
    assert (record["ranks"], record["ranks_of_nodes"], record["weights"]) == (4, [2, 2], 1000)
    assert [phase["steps"] for phase in record["phases"]] == [22 * 12, 22 * 8]
    assert record["phases"][0]["slow_bytes"] == 80
    assert record["phases"][1]["rate"] == {"start": 0.1, "peak": 0.1, "end": 0.0}
    memory = record["phases"][0]["memory"]
    assert 2 * memory["total"] == sum(memory.values())
    assert record["total"]["cost"] == pytest.approx(2 * 3 * record["total"]["seconds"] / 3600)
    assert record["total"]["seconds"] == pytest.approx(sum(each["seconds"] for each in record["phases"]))
    assert [each["reducer"] for each in record["simulated"]] == ["hitopk", "dense"]
    shown = printed(*words)
    assert "264     12 64 samples" in shown
    assert f"{record['total']['cost']:,.2f} for 2 nodes" in shown


def test_the_page_shows_what_is_printed(monkeypatch):
    shown = re.search(r"^\$ cloudtrain plan ([^\n]*)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    monkeypatch.setattr(command, "weights_of", lambda config, dataset: Weights(resnet50(), 53_120))
    lines = printed(*shown[1].split()).splitlines()
    assert [line.rstrip() for line in lines] == shown[2].splitlines()


def test_the_clusters_of_the_page_load(tmp_path):
    (text,) = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    (tmp_path / "my_cluster.yaml").write_text(text)
    keys = load_cluster(tmp_path / "my_cluster.yaml").model_dump(exclude_none=True).keys()
    assert keys == ClusterFile.model_fields.keys()  # the page shows them all
