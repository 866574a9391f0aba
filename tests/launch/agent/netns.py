"""Network namespaces as the nodes of a cluster, on one bridge; what runs in them, and what goes wrong with them.

The disk is shared, as it is one machine; names and clocks are, too. Needs root and iproute2.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from launch.run.msrun import ROOT

_NUMBERS = itertools.count()
EVERYTHING = ("worker", "scheduler", "msrun", "agent", "other")


def missing() -> str | None:
    """Return why this machine cannot make network namespaces; return None if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if not (shutil.which("ip") and shutil.which("nsenter")):
        return "network namespaces need iproute2 and util-linux"
    name = f"tc3-{os.getpid():x}-try"
    done = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if done.returncode == 0:
        _ip("netns", "del", name)
        bridge = f"tc3t{os.getpid():x}"
        done = subprocess.run(
            ["ip", "link", "add", bridge, "type", "bridge"], capture_output=True, text=True, check=False
        )
        _ip("link", "del", bridge, check=False)
    return f"no network namespaces here: {done.stderr.strip()}" if done.returncode else None


def _ip(*words: str, check: bool = True) -> None:
    subprocess.run(["ip", *words], check=check, capture_output=True)


@dataclass
class Nodes:
    """`count` nodes while in the context; what still runs in them at its end is killed."""

    count: int
    tag: str = field(default_factory=lambda: f"{os.getpid():x}{next(_NUMBERS):x}")

    def __enter__(self) -> Nodes:
        """Make the bridge and the nodes."""
        _ip("link", "add", self._bridge, "type", "bridge")
        _ip("link", "set", self._bridge, "up")
        for node in range(self.count):
            name, port = self._name(node), self._port(node)
            _ip("netns", "add", name)
            _ip("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("link", "set", port, "master", self._bridge, "up")
            _ip("-n", name, "addr", "add", f"{self.host(node)}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
            _ip("-n", name, "link", "set", "lo", "up")
        return self

    def __exit__(self, *error: object) -> None:
        """Kill what is left, and take all down."""
        for node in range(self.count):
            for _ in range(50):
                if not (pids := self.running(node)):
                    break
                for pid in pids:
                    _kill(pid, signal.SIGKILL)
                time.sleep(0.1)
            _ip("netns", "del", self._name(node), check=False)
            _ip("link", "del", self._port(node), check=False)
        _ip("link", "del", self._bridge, check=False)

    def host(self, node: int) -> str:
        """The address of a node, which is its name, too."""
        return f"10.77.0.{node + 1}"

    def start(self, node: int, command: Sequence[str], environment: Mapping[str, str], out: Path) -> subprocess.Popen:
        """Start a command in a node, in a session of its own."""
        inside = ["nsenter", f"--net=/run/netns/{self._name(node)}", *command]
        with out.open("ab") as file:
            return subprocess.Popen(
                inside,
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def running(self, node: int, roles: Sequence[str] = EVERYTHING) -> dict[int, str]:
        """Pid -> role of all that runs in a node."""
        inode = os.stat(f"/run/netns/{self._name(node)}").st_ino
        found = {}
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and os.readlink(entry / "ns/net") == f"net:[{inode}]":
                    role = _role(entry)
                    if role in roles:
                        found[int(entry.name)] = role
        return found

    def signal(self, node: int, number: signal.Signals, *roles: str) -> None:
        """Send a signal to all of these roles in a node; for SIGKILL to a whole node all are stopped first."""
        pids = self.running(node, roles or EVERYTHING)
        if number == signal.SIGKILL:  # nobody may see another one's death
            for pid in pids:
                _kill(pid, signal.SIGSTOP)
            pids |= self.running(node, roles or EVERYTHING)
        for pid in pids:
            _kill(pid, number)

    def freeze(self, node: int, role: str) -> None:
        """Stop the main threads of a role's processes in a node; their other threads go on."""
        for pid in self.running(node, (role,)):
            command = [sys.executable, "-m", "tests.launch.agent.freeze", str(pid)]
            helper = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
            assert helper.stdout and helper.stdout.readline().strip() == str(pid), f"{pid} was not stopped"

    def link(self, node: int, up: bool) -> None:
        """Plug a node's cable in, or out."""
        _ip("link", "set", self._port(node), "up" if up else "down")

    @property
    def _bridge(self) -> str:
        return f"tc3b{self.tag}"

    def _port(self, node: int) -> str:
        return f"tc3p{self.tag}-{node}"

    def _name(self, node: int) -> str:
        return f"tc3-{self.tag}-{node}"


def _role(entry: Path) -> str | None:
    """Return the role of a process in a run; return None if the process has ended."""
    if (entry / "stat").read_text().rsplit(")", 1)[1].split()[0] in "ZX":
        return None
    words = (entry / "cmdline").read_bytes().decode("utf-8", "replace")
    if "agent" in Path(words.split("\0")[1] if "\0" in words[:-1] else words).name or "\0agent\0" in words:
        return "agent"
    if "--worker_num=" in words:
        return "msrun"
    if "--run-dir" not in words:
        return "other"
    environment = (entry / "environ").read_bytes().split(b"\0")
    return "scheduler" if b"MS_ROLE=MS_SCHED" in environment else "worker"


def _kill(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """A file system of `size` (as `mount` writes it) at `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
