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


def main() -> None:
    """Run the command line."""
    app()
