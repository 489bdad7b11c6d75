"""What TensorFlow is told before a run."""

import sys

import pytest
import tensorflow as tf

from tests.launching import run
from training.process import devices
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
    devices._share_cores(LocalRank(0, 1), overlap=overlap)
    assert found == set_to


def test_the_import_leaves_out_packages_that_keras_would_take_along_and_they_can_be_imported_later():
    """That costs each rank more than a second, at each start."""
    program = (
        "import gc, sys\n"
        "from training.process.tf_logging import OPTIONAL, import_tensorflow\n"
        "import_tensorflow()\n"
        "assert {'keras', 'tensorflow'} <= sys.modules.keys()\n"
        "print([name for name in OPTIONAL if name in sys.modules], gc.isenabled())\n"
        "import scipy.sparse, sklearn, pandas\n"
    )
    done = run(sys.executable, "-c", program)
    assert (done.returncode, done.stdout.strip()) == (0, "[] True"), done.stderr
