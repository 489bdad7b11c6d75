"""Training with buckets that are reduced in the background: weights as in plain training, to the bit."""

import pytest

from commlib.transport import simulated
from tests.extent import more
from tests.gpu.test_training import LARS, STEPS, config_of, learned, two_layers
from tests.training.replicas import replica_of
from training.datasets import make_dataset
from training.models import MODELS

BUCKETS = "bucket_mib=0.0005"  # 131 entries of the 586: kernels of 320 and 200, and what lies beside them
SPOILT = (1, 2 * STEPS - 1)  # the rank, and the last step of the second phase
CASES = {
    "lars, clipped, average, oktopk": ((LARS, "clip_norm=0.01", "average=0.9"), ("oktopk", "hitopk")),
    "scaled": (("precision=float16",), ("hitopk", "dense")),
}
MORE = {
    "plain": ((), ("hitopk", "dense")),
    "lamb": (("optimizer={name: lamb, norms: local}",), ("hioktopk", "torus2d")),
    "updated in parts": (("optimizer={name: adamw, sharded: true}",), ("dense", "hitopk")),
}


@pytest.fixture(autouse=True)
def _small_model(monkeypatch):
    monkeypatch.setitem(MODELS, "two_layers", two_layers)


def trained(*words, reducers):
    dataset, config = make_dataset("digits"), config_of(*words, reducers=reducers)
    return simulated.run(lambda comm: learned(comm, config, dataset, SPOILT), 3)


@pytest.mark.parametrize("name", [*CASES, *more(*MORE)])
def test_overlap_changes_no_bit_of_the_weights_the_reports_and_the_residuals(name):
    """Also in a step in which one bucket of one rank is not finite, and which changes no weight."""
    words, reducers = (CASES | MORE)[name]
    overlapped = trained(BUCKETS, *words, reducers=reducers)
    assert overlapped == trained(BUCKETS, "overlap=false", *words, reducers=reducers)
    for (*_, (was_finite, *_), (finite, *_), _), _ in overlapped:
        assert (was_finite, finite) == (True, False)


def test_with_a_gradient_in_parts_the_buckets_are_reduced_after_the_last_one():
    def overlaps(comm, *words):
        return replica_of(comm, config_of(BUCKETS, *words), 2).gradients.overlaps

    assert simulated.run(overlaps, 2) == [True] * 2
    assert simulated.run(lambda comm: overlaps(comm, "accumulate=2"), 2) == [False] * 2
