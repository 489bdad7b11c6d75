"""The link of a node that is cut, for some seconds and for good."""

import json
import time

import pytest

from tests.faults.jobs import assert_same, failures, undisturbed, weights_of
from tests.faults.on_cluster import NODES, RATE, started_on
from tests.test_cluster import Cluster, skip_where_no_cluster_can_be_made, tail

STALL_SECONDS = 10
CUT_SECONDS = 5
# Enough epochs that accuracy is no matter of chance.
TRAINED = ("model=resnet8", "phases.0.epochs=10", "phases.1.epochs=10")

pytestmark = [pytest.mark.faults, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    skip_where_no_cluster_can_be_made()
    made = Cluster(tmp_path_factory.mktemp("cluster") / "state")
    result = made("up", "--nodes", str(len(NODES)), "--rate", RATE)
    assert result.returncode == 0, tail(result)
    yield made
    made("down")


def summary_of(folder):
    (run,) = (folder / "runs").iterdir()
    return json.loads((run / "summary.json").read_text())


def test_a_link_that_is_cut_for_seconds_holds_training_up_and_nothing_else(cluster, tmp_path):
    folder = tmp_path / "run"
    expected = undisturbed(tmp_path / "whole", 3)
    with started_on(cluster, folder, f"stall_timeout={6 * CUT_SECONDS}", ranks=3) as job:
        job.wait_until(lambda: job.steps > 30)
        job.cut("node2")
        time.sleep(1)  # for what is on its way
        steps = job.steps
        time.sleep(CUT_SECONDS - 1)
        assert job.steps - steps <= 1
        job.mend("node2")
        assert job.end() == 0, job.said
        assert failures(job.said) == []
        assert job.left == []
    assert_same(weights_of(folder), expected)


def test_a_daemon_of_mpirun_that_is_killed_ends_the_job_which_goes_on_from_its_checkpoints(cluster, tmp_path):
    folder = tmp_path / "run"
    expected = undisturbed(tmp_path / "whole", 3)
    with started_on(cluster, folder, ranks=3) as job:
        job.wait_until(lambda: job.steps > 30)
        daemon = job.rank(2).parent()
        assert daemon.name() == "prted"
        daemon.kill()
        assert job.end() == 0, job.said
        assert len(failures(job.said)) == 1
        assert [name for name in job.left if not name.startswith("prted.")] == []  # its own folder stays
    assert_same(weights_of(folder), expected)


def test_a_link_that_is_cut_for_good_ends_the_job_which_goes_on_with_the_other_nodes(
    cluster, tmp_path, record_property
):
    """To the accuracy of a run to which nothing happens, within a point."""
    folder, whole = tmp_path / "run", tmp_path / "whole"
    undisturbed(whole, 4, TRAINED)
    with started_on(cluster, folder, f"stall_timeout={STALL_SECONDS}", *TRAINED, ranks=4) as job:
        job.wait_until(lambda: job.steps > 30)
        job.cut("node3")
        begun = time.monotonic()
        job.wait_until(lambda: failures(job.said))
        record_property("seconds until the job had ended", round(time.monotonic() - begun, 1))
        assert job.end() == 0, job.said
        assert "with 3 ranks, without node3" in job.said
    found, expected = summary_of(folder), summary_of(whole)
    record_property("accuracies", [each["top1"] for each in (found, expected)])
    assert (found["ranks"], found["hosts"]) == (3, ["node1", "node2", "node4"])
    assert found["residual_norm"] == 0  # it has come to the end of the dense phase
    assert abs(found["top1"] - expected["top1"]) <= 0.01
