"""What TensorFlow is told before a run."""

import pytest
import tensorflow as tf

from training.process import backend
from training.process.job import LocalRank

BOTH = ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")


@pytest.mark.parametrize(
    ("threads", "overlap", "given", "set_to"),
    [
        (3, False, (), {"intra": 3, "inter": 3}),
        (3, True, (), {"intra": 3, "inter": 3}),
        (1, False, (), {"intra": 1, "inter": 1}),
        (1, True, (), {"intra": 1, "inter": 2}),  # with one, buckets are submitted last
        (1, True, ("TF_NUM_INTEROP_THREADS",), {"intra": 1}),
        (3, True, BOTH, {}),
    ],
)
def test_cores_are_shared_where_the_environment_sets_no_threads(monkeypatch, threads, overlap, given, set_to):
    found = {}
    for kind in ("intra", "inter"):
        monkeypatch.setattr(
            tf.config.threading,
            f"set_{kind}_op_parallelism_threads",
            lambda threads, kind=kind: found.update({kind: threads}),
        )
    monkeypatch.setattr(LocalRank, "threads", threads)
    for name in BOTH:
        monkeypatch.setenv(name, "5")
        if name not in given:
            monkeypatch.delenv(name)
    backend._share_cores(LocalRank(0, 1), overlap=overlap)
    assert found == set_to
