"""What runs inside the namespaces, the switch and below it the nodes: ``inside.py STATE switch|nodeN``."""

import fcntl
import heapq
import json
import os
import pwd
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from itertools import count
from pathlib import Path
from typing import Any

TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000  # of linux/if_tun.h
QUEUE_SECONDS = 0.05  # of a link; what does not fit is dropped
DELAYED_FRAME = 32_000  # bytes: the switch handles one frame after the other


def switch(state: Path, settings: dict[str, Any]) -> None:
    """Be the bridge between the nodes, and the first process of the namespace that theirs are below.

    Where links have a delay, it passes frames on itself: few kernels have the queue (netem) that would.
    """
    names = list(settings["addresses"])
    cards = [tap(name) for name in names] if settings["delay_seconds"] else []
    # /proc is still the machine's, and so is the number in it.
    (state / "switch.pid").write_text(os.readlink("/proc/self"))
    if not cards:
        call("ip", "link", "add", "switch", "type", "bridge")
        call("ip", "link", "set", "switch", "addrgenmode", "none", "up")
    unshare = ["unshare", "--net", "--uts", "--ipc", "--mount", "--pid", "--fork"]
    for name in names:
        with (state / f"{name}.log").open("w") as log:
            # The lock, which is stdin, stays here.
            subprocess.Popen(
                [*unshare, sys.executable, __file__, str(state), name], stdin=subprocess.DEVNULL, stderr=log
            )
    if cards:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a node that ends
        forward(cards, settings["delay_seconds"], settings["bytes_per_second"])
    while True:
        os.wait()


def tap(name: str) -> int:
    """Return the end of a new network card whose frames this process reads and writes."""
    card = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(card, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TAP | IFF_NO_PI))
    return card


def forward(cards: list[int], delay: float, bytes_per_second: float) -> None:
    """Pass frames on to their cards, ``delay`` seconds later and at the rate of the card's link."""
    waiting: list[tuple[float, int, int, bytes]] = []  # when, in which order, to which card, what
    order, card_of = count(), dict[bytes, int]()
    free = dict.fromkeys(cards, 0.0)
    while True:
        patience = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        readable, _, _ = select.select(cards, [], [], patience)
        now = time.monotonic()
        for card in readable:
            try:
                frame = os.read(card, 1 << 17)
            except OSError:  # of a node that is down
                cards.remove(card)
                continue
            card_of[frame[6:12]] = card
            known = card_of.get(frame[:6])
            for to in cards if known is None else [known]:  # to all: a question for an address
                begin = max(now + delay, free[to])
                if to != card and begin - now - delay <= QUEUE_SECONDS:
                    free[to] = begin + len(frame) / bytes_per_second
                    heapq.heappush(waiting, (free[to], next(order), to, frame))
        while waiting and waiting[0][0] <= now:
            _, _, to, frame = heapq.heappop(waiting)
            try:
                os.write(to, frame)
            except OSError:  # of a node that is down
                continue


def node(state: Path, name: str, settings: dict[str, Any]) -> None:
    """Become a node: a name, a link to the switch, own mounts, and sshd as the first process."""
    (state / f"{name}.pid").write_text(os.readlink("/proc/self"))
    socket.sethostname(name)
    connect(name, settings, f"/proc/{(state / 'switch.pid').read_text()}/ns/net")
    mount_own(state)
    sshd = str(shutil.which("sshd"))
    os.execv(sshd, [sshd, "-D", "-f", "/etc/ssh/sshd_config", "-E", f"{state}/{name}.log"])


