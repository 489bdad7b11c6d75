"""The cluster of network namespaces, and the reducers on it: over real ssh, at a real rate, on real cards."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.emulated.nodes import AUTOGROUP
from commlib import REDUCERS, transport
from commlib.tuning.probe import MESSAGE_BYTES, Profile
from tests import cluster_program
from tests.launching import DIGITS, ENVIRONMENT, ROOT, tail

NODES = ["node1", "node2", "node3", "node4"]
HOSTS = ",".join(f"{node}:2" for node in NODES)
TOOLS = ["ip", "tc", "ssh", "ssh-keygen", "sshd", "unshare", "nsenter", "mount"]
SYSTEM_PATH = f"{os.environ['PATH']}:/usr/local/sbin:/usr/sbin:/sbin"
GBIT_BYTES = 125_000_000  # a second
SEND = "import socket; socket.create_connection(('node3', 5001)).sendall(bytes(25_000_000))"
RECEIVE = """
import socket
server = socket.create_server(("", 5001))
print("ready", flush=True)
card, _ = server.accept()
print(sum(map(len, iter(lambda: card.recv(1 << 20), b""))))
"""

pytestmark = pytest.mark.cluster


class Cluster:
    """``benchmarks.emulated`` on a state folder of the tests: the developer's own cluster stays."""

    def __init__(self, state: Path) -> None:
        self.state = state

    def start(self, *words: str) -> "subprocess.Popen[str]":
        """Start the script in a session of its own, as a terminal does."""
        return subprocess.Popen(
            [sys.executable, "-m", "benchmarks.emulated", "--state", str(self.state), *words],
            env=ENVIRONMENT,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            # Ignored in the processes of a shell's background jobs, which this may be one of.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def __call__(self, *words: str) -> "subprocess.CompletedProcess[str]":
        with self.start(*words) as process:
            stdout, stderr = process.communicate()
        return subprocess.CompletedProcess(words, process.returncode, stdout, stderr)

    def run(self, *words: str) -> str:
        """Return what a command on node1 prints."""
        result = self("run", "--timeout", "250", "--", *words)
        assert result.returncode == 0, tail(result)
        return result.stdout

    def pid(self, name: str) -> int:
        """Return the first process of a node, or the switch, as the machine numbers it."""
        return int((self.state / f"{name}.pid").read_text())

    def processes(self) -> set[int]:
        """Return the processes that the cluster is made of: a word of each names its folder."""
        return {pid for pid, command in commands().items() if str(self.state) in command}


def commands() -> dict[int, str]:
    """Return the command line of every process of the machine that is not ours."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            found[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ")
        except OSError:  # it has just ended
            continue
    return {pid: command for pid, command in found.items() if pid != os.getpid()}


def wait_until(condition: Callable[[], bool]) -> None:
    while not condition():  # the test's own timeout bounds it
        time.sleep(0.01)


def machine() -> dict[str, object]:
    """Return what a cluster must not change: names, addresses, routes, mounts, what root's ssh keeps."""
    networks = Path("/run/netns")
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()  # other tests may run beside these
    ssh = Path("~root/.ssh").expanduser()
    return {
        "links": sorted(os.listdir("/sys/class/net")),
        "addresses": Path("/proc/net/fib_trie").read_text(),
        "routes": Path("/proc/net/route").read_text(),
        "networks": sorted(networks.iterdir()) if networks.exists() else [],
        "mounts": [line for line in mounts if "/pytest-of-" not in line or "/cluster" in line],
        "ssh": [(path, path.stat().st_mtime_ns) for path in sorted(ssh.glob("*"))] if ssh.exists() else None,
        "host name": os.uname().nodename,
        "run": sorted(name for name in os.listdir("/run") if name in ("sshd", "mount")),
    }


def skip_where_no_cluster_can_be_made():
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("needs root on Linux")
    if missing := [tool for tool in TOOLS if shutil.which(tool, path=SYSTEM_PATH) is None]:
        pytest.skip(f"needs {', '.join(missing)}: apt-get install iproute2 openssh-server openssh-client")


@pytest.fixture(scope="module")
def untouched():
    """What the machine is like without a cluster, if one can be made: where it cannot come up, tests fail."""
    skip_where_no_cluster_can_be_made()
    return machine()


@pytest.fixture(scope="module")
def made(untouched, tmp_path_factory):
    """A cluster that any test may change."""
    cluster = Cluster(tmp_path_factory.mktemp("cluster") / "state")
    yield cluster
    cluster("down")


@pytest.fixture
def cluster(made):
    """The same cluster with four nodes up, whatever the test before did to it."""
    result = made("up", "--nodes", "4", "--rate", "1gbit")
    assert result.returncode == 0, tail(result)
    return made


@pytest.fixture
def new(made):
    """A cluster that there is not yet."""
    new = Cluster(made.state.with_name("new"))
    yield new
    new("down")


@pytest.mark.launch
def test_mpirun_starts_ranks_that_give_way_to_each_other_on_all_nodes(cluster):
    # eight ranks share the machine's cores: polling ones made an all-reduce of 10 MB take 13 times as long
    words = ["mpirun", "-np", "4", "-H", ",".join(NODES), "sh", "-c"]
    printed = cluster.run(*words, "echo $(hostname) $OMPI_MCA_mpi_yield_when_idle")
    assert sorted(printed.split("\n")) == ["", *(f"{node} 1" for node in NODES)]


def shapers(printed: str) -> dict[str, dict]:
    """Return what tc says of each card that is shaped."""
    return {each["dev"]: each for each in json.loads(printed) if each["kind"] == "tbf"}


def test_both_ends_of_a_link_have_the_rate_and_all_bytes_pass_them(cluster, tmp_path):
    def of_node(*ssh: str) -> dict[str, dict]:
        return shapers(cluster.run(*ssh, "tc", "-json", "-s", "qdisc", "show"))

    def of_switch() -> dict[str, dict]:
        network = f"--net=/proc/{cluster.pid('switch')}/ns/net"
        words = ["nsenter", network, "tc", "-json", "-s", "qdisc", "show"]
        return shapers(subprocess.check_output(words, env=ENVIRONMENT | {"PATH": SYSTEM_PATH}, text=True))

    leaving, arriving = of_node()["eth0"]["bytes"], of_switch()["node3"]["bytes"]
    (tmp_path / "receive.py").write_text(RECEIVE)
    (tmp_path / "send.py").write_text(SEND)
    receive, send = (f"{sys.executable} {tmp_path}/{name}.py" for name in ("receive", "send"))
    received = cluster.run("sh", "-c", f"ssh node3 {receive} | (read ready; {send}; cat)")
    assert received == "25000000\n"
    # Headers come on top, 66 bytes for 1,448: 4.6 %. So do sessions of ssh, some kilobytes.
    assert 25e6 <= of_node()["eth0"]["bytes"] - leaving < 27e6
    assert 25e6 <= of_switch()["node3"]["bytes"] - arriving < 27e6
    assert {name: each["options"]["rate"] for name, each in of_switch().items()} == dict.fromkeys(
        NODES, GBIT_BYTES
    )
    for node in NODES:
        assert of_node("ssh", node)["eth0"]["options"]["rate"] == GBIT_BYTES


def test_a_node_that_died_is_shown_and_mended(cluster):
    os.kill(cluster.pid("node2"), signal.SIGKILL)
    wait_until(lambda: f"{cluster.state}/node2.log" not in " ".join(commands().values()))
    status = cluster("status")
    assert status.returncode == 1
    assert "node2   10.18.0.2     down: mend it" in status.stdout
    assert cluster("run", "hostname").returncode == 2
    result = cluster("up", "--nodes", "4", "--rate", "1gbit")
    assert "found node2 down: building it again" in result.stderr
    assert cluster.run("ssh", "node2", "hostname") == "node2\n"


@pytest.mark.parametrize(
    ("options", "end", "expected"),
    [(["--timeout", "8"], None, 124), ([], signal.SIGINT, 130), ([], signal.SIGTERM, 143)],
    ids=["timeout", "interrupt", "terminate"],
)
def test_a_run_that_is_ended_leaves_no_process_in_any_node(cluster, tmp_path, options, end, expected):
    # on every node a process that is no child of ssh's any more, and ignores what can be ignored
    seconds = f"1000{os.getpid()}"
    stay = f"setsid sh -c \\\"trap '' INT TERM HUP; touch {tmp_path}/\\$(hostname); sleep {seconds}\\\""
    script = f'for node in {" ".join(NODES)}; do ssh $node "{stay}" & done; wait'
    started = cluster.start("run", *options, "--", "sh", "-c", script)
    wait_until(lambda: sorted(path.name for path in tmp_path.iterdir()) == NODES)
    if end is not None:
        os.killpg(started.pid, end)
    started.communicate()
    assert started.returncode == expected
    assert not any(seconds in command for command in commands().values())


def test_a_second_run_is_refused_while_one_has_the_nodes(cluster, tmp_path):
    first = cluster.start("run", "--", "sh", "-c", f"touch {tmp_path}/begun; sleep 1000")
    wait_until((tmp_path / "begun").exists)
    for words in (["run", "hostname"], ["up", "--nodes", "3"]):
        result = cluster(*words)
        assert (result.returncode, result.stderr[:16]) == (2, "cluster: is busy")
    os.killpg(first.pid, signal.SIGTERM)
    first.communicate()
    assert first.returncode == 143


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["up", "--rate=fast"], "--rate: expected a rate of tc, such as 1gbit or 200mbit, got 'fast' (tc: "),
        (["up", "--nodes=255"], "--nodes: expected 1 to 254, got 255"),
        (["run", "--", "true"], "is not up: python -m benchmarks.emulated up"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_refused_in_one_line_and_leaves_nothing(new, words, message):
    result = new(*words)
    assert result.returncode == 2
    assert result.stderr.startswith(f"cluster: {message}")
    assert result.stderr.count("\n") == 1
    assert not new.state.exists()


@pytest.mark.parametrize("command", ["up", "down"])
def test_a_folder_of_somebody_else_is_refused_and_stays_as_it_is(made, tmp_path, command):
    (tmp_path / "thesis").write_text("draft")
    result = Cluster(tmp_path)(command)
    assert result.returncode == 2
    assert "--state: expected a folder of an emulated cluster or a new one" in result.stderr
    assert [path.read_text() for path in tmp_path.iterdir()] == ["draft"]


def test_down_leaves_nothing_even_twice(untouched, cluster):
    # the switch and four nodes, and before each of them the unshare that waits for it
    assert machine() == untouched
    assert len(cluster.processes()) == 10
    kept = cluster.state / "autogroup"  # there where this cluster has turned them off
    autogroups = kept.read_text() if kept.exists() else "0\n"
    assert not AUTOGROUP.exists() or AUTOGROUP.read_text() == "0\n"
    for said in ("is down", "was not up"):
        result = cluster("down")
        assert (result.returncode, result.stderr) == (0, f"cluster: {said}\n")
        assert not cluster.state.exists()
        assert cluster.processes() == set()
        assert machine() == untouched
        assert not AUTOGROUP.exists() or AUTOGROUP.read_text() == autogroups


@pytest.mark.launch
def test_reducers_under_horovodrun_equal_the_simulated_ones_and_send_what_is_accounted(cluster, tmp_path):
    results = tmp_path / "results.json"
    cluster.run(
        *("horovodrun", "--mpi", "--disable-cache", "-np", "8", "-H", HOSTS),
        "--binding-args=--bind-to none --map-by slot",
        *("env", f"PYTHONPATH={ROOT}", sys.executable, cluster_program.__file__, str(results)),
    )
    real = json.loads(results.read_text())
    assert [rank["host"] for rank in real] == sorted(NODES * 2)
    simulated = transport.simulated.run(lambda comm: cluster_program.reduce_all(comm, ranks_per_node=2), 8, 2)
    for name in REDUCERS:
        means = simulated[0][name]["means"]
        assert len(set(means)) == cluster_program.STEPS
        for rank, twin in zip(real, simulated, strict=True):
            assert rank["seen"][name]["means"] == twin[name]["means"] == means
            assert rank["seen"][name]["accounted"] == twin[name]["accounted"]
        for node in NODES:
            ranks = [rank["seen"][name] for rank in real if rank["host"] == node]
            accounted = sum(sum(rank["accounted"]) for rank in ranks)
            # 5 % for headers. On Ethernet they are 66 bytes for at most 1,448, 4.6 %; the card of a namespace
            # is handed up to 28 kB at a time and counts them once, 0.2 %. Then there are MPI's headers,
            # acknowledgements, and exchanges of a few integers that are no payload: log2(8) = 3 messages of
            # some 200 bytes a rank, about six times a step, 7 kB of the 240 kB that a node sends at least.
            assert accounted <= ranks[0]["card"] <= 1.05 * accounted + ranks[0]["again"], (name, node)


@pytest.mark.launch
def test_tune_measures_the_nodes_and_launch_trains_on_them_with_what_auto_picks(cluster, tmp_path):
    job, profile = ("-np", "4", "-H", "node1:2,node3:2"), tmp_path / "profile.json"
    told = cluster.run("cloudtrain", "tune", *job, DIGITS, "ranks_per_node=null", "--profile", str(profile))
    assert "between nodes" in told
    measured = Profile.load(profile)
    assert measured.job.hosts == ("node1", "node3")
    # What the shaper lets through: 1 Gbit/s at most, but for a burst; less where the processors are busy.
    link, sent = measured.network.inter, 2 * max(MESSAGE_BYTES)  # by the two ranks of a node
    assert link.alpha + sent * link.beta > 0.8 * 8e-9 * sent

    brief = ("phases.0.epochs=1", "phases.1.epochs=1", f"output={tmp_path}", f"profile={profile}")
    printed = cluster.run("cloudtrain", "launch", *job, DIGITS, "reducer=auto", "ranks_per_node=null", *brief)
    assert re.search(r"phase 1: auto picks \w+.*: [\d.]+ ms measured a step", printed)
    assert "4 ranks on 2 nodes" in printed
    assert "test accuracy" in printed


def test_a_delay_is_that_of_each_message_and_a_node_that_died_takes_no_other_with_it(new):
    result = new("up", "--nodes", "3", "--rate", "200mbit", "--delay", "30")
    assert result.returncode == 0, tail(result)
    assert result.stderr == "cluster: is up: 3 nodes at 200mbit, 30 ms\n"
    connect = "import socket, time; start = time.monotonic(); socket.create_connection(('node3', 22));"
    assert float(new.run(sys.executable, "-c", f"{connect} print(time.monotonic() - start)")) >= 0.06
    assert new.run("ssh", "node2", "hostname") == "node2\n"
    os.kill(new.pid("node3"), signal.SIGKILL)
    wait_until(lambda: f"{new.state}/node3.log" not in " ".join(commands().values()))
    states = [line.split()[2] for line in new("status").stdout.splitlines()]
    assert states == ["sshd", "sshd", "down:"]
