"""Whole training steps with each reducer and with Horovod's own all-reduce, and runs to an accuracy.

    python -m benchmarks.race --model mlp --rate 0.2gbit    # as root

On emulated clusters. A job measures all subjects of one algorithm of MPI's all-reduce, turn after turn:
Horovod as it comes and all of ours in one, Horovod over MPI's ring in the other. The two alternate. Before
each of the former the cluster is measured by ``cloudtrain tune``, and steps are planned.
"""

import os
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, product
from statistics import fmean, median, median_high
from typing import Annotated, Any

import typer
from typer import Option

from benchmarks.drawing.pages import percent
from benchmarks.jobs import (
    DEFAULT,
    EmulatedCluster,
    Failed,
    cluster_until_end,
    environment,
    module,
    objects_in,
    output,
    pass_on,
    ratio,
    world,
)
from benchmarks.race_plan import AUTO, DENSITY, OFF, RACED, Cell, Subject, cells, subjects
from commlib.topology import LinkBytes
from training.bench.record import Record, Seconds
from training.commands.printing import NOTHING, Table, milliseconds, times
from training.process.job import usage_error
from training.process.launch import cloudtrain

TURNS = {"turns": 2, "warm_up": 2, "counted": 6}  # of a subject in a job, and the steps of each
TIMEOUT_SECONDS = 7200.0  # of a job
Words = list[str] | None  # of an option that may be repeated
A_STEP, TO_ACCURACY = "seconds a step", "seconds to the accuracy"
Result = dict[str, Any]  # of a subject in one job: see race_job.py
Told = dict[Subject, list[Result]]  # what the jobs told of each subject


def measured(places: Sequence[Cell], raced: Sequence[Subject]) -> Generator[Record, None, None]:
    """Yield the records; however this ends, the cluster is gone."""
    with cluster_until_end() as cluster:
        for cell in places:
            cluster.up(cell.layout.nodes, cell.rate)
            yield from CellRace(cell, raced, cluster).records()


