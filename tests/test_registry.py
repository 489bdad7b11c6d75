"""Parts from outside the package: by entry point or import path, with the options of their signatures."""

import sys

import numpy as np
import pytest

from commlib import (
    CODECS,
    SELECTORS,
    InvalidArgument,
    Link,
    Network,
    Selector,
    SparseVector,
    Topology,
    UnknownName,
    bytes_sent,
    make_reducer,
    predict,
)
from commlib.reducers import REDUCERS, Reducer, reducer_options
from commlib.registry import REQUIRED, check_options, is_import_path, options_of, resolve
from commlib.transport import simulated
from commlib.tuning import tuner
from commlib.tuning.probe import WIRES, Candidate, Job, Profile
from commlib.wire.base import Fp32
from commlib.work import Speeds

REDUCER = '''
import numpy as np
from commlib.cost import Cost, by_link
from commlib.work import Work
from commlib.reducers import Outcome, Reducer
from commlib.reducers.allgather import AllGather

class Everything(Reducer):
    """All ranks exchange their gradients and add them up in rank order."""

    sparse = False

    def __init__(self, topology, size, *, factor=1.0):
        super().__init__(topology, size)
        self._factor = np.float32(factor)

    def _reduce(self, gradient, buffer):
        gathered = [np.empty(self.size, np.float32) for _ in range(self.topology.world.size)]
        self.topology.world.allgather(gradient, gathered)
        mean = buffer.dense()
        mean[...] = self._factor * sum(gathered) / np.float32(len(gathered))
        return Outcome(mean if self.synchronize_step(True) is not None else None)

def traffic(step, rank):
    right = (rank + 1) % step.ranks
    return by_link(step.nodes, rank, {right: 4 * step.size * (step.ranks - 1)})

def seconds(step):
    return step.on_slowest_link(step.world.ring(4 * step.size) + step.synchronize_step())

def work(step):
    return Work(add=step.size * step.options["factor"] * step.ranks)

class Priced(Everything):
    cost = Cost(traffic, seconds, work, is_exact=True)

class Choosy(Priced):
    def __init__(self, topology, size, *, factor):
        super().__init__(topology, size, factor=factor)

class Rare(AllGather):
    def __init__(self, topology, size, *, density=0.5, every=2, **options):
        super().__init__(topology, size, density=density, **options)

class Fixed(AllGather):
    def __init__(self, topology, size, *, every=2):
        super().__init__(topology, size, density=0.1)

class Unfinished(Reducer):
    sparse = False

class NoSize(AllGather):
    def __init__(self, topology):
        super().__init__(topology, 1)

class Nested:
    class Inner(Everything):
        pass

def build(topology, size):
    return Everything(topology, size)
'''


