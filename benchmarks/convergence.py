"""Train models densely and sparsely, and compare where they end: docs/convergence.md.

    python -m benchmarks.convergence --run [NAME ...]  # what convergence.yaml has and no record is of
    python -m benchmarks.convergence                   # the tables and pictures of the page, from the records

Texts are those that cloudtrain data fetches. Ranks are threads of one process (see
benchmarks/simulated_ranks.py): the reducers are those of any run.
"""

import argparse
import json
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import yaml

from benchmarks.drawing.pages import markdown, rewrite
from benchmarks.drawing.style import PALETTE, docs_picture
from training.bench.record import machine
from training.config.reading import resolve
from training.tasks import TASKS, Metric

DENSE = "dense"
Records = Sequence[Mapping[str, Any]]
Places = Mapping[tuple[str, tuple[int, ...]], Records]  # the records of an experiment, by variant and layout


def metrics_of(experiment: Mapping[str, Any]) -> Mapping[str, Metric]:
    task = experiment["config"].get("task", "image_classification")
    return TASKS[task if isinstance(task, str) else task["name"]].metrics


def by_place(name: str, experiment: Mapping[str, Any], records: Records) -> Places:
    """Return the records of an experiment, in the order of the plan."""
    found: dict[tuple[str, tuple[int, ...]], list[Mapping[str, Any]]] = {
        (variant, tuple(runs["ranks"])): [] for runs in experiment["runs"] for variant in runs["variants"]
    }
    for record in records:
        case = case_of(record)
        if case.experiment == name:
            found[case.variant, case.layout].append(record)
    return {place: own for place, own in found.items() if own}


def ends_of(records: Records, experiment: Mapping[str, Any]) -> list[float]:
    return [record["epochs"][-1][experiment["metric"]] for record in records]


def megabytes_of(records: Records) -> float:
    """Return what the busiest rank sent to other nodes in a run, in MB: the mean over seeds."""
    return fmean(record["sent_bytes"] / 1e6 for record in records)


def table(found: Places, experiment: Mapping[str, Any]) -> str:
    """Return the table of an experiment: where each variant ends, and how far that is from dense."""
    metric, of_bytes = metrics_of(experiment)[experiment["metric"]], is_of_bytes(experiment)
    form = ".2%" if metric.share else ".4g"
    (dense,) = (fmean(ends_of(own, experiment)) for (variant, _), own in found.items() if variant == DENSE)
    lines = []
    for (variant, layout), own in found.items():
        values = ends_of(own, experiment)
        mean, between = fmean(values), f"{min(values):{form}} … {max(values):{form}}"
        against = f"{100 * (mean - dense):+.2f} points" if metric.share else f"{mean / dense - 1:+.1%}"
        shown = [str(len(values)), f"{mean:{form}}", between, "" if variant == DENSE else against]
        sent = [f"{megabytes_of(own):,.1f}"] if of_bytes else []
        lines.append([variant, " + ".join(map(str, layout)), *sent, *shown])
    header = ["reducer", "ranks", *(["MB sent"] if of_bytes else []), "seeds"]
    return markdown([*header, experiment["label"], "smallest … largest", "against dense"], lines)


def settings(experiment: Mapping[str, Any]) -> str:
    config = json.loads(json.dumps(experiment["config"]))  # what is shared would be written by reference
    text = yaml.safe_dump(config, sort_keys=False, default_flow_style=None, width=110)
    return f"```yaml\n{text}```\n"


