"""What the README claims of speed, as a table of the newest records: python -m benchmarks.draw_benchmarks."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import convergence, local_steps
from benchmarks.drawing.pages import Results
from benchmarks.drawing.tables import markdown, rate_in_words
from benchmarks.race import A_STEP, TO_ACCURACY
from training.bench.record import Record

ROOT = Path(__file__).resolve().parent.parent
OLDER = " †"  # the code that was measured has changed since
STEP, ACCURACY = {"unit": A_STEP}, {"unit": TO_ACCURACY}
STEP_OF_MLP, MLP_TO_91 = "a step of an MLP of 10 M weights", "that MLP to 91 % test accuracy"
LSTM = "an LSTM of 0.9 M weights to the loss of dense after 3/4 of its steps"
RING, BARE = ("horovod, ring", "Horovod, MPI's ring"), ("horovod", "Horovod out of the box")
TORUS, GLOO = ("torus2d", "`torus2d`, the fastest dense one"), ("ddp over gloo", "PyTorch's DDP over Gloo")
POWERSGD = ("ddp, PowerSGD hook of rank 4", "DDP with its PowerSGD hook")


@dataclass(frozen=True)
class Claim:
    """A subject beside a peer of the same records and case; ``peer``: its name there, and as it is shown."""

    what: str
    kind: str
    case: dict[str, Any]
    subject: str
    peer: tuple[str, str]

    def row(self, results: Results) -> list[str]:
        own, other = self._record(results, self.subject), self._record(results, self.peer[0])
        assert own.more.get("reached") == own.more.get("seeds"), "a run that has not arrived has no time"
        cells = _cells(self.subject, own.seconds.median, self.peer[1], other.seconds.median)
        link = results.path.relative_to(ROOT)
        cores = f"[{own.more['machine']['cores']}]({link})" + OLDER * (not results.is_current)
        return [self.what, _links(own.case), *cells, cores]

    def _record(self, results: Results, subject: str) -> Record:
        own = (each for each in results.records if each.subject == subject)
        (found,) = (each for each in own if self.case.items() <= each.case.items())
        return found


CLAIMS = (
    Claim(STEP_OF_MLP, "race", STEP, "hitopk", RING),
    Claim(MLP_TO_91, "race", ACCURACY, "hitopk", RING),
    Claim(MLP_TO_91, "race", ACCURACY, "oktopk", RING),
    Claim(STEP_OF_MLP, "race-all", STEP, "hitopk", TORUS),
    Claim(STEP_OF_MLP, "race-all", STEP, "hitopk", BARE),
    Claim("a step in PyTorch, 10 M weights", "torch-ddp", {"network": "wide"}, "hitopk, gap+fp16", GLOO),
    Claim("a step in PyTorch, 10 M weights", "torch-ddp", {"network": "wide"}, "hitopk, gap+fp16", POWERSGD),
)


def _links(case: dict[str, Any]) -> str:
    nodes = case["ranks_of_nodes"]
    return f"{rate_in_words(case['rate'])}, {len(nodes)} × {nodes[0]}"


def _cells(subject: str, seconds: float, peer: str, beside: float) -> list[str]:
    names = (f"`{part}`" if part.islower() and " " not in part else part for part in subject.split(", "))
    return [", ".join(names), _seconds(seconds), peer, _seconds(beside), f"{beside / seconds:.1f}"]


def _seconds(value: float) -> str:
    return f"{float(f'{value:.3g}'):,g} s"


def _local_steps() -> Iterator[list[str]]:
    runs, records = local_steps.Runs.of(local_steps.plan()), convergence.recorded(local_steps.TIMES)
    dense, subject = runs.content["times"]["dense"], "MuLoCo, 2 bits, H = 30"
    for rate in ("50mbit", "10mbit"):
        own = local_steps.on_cluster(records, rate, "4x1")
        seconds = local_steps.seconds_to(runs.target, runs, own)
        fastest = min((name for name in dense if name in seconds), key=seconds.__getitem__)
        cells = _cells(subject, seconds[subject], f"`{fastest}`, the fastest dense one", seconds[fastest])
        cores = f"[{own[subject]['machine']['cores']}](docs/local_steps.md#time-to-the-same-loss){OLDER}"
        yield [LSTM, _links({"rate": rate, "ranks_of_nodes": [1] * 4}), *cells, cores]


def table(found: dict[str, Results]) -> str:
    rows = [claim.row(found[claim.kind]) for claim in CLAIMS]
    header = ["what", "links, nodes × ranks", "here", "", "beside", "", "×", "cores"]
    return markdown(header, [*rows, *_local_steps()])
