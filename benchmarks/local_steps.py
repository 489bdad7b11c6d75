"""Train with local steps and without, and time them on slow links: docs/local_steps.md.

    python -m benchmarks.local_steps --run            # what local_steps.yaml has and no record is of
    python -m benchmarks.local_steps --time [CELL …]  # on emulated clusters, such as 50mbit,4x1; as root
    python -m benchmarks.local_steps                  # the tables and pictures of the page, from the records

The text is that of `scripts/get_data.sh brown`. Ranks that train are threads of one process, as in
benchmarks/convergence.py; those that are timed are processes.
"""

import argparse
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks import convergence
from benchmarks.convergence import Case
from benchmarks.drawing import local_steps as local_step_times
from benchmarks.drawing.local_steps import Runs, draw_against_h
from benchmarks.drawing.pages import rewrite
from benchmarks.jobs import Layout, cluster_until_end, environment, module
from benchmarks.race_plan import HOROVOD_RING, RING
from training.bench.record import Seconds
from training.callbacks.callback import Callback, Event

if TYPE_CHECKING:
    from training.results import Step
    from training.run.trainer import Trainer

ROOT = Path(__file__).resolve().parent.parent
PLAN = ROOT / "benchmarks" / "local_steps.yaml"
PAGE, FOLDER = ROOT / "docs" / "local_steps.md", ROOT / "docs" / "local_steps"
RECORDS, TIMES = FOLDER / "records.jsonl", FOLDER / "times.jsonl"
EXPERIMENT = "brown"
NEVER = 10**9
TURNS = {"turns": 3, "warm_up": 1, "counted": 3}  # steps at least, whole rounds
TIMEOUT_SECONDS = 600.0

# ------------------------------------------------------------------------------------------- training


@dataclass(frozen=True)
class RoundTested(Event):
    """The loss of the weights that all ranks have after a round, on the first tokens of the test part."""

    kind = "round_tested"
    steps: int
    loss: float


class LossAfterRounds(Callback):
    """Tests on ``batches`` batches after each round in which ``every`` steps are reached again."""

    def __init__(self, every: int, batches: int) -> None:
        self._every, self._batches = every, batches

    def on_step_end(self, run: "Trainer", step: "Step") -> None:
        """Test, if it is time to."""
        from training.run.build import evaluate

        steps = run.position.steps
        if step.hyperparameters.passes(steps, self._every):
            tested = evaluate(run.parts, islice(run.phase.data.test_batches(), self._batches))
            run.report(RoundTested(steps, float(np.log(tested.values["perplexity"]))))


def plan() -> dict[str, Any]:
    """Return the file of what is trained, with the variants of each method."""
    content = convergence.plan(PLAN)
    for name, phase in content["methods"].items():
        for steps in content["local_steps"]:
            content["variants"][f"{name}, H = {steps}"] = phase | {"local_steps": steps}
    return content


def trained(case: Case) -> dict[str, Any]:
    """Train a case, and return its record; in a process of its own."""
    run, lines = convergence.train(plan(), case)
    (last,) = (line for line in lines if line["kind"] == "epoch" and "perplexity" in line)
    return {
        "bench": "local steps",
        "case": asdict(case),
        "steps": sum(line["steps"] for line in lines if line["kind"] == "epoch"),
        "loss": float(np.log(last["perplexity"])),
        "tested": [[line["steps"], line["loss"]] for line in lines if line["kind"] == RoundTested.kind],
        "weights": run.weights,
        "ranks": [asdict(each) for each in run.totals],
        "skipped_steps": sum(phase.skipped_steps for phase in run.summary.phases),
        **convergence.made_by("python -m benchmarks.local_steps --run"),
    }


# ------------------------------------------------------------------------------------------- timing


def cells(content: Mapping[str, Any]) -> list[str]:
    """Return the names of the clusters, the most telling first."""
    times = content["times"]
    return [f"{rate},{layout}" for layout, rate in product(times["layouts"], times["rates"])]


def subjects(content: Mapping[str, Any], layout: Layout) -> list[dict[str, Any]]:
    """Return whose steps are timed, as a job of the race has them."""
    times, found = content["times"], []
    for name in [*times["dense"], times["beside"], *times["subjects"]]:
        variant = content["variants"].get(name) or {"reducer": "torus2d" if name == "torus2d" else "dense"}
        if name != "torus2d" or layout.ranks_per_node > 1:  # on single ranks it is dense
            is_horovod = name == HOROVOD_RING
            config = {"overlap": False, **({"clip_norm": None} if is_horovod else {})}  # it cannot clip
            told = {"name": name, "horovod": is_horovod, "config": config}
            found.append(told | {"phase": phase_of(content, layout) | variant})
    return found


