"""What TensorFlow is told before a run."""

import pytest
import tensorflow as tf

from training.process import backend
from training.process.job import LocalRank


@pytest.mark.parametrize(
    ("said", "set_to"),
    [
        ((), {"intra": 3, "inter": 3}),
        (("TF_NUM_INTEROP_THREADS",), {"intra": 3}),
        (("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"), {}),
    ],
    ids=["nothing", "one", "both"],
)
def test_threads_are_shared_where_nobody_has_said_how_many(monkeypatch, said, set_to):
    found = {}
    for kind in ("intra", "inter"):
        monkeypatch.setattr(
            tf.config.threading,
            f"set_{kind}_op_parallelism_threads",
            lambda threads, kind=kind: found.update({kind: threads}),
        )
    monkeypatch.setattr(LocalRank, "threads", 3)
    for name in ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"):
        monkeypatch.setenv(name, "5")
        if name not in said:
            monkeypatch.delenv(name)
    backend._share_cores(LocalRank(0, 1))
    assert found == set_to
