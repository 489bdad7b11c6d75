"""What is shown of ``benchmarks.validate``: predictions and picks beside what was measured."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from itertools import accumulate, groupby, pairwise
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.convergence import recorded
from benchmarks.drawing.pages import CHANGED, layout_in_words, markdown, percent, rate_in_words
from benchmarks.drawing.style import PALETTE, docs_picture
from commlib import REDUCERS
from commlib.tuning import probe, tuner
from commlib.tuning.probe import Candidate, Profile
from commlib.tuning.tuner import Case
from training.bench.record import code_of

DOCS = Path(__file__).resolve().parent.parent.parent / "docs"
PAGE, PICTURES = DOCS / "validation.md", DOCS / "validation"
RECORDS = PICTURES / "cells.jsonl"  # what ``--measure`` appends
VIRTUAL = PICTURES / "simulated.jsonl"  # what ``--simulate`` writes
KIND = "validation"  # of the records
COLORS = (*PALETTE, "#999999", "#8c564b", "#bcbd22", "#17becf", "#e377c2", "#9467bd", "#aec7e8")
WITHIN = 1.1  # the most that a pick may take, relative to the fastest


@dataclass(frozen=True)
class Visit:
    """What was measured of a case: the profile with ``auto``'s trials, and the seconds of a step.

    ``steps``: of all candidates, in few steps. ``longer``: of some of them in as many as in a trial.
    ``after``: a second profile, measured after ``steps``, if there is one.
    """

    case: Case
    profile: Profile
    steps: dict[Candidate, float]
    longer: dict[Candidate, float] = field(default_factory=dict)
    after: Profile | None = None

    @property
    def seconds(self) -> dict[Candidate, float]:
        """Return the seconds of a step, in many steps if so many were taken."""
        return self.steps | self.longer

    @cached_property
    def expected(self) -> dict[Candidate, float]:
        """Return the seconds by today's closed forms, before any trial."""
        return self._expected_by(self.profile)

    @property
    def expected_around(self) -> dict[Candidate, float]:
        """Return the same by the profiles before and after the steps, in the mean."""
        return _medians([self.expected, self._expected_by(self.after)]) if self.after else self.expected

    def _expected_by(self, profile: Profile) -> dict[Candidate, float]:
        own = partial(tuner.predicted, profile, self.case, settled=False)
        return {each: own(each) for each in self.steps}

    @property
    def pickable(self) -> list[Candidate]:
        """Return those that ``auto`` may pick."""
        return list(filter(tuner.is_pickable, self.steps))

    @property
    def predicted(self) -> Candidate:
        """Return the fastest one by the closed forms."""
        return min(self.pickable, key=lambda each: self.expected[each])

    @cached_property
    def picked(self) -> Candidate:
        """Return the pick of ``auto``, after its trials."""
        case = self.case
        made = tuner.choose(self.profile, case.nodes, case.size, case.density)
        return next(each for each in self.steps if (each.reducer, each.given) == (made.reducer, made.options))

    @property
    def fastest(self) -> Candidate:
        return min(self.longer or self.pickable, key=lambda each: self.seconds[each])

    @property
    def dense_seconds(self) -> float:
        """Return the seconds of the fastest one that sends all entries."""
        return min(value for each, value in self.seconds.items() if not REDUCERS[each.reducer].sparse)

    def ratio(self, candidate: Candidate) -> float:
        """Return how many times as long a candidate takes as the fastest."""
        return self.seconds[candidate] / self.seconds[self.fastest]


@dataclass(frozen=True)
class Group:
    """A case on a cluster, and the visits to it on one kind of processor."""

    processor: str
    cores: int
    cell: dict[str, Any]
    case: Case
    visits: list[Visit]

    @property
    def name(self) -> list[Any]:
        """Return what tells it from others: processor, layout, rate, latency, entries and density."""
        return [self.processor, *self.cell.values(), self.case.size, self.case.density]

    @cached_property
    def expected(self) -> dict[Candidate, float]:
        """Return the seconds by today's closed forms, before any trial."""
        return _medians([each.expected_around for each in self.visits])

    @cached_property
    def steps(self) -> dict[Candidate, float]:
        """Return the seconds of a step."""
        return _medians([each.steps for each in self.visits])


