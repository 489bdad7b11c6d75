"""Runs of one rank on each node of an emulated cluster, whose links can be cut and throttled."""

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.faults.jobs import WORDS, Job
from tests.launching import ENVIRONMENT
from tests.test_cluster import SYSTEM_PATH, Cluster

NODES = ("node1", "node2", "node3", "node4")
RATE = "1gbit"
# TensorFlow adds up in another order with other threads, of which a rank alone on its host would have more.
ONE_THREAD = ("env", "TF_NUM_INTRAOP_THREADS=1")
# The launch, and then what is left of it on any node: processes, and files in the memory of the node.
LOOK = """
"$@"
status=$?
sleep 3
for node in {nodes}; do
    ssh -o ConnectTimeout=5 $node 'ps -eo args= | grep "bin/[c]loudtrain\\|[p]rted"; ls /dev/shm'
done >{left} 2>&1
exit $status
"""


class ClusterJob(Job):
    """A launch on node1, of ranks on all nodes."""

    def __init__(self, process: "subprocess.Popen[str]", folder: Path, cluster: Cluster) -> None:
        super().__init__(process, folder)
        self.cluster = cluster

    def _processes(self, word: str) -> Iterator[psutil.Process]:
        for each in psutil.process_iter():
            try:
                words = each.cmdline()
                if word in words and any(str(self.folder) in each for each in words):
                    yield each
            except psutil.Error:
                continue

    def _ranks(self, number: int) -> Iterator[psutil.Process]:
        for each in self._processes("train"):
            try:
                if each.environ().get("OMPI_COMM_WORLD_RANK") == str(number) and each.name() != "ssh":
                    yield each
            except psutil.Error:
                continue

    def terminate(self) -> None:
        next(each for each in self._processes("launch") if "cloudtrain" in each.cmdline()[1]).terminate()

    def _at_the_switch(self, *words: str) -> None:
        network = f"--net=/proc/{self.cluster.pid('switch')}/ns/net"
        path = ENVIRONMENT | {"PATH": SYSTEM_PATH}
        subprocess.run(["nsenter", network, *words], env=path, check=True)

    def cut(self, node: str) -> None:
        self._at_the_switch("ip", "link", "set", node, "down")

    def mend(self, node: str) -> None:
        self._at_the_switch("ip", "link", "set", node, "up")

    def throttle(self, node: str, rate: str = RATE) -> None:
        shape = f"root tbf rate {rate} burst 256kb latency 50ms".split()
        self._at_the_switch("tc", "qdisc", "replace", "dev", node, *shape)

    @property
    def left(self) -> list[str]:
        """What was left on the nodes when the launch had ended, but for what killed TensorFlows leave."""
        lines = (self.folder / "left").read_text().splitlines()
        return [line for line in lines if not line.startswith("__autograph_generated_file")]


@contextmanager
def started_on(
    cluster: Cluster, folder: Path, *words: str, ranks: int, launch: Sequence[str] = ("--restarts", "5")
) -> Iterator[ClusterJob]:
    """Launch a run on the first nodes of a cluster, with these options; nothing of it is left afterwards."""
    folder.mkdir(exist_ok=True)
    nodes = NODES[:ranks]
    look = LOOK.format(nodes=" ".join(nodes), left=folder / "left")
    options = ("-np", str(ranks), "-H", ",".join(f"{node}:1" for node in nodes), *launch)
    command = (
        *("run", "--", *ONE_THREAD, "bash", "-c", look, "bash", "cloudtrain", "launch", *options),
        *(*WORDS, f"output={folder}/runs", *words),
    )
    with (folder / "errors").open("a") as errors, (folder / "output").open("a") as output:
        process = cluster.start(*command, stdout=output, stderr=errors)
    job = ClusterJob(process, folder, cluster)
    try:
        yield job
    finally:
        for node in nodes:
            job.mend(node)
        if process.poll() is None:
            os.killpg(process.pid, 15)
        process.wait()
