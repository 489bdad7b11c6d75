"""The command ``cloudtrain``."""

from typing import Annotated

import typer

from commlib.version import __version__

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
AsJson = Annotated[bool, typer.Option("--json", help="one JSON object a line instead of tables")]
Quick = Annotated[bool, typer.Option("--quick", help="smaller sizes: ends within a minute")]

benches = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
app.add_typer(benches, name="bench", help="Measure the parts beside what one would use instead.")


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
def train(config: ConfigPath, overrides: Overrides = None) -> None:
    """Train, as one rank of a job: alone, or started by horovodrun or mpirun."""
    from training.train import train as run

    run(config, overrides or [])


@app.command()
def launch(
    ranks: Annotated[int, typer.Option("-np", min=1, help="number of ranks")],
    config: ConfigPath,
    overrides: Overrides = None,
    hosts: Annotated[str | None, typer.Option("-H", help="host:slots,… (this machine without it)")] = None,
    network_interface: Annotated[
        str | None, typer.Option(help="which connects the hosts, such as eth0 (found out without it)")
    ] = None,
) -> None:
    """Start `cloudtrain train` on many ranks through horovodrun."""
    from training.launch import launch as run

    raise typer.Exit(run(ranks, config, overrides or [], hosts, network_interface))


@app.command()
def doctor() -> None:
    """Check what this machine has, and say how to mend what is missing."""
    from training.doctor import examine

    raise typer.Exit(examine())


@benches.command("selection")
def bench_selection(
    sizes: Annotated[list[int] | None, typer.Option("--size", help="entries; may be repeated")] = None,
    densities: Annotated[
        list[float] | None, typer.Option("--density", help="share to select; may be repeated")
    ] = None,
    as_json: AsJson = False,
    quick: Quick = False,
) -> None:
    """Time every selector.

    Beside torch.topk, np.partition, and a bare read of the vector, which none can beat.
    """
    from training.bench.selection import bench

    raise typer.Exit(bench(as_json, sizes=sizes or [], densities=densities or [], quick=quick))


@benches.command("reducers")
def bench_reducers(
    ranks: Annotated[int | None, typer.Option("-np", "--ranks", help="simulated ranks [8]")] = None,
    ranks_per_node: Annotated[int | None, typer.Option(help="[4]; real ranks: as their hosts say")] = None,
    size: Annotated[int | None, typer.Option(help="entries of the gradient [1000000]")] = None,
    density: Annotated[float, typer.Option(help="share to select")] = 0.01,
    reducers: Annotated[list[str] | None, typer.Option("--reducer", help="may be repeated [all]")] = None,
    steps: Annotated[int | None, typer.Option(help="to time, after two to warm up [5]")] = None,
    inter_gbit: Annotated[float, typer.Option(help="Gbit/s of a node's card")] = 25,
    inter_microseconds: Annotated[float, typer.Option(help="latency between nodes")] = 30,
    intra_gbit: Annotated[float, typer.Option(help="Gbit/s between two ranks of a node")] = 1200,
    intra_microseconds: Annotated[float, typer.Option(help="latency inside a node")] = 10,
    peers: Annotated[
        bool, typer.Option("--peers", help="beside plain NumPy transcriptions instead of beside dense")
    ] = False,
    as_json: AsJson = False,
    quick: Quick = False,
) -> None:
    """Measure every reducer.

    On simulated ranks, or on those that mpirun or horovodrun has started. Beside dense.
    """
    from training.bench.reducers import bench

    raise typer.Exit(
        bench(
            as_json,
            ranks=ranks,
            ranks_per_node=ranks_per_node,
            size=size,
            density=density,
            reducers=reducers or [],
            steps=steps,
            inter_gbit=inter_gbit,
            inter_microseconds=inter_microseconds,
            intra_gbit=intra_gbit,
            intra_microseconds=intra_microseconds,
            quick=quick,
            peers=peers,
        )
    )


def main() -> None:
    """Run the command line."""
    app()