@pytest.fixture(autouse=True)
def package(tmp_path, monkeypatch):
    """Put the installed distribution ``toys`` on the path: modules, and entry points."""
    folder = tmp_path / "toys"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "reducers.py").write_text(REDUCER)
    (folder / "broken.py").write_text("raise RuntimeError('two\\nlines')")
    (folder / "lacking.py").write_text("import a_module_that_is_not_there")
    (folder / "leaving.py").write_text("import sys; sys.exit(3)")
    (folder / "misspelt.py").write_text("def = 3")
    for distribution, points in {
        "toys": [
            "everything = toys.reducers:Everything",
            "priced = toys.reducers:Priced",
            "choosy = toys.reducers:Choosy",
            "dense = toys.broken:X",
            "no_class = toys.reducers",
            "both = toys.reducers:Rare",
            "gone = toys.reducers:Gone",
        ],
        "others": ["both = toys.reducers:Fixed"],
    }.items():
        information = tmp_path / f"{distribution}-1.0.dist-info"
        information.mkdir()
        (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
        (information / "entry_points.txt").write_text("\n".join(["[cloudtrain.reducers]", *points]))
    monkeypatch.syspath_prepend(tmp_path)
    yield folder
    for module in [each for each in sys.modules if each.partition(".")[0] == "toys"]:
        del sys.modules[module]


@pytest.mark.parametrize("name", ["everything", "toys.reducers:Everything", "toys.reducers:Nested.Inner"])
def test_a_reducer_from_outside_is_made_with_its_options_and_reduces(name):
    def body(comm):
        reducer = make_reducer(name, Topology(comm), 2, factor=0.5)
        assert isinstance(reducer, Reducer)
        return reducer.reduce([comm.rank, 4.0]).tolist()

    assert simulated.run(body, 4) == [[0.75, 2.0]] * 4
    assert reducer_options(name) == {"factor": 1.0}


def test_options_are_those_of_the_constructors_that_get_them():
    assert reducer_options("toys.reducers:Rare") == reducer_options("allgather") | {
        "density": 0.5,
        "every": 2,
    }
    assert reducer_options("toys.reducers:Fixed") == {"every": 2}


LACKS = "(install it, or add its folder to PYTHONPATH)"
NO_SUCH_OPTION = "has no such option (its options:"


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("hitopkk", 'unknown reducer "hitopkk" (known: dense, torus2d, allgather, gtopk, '),
        ("everythin", 'did you mean "everything"?'),
        ("toys:", "; an import path is written package.module:Name"),
        ("toyz.reducers:Rare", f": there is no module toyz {LACKS}"),
        ("toys.reduce:Rare", f": there is no module toys.reduce {LACKS}"),
        ("toys.reducers:Rere", ': toys.reducers has no Rere, did you mean "Rare"?'),
        ("gone", ": toys.reducers has no Gone"),
        ("toys.reducers:Nested.Iner", ': toys.reducers.Nested has no Iner, did you mean "Inner"?'),
        ("toys.lacking:X", "raised ModuleNotFoundError: No module named 'a_module_that_is_not_there'"),
        ("toys.broken:X", r": importing toys.broken raised RuntimeError: two\nlines"),
        ("toys.leaving:X", ": importing toys.leaving raised SystemExit: 3"),
        ("toys.misspelt:X", "toys.misspelt raised SyntaxError: invalid syntax (misspelt.py, line 1)"),
        ("toys.reducers:build", ": expected a subclass of Reducer, got <function build at "),
        ("collections:Counter", ": expected a subclass of Reducer, got <class 'collections.Counter'>"),
        ("toys.reducers:Unfinished", ": Unfinished does not define _reduce"),
        ("both", "expected one installed package that provides it, got toys.reducers:Fixed, toys.reducers:R"),
        ("no_class", ": expected an entry point package.module:Name, got "),
        (
            "toys.reducers:Rare",
            f"evry: {{}} {NO_SUCH_OPTION} density, decay, hierarchical, selector, wire, every), d",
        ),
        ("toys.reducers:Fixed", f"evry: {{}} {NO_SUCH_OPTION} every)"),
        ("toys.reducers:NoSize", "got another signature: too many positional arguments"),
    ],
)
def test_what_cannot_be_made_is_one_line(name, line):
    options = {"evry": 1} if NO_SUCH_OPTION in line else {}

    def body(comm):
        with pytest.raises((InvalidArgument, UnknownName)) as caught:
            make_reducer(name, Topology(comm), 10, **options)
        return str(caught.value)

    (message,) = simulated.run(body, 1)
    assert (f'reducer "{name}"{line}' if line.startswith(": ") else line.replace("{}", str(name))) in message
    assert "\n" not in message


def test_whether_a_name_is_an_import_path_is_seen_without_importing():
    assert is_import_path("toys.broken:X")
    assert is_import_path("toys.broken:X.y")
    for other in ("hitopk", "toys.broken", "toys:", ":X", "a b:X", ".toys:X", "toys:X:Y", "s3://x", None, 3):
        assert not is_import_path(other)
    assert "toys.broken" not in sys.modules


def test_a_kind_without_a_base_class_takes_what_can_be_called():
    assert resolve({}, "model", "toys.reducers:build").__name__ == "build"
    with pytest.raises(InvalidArgument, match=r'^model "math:pi": expected a class or a function, got 3\.14'):
        resolve({}, "model", "math:pi")
    with pytest.raises(UnknownName, match=r'^unknown model "everything" \(known: \)$'):
        resolve({}, "model", "everything")  # the entry point is a reducer


