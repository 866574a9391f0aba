"""What a host says of itself: its files below a root, and the output of its tools.

A recorded host is a folder that mirrors the parts of `/` that were copied (`proc/cmdline`, `sys/bus/pci/...`), with
the output of a tool in `outputs/`, named after its command line: `outputs/npu-smi_info_-t_topo.txt`.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen, TimeoutExpired

OUTPUTS = "outputs"
_PATIENCE = 10.0  # seconds for one tool; a driver that hangs is a finding of its own
_GRACE = 0.5  # seconds to wait for one that was killed


@dataclass(frozen=True)
class Root:
    """The host whose files stand below `path`: this one if that is `/`, otherwise a recorded one."""

    path: Path = Path("/")
    _answers: dict[tuple[str, ...], str | None] = field(default_factory=dict, compare=False, repr=False)
    _hung: set[str] = field(default_factory=set, compare=False, repr=False)

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
        """What a tool prints; None where it is not there, fails or takes more than ten seconds.

        It is asked once: some take a second, and many checks read the same. One that hung is not started again.
        """
        if not self.live:
            return self.read(f"{OUTPUTS}/{'_'.join(command).replace('/', '')}.txt")
        if command not in self._answers:
            self._answers[command] = None if command[0] in self._hung else self._run(command)
        return self._answers[command]

    def _run(self, command: tuple[str, ...]) -> str | None:
        """In a session of its own, so that children go with it. One that a driver holds cannot even be killed."""
        try:
            process = Popen(command, stdin=DEVNULL, stdout=PIPE, stderr=DEVNULL, start_new_session=True)
        except OSError:
            return None
        try:
            text = process.communicate(timeout=_PATIENCE)[0].decode(errors="replace")
            return text if process.returncode == 0 else None
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            with suppress(TimeoutExpired):
                process.wait(_GRACE)
            if not isinstance(error, TimeoutExpired):
                raise
            self._hung.add(command[0])
            return None


# Lists of cores as Linux writes them: ``0-3,8``.

MOST = 1 << 17  # more than any host has cores, and than there are ports


def expand(text: str) -> list[int]:
    """``"0-3,8"`` -> [0, 1, 2, 3, 8], in the order written.

    Raises:
        ValueError: something else than numbers and ranges, or more of them than any host has.
    """
    cores: list[int] = []
    for part in filter(None, "".join(text.split()).split(",")):
        first, _, last = part.partition("-")
        found = range(int(first), int(last or first) + 1)
        if len(found) + len(cores) > MOST:
            raise ValueError(f"{part}: more than {MOST:,} numbers")
        cores += found
    return cores


def compress(cores: Iterable[int]) -> str:
    """[0, 1, 2, 3, 8] -> ``"0-3,8"``; nothing for no cores."""
    ranges: list[list[int]] = []
    for core in sorted(cores):
        if ranges and core == ranges[-1][1] + 1:
            ranges[-1][1] = core
        else:
            ranges.append([core, core])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)
