"""Train with local steps and without, and time them on slow links: docs/local_steps.md.

    python -m benchmarks.local_steps --run            # what local_steps.yaml has and no record is of
    python -m benchmarks.local_steps --time           # on emulated clusters; as root
    python -m benchmarks.local_steps --link           # what the links carry over time; as root
    python -m benchmarks.local_steps                  # the tables and pictures of the page, from the records

The text is that of `cloudtrain data brown`. Ranks that train are threads of one process, as in
benchmarks/convergence.py; those that are timed are processes.
"""

import argparse
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice, pairwise, product
from math import exp
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from benchmarks import convergence, link_use
from benchmarks.convergence import Case
from benchmarks.drawing.pages import markdown, rate_in_words, rewrite
from benchmarks.drawing.style import PALETTE, docs_picture
from benchmarks.jobs import EmulatedCluster, Layout, cluster_until_end, environment, module, ratio
from benchmarks.race_plan import HOROVOD_RING, RING
from training.bench.record import Seconds, code_of, machine
from training.callbacks.callback import Callback, Event
from training.commands.printing import NOTHING, times

ROOT = Path(__file__).resolve().parent.parent
PLAN = ROOT / "benchmarks" / "local_steps.yaml"
PAGE, FOLDER = ROOT / "docs" / "local_steps.md", ROOT / "docs" / "local_steps"
RECORDS, TIMES, LINK = (FOLDER / f"{name}.jsonl" for name in ("records", "times", "link"))
EXPERIMENT = "brown"
NEVER = 10**9
TURNS = {"turns": 3, "warm_up": 1, "counted": 3}  # steps at least, whole rounds
TIMEOUT_SECONDS = 600.0


@dataclass(frozen=True)
class RoundTested(Event):
    """The loss of the weights that all ranks have after a round, on the first tokens of the test part."""

    kind = "round_tested"
    steps: int
    loss: float


class LossAfterRounds(Callback):
    """Tests on ``batches`` batches after each round in which a multiple of ``every`` steps is reached."""

    def __init__(self, every: int, batches: int) -> None:
        self._every, self._batches = every, batches

    def on_step_end(self, run: Any, step: Any) -> None:
        from training.run.build import evaluate

        steps = run.position.steps
        if step.hyperparameters.passes(steps, self._every):
            tested = evaluate(run.parts, islice(run.phase.data.test_batches(), self._batches))
            run.report(RoundTested(steps, float(np.log(tested.values["perplexity"]))))


def plan() -> dict[str, Any]:
    """Return the file of what is trained, with the variants of each method."""
    content = convergence.plan(PLAN)
    for name, phase in content["methods"].items():
        for steps in phase.get("local_steps", content["local_steps"]):
            content["variants"][f"{name}, H = {steps}"] = phase | {"local_steps": steps}
    return content


def trained(case: Case) -> dict[str, Any]:
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
        "machine": machine(),
        "command": "python -m benchmarks.local_steps --run",
    }


def subjects(content: Mapping[str, Any], layout: Layout) -> list[dict[str, Any]]:
    """Return whose steps are timed, as a job of the race has them."""
    timed, found = content["times"], []
    own = content["experiments"][EXPERIMENT]["config"]
    for name in [*timed["dense"], timed["beside"], *timed["subjects"]]:
        variant = dict(content["variants"].get(name, {"reducer": name if name == "torus2d" else "dense"}))
        optimizer = variant.pop("optimizer", {})
        if name != "torus2d" or layout.ranks_per_node > 1:  # on single ranks it is dense
            is_horovod = name == HOROVOD_RING
            delays = "delay" in variant.get("outer", {})  # which only overlap hides
            config = {"overlap": delays, **({"clip_norm": None} if is_horovod else {})}  # it cannot clip
            if optimizer:
                config["optimizer"] = own["optimizer"] | optimizer
            told = {"name": name, "horovod": is_horovod, "config": config}
            found.append(told | {"phase": phase_of(content, layout) | variant})
    return found


