"""A real cluster on one Linux machine: nodes with their own networks, ssh between them, links of a set rate.

    python -m benchmarks.emulated up --nodes 4 --rate 1gbit
    python -m benchmarks.emulated run -- cloudtrain launch -np 4 -H node1:1,node2:1,node3:1,node4:1 my.yaml
    python -m benchmarks.emulated status
    python -m benchmarks.emulated down

A node has its own network, host name, processes, sshd and /dev/shm; its other files are the machine's.
Nothing appears among the machine's names, addresses and routes, and no home is written to.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from benchmarks.emulated.nodes import NODE_PATH, PROGRAMS, SYSTEM_PATH, Cluster, Problem, alone, call

STATE = Path("/run/cloudtrain-cluster")
ADDRESSES = [f"10.18.0.{number}" for number in range(1, 255)]
PACKAGES = {
    **dict.fromkeys(["ip", "tc"], "iproute2"),
    **dict.fromkeys(["ssh", "ssh-keygen"], "openssh-client"),
    "sshd": "openssh-server",
    **dict.fromkeys(["unshare", "nsenter"], "util-linux"),
    "mount": "mount",
}
LONGEST_DELAY = 1000.0  # ms
FAILED, NOT_UP, TIMED_OUT = 2, 1, 124
INTERRUPT_SECONDS = 5.0


def up(cluster: Cluster, nodes: int, rate: str, delay: float = 0.0) -> int:
    """Make the cluster, or mend it, or report that it is up. ``delay``: of its links, in ms."""
    check_machine()
    if not 1 <= nodes <= len(ADDRESSES):
        raise Problem(f"--nodes: expected 1 to {len(ADDRESSES)}, got {nodes}")
    if not 0 <= delay <= LONGEST_DELAY:
        raise Problem(f"--delay: expected 0 to {LONGEST_DELAY:g} ms, got {delay:g}")
    addresses = {f"node{number}": address for number, address in enumerate(ADDRESSES[:nodes], start=1)}
    burst, bytes_per_second = burst_and_rate(rate)
    wanted = {
        "rate": rate,
        "burst_bytes": burst,
        "bytes_per_second": bytes_per_second,
        "delay_seconds": delay / 1e3,
        "path": NODE_PATH,
        "addresses": addresses,
    }
    links = rate + f", {delay:g} ms" * (delay > 0)
    with alone(cluster.state):
        fault = cluster.fault(wanted)
        if fault is None:
            print_note(f"is up already: {_counted(nodes)} at {links}")
            return 0
        with cluster.in_use():  # no run uses it
            if fault:
                print_note(f"{fault}: building it again")
            cluster.destroy()
        cluster.build(wanted)
    print_note(f"is up: {_counted(nodes)} at {links}")
    return 0


def run(cluster: Cluster, command: Sequence[str], timeout: float | None) -> int:
    """Run a command on node1 and return its status; when it ends, nothing it started is left in any node."""
    if not command:
        raise Problem("run: expected a command: python -m benchmarks.emulated run -- hostname")
    if timeout is not None and not timeout > 0:
        raise Problem(f"--timeout: expected seconds above 0, got {timeout:g}")
    check_machine()
    nodes = cluster.nodes()
    if not nodes or any(node.pid is None for node in nodes):
        raise Problem("is not up: python -m benchmarks.emulated up")
    with cluster.in_use():
        cluster.end_processes()  # of a run that was killed
        enter = f"nsenter --target={nodes[0].pid} --mount --uts --ipc --net --pid".split()
        there = ["sh", "-c", 'cd "$0" && exec "$@"', os.getcwd(), *command]
        process = subprocess.Popen([*enter, *there], env=_environment())
        try:
            status = _status_of(process, timeout)
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            cluster.end_processes()
            process.wait()
    if status == TIMED_OUT and timeout is not None:
        print_note(f"ended after {timeout:g} s: {' '.join(command)}")
    return status


def status(cluster: Cluster) -> int:
    nodes = cluster.nodes()
    if not any(node.pid for node in nodes):
        print_note("is down")
        return NOT_UP
    print_note(f"is up: {_counted(len(nodes))} at {cluster.settings['rate']}")
    for node in nodes:
        line = f"{node.name:8}{node.address:14}"
        if node.pid is None:
            print(f"{line}down: mend it with python -m benchmarks.emulated up")
            continue
        sent, received = node.card_bytes()
        sshd = "sshd listens" if node.listens else "sshd does not listen"
        print(f"{line}{sshd}   sent {sent:>15,} bytes   received {received:>15,} bytes")
    return 0 if all(node.listens for node in nodes) else NOT_UP


def down(cluster: Cluster) -> int:
    """Remove everything, also while a command runs."""
    with alone(cluster.state):
        was_there = cluster.state.exists()
        cluster.destroy()
    print_note("is down" if was_there else "was not up")
    return 0


def burst_and_rate(rate: str) -> tuple[int, int]:
    """Return the burst in bytes, 0.25 ms of the rate and some packets at least, and the rate in bytes/s.

    With a larger burst, small messages would exceed the rate; with a smaller one, late timers would hold up
    large ones. ``tc`` itself parses the rate, in a temporary namespace. If it accepts a rate that it cannot
    hold, such as ``-5mbit``, it shows a burst other than the one it was given.
    """
    wanted = 80_000
    shape = f'tc qdisc add dev lo root tbf burst {wanted} latency 50ms rate "$0"'
    result = call("unshare", "--net", "sh", "-c", f"{shape} && tc -json qdisc show dev lo", rate, check=False)
    shown = json.loads(result.stdout)[0]["options"] if result.returncode == 0 else {"burst": 0}
    if not 0.9 * wanted < shown["burst"] < 1.1 * wanted:
        reason = (result.stderr.splitlines() or ["it takes that for another rate"])[0]
        raise Problem(f"--rate: expected a rate of tc, such as 1gbit or 200mbit, got {rate!r} (tc: {reason})")
    return max(8_000, shown["rate"] // 4000), shown["rate"]


def check_machine() -> None:
    """Raise ``Problem`` where a cluster cannot be made here, with the way to mend it."""
    if sys.platform != "linux":
        raise Problem(f"needs Linux, found {sys.platform}")
    if missing := [tool for tool in PACKAGES if shutil.which(tool) is None]:
        packages = " ".join(dict.fromkeys(PACKAGES[tool] for tool in missing))
        raise Problem(f"needs {', '.join(missing)}: apt-get install {packages}")
    if os.geteuid() != 0:
        raise Problem("needs root, to make network namespaces: run it as root")
    result = call("unshare", "--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "true", check=False)
    if result.returncode != 0:
        raise Problem(f"cannot make namespaces ({result.stderr.strip()}): a container needs --privileged")


def print_note(text: str) -> None:
    print(f"cluster: {text}", file=sys.stderr, flush=True)


def _counted(nodes: int) -> str:
    return "1 node" if nodes == 1 else f"{nodes} nodes"


def _environment() -> dict[str, str]:
    # All nodes share the machine's cores: a rank that polls holds up the one it waits for.
    unless_given = {"OMPI_MCA_mpi_yield_when_idle": "1"}
    own = {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PATH": f"{PROGRAMS}:{os.environ['PATH']}",
        "TMPDIR": "/dev/shm",
    }
    return unless_given | dict(os.environ) | own


def _status_of(process: "subprocess.Popen[bytes]", timeout: float | None) -> int:
    try:
        code = process.wait(timeout)
    except subprocess.TimeoutExpired:
        return TIMED_OUT
    except KeyboardInterrupt:  # the terminal has interrupted the command as well
        with suppress(subprocess.TimeoutExpired):
            process.wait(INTERRUPT_SECONDS)
        return 128 + signal.SIGINT
    return code if code >= 0 else 128 - code


def exit_on_signal(number: int, frame: object) -> None:
    sys.exit(128 + number)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--state", type=Path, default=STATE, help=f"folder of the cluster (default {STATE})")
    commands = parser.add_subparsers(dest="action", required=True)
    making = commands.add_parser("up", help="make it, or mend it")
    making.add_argument("--nodes", type=int, default=4)
    making.add_argument("--rate", default="1gbit", help="of each link, as tc writes it (default 1gbit)")
    making.add_argument("--delay", type=float, default=0.0, help="of each link, in ms (default 0)")
    running = commands.add_parser("run", help="run a command on node1; when it ends, all it started ends")
    running.add_argument("--timeout", type=float, metavar="SECONDS")
    running.add_argument("command", nargs=argparse.REMAINDER)
    commands.add_parser("status", help="print nodes, addresses, rate and bytes sent")
    commands.add_parser("down", help="remove everything")
    return parser


def main(arguments: Sequence[str]) -> int:
    given = _parser().parse_args(arguments)
    cluster = Cluster(given.state.absolute())
    os.environ["PATH"] = f"{os.environ.get('PATH', '')}:{SYSTEM_PATH}"  # cron and others may leave out sbin
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, exit_on_signal)
    try:
        if given.action == "up":
            return up(cluster, given.nodes, given.rate, given.delay)
        if given.action == "run":
            return run(cluster, given.command[given.command[:1] == ["--"] :], given.timeout)
        return {"status": status, "down": down}[given.action](cluster)
    except Problem as problem:
        print_note(str(problem))
        return FAILED
    except PermissionError as error:
        print_note(f"{error.filename}: {error.strerror}: run it as root")
        return FAILED
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
