"""Ok-Topk on its cluster, 256 nodes of one GPU: figure 12, statements of the text, and the sums' density."""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

from benchmarks.drawing.pages import Table, milliseconds
from benchmarks.papers.clusters import PAPERS, Cluster, Comparison, communication
from commlib import Link, Network
from commlib.cost import union
from training.plan.cluster import load_cluster

OKTOPK = SimpleNamespace(**PAPERS["oktopk"])
OKTOPK.link = load_cluster(OKTOPK.cluster).network.inter
OKTOPK.step = OKTOPK.hours * 3600 / OKTOPK.iterations  # seconds on 32 GPUs
OKTOPK.dense_step = OKTOPK.dense_hours * 3600 / OKTOPK.iterations
ALGORITHMS = OKTOPK.algorithms
OTHERS = [name for name in ALGORITHMS if name != "Ok-Topk"]


@dataclass(frozen=True)
class Fit:
    """A step of BERT: ``computing`` seconds and the messages, over links like ``link``."""

    name: str
    link: Link
    computing: float

    def seconds(self, algorithm: str, ranks: int) -> float:
        """Return the predicted seconds of a whole step."""
        return self.computing + messages(algorithm, ranks, self.link)

    def speedup(self, algorithm: str, ranks: int) -> float:
        """Return how many times as long as Ok-Topk's a step with ``algorithm`` takes."""
        return self.seconds(algorithm, ranks) / self.seconds("Ok-Topk", ranks)

    def speedups(self, *, but: str = "") -> list[float]:
        """Return Ok-Topk's speed-ups over all others, ``but`` one, on 256 ranks."""
        return [self.speedup(name, OKTOPK.many) for name in OTHERS if name != but]

    @property
    def efficiency(self) -> float:
        """Return Ok-Topk's efficiency on 256 ranks in weak scaling, where that of 32 is 1."""
        return self.seconds("Ok-Topk", OKTOPK.few) / self.seconds("Ok-Topk", OKTOPK.many)


def messages(algorithm: str, ranks: int, link: Link) -> float:
    """Return the predicted seconds of a step's messages for BERT, one rank a node."""
    given, cluster = ALGORITHMS[algorithm], Cluster(ranks, 1, Network(inter=link))
    density = OKTOPK.density * given.get("share", 1.0)
    return communication(given["reducer"], cluster, OKTOPK.parameters, density).seconds


def over(name: str, beta: float) -> Fit:
    """Return a step at so many seconds a byte; computing is the rest of Ok-Topk's step."""
    link = Link(OKTOPK.link.alpha, beta)
    return Fit(name, link, OKTOPK.step - messages("Ok-Topk", OKTOPK.few, link))


def fit(name: str, algorithm: str, step: float) -> Fit:
    """Return the rate at which ``algorithm`` on 32 ranks takes ``step`` seconds where Ok-Topk takes its own.

    The seconds of both are linear in the seconds a byte, ``a + b·β``, so ``β`` follows from their difference.
    """

    def difference(beta: float) -> float:
        link = Link(OKTOPK.link.alpha, beta)
        return messages(algorithm, OKTOPK.few, link) - messages("Ok-Topk", OKTOPK.few, link)

    at_zero = difference(0.0)
    return over(name, (step - OKTOPK.step - at_zero) / (difference(1.0) - at_zero))


def fits() -> list[Fit]:
    """Return the network's own rate, and those that two statements on 32 GPUs imply."""
    return [
        over("the network's rate", OKTOPK.link.beta),
        fit("fitted to DenseOvlp", "Dense", OKTOPK.dense_step),
        fit("fitted to Gaussiank", "Gaussiank", OKTOPK.over_gaussian * OKTOPK.step),
    ]


@dataclass(frozen=True)
class Statement:
    """A number of Ok-Topk's text, and the function that predicts it."""

    text: str
    paper: float
    predicted: Callable[[Fit], float]
    met_by: str = ""  # the fit that meets it by construction

    def under(self, given: Fit) -> Comparison | None:
        """Return the comparison, None where the fit was made with this statement."""
        return None if given.name == self.met_by else Comparison(self.paper, self.predicted(given))


FASTEST, SLOWEST = OKTOPK.over_all
STATEMENTS = (
    Statement(
        "32 GPUs: over DenseOvlp",
        OKTOPK.dense_step / OKTOPK.step,
        lambda fit: fit.speedup("Dense", OKTOPK.few),
        "fitted to DenseOvlp",
    ),
    Statement(
        "32 GPUs: over Gaussiank",
        OKTOPK.over_gaussian,
        lambda fit: fit.speedup("Gaussiank", OKTOPK.few),
        "fitted to Gaussiank",
    ),
    Statement("256 GPUs: over the fastest other", FASTEST, lambda fit: min(fit.speedups())),
    Statement(
        "256 GPUs: over the fastest other but gTopk", FASTEST, lambda fit: min(fit.speedups(but="gTopk"))
    ),
    Statement("256 GPUs: over the slowest other", SLOWEST, lambda fit: max(fit.speedups())),
    Statement("256 GPUs: parallel efficiency", OKTOPK.efficiency, lambda fit: fit.efficiency),
)


def rates_table() -> Table:
    """Return the rate and the computing of each fit."""
    rows = [(fit.name, f"{1 / fit.link.beta / 1e9:.2f}", milliseconds(fit.computing)) for fit in fits()]
    return Table("rates", ("rate", "GB/s", "computing, ms a step"), rows)


def statements_table() -> Table:
    """Return the statements as rows, each fit in a column."""
    rows = []
    for statement in STATEMENTS:
        found = [statement.under(each) for each in fits()]
        cells = [f"{each.predicted:.2f} ({each.ratio:.2f})" if each else "(fitted)" for each in found]
        rows.append((statement.text, f"{statement.paper:.2f}", *cells))
    return Table("statements", ("Ok-Topk", "paper", *(each.name for each in fits())), rows)


def figure_12_table() -> Table:
    """Return the predicted seconds of the messages of each algorithm, at the rate fitted to DenseOvlp."""
    link, ranks = fits()[1].link, (32, 64, 128, 256)
    rows = [
        (name, f"`{given['reducer']}`", *(milliseconds(messages(name, each, link)) for each in ranks))
        for name, given in ALGORITHMS.items()
    ]
    return Table("figure 12", ("algorithm", "reducer", *(f"ms on {each}" for each in ranks)), rows)


def fill_in() -> dict[str, Comparison]:
    """Return the densities of sums of independent, evenly spread selections."""
    return {
        f"{each['model']}, {each['ranks']} GPUs at {each['density']:.0%}": Comparison(
            each["found"], union(each["ranks"], each["density"], 1.0)
        )
        for each in OKTOPK.fill_in
    }