def connect(name: str, settings: dict[str, Any], switch_network: str) -> None:
    """Make the link to the switch, shaped at both ends: what leaves the node, and what arrives."""
    burst = settings["burst_bytes"]
    at_switch = ["nsenter", f"--net={switch_network}"]
    if settings["delay_seconds"]:
        burst = max(burst, 2 * DELAYED_FRAME)
        card = f"addrgenmode none mtu {DELAYED_FRAME} up".split()
        call(*at_switch, "ip", "link", "set", name, "netns", f"/proc/{os.readlink('/proc/self')}/ns/net")
        call("ip", "link", "set", name, "name", "eth0")
    else:
        # Segments that are cut into packets behind the shaper have to fit into the burst, headers and all.
        card = f"addrgenmode none gso_max_size {min(65536, burst * 9 // 10)} up".split()
        call("ip", "link", "add", "eth0", "type", "veth", "peer", "name", name, "netns", switch_network)
    shape = f"root tbf rate {settings['rate']} burst {burst} latency {QUEUE_SECONDS:g}s".split()
    if not settings["delay_seconds"]:
        call(*at_switch, "tc", "qdisc", "add", "dev", name, *shape)
        call(*at_switch, "ip", "link", "set", name, "master", "switch", *card)
    call("tc", "qdisc", "add", "dev", "eth0", *shape)
    call("ip", "address", "add", f"{settings['addresses'][name]}/24", "dev", "eth0")
    call("ip", "link", "set", "eth0", *card)
    call("ip", "link", "set", "lo", "up")
    # TCP tries each second after a link was cut, as docs/cluster.md has it; up to four minutes.
    tcp = Path("/proc/sys/net/ipv4")
    (tcp / "tcp_congestion_control").write_text("reno")  # BBR, of some machines, pauses each ten seconds
    if (tcp / "tcp_rto_max_ms").exists():  # from Linux 6.15 on
        (tcp / "tcp_rto_max_ms").write_text("1000")
        (tcp / "tcp_retries2").write_text("255")


def mount_own(state: Path) -> None:
    """Mount the files of this node over those of the machine; only this node sees them."""
    mount("-t", "proc", "proc", "/proc")
    mount("-t", "sysfs", "sysfs", "/sys")  # shows the cards of the namespace that mounts it
    mount("-t", "tmpfs", "-o", "mode=1777", "tmpfs", "/dev/shm")
    places = {
        "ssh": "/etc/ssh",
        "hosts": "/etc/hosts",
        "shadow": "/etc/shadow",
        "empty": f"{pwd.getpwuid(0).pw_dir}/.ssh",  # a configuration there would go before ours
    }
    for own, place in places.items():
        if os.path.exists(place):
            mount("--bind", f"{state}/{own}", place)
    if not os.path.isdir("/run/sshd"):
        add_to_run("sshd")


def add_to_run(folder: str) -> None:
    """Add an empty folder to this node's /run, and leave the machine's as it is.

    Debian's sshd needs /run/sshd, which is made only when the machine's own sshd starts.
    """
    aside = "/dev/shm/run"
    os.mkdir(aside)
    mount("--rbind", "/run", aside)
    mount("-t", "tmpfs", "-o", "mode=755", "tmpfs", "/run")
    os.mkdir(f"/run/{folder}")
    for entry in os.scandir(aside):
        here = f"/run/{entry.name}"
        if entry.is_symlink():
            os.symlink(os.readlink(entry.path), here)
            continue
        if entry.is_dir():
            os.mkdir(here)
        else:
            Path(here).touch()
        mount("--rbind", entry.path, here)
    call("umount", "-n", "--lazy", aside)
    os.rmdir(aside)


def mount(*arguments: str) -> None:
    """Mount, without a note of it in the machine's /run/mount."""
    call("mount", "-n", *arguments)


def call(*command: str) -> None:
    """Run a command; if it fails, exit with the reason in one line."""
    result = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    if result.returncode != 0:
        reason = " ".join(result.stderr.split()) or f"status {result.returncode}"
        sys.exit(f"{' '.join(command)}: {reason}")


def main(state: Path, name: str) -> None:
    settings = json.loads((state / "settings.json").read_text())
    if name == "switch":
        switch(state, settings)
    else:
        node(state, name, settings)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