def phase_of(content: Mapping[str, Any], layout: Layout) -> dict[str, Any]:
    """Return the phase of one rank, of which there are as many as in ``layout``."""
    (phase,) = content["experiments"][EXPERIMENT]["config"]["phases"]
    own = {"steps": NEVER, "batch_size": phase["batch_size"] // layout.ranks}
    return phase | own | {"learning_rate": 0.001}  # a schedule would begin at 0: differences of nothing


def job_of(content: Mapping[str, Any], layout: Layout) -> dict[str, Any]:
    """Return what benchmarks.race_job is told."""
    case = Case(EXPERIMENT, (), "dense", 1)
    config = convergence.configuration(content, case, tempfile.gettempdir())
    config |= {"callbacks": [], "phases": [phase_of(content, layout) | {"reducer": "dense"}]}
    return {"config": config, "steps": subjects(content, layout), "turns": TURNS, "runs": []}


def time_cells(names: Sequence[str]) -> None:
    """Time steps on clusters, and record them."""
    content = plan()
    with cluster_until_end() as cluster, tempfile.TemporaryDirectory(prefix="cloudtrain-times-") as folder:
        for name in names or cells(content):
            rate, layout = name.split(",")[0], Layout.of(name.split(",")[1])
            file = Path(folder) / "job.json"
            file.write_text(json.dumps(job_of(content, layout)))
            cluster.up(layout.nodes, rate)
            # All nodes are on this machine, whose cores their ranks share.
            threads = {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "1"}
            words, variables = module("benchmarks.race_job", str(file)), environment(RING) | threads
            with TIMES.open("a") as records:
                for told in cluster.records(layout, words, variables, TIMEOUT_SECONDS, f"{name}: steps"):
                    records.write(json.dumps(time_record(name, told)) + "\n")


def time_record(name: str, told: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record of a subject on a cluster; seconds: of a step, in rounds on average.

    Bytes and stages are those of an exchange.
    """
    rate, layout = name.split(",")
    shown = ("bytes", "card_bytes", "stages", "reducer", "weights", "nodes", "machine", "settings")
    return {
        "bench": "local steps, times",
        "case": {"rate": rate, "layout": layout, "variant": told["subject"]},
        "seconds": asdict(Seconds.of(told["seconds"])),
        **{key: told[key] for key in shown},
        "command": "python -m benchmarks.local_steps --time",
    }


# ------------------------------------------------------------------------------------------- the page


def blocks(content: Mapping[str, Any]) -> dict[str, str]:
    """Return what the page has from the plan and the records, by the names of its marks."""
    runs = Runs.of(content, convergence.recorded(RECORDS), EXPERIMENT)
    found = {
        "settings": convergence.settings(content["experiments"][EXPERIMENT]),
        "loss against H": runs.against_h(),
        "loss against bytes": runs.against_bytes(),
        "equal bytes": runs.at_equal_bytes(),
    }
    if times := convergence.recorded(TIMES):
        found["times"] = local_step_times.page(runs, times)
    return found


def draw() -> None:
    """Write the tables and the picture of the page."""
    content = plan()
    rewrite(PAGE, blocks(content))
    runs = Runs.of(content, convergence.recorded(RECORDS), EXPERIMENT)
    draw_against_h(FOLDER / "loss-against-h.svg", runs)


def main() -> None:
    """Run, time, or draw."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--run", action="store_true", help="train what is not recorded yet")
    parser.add_argument("--time", nargs="*", metavar="CELL", help="time steps on clusters; all by default")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="runs at a time")
    arguments = parser.parse_args()
    FOLDER.mkdir(exist_ok=True)
    if arguments.run:
        planned = convergence.cases(plan(), [])
        for record in convergence.train_missing(planned, trained, RECORDS, arguments.jobs):
            print(f"{convergence.case_of(record)}: {record['loss']:.3f}", flush=True)
    elif arguments.time is not None:
        time_cells(arguments.time)
    else:
        draw()


if __name__ == "__main__":
    main()
