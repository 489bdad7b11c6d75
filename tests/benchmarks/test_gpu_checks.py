"""The checks that need a GPU, as far as they go without one."""

import threading

import numpy as np

from benchmarks import gpu_checks


def test_ranks_that_die_without_a_word_are_a_failure(monkeypatch, tmp_path):
    (tmp_path / "cupy.py").write_text("import os; os._exit(3)")  # as a fault of the driver ends a process
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "lo")
    found = gpu_checks.through_nccl(2, [1], limit=60.0)
    assert found == [("failed", {"error": "the ranks ended with the statuses [3, 3]"})]


def test_ranks_that_are_connected_by_pipes_see_the_bits_of_simulated_ones():
    """All that the ranks of NCCL do, in host memory: what travels is short enough for a pipe."""
    ranks, sizes, found = 3, (1, 500), {}
    pipes = gpu_checks.connected(ranks)
    threads = [
        threading.Thread(
            target=lambda rank: found.update(
                {rank: list(gpu_checks.check(gpu_checks.Pipes(pipes, rank, range(ranks)), sizes))}
            ),
            args=(rank,),
        )
        for rank in range(ranks)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = found[0]
    assert [what for what, _ in found] == ["reducer"] * 2 * len(sizes) * len(gpu_checks.CASES)
    for _, each in found:
        assert each["digests"] == gpu_checks.in_threads(each["case"], ranks, each["ranks_per_node"], np)
