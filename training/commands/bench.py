"""The commands ``cloudtrain bench``; each benchmark is imported only when it is called."""

from typing import Annotated

import typer
from typer import Option

from training.commands.help import Group

benches = typer.Typer(cls=Group, no_args_is_help=True, rich_markup_mode=None)

AsJson = Annotated[bool, Option("--json", help="one JSON object a line instead of tables")]
Quick = Annotated[bool, Option("--quick", help="smaller sizes: ends within a minute")]

# Of ``bench reducers``: training/bench/options.py checks the combinations.
SimulatedRanks = Annotated[int | None, Option("-np", "--ranks", help="simulated ranks [8]")]
RanksPerNode = Annotated[
    int | None, Option(help="ranks of a node [4; real ranks: by host name; --cluster: 2]")
]
Sizes = Annotated[list[int] | None, Option("--size", help="entries; --cluster: may be repeated [1000000]")]
Densities = Annotated[
    list[float] | None, Option("--density", help="share to select; --cluster: may be repeated [0.01]")
]
Reducers = Annotated[list[str] | None, Option("--reducer", help="reducer to measure; may be repeated [all]")]
Wires = Annotated[list[str] | None, Option("--wire", help="codec of sparse reducers; may be repeated [fp32]")]
ReducerSteps = Annotated[int | None, Option(help="steps to time, after two to warm up [5; 20]")]
InterGbit = Annotated[float, Option(help="Gbit/s of a node's card")]
InterMicroseconds = Annotated[float, Option(help="latency between nodes")]
IntraGbit = Annotated[float, Option(help="Gbit/s between two ranks of a node")]
IntraMicroseconds = Annotated[float, Option(help="latency inside a node")]
Peers = Annotated[
    bool, Option("--peers", help="against the papers' algorithms in plain NumPy, not against dense")
]
AllReduce = Annotated[
    bool, Option("--allreduce", help="against MPI's and Horovod's all-reduce, on real ranks")
]
Horovod = Annotated[
    bool, Option("--horovod/--no-horovod", help="with --allreduce: start TensorFlow and Horovod")
]
Cluster = Annotated[
    bool, Option("--cluster", help="--allreduce on nodes of an emulated cluster (needs root)")
]
Nodes = Annotated[int | None, Option(help="nodes of the cluster [4]")]
Rates = Annotated[
    list[str] | None, Option("--rate", help="rate of its links; may be repeated [1gbit, 10gbit]")
]
Algorithm = Annotated[
    str | None, Option(help="MPI's all-reduce on it: default, ring, … [the fastest, probed]")
]
Timeout = Annotated[float | None, Option(help="seconds that a job on it may take [3600]")]


@benches.command("selection")
def bench_selection(
    sizes: Annotated[list[int] | None, Option("--size", help="entries; may be repeated")] = None,
    densities: Annotated[
        list[float] | None, Option("--density", help="share to select; may be repeated")
    ] = None,
    device: Annotated[str, Option(help="cpu or gpu")] = "cpu",
    as_json: AsJson = False,
    quick: Quick = False,
) -> None:
    """Time selectors.

    Against torch.topk, np.partition, and a plain read of the vector as the lower bound. On a GPU against
    torch.topk, cupy.argpartition, jax.lax.approx_max_k, the paper's thirty passes, and a copy.
    """
    if device == "gpu":
        from benchmarks.gpu import bench
    elif device == "cpu":
        from training.bench.selection import bench
    else:
        raise typer.BadParameter(f"expected cpu or gpu, got {device}", param_hint="--device")

    raise typer.Exit(bench(as_json, sizes=sizes or [], densities=densities or [], quick=quick))


@benches.command("reducers")
def bench_reducers(
    ranks: SimulatedRanks = None,
    ranks_per_node: RanksPerNode = None,
    sizes: Sizes = None,
    densities: Densities = None,
    reducers: Reducers = None,
    wires: Wires = None,
    steps: ReducerSteps = None,
    inter_gbit: InterGbit = 25,
    inter_microseconds: InterMicroseconds = 30,
    intra_gbit: IntraGbit = 1200,
    intra_microseconds: IntraMicroseconds = 10,
    peers: Peers = False,
    allreduce: AllReduce = False,
    horovod: Horovod = True,
    cluster: Cluster = False,
    nodes: Nodes = None,
    rates: Rates = None,
    algorithm: Algorithm = None,
    timeout: Timeout = None,
    as_json: AsJson = False,
    quick: Quick = False,
) -> None:
    """Measure reducers against dense.

    On simulated ranks, on those that mpirun or horovodrun has started, or on an emulated cluster.
    """
    given = {name: value for name, value in locals().items() if value is not None}  # else as in Options
    if cluster:
        from benchmarks.cluster import bench
    else:
        from training.bench.reducers import bench

    raise typer.Exit(bench(**given))


@benches.command("cache")
def bench_cache(
    samples: Annotated[int | None, Option(min=300, help="pictures to generate [10000]")] = None,
    as_json: AsJson = False,
    quick: Quick = False,
) -> None:
    """Time batches from the levels of the cache.

    Against emulated central storage and against tf.data, of generated pictures in the shape of ImageNet's.
    """
    from training.bench.cache import bench

    raise typer.Exit(bench(as_json, samples=samples, quick=quick))