def phase_of(content: Mapping[str, Any], layout: Layout) -> dict[str, Any]:
    """Return the phase of one rank, of which there are as many as in ``layout``."""
    (phase,) = content["experiments"][EXPERIMENT]["config"]["phases"]
    own = {"steps": NEVER, "batch_size": phase["batch_size"] // layout.ranks}
    return phase | own | {"learning_rate": 0.001}  # a schedule would begin at 0: differences of nothing


def job_of(content: Mapping[str, Any], layout: Layout) -> dict[str, Any]:
    case = Case(EXPERIMENT, (), "dense", 1)
    config = convergence.configuration(content, case, tempfile.gettempdir())
    config |= {"callbacks": [], "phases": [phase_of(content, layout) | {"reducer": "dense"}]}
    return {"config": config, "steps": subjects(content, layout), "turns": TURNS, "runs": []}


def told_on(
    cluster: EmulatedCluster, layout: Layout, program: str, job: Mapping[str, Any], what: str
) -> Iterator[dict[str, Any]]:
    """Yield what the ranks of a job tell on a cluster that is up."""
    # All nodes are on this machine, whose cores their ranks share.
    variables = environment(RING) | {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "1"}
    words = module(program, cluster.write("job.json", job))
    yield from cluster.objects(layout, words, variables, TIMEOUT_SECONDS, what)


def time_steps() -> None:
    """Record the seconds of steps on all clusters of the plan, in place of what was recorded before."""
    content, found = plan(), []
    with cluster_until_end() as cluster:
        for name, rate in product(content["times"]["layouts"], content["times"]["rates"]):
            layout, what = Layout.of(name), f"{rate}, {name}: steps"
            cluster.up(layout.nodes, rate)
            for told in told_on(cluster, layout, "benchmarks.race_job", job_of(content, layout), what):
                case = {"rate": rate, "layout": name, "variant": told["subject"]}
                found.append(time_record(case, told))
    convergence.write_records(TIMES, found)


def watch_links() -> None:
    """Record what the links of the plan's clusters carry over time, in place of what was recorded before."""
    content, found = plan(), []
    with cluster_until_end() as cluster:
        for cell in content["link"]["cells"]:
            rate, _, name = cell.partition(",")
            layout = Layout.of(name)
            job = job_of(content, layout) | {"rounds": content["link"]["rounds"]}
            job["subjects"] = [
                {"name": variant, "config": {"overlap": True}, "phase": phase_of(content, layout) | phase}
                for variant, phase in content["link"]["variants"].items()
            ]
            cluster.up(layout.nodes, rate)
            with link_use.sampled(cluster.state) as samples:
                results = list(told_on(cluster, layout, "benchmarks.link_use", job, f"{cell}: links"))
            for told in results:
                case = {"rate": rate, "layout": name, "variant": told["subject"]}
                found.append(link_use.record_of(case, told, samples))
    convergence.write_records(LINK, found)


def time_record(case: Mapping[str, Any], told: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record of a subject: seconds of a step, bytes and stages of an exchange."""
    shown = ("bytes", "card_bytes", "stages", "reducer", "weights", "nodes", "machine", "settings")
    return {
        "bench": "local steps, times",
        "code": code_of("local steps, times"),
        "case": case,
        "seconds": asdict(Seconds.of(told["seconds"])),
        **{key: told[key] for key in shown},
        "command": "python -m benchmarks.local_steps --time",
    }


DENSE, COMPARED = "dense", "SparseLoCo"


@dataclass(frozen=True)
class Run:
    """A variant, over its seeds.

    ``losses``: those at the end. ``sent``: by the busiest rank to other nodes, mean over seeds. ``bits``: of
    an entry, index and value, where a rank sends it to all others. ``tested``: steps and losses on the way.
    """

    variant: str
    losses: Sequence[float]
    steps: int
    weights: int
    sent: float
    bits: float | None
    tested: Sequence[Sequence[Sequence[float]]]

    @classmethod
    def of(cls, variant: str, phase: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> "Run":
        sent = [[rank["sent"]["inter"] for rank in record["ranks"]] for record in records]
        selected = sum(rank["selected"] for record in records for rank in record["ranks"])
        others = len(records[0]["case"]["layout"]) - 1
        to_all = not isinstance(phase["reducer"], str) and phase["reducer"]["name"] == "hitopk"
        return cls(
            variant=variant,
            losses=[record["loss"] for record in records],
            steps=records[0]["steps"],
            weights=records[0]["weights"],
            sent=fmean(max(each) for each in sent),
            bits=8 * sum(map(sum, sent)) / selected / others if to_all else None,
            tested=[record["tested"] for record in records],
        )

    @property
    def loss(self) -> float:
        return fmean(self.losses)

    def steps_to(self, target: float) -> float | None:
        """Return the steps to a loss, mean over seeds; ``None`` where one has not come there."""
        found = [steps_to(target, tested) for tested in self.tested]
        return None if None in found else fmean(each for each in found if each is not None)


def steps_to(target: float, tested: Sequence[Sequence[float]]) -> float | None:
    """Return the step at which a loss is reached, on the line between two tests.

    >>> steps_to(3.0, [[10, 5.0], [20, 4.0], [30, 2.0]])
    25.0
    """
    for (before, more), (step, loss) in pairwise([tested[0], *tested]):
        if loss <= target:
            return float(np.interp(-target, [-more, -loss], [before, step]))
    return None


@dataclass(frozen=True)
class Runs:
    """All variants that have a record, in the order of the plan."""

    content: Mapping[str, Any]
    runs: Mapping[str, Run]

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> "Runs":
        records, found = convergence.recorded(RECORDS), {}
        for variant, phase in content["variants"].items():
            own = [each for each in records if each["case"]["variant"] == variant]
            if own:
                found[variant] = Run.of(variant, phase, own)
        return cls(content, found)

    @property
    def dense(self) -> Run:
        return self.runs[DENSE]

    @property
    def target(self) -> float:
        """Return the loss that dense has after the plan's share of its steps."""
        steps = self.content["times"]["of_dense"] * self.dense.steps
        # On the line between two tests, mean over seeds.
        losses = [float(np.interp(steps, *np.transpose(tested))) for tested in self.dense.tested]
        return round(fmean(losses), 2)

    def steps_to(self, target: float, variant: str) -> float | None:
        """Return the steps of a timed variant to a loss; all that send all gradients train alike."""
        run = self.runs.get(DENSE if variant in self.content["times"]["dense"] else variant)
        return None if run is None else run.steps_to(target)

    def against(self, run: Run) -> str:
        """Return how much more a run's loss is than that of dense."""
        return f"{run.loss / self.dense.loss - 1:+.1%}".replace("%", " %")

    def of_method(self, method: str) -> dict[int, Run]:
        """Return the runs of a method by H."""
        named = {steps: f"{method}, H = {steps}" for steps in sorted(self.content["local_steps"])}
        return {steps: self.runs[name] for steps, name in named.items() if name in self.runs}

    def against_h(self) -> str:
        """Return the table of losses by method and H."""
        methods = {method: self.of_method(method) for method in self.content["methods"]}
        lines = []
        for steps in sorted(self.content["local_steps"]):
            shown = [self._shown(own[steps]) if steps in own else NOTHING for own in methods.values()]
            lines.append([str(steps), *shown])
        return (
            f"{markdown(['H', *methods], lines)}\nWithout local steps, `dense`: {self._shown(self.dense)}\n"
        )

    def _shown(self, run: Run) -> str:
        seeds = "" if len(run.losses) == 1 else f", {min(run.losses):.3f} … {max(run.losses):.3f}"
        beside = "" if run is self.dense else f" ({self.against(run)})"
        return f"{run.loss:.3f}{beside}{seeds}"

    def against_bytes(self) -> str:
        """Return the table of all variants, those first that send the most."""
        header = ["variant", "MB a rank", "bytes a weight and step", "bits an entry", "seeds", "test loss"]
        lines = []
        for run in sorted(self.runs.values(), key=lambda each: -each.sent):
            bits = NOTHING if run.bits is None else f"{run.bits:.2f}"
            beside = NOTHING if run is self.dense else self.against(run)
            sent = [f"{run.sent / 1e6:,.3f}", f"{run.sent / run.weights / run.steps:.5f}", bits]
            lines.append([run.variant, *sent, str(len(run.losses)), f"{run.loss:.3f}", beside])
        return markdown([*header, "against dense"], lines)

    def at_equal_bytes(self) -> str:
        """Return the table of local steps beside steps with as many entries."""
        local, lines = self.of_method(COMPARED), []
        for steps, name in self.content["compared"].items():
            if steps in local and name in self.runs:
                ours, other = local[steps], self.runs[name]
                pair = [[f"{each.sent / 1e6:.3f}", f"{each.loss:.3f}"] for each in (ours, other)]
                lines.append([str(steps), *pair[0], *pair[1], f"{other.loss - ours.loss:+.3f}"])
        head = ["H", "MB, every H steps", "test loss", "MB, every step", "test loss", "every step − every H"]
        return markdown(head, lines)


def draw_against_h(path: Path, runs: Runs) -> None:
    with docs_picture(path, 6.5, 3.0) as figure:
        axes = figure.subplots()
        for color, method in zip(PALETTE, runs.content["methods"], strict=False):
            if not (own := runs.of_method(method)):
                continue
            axes.plot(list(own), [run.loss for run in own.values()], ".-", color=color, label=method)
        axes.axhline(runs.dense.loss, color="grey", linewidth=0.8, linestyle="--", label=DENSE)
        axes.set(xscale="log", xlabel="H, local steps", ylabel="test loss")
        hs = sorted(runs.content["local_steps"])
        axes.set_xticks(hs, [str(steps) for steps in hs], minor=False)
        axes.minorticks_off()
        axes.legend(fontsize=7)


def on_cluster(records: Sequence[Mapping[str, Any]], rate: str, layout: str) -> dict[str, Mapping[str, Any]]:
    """Return the records of one cluster by their variants."""
    wanted = {"rate": rate, "layout": layout}.items()
    return {each["case"]["variant"]: each for each in records if wanted <= each["case"].items()}


def seconds_to(target: float, runs: Runs, records: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Return the seconds to a loss of each variant that comes there, timed on one cluster."""
    found = {variant: runs.steps_to(target, variant) for variant in records}
    return {
        variant: records[variant]["seconds"]["median"] * steps
        for variant, steps in found.items()
        if steps is not None
    }


def times_table(runs: Runs, records: Mapping[str, Mapping[str, Any]], targets: Sequence[float]) -> str:
    plan, variants = runs.content["times"], runs.content["variants"]
    lines = []
    for variant, record in records.items():
        local_steps = variants.get(variant, {}).get("local_steps", 1)
        exchange = record["stages"] and sum(record["stages"].values()) / local_steps
        ms = f"{1e3 * record['seconds']['median']:,.1f}"
        lines.append([variant, ms, NOTHING if exchange is None else f"{1e3 * exchange:,.1f}"])
    header = ["variant", "ms a step", "of it exchange"]
    for target in targets:
        seconds = seconds_to(target, runs, records)
        dense = min((seconds[name] for name in plan["dense"] if name in seconds), default=None)
        header += [f"s to {target:g}", "× dense"]
        for line in lines:
            own = seconds.get(line[0])
            line += [NOTHING if own is None else f"{own:,.1f}", times(ratio(dense, own))]
    return markdown(header, lines)


def times_page(runs: Runs) -> str:
    plan, records = runs.content["times"], convergence.recorded(TIMES)
    first, second = runs.target, plan["target"]
    of_dense = f"{first:g}, that of dense after {plan['of_dense']:g} of its steps"
    perplexities = f"perplexities of {exp(first):.0f} and {exp(second):.0f}"
    parts = [f"Test losses of {of_dense}, and of {second:g}: {perplexities}. –: not reached.\n"]
    for layout, rate in product(plan["layouts"], plan["rates"]):
        if own := on_cluster(records, rate, layout):
            parts.append(f"{rate_in_words(rate)}, {layout.replace('x', ' × ')}:\n")
            parts.append(times_table(runs, own, (first, second)))
    return "\n".join(parts)


def blocks() -> dict[str, str]:
    runs = Runs.of(plan())
    return {
        "settings": convergence.settings(runs.content["experiments"][EXPERIMENT]),
        "loss against H": runs.against_h(),
        "loss against bytes": runs.against_bytes(),
        "equal bytes": runs.at_equal_bytes(),
        "times": times_page(runs),
        "link": link_use.table(convergence.recorded(LINK)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--run", action="store_true", help="train what is not recorded yet")
    parser.add_argument("--time", action="store_true", help="time steps on emulated clusters")
    parser.add_argument("--link", action="store_true", help="watch the links of emulated clusters")
    arguments = parser.parse_args()
    FOLDER.mkdir(exist_ok=True)
    if arguments.run:
        planned = convergence.cases(plan(), [])
        for record in convergence.train_missing(planned, trained, RECORDS):
            print(f"{convergence.case_of(record)}: {record['loss']:.3f}", flush=True)
    elif arguments.time:
        time_steps()
    elif arguments.link:
        watch_links()
    else:
        rewrite(PAGE, blocks())
        runs = Runs.of(plan())
        draw_against_h(FOLDER / "loss-against-h.svg", runs)
        drawn = runs.content["link"]["cells"][0].split(",")
        if own := on_cluster(convergence.recorded(LINK), *drawn):
            link_use.draw(FOLDER / "link.svg", list(own.values()))


if __name__ == "__main__":
    main()
