"""The ranks of a job, the hosts on which they run, and the network between the hosts.

``python -I hosts.py`` prints the network interfaces of the machine that runs it, as JSON.
"""

import json
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import psutil

HOSTS = re.compile(r"[\w.-]+:[1-9]\d*(,[\w.-]+:[1-9]\d*)*")
LOOPBACK = "lo"
SSH = (
    *("ssh", "-o", "PasswordAuthentication=no", "-o", "StrictHostKeyChecking=no"),
    *("-o", "ConnectTimeout=10", "-o", "ConnectionAttempts=5"),
)


@dataclass(frozen=True)
class Ranks:
    """The ranks to start: ``count`` on ``hosts``, as host:slots,…, connected by a network interface."""

    count: int
    hosts: str | None = None
    interface: str | None = None

    @property
    def slots(self) -> dict[str, int]:
        """The slots of each host, in order; none without hosts."""
        found: dict[str, int] = {}
        for entry in self.hosts.split(",") if self.hosts else ():
            host, _, slots = entry.rpartition(":")
            found[host] = found.get(host, 0) + int(slots)
        return found

    def host_of(self, rank: int) -> str | None:
        """Return the host of a rank; ranks fill the hosts in order. ``None`` without hosts or such a rank.

        >>> [Ranks(3, "a:2,b:2").host_of(rank) for rank in range(5)]
        ['a', 'a', 'b', 'b', None]
        """
        for host, slots in self.slots.items():
            if rank < slots:
                return host
            rank -= slots
        return None

    def without(self, hosts: Collection[str]) -> "Ranks | None":
        """Return the ranks without some hosts, fewer where slots are missing; ``None`` if no host is left.

        >>> Ranks(4, "a:2,b:2,c:1").without({"b"})
        Ranks(count=3, hosts='a:2,c:1', interface=None)
        >>> Ranks(2, "a:2").without({"a"})
        """
        if not hosts:
            return self
        left = {host: slots for host, slots in self.slots.items() if host not in hosts}
        if not left:
            return None
        entries = ",".join(f"{host}:{slots}" for host, slots in left.items())
        return replace(self, count=min(self.count, sum(left.values())), hosts=entries)

    def check(self) -> None:
        """Raise ``ValueError`` where ``hosts`` is no list of host:slots, or has fewer slots than ranks."""
        if self.hosts is None:
            return
        if not HOSTS.fullmatch(self.hosts):
            raise ValueError(f"-H: expected host:slots,host:slots,…, got {self.hosts!r}")
        if (slots := sum(self.slots.values())) < self.count:
            raise ValueError(f"-H: expected slots for {self.count} ranks, got {slots} in {self.hosts}")


class HostUnreachable(Exception):
    """Hosts that ssh does not reach, a line each."""


def connecting_interfaces(ranks: Ranks) -> str | None:
    """Return the interfaces that connect the hosts, joined by commas; ``None`` where they are not known.

    They are the given one; else loopback, on one machine; else those that all hosts have, with different
    addresses (a container bridge has the same on all). Raises :class:`HostUnreachable`.
    """
    remote = [host for host in ranks.slots if not _is_this_machine(host)]
    if not remote:
        return ranks.interface or LOOPBACK
    found = _ask(remote)
    if len(remote) < len(ranks.slots):
        found.append(interfaces())
    return ranks.interface or common(found)


def common(of_hosts: Sequence[Mapping[str, str]]) -> str | None:
    """Return the interfaces that all hosts have with different addresses, joined by commas."""
    names = sorted(set.intersection(*(set(each) for each in of_hosts)))
    connected = [name for name in names if len({each[name] for each in of_hosts}) == len(of_hosts)]
    return ",".join(connected) if len(of_hosts) > 1 and connected else None


def _ask(hosts: Sequence[str]) -> list[dict[str, str]]:
    """Return the interfaces of other hosts, which are asked over ssh at the same time."""
    question = shlex.join([sys.executable, "-I", __file__])
    asked = [
        subprocess.Popen(
            [*SSH, host, question],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        for host in hosts
    ]
    found, problems = list[dict[str, str]](), list[str]()
    try:
        for host, process in zip(hosts, asked, strict=True):
            answer, errors = process.communicate()
            if process.returncode == 0:
                found.append(json.loads(answer.splitlines()[-1]))  # after what its shell may print
            else:
                problems.append(f"ssh not successful for host {host}: {' '.join(errors.split())}")
    finally:
        for process in asked:
            process.kill()
    if problems:
        raise HostUnreachable("\n".join(problems))
    return found


def _is_this_machine(host: str) -> bool:
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind((socket.gethostbyname(host), 0))  # possible for an own address only
    except (OSError, UnicodeError):  # the latter for what cannot be a name, such as a..b
        return False
    return True


def interfaces() -> dict[str, str]:
    """Return the IPv4 address of each network interface of this machine."""
    return {
        name: each.address
        for name, addresses in psutil.net_if_addrs().items()
        for each in addresses
        if each.family == socket.AF_INET
    }


if __name__ == "__main__":
    print(json.dumps(interfaces()))
