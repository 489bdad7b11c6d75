"""The ranks of a job, and the hosts on which they are."""

import re
from collections.abc import Collection
from dataclasses import dataclass, replace

HOSTS = re.compile(r"[\w.-]+:[1-9]\d*(,[\w.-]+:[1-9]\d*)*")


@dataclass(frozen=True)
class Ranks:
    """The ranks to start: ``count`` on ``hosts``, as host:slots,…, connected by a network interface."""

    count: int
    hosts: str | None = None
    interface: str | None = None

    def host_of(self, rank: int) -> str | None:
        """Return the host of a rank, which are filled in order; ``None`` where it has none, or all share one.

        >>> [Ranks(3, "a:2,b:2").host_of(rank) for rank in range(5)]
        ['a', 'a', 'b', 'b', None]
        """
        for host, slots in _slots(self.hosts).items():
            if rank < slots:
                return host
            rank -= slots
        return None

    def without(self, hosts: Collection[str]) -> "Ranks | None":
        """Return the ranks without those hosts, fewer where slots are missing; ``None`` if no host is left.

        >>> Ranks(4, "a:2,b:2,c:1").without({"b"})
        Ranks(count=3, hosts='a:2,c:1', interface=None)
        >>> Ranks(2, "a:2").without({"a"})
        """
        if not hosts:
            return self
        left = {host: slots for host, slots in _slots(self.hosts).items() if host not in hosts}
        if not left:
            return None
        entries = ",".join(f"{host}:{slots}" for host, slots in left.items())
        return replace(self, count=min(self.count, sum(left.values())), hosts=entries)


def check_hosts(hosts: str, ranks: int) -> None:
    """Raise ``ValueError`` where ``hosts`` is no list of host:slots, or has fewer slots than ranks."""
    if not HOSTS.fullmatch(hosts):
        raise ValueError(f"-H: expected host:slots,host:slots,…, got {hosts!r}")
    slots = sum(int(entry.rpartition(":")[2]) for entry in hosts.split(","))
    if slots < ranks:
        raise ValueError(f"-H: expected slots for {ranks} ranks, got {slots} in {hosts}")


def _slots(hosts: str | None) -> dict[str, int]:
    """Return the slots by host, in order."""
    found: dict[str, int] = {}
    for entry in hosts.split(",") if hosts else ():
        host, _, slots = entry.rpartition(":")
        found[host] = found.get(host, 0) + int(slots)
    return found
