"""Parts from outside the package: by entry point or import path, with the options of their signatures."""

import sys

import pytest

import commlib
from commlib import InvalidArgument, Topology, UnknownName, make_reducer
from commlib.reducers import REDUCERS, Reducer, reducer_options
from commlib.registry import REQUIRED, check_options, is_import_path, options_of, resolve
from commlib.transport import simulated

REDUCER = '''
import numpy as np
from commlib.reducers import Outcome, Reducer
from commlib.reducers.allgather import AllGather

class Everything(Reducer):
    """All ranks exchange their gradients and add them up in rank order."""

    sparse = False

    def __init__(self, topology, size, *, factor=1.0):
        super().__init__(topology, size)
        self._factor = np.float32(factor)

    def _reduce(self, gradient):
        gathered = [np.empty(self.size, np.float32) for _ in range(self.topology.world.size)]
        self.topology.world.allgather(gradient, gathered)
        mean = self.step_mean.overwrite()
        mean[...] = self._factor * sum(gathered) / np.float32(len(gathered))
        return Outcome(mean if self.synchronize_step(True) is not None else None)

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


def test_a_name_of_the_table_is_never_an_entry_point():
    assert resolve(REDUCERS, "reducer", "dense") is REDUCERS["dense"]


def test_options_are_those_of_the_constructors_that_get_them():
    assert reducer_options("toys.reducers:Rare") == reducer_options("allgather") | {
        "density": 0.5,
        "every": 2,
    }
    assert reducer_options("toys.reducers:Fixed") == {"every": 2}


@pytest.mark.parametrize(
    ("name", "options", "line"),
    [
        ("hitopkk", {}, 'unknown reducer "hitopkk" (known: dense, torus2d, allgather, gtopk, '),
        ("everythin", {}, 'did you mean "everything"?'),
        ("toys:", {}, "; an import path is written package.module:Name"),
        ("toys.reducers.Rare", {}, "; an import path is written package.module:Name"),
        (
            "toyz.reducers:Rare",
            {},
            'reducer "toyz.reducers:Rare": there is no module toyz '
            "(install it, or add its folder to PYTHONPATH)",
        ),
        (
            "toys.reduce:Rare",
            {},
            'reducer "toys.reduce:Rare": there is no module toys.reduce '
            "(install it, or add its folder to PYTHONPATH)",
        ),
        (
            "toys.reducers:Rere",
            {},
            'reducer "toys.reducers:Rere": toys.reducers has no Rere, did you mean "Rare"?',
        ),
        ("gone", {}, 'reducer "gone": toys.reducers has no Gone'),
        (
            "toys.reducers:Nested.Iner",
            {},
            'reducer "toys.reducers:Nested.Iner": toys.reducers.Nested has no Iner, did you mean "Inner"?',
        ),
        (
            "toys.lacking:X",
            {},
            'reducer "toys.lacking:X": importing toys.lacking raised ModuleNotFoundError: '
            "No module named 'a_module_that_is_not_there'",
        ),
        (
            "toys.broken:X",
            {},
            r'reducer "toys.broken:X": importing toys.broken raised RuntimeError: two\nlines',
        ),
        ("toys.leaving:X", {}, 'reducer "toys.leaving:X": importing toys.leaving raised SystemExit: 3'),
        (
            "toys.misspelt:X",
            {},
            'reducer "toys.misspelt:X": importing toys.misspelt raised SyntaxError: '
            "invalid syntax (misspelt.py, line 1)",
        ),
        ("toys.reducers:build", {}, "expected a subclass of Reducer, got <function build at "),
        ("toys.reducers:np", {}, "expected a subclass of Reducer, got <module 'numpy'"),
        (
            "toys.reducers:Unfinished",
            {},
            'reducer "toys.reducers:Unfinished": Unfinished does not define _reduce',
        ),
        (
            "both",
            {},
            'reducer "both": expected one installed package that provides it, got toys.reducers:Fixed, '
            "toys.reducers:Rare",
        ),
        ("no_class", {}, 'reducer "no_class": expected an entry point package.module:Name, got '),
        (
            "toys.reducers:Rare",
            {"evry": 1},
            "evry: toys.reducers:Rare has no such option (its options: density, selector, wire, every), "
            'did you mean "every"?',
        ),
        (
            "toys.reducers:Fixed",
            {"density": 0.1},
            "toys.reducers:Fixed has no such option (its options: every)",
        ),
        (
            "toys.reducers:NoSize",
            {},
            "toys.reducers:NoSize: expected one that takes 2 arguments and its options, "
            "got another signature: too many positional arguments",
        ),
        ([], {}, 'unknown reducer "[]"'),
    ],
)
def test_what_cannot_be_made_is_one_line(name, options, line):
    def body(comm):
        with pytest.raises((InvalidArgument, UnknownName)) as caught:
            make_reducer(name, Topology(comm), 10, **options)
        return str(caught.value)

    (message,) = simulated.run(body, 1)
    assert line in message
    assert "\n" not in message


def test_what_the_import_raised_is_the_cause():
    with pytest.raises(InvalidArgument) as caught:
        resolve({}, "model", "toys.broken:X")
    assert isinstance(caught.value.__cause__, RuntimeError)


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


def test_a_name_of_the_table_needs_no_search_for_entry_points(monkeypatch):
    monkeypatch.setattr("commlib.registry.entry_points", lambda **_: pytest.fail("looked for entry points"))
    assert isinstance(
        simulated.run(lambda comm: commlib.make_reducer("dense", Topology(comm), 1), 1)[0], Reducer
    )