@dataclass(frozen=True)
class CellRace:
    """The jobs of a cell on a cluster that is up. ``plans``: each subject's step, as planned before a job."""

    cell: Cell
    subjects: Sequence[Subject]
    cluster: EmulatedCluster
    plans: list[dict[str, float]] = field(default_factory=list, init=False)

    def records(self) -> Iterator[Record]:
        """Yield the records, those of steps first, also where a job fails or is interrupted."""
        results, failure = list[Result](), None
        try:
            algorithms = dict.fromkeys(subject.algorithm for subject in self.subjects)
            for number, algorithm in product(range(self.cell.jobs), algorithms):
                if algorithm == DEFAULT:  # of all subjects that can be planned
                    self._tune(number)
                    self.plans.append(dict(self._planned(number)))
                for result in self._job(number, algorithm):
                    results.append(result)
        except (Failed, KeyboardInterrupt, SystemExit) as error:
            failure = error
        for part, records_of in (("steps", self._of_steps), ("run", self._of_runs)):
            of_part = [result for result in results if result["part"] == part]
            told = {
                subject: [result for result in of_part if result["subject"] == subject.name]
                for subject in self.subjects
            }
            yield from records_of({subject: own for subject, own in told.items() if own})
        if failure is not None:
            raise failure

    def _job(self, number: int, algorithm: str) -> Iterator[Result]:
        """Run a job, of which each seed has one of each algorithm, and yield what it tells."""
        cell = self.cell
        own = [subject for subject in self.subjects if subject.algorithm == algorithm]
        raced = [each for each in own if each.accuracy and (each.phases == 1 or cell.model.switch)]
        running = raced if number < cell.seeds else []
        first = number * len(running) // max(1, cell.seeds)  # each seed begins with another one
        running = [*running[first:], *running[:first]]
        job: Result = {
            "config": cell.config(number + 1),
            "steps": [
                self._told(each, number) | {"phase": cell.stepping(each)} for each in own if each.steps
            ],
            "turns": TURNS,
            "runs": [self._told(each, number, **cell.running(each)) for each in running],
        }
        runs = f", {len(running)} runs with seed {number + 1}" if running else ""
        what = f"job {number + 1} of {cell.jobs}, all-reduce of MPI: {algorithm}"
        words = module("benchmarks.race_job", self.cluster.write("job.json", job))
        yield from self._told_by(words, algorithm, f"{what}: steps of {len(job['steps'])} subjects{runs}")

    def _told(self, subject: Subject, number: int, **config: Any) -> Result:
        """Return what a job has to know of a subject; ``config``: more of its configuration."""
        config |= {"overlap": subject.overlap and not subject.horovod}
        if subject.reducer == AUTO:
            config["profile"] = self._profile(number)
        return {"name": subject.name, "horovod": subject.horovod, "config": config}

    def _profile(self, number: int) -> str:
        """Return the path of the profile that is measured before a job."""
        return str(self.cluster.folder / f"profile-{number}.json")

    def _tune(self, number: int) -> None:
        """Measure the links, and reducers on the model's gradient, as one does before ``reducer: auto``."""
        auto = Subject(AUTO, AUTO)
        config = self.cell.config() | {"phases": [self.cell.stepping(auto)]}
        path = self.cluster.write("tune.yaml", config)
        words = cloudtrain("tune", "--profile", self._profile(number), path)
        list(self._told_by(words, auto.algorithm, "cloudtrain tune"))

    def _planned(self, number: int) -> Iterator[tuple[str, float]]:
        """Yield each subject's step by ``cloudtrain plan``, which knows nothing of Horovod."""
        for subject in self.subjects:
            if subject.steps and not subject.horovod:
                told = self._told(subject, number, profile=self._profile(number))["config"]
                config = self.cell.config() | told | {"phases": [self.cell.stepping(subject)]}
                words = cloudtrain("plan", self.cluster.write("plan.yaml", config), "--json")
                (plan,) = objects_in(output(words, os.environ))
                yield subject.name, plan["phases"][0]["step"]

    def _told_by(self, words: Sequence[str], algorithm: str, what: str) -> Iterator[Result]:
        cell, layout = self.cell, self.cell.layout
        # All nodes are on this machine, whose cores their ranks share; none of them can know.
        threads = max(1, len(os.sched_getaffinity(0)) // layout.ranks)
        # A bucket is submitted by an operation of TensorFlow's: with one thread, when all others are through.
        sharing = {"TF_NUM_INTRAOP_THREADS": str(threads), "TF_NUM_INTEROP_THREADS": str(max(2, threads))}
        variables = environment(algorithm) | sharing
        where = f"{cell.model.name}, {cell.rate}, {layout}: {what}"
        yield from self.cluster.objects(layout, words, variables, TIMEOUT_SECONDS, where)

    def _of_steps(self, told: Told) -> Iterator[Record]:
        """Yield the records of steps, beside the fastest that exchanges all gradients in full."""
        seconds = {
            subject: Seconds.of([turn for each in results for turn in each["seconds"]])
            for subject, results in told.items()
        }
        peers = {subject: own for subject, own in seconds.items() if not subject.is_sparse}
        fastest = min((own.median for own in seconds.values()), default=0.0)
        for subject, results in told.items():
            last = results[-1]
            shares = [each["hidden_share"] for each in results]
            more = {
                "steps_a_second": 1 / seconds[subject].median,
                "overlap": last["overlaps"],
                "buckets": last["buckets"],
                "hidden_share": None if None in shares else fmean(shares),
                "stages": last["stages"]
                and {name: median(each["stages"][name] for each in results) for name in last["stages"]},
                "card_bytes": median(each["card_bytes"] for each in results),
                "reducer": last["reducer"],
                "baselines": {peer.name: own.median for peer, own in peers.items()},
                "of_best": fastest / seconds[subject].median,
                "planned_seconds": None
                if subject.horovod
                else median(plan[subject.name] for plan in self.plans),
            }
            yield self._line(subject, last, A_STEP, seconds[subject], peers, more)

    def _of_runs(self, told: Told) -> Iterator[Record]:
        """Yield the records of runs, beside the dense one that is the first at the accuracy."""
        if not told:
            return
        target = self.cell.model.target
        seconds, reached = dict[Subject, Seconds](), dict[Subject, int]()
        for subject, results in told.items():
            curves = [each["curve"] for each in results]
            ends = [next((at for at, accuracy in own if accuracy >= target), None) for own in curves]
            reached[subject] = len(ends) - ends.count(None)
            last = [own[-1][0] for own in curves]
            seconds[subject] = Seconds.of(
                [end if at is None else at for at, end in zip(ends, last, strict=True)]
            )
        arrived = [subject for subject, results in told.items() if reached[subject] == len(results)]
        peers = {each: seconds[each] for each in arrived if not each.is_sparse}
        for subject, results in told.items():
            sent = [each["sent_inter_bytes"] for each in results]
            more = {
                "target": target,
                "seeds": len(results),
                "reached": reached[subject],
                "overlap": results[-1]["overlaps"],
                "final_accuracy": [each["curve"][-1][1] for each in results],
                "curves": [each["curve"] for each in results],
                "steps": [each["steps"] for each in results],
                "sent_bytes_of_run": None if subject.horovod else median(sent),
                "reducers": results[-1]["reducers"],
            }
            beside = peers if subject in arrived else {}
            yield self._line(subject, results[-1], TO_ACCURACY, seconds[subject], beside, more)

    def _line(
        self,
        subject: Subject,
        told: Result,
        unit: str,
        seconds: Seconds,
        peers: dict[Subject, Seconds],
        more: dict[str, Any],
    ) -> Record:
        """Return a record; ``told``: by the last job, whose machine and settings it has."""
        case = {
            "unit": unit,
            "model": self.cell.model.name,
            "weights": told["weights"],
            "batch": self.cell.model.sizes["batch_size"],
            "rate": self.cell.rate,
            "ranks_of_nodes": told["nodes"],
            "density": DENSITY if subject.is_sparse else None,
            "mpi_algorithm": subject.algorithm,
        }
        sent = told.get("bytes")
        more |= {"machine": told["machine"], "settings": told["settings"]}
        record = Record("race", case, subject.name, seconds, bytes=sent and LinkBytes(**sent), more=more)
        best = min(peers, key=lambda each: peers[each].median, default=subject)
        return record if best == subject else record.beside(best.name, peers[best])


def title_of(record: Record) -> str:
    """Return what distinguishes a cell from others."""
    case = record.case
    where = world(case["ranks_of_nodes"])
    return f"{case['model']} ({case['weights']:,} weights), {case['rate']}, {where}"


def steps_table(records: Sequence[Record]) -> Table:
    header = ["", "steps/s", "ms", "min\nms", "max\nms", "peer", "× peer", "× horovod", "of best"]
    header += ["× no\noverlap", "hidden", "planned\nms", "sent inter\nkB", "card\nkB"]
    notes = [
        "ms: of a step, from barrier to barrier, median of turns. peer: the fastest that sends all;",
        "of best: the fastest of all over it. hidden: share of the exchange behind computing.",
        "planned: the step by cloudtrain plan, from what cloudtrain tune measured there before each job.",
        "sent: payload of the busiest rank; card: what the busiest node's card sent, headers and all",
    ]
    medians = {record.subject: record.seconds.median for record in records}
    rows = []
    for record in records:
        seconds, more = record.seconds, record.more
        hidden = more["hidden_share"] if more["overlap"] else None
        row = [
            record.subject,
            f"{more['steps_a_second']:.3g}",
            *(milliseconds(each) for each in (seconds.median, seconds.min, seconds.max)),
            record.peer or NOTHING,
            times(record.ratio),
            times(ratio(medians.get("horovod"), seconds.median)),
            f"{more['of_best']:.2f}",
            times(ratio(medians.get(f"{record.subject}{OFF}"), seconds.median)),
            NOTHING if hidden is None else percent(hidden),
            milliseconds(more.get("planned_seconds")),
            f"{record.bytes.inter / 1e3:,.0f}" if record.bytes else NOTHING,
            f"{more['card_bytes'] / 1e3:,.0f}",
        ]
        rows.append(row)
    return Table(title_of(records[0]), header, rows, notes)


def runs_table(records: Sequence[Record]) -> Table:
    header = ["", "reached", "s", "min\ns", "max\ns", "peer", "× peer", "steps", "last\naccuracy"]
    notes = [
        f"s: to a test accuracy of {records[0].more['target']:.1%}, median of seeds; a run that has not",
        "reached it counts with all its seconds, and there is no ratio",
    ]
    rows = [
        [
            record.subject,
            f"{record.more['reached']} of {record.more['seeds']}",
            *(f"{each:,.1f}" for each in (record.seconds.median, record.seconds.min, record.seconds.max)),
            record.peer or NOTHING,
            times(record.ratio),
            f"{median_high(record.more['steps']):,}",
            f"{median_high(record.more['final_accuracy']):.1%}",
        ]
        for record in records
    ]
    return Table(f"{title_of(records[0])}: time to accuracy", header, rows, notes)


def show(records: Sequence[Record]) -> None:
    keys = ("model", "rate", "ranks_of_nodes", "unit")
    for (*_, unit), own in groupby(records, key=lambda record: [record.case[key] for key in keys]):
        (steps_table if unit == A_STEP else runs_table)(list(own)).print()


def main(
    rate: Annotated[Words, Option(help="of the links; may be repeated [0.2gbit, 1gbit, 10gbit]")] = None,
    layout: Annotated[Words, Option(help="nodes x ranks on each; may be repeated [4x1, 4x2]")] = None,
    model: Annotated[Words, Option(help=f"{', '.join(RACED)}; may be repeated [mlp, resnet20]")] = None,
    reducer: Annotated[Words, Option(help="to race, or auto; may be repeated [all]")] = None,
    seeds: Annotated[
        int | None, Option(min=0, help="runs to the accuracy, in the first cell; 0: none [3]")
    ] = None,
    as_json: Annotated[bool, Option("--json")] = False,
) -> None:
    """Race reducers and Horovod on emulated clusters; see the module's docstring. Needs root."""
    try:
        places = cells(rate or (), layout or (), model or (), seeds)
        raced = list(subjects(reducer or ()))
    except ValueError as error:
        usage_error(str(error))
    raise typer.Exit(pass_on(measured(places, raced), as_json=as_json, show=show))


if __name__ == "__main__":
    typer.run(main)