def draw_curves(path: Path, found: Places, experiment: Mapping[str, Any]) -> None:
    """Draw the metric after each epoch, or the loss in training, of what is ``drawn``: means over seeds."""
    is_loss = experiment.get("curve") == "loss"
    layout = tuple(experiment["runs"][0]["ranks"])
    with docs_picture(path, 6.5, 3.0) as figure:
        axes = figure.subplots()
        for color, variant in zip(PALETTE, experiment["drawn"], strict=False):
            told = found.get((variant, layout), ())
            if told and is_loss:
                values = np.mean([each["losses"] for each in told], axis=0)
                steps = sum(epoch["steps"] for epoch in told[0]["epochs"]) / len(values)
                places = (np.arange(len(values)) + 0.5) * steps
                axes.plot(places, values, color=color, label=variant, linewidth=1.2)
            elif told:
                ends = [[epoch[experiment["metric"]] for epoch in each["epochs"]] for each in told]
                values = np.mean(ends, axis=0)
                places = np.arange(len(values)) + 1
                axes.plot(places, values, ".-", color=color, label=variant, linewidth=1.2, markersize=4)
        labels = ("step", "loss in training") if is_loss else ("epoch", experiment["label"])
        axes.set(xlabel=labels[0], ylabel=labels[1])
        axes.legend(fontsize=7)


def is_of_bytes(experiment: Mapping[str, Any]) -> bool:
    return experiment.get("curve") == "bytes"


def draw_bytes(path: Path, content: Mapping[str, Any], records: Records) -> None:
    """Draw where variants end over what they sent, a panel an experiment: the mean, smallest and largest."""
    found = {name: each for name, each in content["experiments"].items() if is_of_bytes(each)}
    with docs_picture(path, 9.5, 4.4) as figure:
        for axes, (name, experiment) in zip(figure.subplots(1, len(found)), found.items(), strict=True):
            colors = iter([*PALETTE, *MORE_COLORS])
            for (variant, _), own in by_place(name, experiment, records).items():
                values = ends_of(own, experiment)
                mean, sent = fmean(values), megabytes_of(own)
                reach = [[mean - min(values)], [max(values) - mean]]
                axes.errorbar(sent, mean, reach, fmt="o", ms=4, color=next(colors), label=variant)
            axes.set(xscale="log", xlabel="MB that a rank sent", ylabel=experiment["label"])
            axes.set_title(experiment["title"], fontsize=9)
            axes.legend(fontsize=6.5)


ROOT = Path(__file__).resolve().parent.parent
MORE_COLORS = ("#999999", "#8c564b", "#bcbd22", "#17becf", "#000000")
PLAN = ROOT / "benchmarks" / "convergence.yaml"
PAGE, PICTURES = ROOT / "docs" / "convergence.md", ROOT / "docs" / "convergence"
RECORDS = PICTURES / "records.jsonl"
LOSSES = 40  # of a run that are recorded, each the mean over as many steps


@dataclass(frozen=True)
class Case:
    """One run. ``layout``: ranks on each node; ``variant``: of the plan's table."""

    experiment: str
    layout: tuple[int, ...]
    variant: str
    seed: int


def plan(path: Path = PLAN) -> dict[str, Any]:
    return yaml.safe_load(path.read_text())


def cases(content: Mapping[str, Any], names: Sequence[str]) -> Iterator[Case]:
    """Yield all cases of experiments, by default of all, seed after seed: what is cut off lacks seeds."""
    found = [
        Case(name, tuple(runs["ranks"]), variant, seed)
        for name in names or content["experiments"]
        for experiment in [content["experiments"][name]]
        for runs in experiment["runs"]
        for variant in runs["variants"]
        for seed in runs.get("seeds", experiment["seeds"])
    ]
    yield from sorted(found, key=lambda case: case.seed)  # in the order of the plan otherwise


def configuration(content: Mapping[str, Any], case: Case, folder: str) -> dict[str, Any]:
    """Return what ``cloudtrain train`` would be given, for all ranks together; its run is in ``folder``."""
    config = dict(content["experiments"][case.experiment]["config"])
    optimizer = dict(config.get("optimizer", {}))
    variant = dict(content["variants"][case.variant])
    config |= variant.pop("config", {})
    optimizer |= variant.pop("optimizer", {})
    first, last = variant.pop("first_phase", {}), variant.pop("last_phase", {})
    phases = [phase | variant for phase in config["phases"]]
    phases[0] |= first
    phases[-1] |= last
    own = {"name": "convergence", "seed": case.seed, "output": folder, "log_every": 1}
    return resolve(config | own | {"optimizer": optimizer, "phases": phases})