def test_options_of_functions():
    def build(channels, classes, *, width=1, depth): ...

    def build_any(channels, **options): ...

    assert options_of(build, positional=2) == {"width": 1, "depth": REQUIRED}
    check_options("mine", build, {"depth": 3}, positional=2)
    check_options("mine", build_any, {"whatever": 3}, positional=1)
    with pytest.raises(InvalidArgument, match=r"^depth: mine needs this option, got none$"):
        check_options("mine", build, {"width": 3}, positional=2)
    with pytest.raises(InvalidArgument, match=r"^mine: expected one that takes 3 arguments"):
        check_options("mine", build, {"depth": 3}, positional=3)


# ------------------------------------------------------------- what a part from outside costs


NODES = [[0, 1], [2, 3]]
NETWORK = Network(Link(1e-6, 1e-10), Link(1e-5, 1e-9))
SPEEDS = Speeds(2e-9, 0, 0, 0, 0, 0, code=dict.fromkeys(WIRES, 0.0))


@pytest.mark.parametrize("name", ["priced", "toys.reducers:Priced"])
def test_what_a_reducer_declares_is_what_is_predicted_and_accounted(name):
    def step(comm):
        reducer = make_reducer(name, Topology(comm), 1000)
        start = comm.now()
        reducer.reduce(np.ones(1000))
        return reducer.last.traffic.sent, comm.now() - start

    sent, seconds = zip(*simulated.run(step, 4, 2, NETWORK), strict=True)
    assert list(sent) == [bytes_sent(name, NODES, rank, 1000) for rank in range(4)]
    found = predict(name, NODES, 1000, network=NETWORK, speeds=SPEEDS, factor=3.0)
    assert found.sent.inter == 4 * 1000 * 3
    assert found.inter == pytest.approx(max(seconds), rel=1e-9)
    assert found.computing == pytest.approx(2e-9 * 1000 * 3 * 4)


def test_a_reducer_that_declares_no_cost_cannot_be_predicted():
    with pytest.raises(InvalidArgument, match="^reducer: expected one that declares what it costs"):
        predict("everything", NODES, 1000)


def test_the_tuner_takes_what_declares_a_cost_and_names_what_it_leaves_out():
    profile = Profile(Job(("node0", "node1"), ("2 cores",), (2, 2)), NETWORK, SPEEDS)
    found = {each.reducer for each in tuner.candidates(NODES)}
    assert found == {*REDUCERS, "priced"}
    assert Candidate("priced") in tuner.expect(profile, tuner.Case(NODES, 1000, 0.01))
    reason = tuner.choose(profile, NODES, 1000, 0.01).reason
    assert "\n" not in reason
    _, _, left_out = reason.partition("; left out: ")
    for line in (
        "everything (it declares no cost)",
        "choosy (it needs factor)",
        'gone (reducer "gone": toys.reducers has no Gone)',
    ):
        assert line in left_out


class First(Selector):
    """The first entries, whatever their magnitudes."""

    def select(self, vector, k):
        k = min(k, len(vector))
        return SparseVector(len(vector), np.arange(k, dtype=np.int32), vector[:k].copy())


class Again(Fp32):
    """Values as they are."""


@pytest.mark.parametrize("selector", ["first", f"{__name__}:First"])
def test_a_selector_and_a_codec_of_one_class_and_one_line_each_are_used(monkeypatch, selector):
    monkeypatch.setitem(SELECTORS, "first", First)
    monkeypatch.setitem(CODECS, "again", Again)
    options = {"density": 0.3, "selector": selector, "wire": "gap+again"}

    def body(comm):
        reducer = make_reducer("allgather", Topology(comm), 10, **options)
        return reducer.reduce(np.arange(10) + comm.rank).tolist()

    assert simulated.run(body, 2) == [[0.5, 1.5, 2.5, 0, 0, 0, 0, 0, 0, 0]] * 2
    assert predict("allgather", NODES, 10, **options) == predict(
        "allgather", NODES, 10, density=0.3, wire="gap"
    )
