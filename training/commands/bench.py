"""The commands ``cloudtrain bench``; each benchmark is imported only when it is called.

Races against Horovod, emulated clusters and GPU kernels are measured from a clone: see ``benchmarks/``.
"""

from typing import Annotated

import typer
from typer import Argument, Option

from training.commands.help import Group

benches = typer.Typer(cls=Group, no_args_is_help=True, rich_markup_mode=None)

AsJson = Annotated[bool, Option("--json", help="one JSON object a line instead of tables")]
Quick = Annotated[bool, Option("--quick", help="smaller sizes: ends within a minute")]


@benches.command("selection")
def bench_selection(
    sizes: Annotated[list[int] | None, Option("--size", help="entries; may be repeated")] = None,
    densities: Annotated[list[float] | None, Option("--density", help="share; may be repeated")] = None,
    as_json: AsJson = False,
    quick: Quick = False,
) -> None:
    """Time selectors on this machine's processor.

    Against torch.topk, np.partition, and a plain read of the vector, which is the lower bound.
    """
    from training.bench.selection import bench

    raise typer.Exit(bench(as_json, sizes=sizes or [], densities=densities or [], quick=quick))


@benches.command("reducers")
def bench_reducers(
    ranks: Annotated[int | None, Option("-np", "--ranks", help="simulated ranks; 8 by default")] = None,
    ranks_per_node: Annotated[
        int | None, Option(help="ranks of a node; by default 4, real ranks by host name")
    ] = None,
    size: Annotated[int | None, Option(help="entries of the gradient; 1000000 by default")] = None,
    density: Annotated[float, Option(help="share that sparse reducers select")] = 0.01,
    reducers: Annotated[
        list[str] | None, Option("--reducer", help="reducer to measure, may be repeated; all by default")
    ] = None,
    wires: Annotated[
        list[str] | None, Option("--wire", help="codec, may be repeated; fp32 by default")
    ] = None,
    steps: Annotated[int | None, Option(help="steps to time after two warm-up steps; 5 by default")] = None,
    inter_gbit: Annotated[float, Option(help="Gbit/s of a node's card")] = 25,
    inter_microseconds: Annotated[float, Option(help="latency between nodes")] = 30,
    intra_gbit: Annotated[float, Option(help="Gbit/s between two ranks of a node")] = 1200,
    intra_microseconds: Annotated[float, Option(help="latency inside a node")] = 10,
    as_json: AsJson = False,
    quick: Quick = False,
) -> None:
    """Measure reducers against dense: seconds, bytes and entries of a step.

    On the ranks that mpirun or horovodrun has started; else on simulated ranks with the links given.
    """
    given = {name: value for name, value in locals().items() if value is not None}  # else as in Plan
    from training.bench.reducers import bench

    raise typer.Exit(bench(**given))


@benches.command("cache")
def bench_cache(
    source: Annotated[str, Argument(help="folder of pictures, with a folder for each class, or its URL")],
    as_json: AsJson = False,
    quick: Quick = False,
) -> None:
    """Time batches from the levels of the cache, against reading them from storage each time.

    Caches are in temporary folders, on the disk and in /dev/shm, and are removed at the end.
    """
    from training.bench.cache import bench

    raise typer.Exit(bench(as_json, source=source, quick=quick))


@benches.command("train")
def bench_train(
    config: Annotated[str | None, Argument(help="file or shipped name [a ResNet-20]")] = None,
    overrides: Annotated[
        list[str] | None, Argument(metavar="KEY=VALUE", help="override the file, as of cloudtrain train")
    ] = None,
    reducers: Annotated[
        list[str] | None,
        Option("--reducer", help="reducer to time, may be repeated; dense, hitopk, oktopk by default"),
    ] = None,
    as_json: AsJson = False,
    quick: Quick = False,
) -> None:
    """Time whole training steps of the first phase of a configuration with each reducer.

    On the ranks that mpirun or horovodrun has started, else on one.
    """
    from training.bench.train import bench

    words, names = overrides or [], reducers or []
    raise typer.Exit(bench(as_json, config=config, overrides=words, reducers=names, quick=quick))
