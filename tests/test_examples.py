"""The programs of examples/ learn on real ranks; tests/torch and tests/jax run those of PyTorch and JAX."""

import re
import sys

import pytest

from tests.launching import ROOT, mpirun, tail

README = (ROOT / "README.md").read_text()


def printed(name, ranks, pattern):
    """Run an example, and return what each rank printed."""
    result = mpirun(ranks, sys.executable, f"examples/{name}.py")
    assert result.returncode == 0, tail(result)
    found = re.findall(pattern, result.stdout, re.DOTALL)
    assert len(found) == ranks
    return found


def test_the_lines_that_the_readme_shows_are_those_of_the_examples():
    section = README.split("## In a program of your own")[1]
    shown = re.findall(r"\(examples/(\w+\.py)\).*?```python\n(.*?)```", section, re.DOTALL)
    assert len(shown) == 4
    for name, block in shown:
        text = (ROOT / "examples" / name).read_text()
        assert all(line.strip() in text for line in block.splitlines() if line.strip() != "…")


@pytest.mark.launch
@pytest.mark.parametrize(("name", "processes"), [("numpy_alone", 4), ("own_reducer", 2)])
def test_least_squares_come_to_the_solution(name, processes):
    assert max(map(float, printed(name, processes, r"rank \d: error (\S+?),?\s"))) < 0.02  # 1 at the start


@pytest.mark.slow
@pytest.mark.launch
def test_a_loop_in_tensorflow_learns():
    assert max(map(float, printed("tensorflow_loop", 2, r"rank \d: loss (\S+)"))) < 0.1  # 8 at the start


@pytest.mark.slow
@pytest.mark.launch
def test_fit_learns_and_ranks_end_with_the_same_weights():
    ranks = printed("keras_mnist", 2, r"accuracy (\S+), bias (\[.*?\])")
    assert ranks[0] == ranks[1]
    assert float(ranks[0][0]) > 0.9
