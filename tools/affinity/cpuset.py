"""The cores that this host lets us use, and those of which msrun knows."""

from __future__ import annotations

from plugins.processor_time import groups, upwards
from tools.process.host import Root, expand

MSRUN_READS = "/sys/fs/cgroup/cpuset/cpuset.cpus"  # mindspore/runtime/thread_bind_core.py, _get_available_cpus (2.9.0)


def allowed(root: Root) -> list[int] | None:
    """Cores of the process's cpuset, cut to those that it may be scheduled on; None where nothing says.

    Control groups of version 1 and of version 2 are read; in a container the process's own group is mounted as the
    top one, so a group's path is tried from the deepest folder upwards.
    """
    status = root.read("/proc/self/status") or ""
    scheduled = next((line.split(":")[1] for line in status.splitlines() if line.startswith("Cpus_allowed_list:")), "")
    lists = [expand(text) for text in (scheduled, _of_group(root)) if text]
    if not lists:
        return None
    return sorted(set(lists[0]).intersection(*lists[1:]))


def msrun_sees(root: Root) -> list[int]:
    """Cores for `msrun --bind_core` and `--bind_numa FILE`: version 1's alone, none on a host of version 2."""
    return sorted(set(expand(root.read(MSRUN_READS) or "")))


def version(root: Root) -> int | None:
    """Of the control groups that hold the cpuset: 1, 2, or None where there is none."""
    if root.read(MSRUN_READS) is not None:
        return 1
    return 2 if root.read("/sys/fs/cgroup/cgroup.controllers") is not None else None


def _of_group(root: Root) -> str:
    """The cpuset of the process's control group."""
    own = dict(groups(root.read("/proc/self/cgroup") or ""))
    for path in upwards(own.get("cpuset", "/")):
        if cores := root.read(f"/sys/fs/cgroup/cpuset{path}cpuset.cpus"):
            return cores
    for path in upwards(own.get("", "/")):
        if cores := root.read(f"/sys/fs/cgroup{path}cpuset.cpus.effective"):
            return cores
    return ""
