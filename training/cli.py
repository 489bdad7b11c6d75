"""The command ``cloudtrain``."""

from typing import Annotated

import typer

from commlib.version import __version__
from training.memory import keep_freed_memory

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Train with TensorFlow and Horovod on clusters that are fast inside a node and slow between nodes.",
)

ConfigPath = Annotated[str, typer.Argument(metavar="CONFIG", help="a YAML file, such as configs/digits.yaml")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="put on top of the file: density=0.05")
]
Hosts = Annotated[str | None, typer.Option("-H", help="host:slots,… (this machine without it)")]
Interface = Annotated[
    str | None, typer.Option(help="which connects the hosts, such as eth0 (found out without it)")
]
AsJson = Annotated[bool, typer.Option("--json", help="one JSON object a line instead of tables")]
Quick = Annotated[bool, typer.Option("--quick", help="smaller sizes: ends within a minute")]

benches = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
app.add_typer(benches, name="bench", help="Measure the parts beside what one would use instead.")


caches = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
app.add_typer(caches, name="cache", help="Fill, list, verify, repair and empty the samples that nodes keep.")
CachedConfig = Annotated[
    str | None, typer.Argument(metavar="[CONFIG]", help="whose folders (those of cache: auto without it)")
]


DryRun = Annotated[
    bool,
    typer.Option("--dry-run", help="build everything, and take one step of each phase on generated data"),
]


@benches.callback()
def _prepare() -> None:
    keep_freed_memory()


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"cloudtrain {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True)] = False,
) -> None:
    pass


@app.command()
def train(config: ConfigPath, overrides: Overrides = None, dry_run: DryRun = False) -> None:
    """Train, as one rank of a job: alone, or started by horovodrun or mpirun."""
    from training.train import train as run

    run(config, overrides or [], dry_run=dry_run)


@app.command()
def launch(
    ranks: Annotated[int, typer.Option("-np", min=1, help="number of ranks")],
    config: ConfigPath,
    overrides: Overrides = None,
    hosts: Hosts = None,
    network_interface: Interface = None,
    dry_run: DryRun = False,
) -> None:
    """Start `cloudtrain train` on many ranks through horovodrun."""
    from training.config import load_with_warnings
    from training.dry_run import generated
    from training.launch import Ranks
    from training.launch import launch as run

    words, change = overrides or [], generated if dry_run else dict
    there, flags = Ranks(ranks, hosts, network_interface), ["--dry-run"] if dry_run else []
    command = ["train", config, *words, *flags]
    raise typer.Exit(run(there, command, check=lambda: load_with_warnings(config, words, change)))


@app.command()
def tune(
    config: Annotated[
        str | None, typer.Argument(metavar="[CONFIG]", help="for whose phases to pick (examples without it)")
    ] = None,
    overrides: Overrides = None,
    ranks: Annotated[
        int | None, typer.Option("-np", min=1, help="start so many ranks through horovodrun")
    ] = None,
    hosts: Hosts = None,
    network_interface: Interface = None,
    ranks_per_node: Annotated[
        str | None, typer.Option(help="emulates nodes: ranks on each, or 3,1 (as their hosts say without it)")
    ] = None,
    profile: Annotated[
        str | None, typer.Option(metavar="PATH", help="to write [~/.cache/cloudtrain/profile-….json]")
    ] = None,
) -> None:
    """Measure links and kernels of a job's ranks, for `reducer: auto`.

    As one rank of a job, as `train` does; or, with -np, start the job, as `launch` does.
    """
    from training.job import refuse
    from training.launch import Ranks, launch
    from training.tune import Request
    from training.tune import tune as run

    request = Request(config, overrides or [], ranks_per_node, profile)
    if ranks is not None:
        there = Ranks(ranks, hosts, network_interface)
        raise typer.Exit(launch(there, request.words(), check=request.resolve))
    for option, value in (("-H", hosts), ("--network-interface", network_interface)):
        if value is not None:
            refuse(f"{option}: expected only with -np, got {value}")
    run(request)


@app.command()
def doctor() -> None:
    """Check what this machine has, and say how to mend what is missing."""
    from training.doctor import examine

    raise typer.Exit(examine())


@caches.command("build")
def cache_build(config: ConfigPath, overrides: Overrides = None) -> None:
    """Read all samples of a configuration before training, as one rank of a job or alone."""
    from training.cache import build

    build(config, overrides or [])


@caches.command("info")
def cache_info(config: CachedConfig = None, overrides: Overrides = None) -> None:
    """List what is kept here."""
    from training.cache import info

    info(config, overrides or [])


@caches.command("verify")
def cache_verify(config: CachedConfig = None, overrides: Overrides = None) -> None:
    """Look at every checksum; the exit status is 1 if something is damaged."""
    from training.cache import verify

    raise typer.Exit(verify(config, overrides or []))


@caches.command("repair")
def cache_repair(config: ConfigPath, overrides: Overrides = None) -> None:
    """Read what is damaged anew from central storage."""
    from training.cache import repair

    repair(config, overrides or [])


@caches.command("gc")
def cache_gc(config: CachedConfig = None, overrides: Overrides = None) -> None:
    """Remove what no living job uses: all of memory, and what is unfinished or unusable on disk."""
    from training.cache import remove

    remove(config, overrides or [], of_everything=False)


@caches.command("clear")
def cache_clear(config: CachedConfig = None, overrides: Overrides = None) -> None:
    """Remove all that no living job uses."""
    from training.cache import remove

    remove(config, overrides or [], of_everything=True)