@benches.command("pto")
def bench_pto(
    ranks: Annotated[
        list[int] | None, Option("-np", "--ranks", help="ranks to start; may be repeated [2, 4]")
    ] = None,
    networks: Annotated[
        list[str] | None, Option("--network", help="network whose shapes to take; may be repeated [all]")
    ] = None,
    steps: Annotated[int | None, Option(help="steps to time, after two to warm up [21]")] = None,
    as_json: AsJson = False,
    quick: Quick = False,
) -> None:
    """Time norms that ranks share, and steps of LARS with them, against all norms on every rank.

    On ranks of this machine, which it starts, or on those of mpirun.
    """
    from benchmarks.pto import bench

    raise typer.Exit(bench(as_json, ranks=ranks or (), networks=networks or (), steps=steps, quick=quick))


# Of ``bench train --cluster``: benchmarks/race_plan.py checks them.
RaceCluster = Annotated[
    bool, Option("--cluster", help="race reducers and Horovod on an emulated cluster (needs root)")
]
RaceRates = Annotated[
    list[str] | None, Option("--rate", help="rate of its links; may be repeated [0.2gbit, 1gbit, 10gbit]")
]
Layouts = Annotated[
    list[str] | None, Option("--layout", help="nodes x ranks on each; may be repeated [4x1, 4x2]")
]
RacedModels = Annotated[
    list[str] | None,
    Option("--model", help="mlp, resnet20, vgg16_cifar, lstm_lm_small; may be repeated [mlp, resnet20]"),
]
RacedReducers = Annotated[
    list[str] | None, Option("--reducer", help="reducer to race, or auto; may be repeated [all]")
]
Seeds = Annotated[int | None, Option(help="runs to the accuracy, at the first rate and layout; 0: none [3]")]
RaceDensity = Annotated[float | None, Option("--density", help="share that sparse reducers select [0.01]")]
RaceTimeout = Annotated[float | None, Option("--timeout", help="seconds that a job on it may take [7200]")]


@benches.command("train")
def bench_train(
    cluster: RaceCluster = False,
    rates: RaceRates = None,
    layouts: Layouts = None,
    models: RacedModels = None,
    reducers: RacedReducers = None,
    seeds: Seeds = None,
    density: RaceDensity = None,
    timeout: RaceTimeout = None,
    as_json: AsJson = False,
    quick: Quick = False,
) -> None:
    """Time steps of the training loop against bare ones, or race reducers against Horovod.

    Without --cluster also the way of a gradient into one vector and back. With it steps a second, and time to
    an accuracy, with every reducer and with Horovod's own all-reduce.
    """
    given = {name: value for name, value in locals().items() if value is not None}  # else as in RaceOptions
    if given.pop("cluster"):
        from benchmarks.race import bench as race

        raise typer.Exit(race(**given))
    from training.bench.train import bench

    if others := given.keys() - {"as_json", "quick"}:
        from benchmarks.race import refuse

        refuse(min(others))
    raise typer.Exit(bench(as_json, quick=quick))


# Of ``bench linear``: benchmarks/linear.py checks them.
LinearCluster = Annotated[
    bool, Option("--cluster", help="on 4 x 2 ranks of an emulated cluster (needs root)")
]
LinearSimulated = Annotated[
    bool, Option("--simulated", help="on as many simulated ranks, each with a core of its own")
]
LinearRate = Annotated[str | None, Option("--rate", help="rate of its links [1gbit]")]
LinearReducers = Annotated[
    list[str] | None, Option("--reducer", help="on ranks: a subject of the table; may be repeated [all]")
]


@benches.command("linear")
def bench_linear(
    shape: Annotated[str | None, Option(help="shape of the rows: url or webspam [url]")] = None,
    loss: Annotated[str | None, Option(help="logistic, hinge or squared_hinge [logistic]")] = None,
    solver: Annotated[str | None, Option(help="on ranks: sgd or coordinate [sgd]")] = None,
    reducers: LinearReducers = None,
    steps: Annotated[int | None, Option(help="on ranks: batches of a pass [10]")] = None,
    passes: Annotated[int | None, Option(help="passes over the rows [5]")] = None,
    batch_size: Annotated[int | None, Option(help="on ranks: rows of a rank in a step [1000]")] = None,
    simulated: LinearSimulated = False,
    cluster: LinearCluster = False,
    rate: LinearRate = None,
    timeout: Timeout = None,
    as_json: AsJson = False,
    quick: Quick = False,
) -> None:
    """Train linear models on sparse rows.

    On ranks of mpirun or an emulated cluster: gradients that stay sparse against dense ones. Alone: against
    scikit-learn's SGDClassifier and LIBLINEAR.
    """
    given = {name: value for name, value in locals().items() if value is not None}  # else as in LinearOptions
    from benchmarks.linear import bench

    raise typer.Exit(bench(**given))