def recorded(records: Path = RECORDS) -> list[dict[str, Any]]:
    return [json.loads(line) for line in records.read_text().splitlines()] if records.exists() else []


def write_records(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(each) + "\n" for each in records))


def case_of(record: Mapping[str, Any]) -> Case:
    of = record["case"]
    return Case(of["experiment"], tuple(of["layout"]), of["variant"], of["seed"])


def trained(case: Case) -> dict[str, Any]:
    """Train a case, and return its record; in a process of its own."""
    content = plan()
    run, lines = train(content, case)
    losses = np.array([line["loss"] for line in lines if line["kind"] == "step"], np.float64)
    parts = np.array_split(losses, min(LOSSES, len(losses)))
    keys = ("epoch", "steps", "loss", *metrics_of(content["experiments"][case.experiment]))
    return {
        "bench": "convergence",
        "case": asdict(case),
        "epochs": [{key: line[key] for key in keys} for line in lines if line["kind"] == "epoch"],
        # Of a part without a finite loss, ``None``.
        "losses": [None if np.isnan(part).all() else float(np.nanmean(part)) for part in parts],
        "sent_bytes": max(totals.sent.inter for totals in run.totals),
        "skipped_steps": sum(phase.skipped_steps for phase in run.summary.phases),
        "machine": machine(),
        "command": f"python -m benchmarks.convergence --run {case.experiment}",
    }


def train(content: Mapping[str, Any], case: Case) -> tuple[Any, list[dict[str, Any]]]:
    """Train a case; return what :func:`benchmarks.simulated_ranks.train` does, and the run's metrics."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    from training.process.tf_logging import import_tensorflow

    import_tensorflow()
    import keras

    from benchmarks import simulated_ranks
    from training.config.config import Config

    keras.utils.clear_session()
    with tempfile.TemporaryDirectory(prefix="cloudtrain-convergence-") as folder:
        config = Config.model_validate(configuration(content, case, folder)).resolved()
        log = Path(folder) / "log"
        with log.open("w") as file, redirect_stdout(file), redirect_stderr(file):
            run = simulated_ranks.train(config, case.layout)
        (own,) = (path for path in Path(folder).iterdir() if path.is_dir())
        lines = [json.loads(line) for line in (own / "metrics.jsonl").read_text().splitlines()]
    return run, lines


def train_missing(
    planned: Iterable[Case], trained: Callable[[Case], dict[str, Any]], records: Path
) -> Iterator[dict[str, Any]]:
    """Yield the new records of what is not recorded yet, a run a core."""
    done = {case_of(record) for record in recorded(records)}
    missing = [case for case in planned if case not in done]
    os.environ |= {"OMP_NUM_THREADS": "1", "TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "1"}
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = [pool.submit(trained, case) for case in missing]
        try:
            for future in as_completed(futures):
                with records.open("a") as file:
                    file.write(json.dumps(future.result()) + "\n")
                yield future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def blocks() -> dict[str, str]:
    found, records = {}, recorded()
    for name, experiment in plan()["experiments"].items():
        if own := by_place(name, experiment, records):
            found |= {f"{name}, settings": settings(experiment), name: table(own, experiment)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--run", nargs="*", metavar="NAME", help="train these experiments; all by default")
    arguments = parser.parse_args()
    content, records = plan(), recorded()
    if arguments.run is not None:
        for record in train_missing(cases(content, arguments.run), trained, RECORDS):
            print(f"{case_of(record)}: {record['epochs'][-1]}", flush=True)
        return
    rewrite(PAGE, blocks())
    for name, experiment in content["experiments"].items():
        if not is_of_bytes(experiment) and (own := by_place(name, experiment, records)):
            draw_curves(PICTURES / f"{name}.svg", own, experiment)
    draw_bytes(PICTURES / "equal_bytes.svg", content, records)


if __name__ == "__main__":
    main()
