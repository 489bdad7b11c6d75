"""An emulated cluster as the machine sees it: a folder of settings and keys, and processes.

Everything hangs off one process, the switch: when it ends, the kernel removes all processes of all nodes, and
with them their mounts, links and addresses.
"""

import fcntl
import json
import os
import pwd
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

INSIDE = Path(__file__).resolve().with_name("inside.py")
# Of the environment that this Python is of; else, as any Python can make a cluster, of the clone.
_BESIDE, _IN_A_CLONE = Path(sys.executable).parent, Path(__file__).resolve().parents[2] / ".venv" / "bin"
PROGRAMS = _BESIDE if (_BESIDE / "cloudtrain").exists() else _IN_A_CLONE
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
NODE_PATH = f"{PROGRAMS}:{SYSTEM_PATH}"
PATIENCE_SECONDS = 20.0
AUTOGROUP = Path("/proc/sys/kernel/sched_autogroup_enabled")
MARK = "settings.json"  # distinguishes the folder of a cluster from others: written first, removed last

SSH_CONFIG = """\
IdentityFile /etc/ssh/key
IdentitiesOnly yes
BatchMode yes
StrictHostKeyChecking yes
UserKnownHostsFile /dev/null
UpdateHostKeys no
LogLevel ERROR
"""
# TMPDIR: Open MPI names folders by process numbers, which nodes have in common; /dev/shm is the node's own.
# SHLVL: bash reads ~/.bashrc when ssh starts it, unless inside another shell; so PATH stays as it is here.
SSHD_CONFIG = f"""\
AddressFamily inet
HostKey /etc/ssh/host_key
AuthorizedKeysFile /etc/ssh/key.pub
AuthenticationMethods publickey
PermitRootLogin prohibit-password
UsePAM no
UseDNS no
PidFile none
PrintMotd no
PrintLastLog no
MaxStartups 1000
MaxSessions 1000
SetEnv PATH={NODE_PATH} TMPDIR=/dev/shm SHLVL=1
"""

Settings = dict[str, Any]


class Problem(Exception):
    """The reason why a command cannot be run, in one line."""


class Node(NamedTuple):
    """``pid``: its first process, sshd, as the machine numbers it; ``None`` where the node is down."""

    name: str
    address: str
    pid: int | None

    @property
    def listens(self) -> bool:
        """Return whether its sshd takes connections."""
        try:
            rows = [line.split() for line in Path(f"/proc/{self.pid}/net/tcp").read_text().splitlines()]
        except OSError:
            return False
        return any(row[1].endswith(":0016") and row[3] == "0A" for row in rows)

    def card_bytes(self) -> tuple[int, int]:
        """Return what its network card has sent and received."""
        lines = Path(f"/proc/{self.pid}/net/dev").read_text().splitlines()
        (counters,) = [line.partition(":")[2].split() for line in lines if line.strip().startswith("eth0:")]
        return int(counters[8]), int(counters[0])


