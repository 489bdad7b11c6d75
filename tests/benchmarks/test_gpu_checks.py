"""What the checks that need a GPU say of ranks that cannot report."""

from benchmarks import gpu_checks


def test_ranks_that_die_without_a_word_are_a_failure(monkeypatch, tmp_path):
    (tmp_path / "cupy.py").write_text("import os; os._exit(3)")  # as a fault of the driver ends a process
    monkeypatch.syspath_prepend(tmp_path)
    found = gpu_checks.through_nccl(2, [1], limit=60.0)
    assert found == [("failed", {"error": "the ranks ended with the statuses [3, 3]"})]
