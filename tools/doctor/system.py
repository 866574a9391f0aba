"""Limits, memory, disks, clock and Python."""

from __future__ import annotations

import os
import re
import tempfile
import time
from pathlib import PurePosixPath

from tools.doctor.checks import Answer, Patient, Verdict, check
from tools.hardware.units import GIB
from tools.schema.versions import installed, others, verified, words

_FILES, _SHARED = 65536, 16 * GIB
_SKEW = 0.1  # seconds between a host and its time server
_PROBE, _SLOW = 4 << 20, 1.0  # bytes that are written, seconds that this may take


def _limit(patient: Patient, name: str) -> float | None:
    """A soft limit of the process; infinite for none."""
    row = re.search(rf"^{name}\s+(\S+)", patient.root.read("/proc/self/limits") or "", re.MULTILINE)
    return None if row is None else float("inf") if row[1] == "unlimited" else int(row[1])


@check(
    why="a worker keeps sockets to its peers, libraries and data files open; the default of 1024 is soon used up",
    source="getrlimit(2), RLIMIT_NOFILE",
    mend="ulimit -n 65536 (docker: --ulimit nofile=65536)",
)
def open_files(patient: Patient) -> Answer:
    """A worker may open many files."""
    limit = _limit(patient, "Max open files")
    if limit is None:
        return Answer("unknown", "no limits can be read")
    return Answer("fail" if limit <= 1024 else "warn" if limit < _FILES else "ok", f"nofile {limit:g}")


@check(
    why="memory registered for RDMA is locked; a small limit fails at the first collective between hosts",
    source="getrlimit(2), RLIMIT_MEMLOCK",
    mend="ulimit -l unlimited (docker: --ulimit memlock=-1)",
    npu=True,
)
def locked_memory(patient: Patient) -> Answer:
    """A worker may lock memory."""
    limit = _limit(patient, "Max locked memory")
    if limit is None:
        return Answer("unknown", "no limits can be read")
    seen = "memlock unlimited" if limit == float("inf") else f"memlock {limit / 1024:.0f} KiB"
    return Answer("ok" if limit == float("inf") else "warn", seen)


@check(
    why="compiling walks deep graphs by recursion",
    source="getrlimit(2), RLIMIT_STACK; Linux's own default is 8 MiB",
    mend="ulimit -s 8192",
)
def stack(patient: Patient) -> Answer:
    """The stack is not smaller than the default."""
    limit = _limit(patient, "Max stack size")
    if limit is None:
        return Answer("unknown", "no limits can be read")
    return Answer("ok" if limit >= 8 << 20 else "warn", f"stack {limit / 1024:.0f} KiB")


def free_space(patient: Patient, path: str) -> tuple[str, int, int] | None:
    """(mount point, bytes in all, bytes free) of the file system of a path, by `df`."""
    best: tuple[str, int, int] | None = None
    for row in re.finditer(r"^\S+\s+(\d+)\s+\d+\s+(\d+)\s+\S+\s+(/.*)$", patient.root.ask("df", "-kP") or "", re.M):
        mount = row[3].strip()
        if PurePosixPath(path).is_relative_to(mount) and (best is None or len(mount) >= len(best[0])):
            best = mount, int(row[1]) * 1024, int(row[2]) * 1024
    return best


@check(
    why="dataset workers pass samples through it; a container has 64 MiB unless told",
    source="docker run --shm-size",
    mend="docker run --shm-size=64g",
)
def shared_memory(patient: Patient) -> Answer:
    """/dev/shm is large enough."""
    found = free_space(patient, "/dev/shm")
    if found is None or found[0] != "/dev/shm":
        return Answer("unknown", "df shows no /dev/shm")
    size = found[1]
    verdict: Verdict = "ok" if size >= _SHARED else "fail" if size < GIB else "warn"
    return Answer(verdict, f"/dev/shm {size / GIB:.1f} GiB")


@check(
    why="a worker that is paged out holds up all others",
    source="swapoff(8)",
    mend="swapoff -a",
)
def swap(patient: Patient) -> Answer:
    """Nothing is paged out."""
    text = patient.root.read("/proc/swaps")
    if text is None:
        return Answer("unknown", "/proc/swaps cannot be read")
    areas = [line.split()[0] for line in text.splitlines()[1:]]
    return Answer("warn" if areas else "ok", ", ".join(areas) or "no swap")


@check(
    why="logs of hosts are compared by their times, and certificates and time-outs trust the clock",
    source="chronyc(1), timedatectl(1)",
    mend="systemctl enable --now chronyd; chronyc makestep",
)
def clock(patient: Patient) -> Answer:
    """The clock follows a time server."""
    offset = re.search(r"System time\s*:\s*([\d.]+) seconds", patient.root.ask("chronyc", "-n", "tracking") or "")
    if offset:
        return Answer("ok" if float(offset[1]) <= _SKEW else "fail", f"{float(offset[1]):.6f} s from its time server")
    synchronised = patient.root.ask("timedatectl", "show", "-p", "NTPSynchronized") or ""
    if "=" in synchronised:
        return Answer("ok" if synchronised.strip().endswith("=yes") else "fail", synchronised.strip())
    return Answer("unknown", "neither chronyc nor timedatectl answers (in a container: ask its host)")


@check(
    why="a full disk ends a run at its next checkpoint",
    source="df(1)",
    mend="an output_dir with more room (--set output_dir=...)",
)
def disk(patient: Patient) -> Answer:
    """There is room where checkpoints go."""
    found = free_space(patient, str(patient.folder))
    if found is None:
        return Answer("unknown", f"df does not show the file system of {patient.folder}")
    mount, _, free = found
    return Answer(
        "ok" if free >= 10 * GIB else "fail" if free < GIB else "warn", f"{free / GIB:.0f} GiB free at {mount}"
    )


@check(
    why="every step of a checkpoint waits for the disk; a share that hangs holds up the whole run",
    source="fsync(2)",
    mend="another output_dir; then look at the file system (mount, dmesg)",
)
def disk_write(patient: Patient) -> Answer:
    """Four MiB are written and synchronised where checkpoints go, into a file without a name."""
    if not patient.root.live:
        return Answer("unknown", "a recorded host cannot be written to")
    above = next(folder for folder in (patient.folder, *patient.folder.parents) if folder.exists())
    began = time.perf_counter()
    try:
        with tempfile.TemporaryFile(dir=above, buffering=0) as part:
            part.write(bytes(_PROBE))
            os.fsync(part.fileno())
    except OSError as error:
        return Answer("fail", f"{above}: {error.strerror or error}")
    took = time.perf_counter() - began
    return Answer("ok" if took < _SLOW else "warn", f"4 MiB in {took * 1000:.0f} ms at {above}")


@check(
    why="recipes, the schema and the replaced internals were verified with these versions",
    source="tools/schema/versions.py",
    mend="pip install -e . (installs the pinned versions)",
)
def python_packages(patient: Patient) -> Answer:
    """MindSpore and MindFormers are the verified ones."""
    if not patient.root.live:
        return Answer("unknown", "a recorded host does not say")
    missing = [name for name in verified() if installed(name) is None]
    if missing:
        return Answer("fail", f"not installed: {', '.join(missing)}")
    if found := others():
        return Answer("fail", f"{words(found)}, verified is {words(verified())}")
    return Answer("ok", words(verified()))
