"""What a host says of itself: its files below a root, and the output of its tools.

A recorded host is a folder that mirrors the parts of `/` that were copied (`proc/cmdline`, `sys/bus/pci/...`), with
the output of a tool in `outputs/`, named after its command line: `outputs/npu-smi_info_-t_topo.txt`.
"""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

OUTPUTS = "outputs"
_PATIENCE = 10  # seconds for one tool; a driver that hangs is a finding of its own


@dataclass(frozen=True)
class Root:
    """The host whose files stand below `path`: this one if that is `/`, otherwise a recorded one."""

    path: Path = Path("/")

    @property
    def live(self) -> bool:
        """Whether it is the host that we run on, whose tools can be asked."""
        return self.path == Path("/")

    def place(self, path: str) -> Path:
        """Where `path` of the host stands."""
        return self.path / path.lstrip("/")

    def read(self, path: str) -> str | None:
        """The text of a file without blanks around it; None where it is not there or may not be read."""
        try:
            return self.place(path).read_text(errors="replace").strip()
        except OSError:
            return None

    def find(self, pattern: str) -> list[str]:
        """The host's paths that match a pattern, sorted."""
        found = self.path.glob(pattern.lstrip("/"))
        return sorted("/" + str(path.relative_to(self.path)) for path in found)

    def has_tool(self, name: str) -> bool:
        """Whether a program is installed."""
        if self.live:
            return shutil.which(name) is not None
        return any(
            self.place(f"{folder}/{name}").exists() for folder in ("usr/bin", "bin", "usr/sbin", "usr/local/bin")
        )

    def ask(self, *command: str) -> str | None:
        """What a tool prints; None where it is not there, fails or takes more than ten seconds."""
        if not self.live:
            return self.read(f"{OUTPUTS}/{'_'.join(command).replace('/', '')}.txt")
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE, errors="replace")
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout if done.returncode == 0 else None