def groups(cpu: str | None = None) -> list[Group]:
    """Return what was measured, on all processors or on one kind."""
    return [each for each in _groups() if cpu in (None, each.processor)]


@cache
def _groups() -> list[Group]:
    found: dict[str, Group] = {}
    for record in recorded(RECORDS):
        cpu, cores = (record["machine"][key] for key in ("cpu", "cores"))
        for case in record["cases"]:
            profile = _profile_of(case["profile"])
            ends = accumulate(profile.job.ranks_of_nodes, initial=0)
            own = Case([range(low, high) for low, high in pairwise(ends)], case["size"], case["density"])
            group = Group(cpu, cores, record["cell"], own, [])
            group = found.setdefault(str(group.name), group)
            steps = map(_seconds_of, (case["steps"], case.get("longer", [])))
            after = _profile_of(case["after"]) if "after" in case else None
            group.visits.append(Visit(own, profile, *steps, after))
    return list(found.values())


def _profile_of(content: dict[str, Any]) -> Profile:
    return Profile.of({"format": probe.FORMAT, **content})


def _seconds_of(rows: Iterable[Sequence[Any]]) -> dict[Candidate, float]:
    return {Candidate(*row[:3]): row[3] for row in rows}


def _medians(visits: Sequence[dict[Candidate, float]]) -> dict[Candidate, float]:
    return {each: median(visit[each] for visit in visits) for each in visits[0]}


@cache
def virtual() -> list[tuple[Group, dict[Candidate, float]]]:
    """Return the groups that were simulated, and the seconds of each candidate there."""
    by_name = {tuple(each.name): each for each in groups()}
    return [(by_name[tuple(name)], _seconds_of(own)) for name, own in recorded(VIRTUAL)]


def processors() -> list[str]:
    """Return the kinds of processors on which anything was measured."""
    return list(dict.fromkeys(each.processor for each in groups()))


def processor_in_words(name: str) -> str:
    return name.replace("(R)", "").removesuffix(" Processor")


def errors(given: Iterable[Group], reducer: str | None = None) -> list[float]:
    """Return expected over measured seconds of all candidates, or of those of a reducer."""
    return [
        group.expected[each] / group.steps[each]
        for group in given
        for each in group.steps
        if reducer in (None, each.reducer)
    ]


def reducers() -> list[str]:
    """Return the reducers that were measured anywhere, in their order."""
    measured = {candidate.reducer for each in groups() for candidate in each.steps}
    return [name for name in REDUCERS if name in measured]


def by_cluster() -> str:
    rows = []
    for name, of_cell in groupby(groups(), key=lambda each: each.name[:4]):
        rows += [[*cluster_in_words(*name), *summary(errors(of_cell))]]
    return markdown([*CLUSTER, *SUMMARY], rows)


def cluster_in_words(cpu: str, layout: str, rate: str, delay: float) -> list[str]:
    return [processor_in_words(cpu), layout_in_words(layout), rate_in_words(rate), f"{delay:g} ms"]


CLUSTER = ("processor", "nodes × ranks", "rate", "latency")
SUMMARY = ("medians", "off by, median", "within 25 %", "predicted/measured")


def summary(ratios: Sequence[float]) -> list[str]:
    off = [abs(each - 1) for each in ratios]
    within = sum(each <= 0.25 for each in off) / len(off)
    return [f"{len(ratios)}", percent(median(off)), percent(within), f"{median(ratios):.2f}"]


def by_reducer() -> str:
    """Return the table of errors by reducer, also of those on simulated ranks."""
    rows = []
    for reducer in reducers():
        on_virtual_clock = [
            value / group.steps[candidate]
            for group, found in virtual()
            for candidate, value in found.items()
            if candidate.reducer == reducer
        ]
        _, half, _, ratio = summary(on_virtual_clock)
        rows.append([f"`{reducer}`", *summary(errors(groups(), reducer)), half, ratio])
    return markdown(["reducer", *SUMMARY, "simulated, off by", "simulated/measured"], rows)


def of_predictions() -> str:
    lines = []
    for cpu in processors():
        count, half, most, _ = summary(errors(groups(cpu)))
        lines.append(
            f"- {processor_in_words(cpu)}: of {int(count):,} predictions half are off by at most {half}, "
            f"and {most} by at most 25 %."
        )
    older = CHANGED * any(each["code"] != code_of(KIND) for each in recorded(RECORDS))
    return "\n".join(lines) + f"{older}\n"