class Cluster:
    """The cluster of a state folder: ``settings``, and whose processes are alive.

    The switch keeps ``switch.pid`` locked as long as it lives: no stale number is ever taken for a process.
    """

    def __init__(self, state: Path) -> None:
        self.state = state

    @property
    def settings(self) -> Settings:
        """Return the settings it was built with; none where they were not written completely."""
        try:
            return dict(json.loads((self.state / MARK).read_text()))
        except (OSError, ValueError):
            return {}

    def switch(self) -> int | None:
        """Return the process that all others hang off; ``None`` where there is none."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline:
            try:
                file = (self.state / "switch.pid").open()
            except (FileNotFoundError, NotADirectoryError):
                return None
            with file:
                if _lock(file.fileno(), fcntl.LOCK_SH):
                    return None
                if number := file.read():
                    return int(number)
            time.sleep(0.01)  # it has just been started
        raise Problem(f"{self.state}/switch.pid is held by a process without a number: end that process")

    def nodes(self) -> list[Node]:
        is_alive = self.switch() is not None
        return [
            Node(name, address, self._node(name) if is_alive else None)
            for name, address in self.settings.get("addresses", {}).items()
        ]

    def _node(self, name: str) -> int | None:
        try:
            number = int((self.state / f"{name}.pid").read_text())
            command = Path(f"/proc/{number}/cmdline").read_text()
        except (OSError, ValueError):
            return None
        return number if f"{self.state}/{name}.log" in command else None

    def fault(self, wanted: Settings) -> str | None:
        """Return why it has to be built: an empty reason where there was none, ``None`` where it is fine."""
        if not self._entries():
            return ""
        if self.switch() is None:
            return "found one half-built or ended"
        if self.settings != wanted:
            return "found one with other settings"
        down = [node.name for node in self.nodes() if not node.listens]
        return f"found {', '.join(down)} down" if down else None

    def build(self, settings: Settings) -> None:
        """Start it, and return when every node takes connections. Where that fails, nothing is left."""
        try:
            self._write(settings)
            with (self.state / "switch.pid").open("w") as file, (self.state / "switch.log").open("w") as log:
                fcntl.flock(file, fcntl.LOCK_EX)
                switch = subprocess.Popen(
                    ["unshare", "--net", "--pid", "--fork", sys.executable, INSIDE, self.state, "switch"],
                    stdin=file,  # the lock goes on in the switch, however this process ends
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    cwd="/",
                )
            self._wait_for(switch)
        except BaseException:
            self.destroy()
            raise

    def _write(self, settings: Settings) -> None:
        self.state.mkdir(mode=0o700)
        (self.state / MARK).write_text(json.dumps(settings))
        ssh = self.state / "ssh"
        ssh.mkdir()
        for name in ("key", "host_key"):
            call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "cloudtrain", "-f", str(ssh / name))
        (ssh / "ssh_known_hosts").write_text(f"* {(ssh / 'host_key.pub').read_text()}")
        (ssh / "ssh_config").write_text(SSH_CONFIG)
        # A newer sshd refuses hosts for a while whose sessions were killed, as a timeout does; an older one
        # knows neither this option nor -G, which asks for it.
        no_penalties = "PerSourcePenalties no"
        is_newer = call("sshd", "-G", "-f", "/dev/null", "-o", no_penalties, check=False).returncode == 0
        (ssh / "sshd_config").write_text(f"{SSHD_CONFIG}{no_penalties if is_newer else ''}\n")
        hosts = {"localhost": "127.0.0.1", **settings["addresses"]}
        (self.state / "hosts").write_text("".join(f"{address} {name}\n" for name, address in hosts.items()))
        # Without PAM, sshd refuses users whose password is locked, as root's often is.
        (self.state / "shadow").write_text(f"{pwd.getpwuid(0).pw_name}:*:19000::::::\n")
        (self.state / "empty").mkdir(mode=0o700)
        with suppress(OSError):  # else each node is a session, and ranks share a core unequally
            if (before := AUTOGROUP.read_text()) != "0\n":  # by another cluster, say, which will restore it
                (self.state / "autogroup").write_text(before)
                AUTOGROUP.write_text("0")

    def _wait_for(self, switch: "subprocess.Popen[bytes]") -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline and switch.poll() is None:
            if all(node.listens for node in self.nodes()):
                return
            time.sleep(0.02)
        logs = [path.read_text().strip() for path in sorted(self.state.glob("*.log"))]
        last = dict.fromkeys(log.splitlines()[-1] for log in logs if log)
        raise Problem(f"it did not come up: {'; '.join(last) or f'no output in {PATIENCE_SECONDS:g} s'}")

    def end_processes(self) -> None:
        """End all that runs in the nodes but their sshd, however it was started."""
        firsts = {node.pid for node in self.nodes() if node.pid}
        spaces = {_process_space(pid) for pid in firsts} - {None}
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline:
            for pid in firsts:
                # All but the first process of a process namespace, at one instant: no fork escapes.
                call("nsenter", f"--target={pid}", "--pid", "sh", "-c", "kill -9 -1", check=False)
            running = {int(name) for name in os.listdir("/proc") if name.isdigit()} - firsts
            if not any(_process_space(pid) in spaces for pid in running):
                return
            time.sleep(0.02)
        raise Problem("some processes in the nodes do not end: python -m benchmarks.emulated down")

    def destroy(self) -> None:
        """End it and remove the folder. Nothing happens where there is none."""
        if (switch := self.switch()) is not None:
            with (self.state / "switch.pid").open() as file:
                os.kill(switch, signal.SIGKILL)
                fcntl.flock(file, fcntl.LOCK_EX)  # free when the last process of all nodes is gone
        with suppress(OSError):
            AUTOGROUP.write_text((self.state / "autogroup").read_text())
        for entry in sorted(self._entries(), key=lambda each: each.name == MARK):
            if entry.is_dir():
                shutil.rmtree(entry)
            else:
                entry.unlink()
        if self.state.exists():
            self.state.rmdir()

    def _entries(self) -> list[Path]:
        """Return the entries of the folder; raise ``Problem`` if it is not of a cluster."""
        if not self.state.exists():
            return []
        entries = list(self.state.iterdir()) if self.state.is_dir() else [self.state]
        if entries and MARK not in [entry.name for entry in entries]:
            raise Problem(f"--state: expected a folder of an emulated cluster or a new one, got {self.state}")
        return entries

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Use the nodes alone: two commands at a time would disturb each other's measurements."""
        if not self.state.exists():
            yield
            return
        with (self.state / "run.lock").open("w") as file:
            if not _lock(file.fileno(), fcntl.LOCK_EX):
                raise Problem("is busy: another run has it; wait for that, or end it")
            yield


@contextmanager
def alone(state: Path) -> Iterator[None]:
    """Run one ``up`` or ``down`` at a time. The folder above is locked, so that no lock file is left."""
    try:
        folder = os.open(state.parent, os.O_RDONLY)
    except OSError as error:
        raise Problem(f"--state: expected a folder in one that is there, got {state}") from error
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def call(*command: str, check: bool = True) -> "subprocess.CompletedProcess[str]":
    """Run a command and return its output; raise ``Problem`` if it fails, unless ``check`` is false."""
    result = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    if check and result.returncode != 0:
        raise Problem(f"{' '.join(command)}: {result.stderr.strip() or result.returncode}")
    return result


def _lock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _process_space(pid: int) -> str | None:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return None
