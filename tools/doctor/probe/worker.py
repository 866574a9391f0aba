"""One worker of the probe: `python -m tools.doctor.probe.worker`, commands in and answers out as lines of JSON.

It ends with its stdin, that is with whoever started it, and by an alarm when a command takes too long.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from tools.doctor.probe import link
from tools.doctor.probe.clock import timed, waiting

PATIENCE = 60  # seconds for one command; the first product on a device is compiled
MARK = "tc3-probe "  # what libraries print on stdout has no such mark


class Desk:
    """The state between commands; each public method is one, its arguments and its answer being JSON."""

    def start(self, cores: list[int], npu: bool, folder: str, kind: str) -> dict[str, Any]:
        """Bind to cores (none: stay where the host puts it) and get the work ready."""
        if cores:
            os.sched_setaffinity(0, cores)
        from tools.doctor.probe import measures  # NumPy's threads stay on the cores that it finds

        threads = max(1, len(cores))
        self.measures, self.folder = measures, folder
        self.matmul_work = measures.device_matmul() if npu else measures.cpu_matmul(threads)
        self.copy = measures.memory_copy()
        return {"kind": kind or f"{processor()}, {threads} core{'s' * (threads > 1)}"}

    def matmul(self, seconds: float) -> list[float]:
        """Rate (GFLOP/s), share waited, share throttled."""
        return self._timed(self.matmul_work, seconds)

    def memory(self, seconds: float) -> list[float]:
        """Rate (GB/s), share waited, share throttled."""
        return self._timed(self.copy, seconds)

    def disk(self, size: int) -> float:
        """MB/s."""
        return self.measures.disk_write(self.folder, size)

    def listen(self, address: str) -> int:
        """The port."""
        self.listener = link.listen(address)
        return int(self.listener.getsockname()[1])

    def serve(self) -> float | str:
        """Answer one connection; the share of the time waited for a core, or why there was none."""
        try:
            return waiting(lambda: link.serve(self.listener))[1]
        except OSError as error:  # the link's, not the worker's
            return str(error)

    def connect(self, address: str, port: int, seconds: float) -> list[float] | str:
        """GB/s and microseconds to who serves there, and the share waited for a core; or why there are none."""
        try:
            found, share = waiting(lambda: link.measure(address, port, seconds))
        except OSError as error:  # the link's, not the worker's
            return str(error)
        return [*found, share]

    def _timed(self, work: Callable[[], float], seconds: float) -> list[float]:
        return list(timed(work, seconds))


def processor() -> str:
    """The model of the processor as /proc/cpuinfo has it; its numbers where, as on Arm, it has no name."""
    rows: dict[str, str] = {}
    with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
        for line in lines:
            key, _, value = line.partition(":")
            rows.setdefault(key.strip(), value.strip())
    return rows.get("model name") or f"CPU {rows.get('CPU implementer', '?')} {rows.get('CPU part', '?')}"


def main() -> None:
    """Answer commands (``{"do": name, ...}``) until stdin ends."""
    desk = Desk()
    for line in sys.stdin:
        signal.alarm(PATIENCE)  # its default action ends the process, also inside a library
        command = json.loads(line)
        try:
            answer = {"value": getattr(desk, command.pop("do"))(**command)}
        except Exception as error:  # of the device, its libraries, the disk or the network: the finding
            answer = {"error": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}
        print(MARK + json.dumps(answer), flush=True)
        signal.alarm(0)


if __name__ == "__main__":
    main()