def of_picks() -> str:
    lines = []
    for cpu in processors():
        visits = [visit for each in groups(cpu) for visit in each.visits]
        auto = _good([each.ratio(each.picked) for each in visits])
        closed = _good([each.ratio(each.predicted) for each in visits])
        lines.append(
            f"- {processor_in_words(cpu)}: the pick of `auto` takes at most {WITHIN} times as long as the "
            f"fastest in {auto}, that of the closed forms alone in {closed}."
        )
    return "\n".join(lines) + "\n"


def _good(ratios: Sequence[float]) -> str:
    count = sum(each <= WITHIN for each in ratios)
    return f"{count} of {len(ratios)} cases ({percent(count / len(ratios))})"


def picks() -> str:
    """Return the table of picks, in that visit to each cluster in which ``auto``'s was the slowest."""
    visits: dict[str, list[tuple[Group, Visit]]] = {}
    for group in groups():
        visits.setdefault(str(group.name[1:]), []).extend((group, each) for each in group.visits)
    slowest = [max(own, key=lambda one: one[1].ratio(one[1].picked)) for own in visits.values()]
    rows = []
    for group, each in slowest:
        *cluster, size, density = group.name
        row = [*cluster_in_words(*cluster), f"{size / 1e6:.3g} M"]
        row += [f"{100 * density:g} %", f"{1e3 * each.dense_seconds:.0f}"]
        for candidate in (each.predicted, each.picked):
            row += [f"`{candidate}`", f"{1e3 * each.seconds[candidate]:.0f}", f"{each.ratio(candidate):.2f}"]
        rows.append([*row, f"`{each.fastest}`", f"{1e3 * each.seconds[each.fastest]:.0f}"])
    head = [*CLUSTER, "entries", "density", "dense, ms"]
    return markdown([*head, "predicted", "ms", "×", "`auto`", "ms", "×", "fastest", "ms"], rows)


def of_wires() -> str:
    """Return the table of how often short messages are worth their processor time, by the links."""
    ratios: dict[tuple[str, float], list[float]] = {}
    for each in groups():
        found = ratios.setdefault((each.cell["rate"], each.cell["delay_ms"]), [])
        shorter = {one: replace(one, wire="gap+fp16") for one in each.steps if one.wire == "fp32"}
        found += [each.steps[one] / each.steps[short] for one, short in shorter.items()]
    rows = []
    for (rate, delay), own in ratios.items():
        faster = sum(ratio > 1.03 for ratio in own), sum(ratio < 0.97 for ratio in own)
        rows.append([rate_in_words(rate), f"{delay:g} ms", str(len(own)), *map(str, faster)])
    return markdown(["rate", "latency", "pairs", "`gap+fp16` is faster", "`fp32` is faster"], rows)


def draw(path: Path) -> None:
    closed = [(each, each.expected) for each in groups()]
    with docs_picture(path, 9.5, 4.6) as figure:
        titles = ("closed form", "simulated")
        panels = figure.subplots(1, 2, sharey=True)
        for axes, title, found in zip(panels, titles, (closed, virtual()), strict=True):
            for name, color in zip(reducers(), COLORS, strict=True):
                places = [
                    (1e3 * group.steps[each], 1e3 * seconds[each])
                    for group, seconds in found
                    for each in group.steps
                    if each.reducer == name
                ]
                axes.plot(*zip(*places, strict=True), "o", color=color, ms=2.5, label=name, alpha=0.8)
            ends = [4, 5000]
            axes.plot(ends, ends, color="black", linewidth=0.8)
            low, high = ([share * end for end in ends] for share in (0.75, 1.25))
            axes.fill_between(ends, low, high, color="#eeeeee", zorder=0)
            axes.set(xscale="log", yscale="log", xlabel="ms measured", title=title)
        panels[0].set_ylabel("ms predicted; grey: within 25 %")
        panels[0].legend(fontsize=6.5)


def blocks() -> dict[str, str]:
    return {
        "errors": of_predictions(),
        "errors by cluster": by_cluster(),
        "errors by reducer": by_reducer(),
        "verdict": of_picks(),
        "picks": picks(),
        "wires": of_wires(),
    }