@benches.command("selection")
def bench_selection(
    sizes: Annotated[list[int] | None, typer.Option("--size", help="entries; may be repeated")] = None,
    densities: Annotated[
        list[float] | None, typer.Option("--density", help="share to select; may be repeated")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or gpu")] = "cpu",
    as_json: AsJson = False,
    quick: Quick = False,
) -> None:
    """Time every selector.

    Beside torch.topk, np.partition, and a bare read of the vector, which none can beat. On a GPU beside
    torch.topk, cupy.argpartition, jax.lax.approx_max_k, the paper's thirty passes, and a copy.
    """
    if device == "gpu":
        from training.bench.gpu import bench
    elif device == "cpu":
        from training.bench.selection import bench
    else:
        raise typer.BadParameter(f"expected cpu or gpu, got {device}", param_hint="--device")

    raise typer.Exit(bench(as_json, sizes=sizes or [], densities=densities or [], quick=quick))


@benches.command("reducers")
def bench_reducers(
    ranks: Annotated[int | None, typer.Option("-np", "--ranks", help="simulated ranks [8]")] = None,
    ranks_per_node: Annotated[
        int | None, typer.Option(help="[4]; real ranks: as their hosts say; --cluster: [2]")
    ] = None,
    sizes: Annotated[
        list[int] | None, typer.Option("--size", help="entries; --cluster: may be repeated [1000000]")
    ] = None,
    densities: Annotated[
        list[float] | None, typer.Option("--density", help="to select; --cluster: may be repeated [0.01]")
    ] = None,
    reducers: Annotated[list[str] | None, typer.Option("--reducer", help="may be repeated [all]")] = None,
    wires: Annotated[
        list[str] | None, typer.Option("--wire", help="codec of sparse reducers; may be repeated [fp32]")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="to time, after two to warm up [5; 20]")] = None,
    inter_gbit: Annotated[float, typer.Option(help="Gbit/s of a node's card")] = 25,
    inter_microseconds: Annotated[float, typer.Option(help="latency between nodes")] = 30,
    intra_gbit: Annotated[float, typer.Option(help="Gbit/s between two ranks of a node")] = 1200,
    intra_microseconds: Annotated[float, typer.Option(help="latency inside a node")] = 10,
    peers: Annotated[
        bool, typer.Option("--peers", help="beside plain NumPy transcriptions instead of beside dense")
    ] = False,
    allreduce: Annotated[
        bool, typer.Option("--allreduce", help="beside MPI's and Horovod's all-reduce, on real ranks")
    ] = False,
    horovod: Annotated[
        bool, typer.Option("--horovod/--no-horovod", help="with --allreduce: start TensorFlow and Horovod")
    ] = True,
    cluster: Annotated[
        bool, typer.Option("--cluster", help="--allreduce on the nodes of scripts/cluster.py (needs root)")
    ] = False,
    nodes: Annotated[int | None, typer.Option(help="of the cluster [4]")] = None,
    rates: Annotated[
        list[str] | None, typer.Option("--rate", help="of its links; may be repeated [1gbit, 10gbit]")
    ] = None,
    algorithm: Annotated[
        str | None, typer.Option(help="of MPI's all-reduce on it: default, ring, … [the best, probed]")
    ] = None,
    timeout: Annotated[float | None, typer.Option(help="seconds that a job on it may take [3600]")] = None,
    as_json: AsJson = False,
    quick: Quick = False,
) -> None:
    """Measure every reducer.

    On simulated ranks, on those that mpirun or horovodrun has started, or on an emulated cluster. Beside
    dense.
    """
    if cluster:
        from training.bench.cluster import bench
    else:
        from training.bench.reducers import bench

    raise typer.Exit(
        bench(
            as_json,
            ranks=ranks,
            ranks_per_node=ranks_per_node,
            sizes=sizes or (),
            densities=densities or (),
            reducers=reducers or (),
            wires=wires or (),
            steps=steps,
            inter_gbit=inter_gbit,
            inter_microseconds=inter_microseconds,
            intra_gbit=intra_gbit,
            intra_microseconds=intra_microseconds,
            quick=quick,
            peers=peers,
            allreduce=allreduce,
            horovod=horovod,
            cluster=cluster,
            nodes=nodes,
            rates=rates or (),
            algorithm=algorithm,
            timeout=timeout,
        )
    )


@benches.command("cache")
def bench_cache(
    samples: Annotated[int | None, typer.Option(min=300, help="pictures to generate [10000]")] = None,
    as_json: AsJson = False,
    quick: Quick = False,
) -> None:
    """Time batches from the levels of the cache.

    Beside emulated central storage and beside tf.data, of generated pictures in the shape of ImageNet's.
    """
    from training.bench.cache import bench

    raise typer.Exit(bench(as_json, samples=samples, quick=quick))


@benches.command("pto")
def bench_pto(
    ranks: Annotated[
        list[int] | None, typer.Option("-np", "--ranks", help="to start; may be repeated [2, 4]")
    ] = None,
    networks: Annotated[
        list[str] | None, typer.Option("--network", help="whose shapes; may be repeated [all]")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="to time, after two to warm up [21]")] = None,
    as_json: AsJson = False,
    quick: Quick = False,
) -> None:
    """Time norms in parts, and steps of LARS with them.

    On real ranks of this machine, which it starts, or on those of mpirun. Beside all norms on every rank.
    """
    from training.bench.pto import bench

    raise typer.Exit(bench(as_json, ranks=ranks or (), networks=networks or (), steps=steps, quick=quick))


@benches.command("train")
def bench_train(
    as_json: AsJson = False,
    quick: Quick = False,
) -> None:
    """Time steps of the training loop beside bare ones.

    And the way of a gradient into one vector and back.
    """
    from training.bench.train import bench

    raise typer.Exit(bench(as_json, quick=quick))


def main() -> None:
    """Run the command line."""
    app()
