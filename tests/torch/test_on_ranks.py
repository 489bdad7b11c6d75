"""PyTorch on real ranks: the same tests under ``mpirun``, the examples, and the programs of the page."""

import re
import sys

import pytest

from tests.extent import more
from tests.launching import ROOT, mpirun, python_on_ranks, tail

pytest.importorskip("torch", reason="PyTorch is not installed here: scripts/install.sh frameworks")

PAGES = [(ROOT / "docs" / name).read_text() for name in ("from_pytorch.md", "local_steps.md")]
PROGRAMS = re.findall(r"```python\n(.*?)```", "".join(PAGES), re.DOTALL)
UNUSED = """
import torch, commlib
from torch.nn.parallel import DistributedDataParallel
from commlib.torch import init_process_group, register

topology = commlib.Topology(commlib.transport.mpi.world())
init_process_group(topology)
ddp = DistributedDataParallel(torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)]))
ddp.module.forward = lambda inputs, layers: sum(ddp.module[layer](inputs).sum() for layer in range(layers))
register(ddp, topology, {"name": "dense"})
for _ in range(2):
    ddp(torch.ones(2), 2 - topology.world.rank).backward()
"""


@pytest.mark.launch
@pytest.mark.parametrize("processes", [3, *more(2, 4)])
def test_the_same_tests_pass_on_real_ranks(processes):
    files = ("tests/torch/test_gradients.py", "tests/torch/test_local_steps.py")
    options = ("-q", "-x", "--color=no", "-p", "no:cacheprovider")
    result = mpirun(processes, sys.executable, "-m", "pytest", *options, *files)
    assert result.returncode == 0, tail(result)
    assert result.stdout.count(" passed") == processes, tail(result)
    assert " skipped" not in result.stdout


@pytest.mark.launch
def test_a_rank_that_uses_fewer_parameters_than_others_ends_the_job_and_names_them():
    result = python_on_ranks(2, UNUSED)
    assert result.returncode == 1
    assert (
        "InvalidArgument: gradients: the loss of rank 1 does not depend on 1.weight, 1.bias" in result.stderr
    )
    assert "find_unused_parameters=True" in result.stderr


@pytest.mark.launch
def test_the_example_of_digits_learns_them_with_sparse_gradients_and_more_with_dense_ones():
    result = mpirun(4, sys.executable, "examples/torch_digits.py")
    assert result.returncode == 0, tail(result)
    lines = re.findall(r"epoch \d: accuracy (\S+), (\S+) bytes between the nodes", result.stdout)
    accuracies = [float(accuracy) for accuracy, _ in lines]
    sent = [int(number.replace(",", "")) for _, number in lines]
    assert len(lines) == 6
    assert accuracies[3] > 0.8
    assert accuracies[5] > 0.93
    assert 0 < sent[0] < sent[5] / 20


@pytest.mark.launch
def test_the_example_of_letters_learns_and_keeps_what_it_holds_back():
    result = mpirun(2, sys.executable, "examples/torch_lstm.py")
    assert result.returncode == 0, tail(result)
    losses = [float(loss) for loss in re.findall(r"step \d+: loss (\S+),", result.stdout)]
    assert losses[-1] < losses[0]
    assert len(re.findall(r"rank \d: holds back [1-9]", result.stdout)) == 2


@pytest.mark.launch
def test_the_example_of_local_steps_ends_with_one_model_that_has_learned():
    result = mpirun(2, sys.executable, "examples/torch_diloco.py")
    assert result.returncode == 0, tail(result)
    first, second = re.findall(r"accuracy (\S+)", result.stdout)
    assert first == second
    assert float(first) > 0.9


@pytest.mark.launch
def test_the_programs_of_the_pages_run(tmp_path):
    through_checkpoint, local = (python_on_ranks(2, program, cwd=tmp_path) for program in PROGRAMS)
    assert through_checkpoint.returncode == 0, tail(through_checkpoint)
    losses = re.findall(r"loss (\S+), and from its checkpoint (\S+)", through_checkpoint.stdout)
    assert len(losses) == 2
    assert all(float(one) == float(other) < 2 for one, other in losses)
    assert local.returncode == 0, tail(local)
    weights = re.findall(r"weights (.*)", local.stdout)
    assert len(weights) == 2
    assert len(set(weights)) == 1
