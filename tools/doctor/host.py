"""This module checks a host itself: its cores, limits, memory, disks, clock and Python.

The first checks examine the cores, their clock frequency, their memory, and other programs on them; `interrupts`
compares the cores that handle interrupts of network cards, disks and NPUs with the cores that workers get. The other
checks examine limits of processes, shared memory and swap, the clock, the disk of checkpoints, and the installed
packages. `tools.doctor.checks` defines a check.
"""

from __future__ import annotations

import re
from pathlib import PurePosixPath

from tools.affinity.plan import make_plan
from tools.affinity.topology import MSRUN_READS, allowed, msrun_sees, read_host
from tools.doctor import measures
from tools.doctor.checks import REPORT, Answer, Patient, UntoldError, Verdict, check, told
from tools.hardware.units import GIB
from tools.process.host import compress, expand
from tools.schema.versions import installed, others, verified, words

_CPU = "/sys/devices/system/cpu"
_BANNED = re.compile(r"""^\s*IRQBALANCE_BANNED_CPU(LIST|S)=["']?([^"'\s]+)""", re.MULTILINE)
# source (which may hold spaces), total, used and free space, share, mount point
_DF = re.compile(r"^\S.*?\s+(\d+|-)\s+(?:-?\d+|-)\s+(-?\d+|-)\s+(?:\d+%|-)\s+(/.*)$", re.MULTILINE)
_WAKES = 10  # microseconds: deeper states are for hosts without work
# what drivers call their interrupts: NICs of Huawei and Mellanox, NVMe, NPUs (sq_send_trigger_irq)
_DEVICE_INTERRUPTS = re.compile(r"hns|hclge|hinic|mlx|nvme|sq_send|devdrv|davinci", re.IGNORECASE)
_FEWEST_FILES, _OPEN_FILES = 1024, 65536  # open files of a process: up to the first fails, below the second warns
_LEAST_STACK = 8 << 20  # bytes: less warns
_LEAST_SHARED, _SHARED_MEMORY = GIB, 16 * GIB  # bytes of /dev/shm: below the first fails, below the second warns
_CLOCK_SKEW = 0.1  # seconds between a host and its time server: more fails
_LEAST_FREE, _FREE = GIB, 10 * GIB  # free bytes of the checkpoints' disk: below the first fails, below the second warns
_WRITTEN, _SLOW = 4 << 20, 1.0  # bytes that are written, seconds that this may take: more warns


@check(
    why="a core that lowers its clock launches the NPU's operators late",
    source="Linux, admin-guide/pm/cpufreq",
    mend="cpupower frequency-set -g performance",
)
def governor(patient: Patient) -> Answer:
    """Check that the host's cores run at their full clock frequency."""
    found = {patient.root.read(path) or "?" for path in patient.root.find(f"{_CPU}/cpu[0-9]*/cpufreq/scaling_governor")}
    told(
        found or None,
        "there is no cpufreq: this is a virtual machine, or the firmware sets the clock by its power profile",
    )
    verdict: Verdict = "fail" if found - {"performance", "?"} else "unknown" if "?" in found else "ok"
    return Answer(verdict, ", ".join(sorted(found)))


@check(
    why="a core in a deep idle state wakes up late, and each operator that waits for the core is delayed",
    source="Linux, admin-guide/pm/cpuidle",
    mend="cpupower idle-set -D 10",
)
def idle_states(patient: Patient) -> Answer:
    """Check that a core can leave each of its enabled idle states quickly."""
    read, worst = patient.root.read, 0
    states = patient.root.find(f"{_CPU}/cpu[0-9]*/cpuidle/state[0-9]*")
    for state in told(states or None, "there is no cpuidle: this is a virtual machine, or idle states are off"):
        if told(read(f"{state}/disable"), f"{state}/disable cannot be read") == "0":
            worst = max(worst, int(told(read(f"{state}/latency"), f"{state}/latency cannot be read")))
    return Answer(
        "ok" if worst <= _WAKES else "warn", f"a core needs {worst} us to wake up from the deepest enabled state"
    )


@check(
    why=(
        "strict address translation slows transfers between host and NPUs; the TeleChat3 report gained 3-5 % with "
        "passthrough"
    ),
    source=REPORT,
    mend="boot with iommu.passthrough=1 (arm64) or iommu=pt (x86)",
)
def iommu(patient: Patient) -> Answer:
    """Check that the IOMMU is off or in passthrough mode."""
    line = patient.root.read("/proc/cmdline")
    kinds = {patient.root.read(path) or "?" for path in patient.root.find("/sys/kernel/iommu_groups/*/type")}
    asked = line is not None and re.search(r"\biommu(\.passthrough=1|=pt|=off)\b", line)
    if kinds:
        seen = f"domains: {', '.join(sorted(kinds))}"
        strict = any(kind.startswith("DMA") for kind in kinds)
        return Answer("warn" if strict else "unknown" if "?" in kinds else "ok", seen)
    if asked:
        return Answer("ok", f"the kernel was started with {asked[0]}")
    if line is None:
        return Answer("unknown", "neither groups nor the kernel's parameters can be read")
    groups = patient.root.find("/sys/kernel/iommu_groups/*")
    if groups:
        return Answer("unknown", f"{len(groups)} groups whose type this kernel does not show")
    return Answer("ok", "there are no IOMMU groups: the IOMMU is off or missing")


@check(
    why=(
        "the kernel unmaps pages to see which core uses them; bound workers already have their pages on their own "
        "NUMA node"
    ),
    source="Linux, admin-guide/sysctl/kernel",
    mend="sysctl -w kernel.numa_balancing=0",
)
def numa_balancing(patient: Patient) -> Answer:
    """Check that Linux does not move pages between NUMA nodes by itself."""
    value = patient.root.read("/proc/sys/kernel/numa_balancing")
    if value is None:
        told(patient.root.read("/proc/sys/kernel/osrelease"), "the kernel's settings cannot be read")
        return Answer("ok", "this kernel has none")
    return Answer("ok" if value == "0" else "warn", f"kernel.numa_balancing = {value}")


@check(
    why="compiling takes 10-20 % longer without huge pages (tc3 train asks for them with GLIBC_TUNABLES)",
    source="benchmarks/RESULTS.md",
    mend="echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
)
def huge_pages(patient: Patient) -> Answer:
    """Check that Linux lets processes ask for transparent huge pages."""
    chosen = patient.find(
        r"\[(\w+)\]", "/sys/kernel/mm/transparent_hugepage/enabled", "the kernel does not show this setting"
    )
    return Answer("warn" if chosen[1] == "never" else "ok", chosen[1])


@check(
    why="interrupts on a worker's core delay its operators; the TeleChat3 report gained 10-15 % by isolation",
    source=REPORT,
    mend=(
        "set IRQBALANCE_BANNED_CPULIST in /etc/sysconfig/irqbalance (tc3 affinity prints it), or systemctl stop "
        "irqbalance"
    ),
)
def irqbalance(patient: Patient) -> Answer:
    """Check that no service moves interrupts onto the workers' cores."""
    read = patient.root.read
    running = {read(path) for path in patient.root.find("/proc/[0-9]*/comm")}
    if "irqbalance" not in running:
        hidden = "the processes of the host are not visible (in a container, run tc3 doctor on its host)"
        told("kthreadd" in running or None, hidden)  # the kernel's own process
        return Answer("ok", "not running")
    for path in ("/etc/sysconfig/irqbalance", "/etc/default/irqbalance"):
        if rows := _BANNED.findall(read(path) or ""):
            kind, cores = rows[-1]
            banned = expand(cores) if kind == "LIST" else _of_mask(cores)
            if left := _workers_cores(patient).difference(banned):
                return Answer("warn", f"running, also on the workers' cores {compress(left)}")
            return Answer("ok", f"irqbalance runs, but is kept off cores {compress(set(banned))}")
    return Answer("warn", "running, on all cores")


def _of_mask(text: str) -> list[int]:
    """Return the cores of a mask as Linux writes it: hexadecimal words of 32 bits, such as ``0000000f,ffff0000``."""
    mask = 0
    for word in text.split(","):
        mask = mask << 32 | int(word, 16)
    return [core for core in range(mask.bit_length()) if mask >> core & 1]


def _workers_cores(patient: Patient) -> set[int]:
    """Return the cores that the plan of `tc3 affinity` gives to the workers; raise UntoldError if the host has too few
    cores to give each worker its own.
    """
    host = read_host(patient.root)
    count = patient.workers if patient.recipe is not None else len(host.npus) or 1
    plan = make_plan(host, count, None if patient.on_cpu else sorted(host.npus) or None)
    told(plan.binds or None, "the host has too few cores to give each worker cores of its own")
    return {core for worker in plan.workers for core in worker.cores}


@check(
    why="msrun of MindSpore 2.9.0 reads only cgroup version 1; without that, --bind_core silently binds nothing",
    source="mindspore/runtime/thread_bind_core.py, _get_available_cpus",
    mend=(
        "tc3 train and its scripts need no change, because their workers bind themselves; for other launches see "
        "tc3 affinity"
    ),
    npu=True,
)
def binding(patient: Patient) -> Answer:
    """Check that msrun can bind workers to cores on this host."""
    cores = msrun_sees(patient.root)
    if not cores:
        return Answer("warn", f"no {MSRUN_READS}: msrun --bind_core does nothing and refuses a bind file")
    return Answer("ok", f"msrun sees cores {compress(cores)}")


@check(
    why="Linux does not spread threads over isolated cores, so that all unbound threads of a worker stay on one core",
    source="Linux, admin-guide/kernel-parameters, isolcpus",
    mend="boot without isolcpus, and keep other processes away with cpusets (tc3 affinity prints the lines)",
)
def isolated(patient: Patient) -> Answer:
    """Check that no core that workers may use is isolated by a kernel parameter."""
    text, may = patient.root.read("/sys/devices/system/cpu/isolated"), allowed(patient.root)
    if text is None or may is None:
        return Answer("unknown", "the isolated or the allowed cores cannot be read")
    both = set(expand(text)).intersection(may)
    return Answer("warn", f"isolated and allowed: {compress(both)}") if both else Answer("ok", "none of the allowed")


@check(
    why="with fewer cores than workers all workers wait for each other",
    source="tc3 affinity",
    mend="allow more cores (docker --cpuset-cpus, Slurm --cpus-per-task), or use fewer workers",
)
def cores(patient: Patient) -> Answer:
    """Check that the host has at least one core for each worker."""
    may = told(allowed(patient.root), "the allowed cores cannot be read")
    seen = f"{len(may)} cores ({compress(may)}) for {patient.workers} worker{'s' * (patient.workers > 1)}"
    return Answer("ok" if len(may) >= patient.workers else "warn", seen)


@check(
    why="an interrupt on a worker's core delays its operators; the TeleChat3 report gained 10-15 % by isolation",
    source=REPORT,
    mend="echo CORES > /proc/irq/N/smp_affinity_list, with the cores for interrupts that tc3 affinity prints",
    npu=True,
)
def interrupts(patient: Patient) -> Answer:
    """Check that devices send their interrupts only to cores that no worker has in the plan of `tc3 affinity`."""
    workers = _workers_cores(patient)
    seen, hit, unreadable = 0, set(), []
    for folder in patient.root.find("/proc/irq/[0-9]*"):
        names = [path.rpartition("/")[2] for path in patient.root.find(f"{folder}/*/")]
        if any(_DEVICE_INTERRUPTS.search(name) for name in names):
            effective = patient.root.read(f"{folder}/effective_affinity_list")
            given = effective or patient.root.read(f"{folder}/smp_affinity_list")
            if given is None:  # hidden, or gone since it was found
                unreadable.append(folder)
                continue
            hit |= workers.intersection(expand(given))
            seen += 1
    if unreadable and not hit:
        raise UntoldError(f"it cannot be read which cores handle the interrupt {unreadable[0]}")
    told(seen or None, "no interrupts of known devices are visible (in a container, run tc3 doctor on its host)")
    return Answer(
        "warn" if hit else "ok", f"{seen} interrupts of devices, of which on workers' cores: {compress(hit) or 'none'}"
    )


def _limit(patient: Patient, name: str) -> float:
    """Return a soft limit of this process, or infinity if the resource is not limited."""
    row = patient.find(rf"^{name}\s+(\S+)", "/proc/self/limits", "no limits can be read")
    return float("inf") if row[1] == "unlimited" else int(row[1])


@check(
    why="a worker keeps many sockets, libraries and data files open, and soon reaches the default limit of 1024",
    source="getrlimit(2), RLIMIT_NOFILE",
    mend="ulimit -n 65536 (docker: --ulimit nofile=65536)",
)
def open_files(patient: Patient) -> Answer:
    """Check that the limit on open files lets a worker open many files."""
    limit = _limit(patient, "Max open files")
    return Answer("fail" if limit <= _FEWEST_FILES else "warn" if limit < _OPEN_FILES else "ok", f"nofile {limit:g}")


@check(
    why="memory registered for RDMA is locked; a small limit fails at the first collective between hosts",
    source="getrlimit(2), RLIMIT_MEMLOCK",
    mend="ulimit -l unlimited (docker: --ulimit memlock=-1)",
    npu=True,
)
def locked_memory(patient: Patient) -> Answer:
    """Check that the limit on locked memory lets a worker lock memory."""
    limit = _limit(patient, "Max locked memory")
    seen = "memlock unlimited" if limit == float("inf") else f"memlock {limit / 1024:.0f} KiB"
    return Answer("ok" if limit == float("inf") else "warn", seen)


@check(
    why="the compiler walks deep graphs recursively and needs a large stack",
    source="getrlimit(2), RLIMIT_STACK; Linux's own default is 8 MiB",
    mend="ulimit -s 8192",
)
def stack(patient: Patient) -> Answer:
    """Check that the limit on the size of a process's stack is not smaller than the default."""
    limit = _limit(patient, "Max stack size")
    return Answer("ok" if limit >= _LEAST_STACK else "warn", f"stack {limit / 1024:.0f} KiB")


def free_space(patient: Patient, path: str) -> tuple[str, int, int] | None:
    """Return (mount point, total bytes, free bytes) of the file system that holds a path, as `df` reports them."""
    best: tuple[str, str, str] | None = None
    for row in _DF.finditer(patient.root.ask("df", "-kP") or ""):
        mount = row[3].strip()
        if PurePosixPath(path).is_relative_to(mount) and (best is None or len(mount) >= len(best[0])):
            best = mount, row[1], row[2]
    if best is None or "-" in best[1:]:  # df does not know the sizes of this file system
        return None
    return best[0], int(best[1]) * 1024, int(best[2]) * 1024


@check(
    why="dataset workers pass samples through /dev/shm, which has only 64 MiB in a container by default",
    source="docker run --shm-size",
    mend="docker run --shm-size=64g",
)
def shared_memory(patient: Patient) -> Answer:
    """Check that /dev/shm is large enough."""
    found = free_space(patient, "/dev/shm")
    if found is None or found[0] != "/dev/shm":
        return Answer("unknown", "df shows no /dev/shm")
    size = found[1]
    verdict: Verdict = "ok" if size >= _SHARED_MEMORY else "fail" if size < _LEAST_SHARED else "warn"
    return Answer(verdict, f"/dev/shm {size / GIB:.1f} GiB")


@check(
    why="a worker whose memory is swapped out delays all other workers",
    source="swapoff(8)",
    mend="swapoff -a",
)
def swap(patient: Patient) -> Answer:
    """Check that the host has no active swap area, so that no memory can be swapped out."""
    text = told(patient.root.read("/proc/swaps"), "/proc/swaps cannot be read")
    areas = [line.split()[0] for line in text.splitlines()[1:]]
    return Answer("warn" if areas else "ok", ", ".join(areas) or "no swap")


@check(
    why="logs of different hosts are compared by their times, and certificates and time-outs rely on the clock",
    source="chronyc(1), timedatectl(1)",
    mend="systemctl enable --now chronyd; chronyc makestep",
)
def clock(patient: Patient) -> Answer:
    """Check that the host's clock follows a time server."""
    tracking = patient.root.ask("chronyc", "-n", "tracking") or ""
    offset = re.search(r"System time\s*:\s*([\d.]+) seconds", tracking)
    if re.search(r"Leap status\s*:\s*Not synchronised", tracking):  # the offset is then 0, from no server
        return Answer("fail", "chronyd runs, but has no time server that it follows")
    if re.search(r"Reference ID\s*:\s*7F7F0101", tracking, re.IGNORECASE):
        return Answer("warn", "chronyd follows only its own clock, which is right only on the cluster's time server")
    if offset:
        seconds = float(offset[1])
        root = dict(re.findall(r"Root (delay|dispersion)\s*:\s*([\d.]+) seconds", tracking))
        error = (
            float(root.get("dispersion", 0)) + float(root.get("delay", 0)) / 2
        )  # chronyc(1): no clock is further off
        seen = f"{seconds:.6f} s from its time server"
        if seconds <= _CLOCK_SKEW < seconds + error:
            return Answer("unknown", f"{seen}, which may itself be {error:.3f} s off, or was not reached for long")
        return Answer("ok" if seconds <= _CLOCK_SKEW else "fail", seen)
    synchronised = patient.root.ask("timedatectl", "show", "-p", "NTPSynchronized") or ""
    if "=" in synchronised:
        return Answer("ok" if synchronised.strip().endswith("=yes") else "fail", synchronised.strip())
    return Answer("unknown", "neither chronyc nor timedatectl answers (in a container, run tc3 doctor on its host)")


@check(
    why="a full disk ends a run at its next checkpoint",
    source="df(1)",
    mend="write the run to a disk with more room (tc3 train --run-dir FOLDER)",
)
def disk(patient: Patient) -> Answer:
    """Check that the disk of the checkpoints has enough free space."""
    found = told(free_space(patient, str(patient.folder)), f"df does not show the free space at {patient.folder}")
    mount, _, free = found
    verdict: Verdict = "ok" if free >= _FREE else "fail" if free < _LEAST_FREE else "warn"
    return Answer(verdict, f"{free / GIB:.0f} GiB free at {mount}")


@check(
    why="every save of a checkpoint waits for the disk, and a network file system that hangs stops the whole run",
    source="fsync(2)",
    mend="choose another output_dir, then look at the file system (mount, dmesg)",
)
def disk_write(patient: Patient) -> Answer:
    """Check how fast four MiB can be written and synchronised on the disk of the checkpoints; the file has no name, so
    that no file is left behind.
    """
    if not patient.root.live:
        return Answer("unknown", "a recorded host cannot be written to")
    above = next(folder for folder in (patient.folder, *patient.folder.parents) if folder.exists())
    try:
        took = _WRITTEN / 1e6 / measures.disk_write(str(above), _WRITTEN)
    except OSError as error:
        return Answer("fail", f"{above}: {error.strerror or error}")
    return Answer("ok" if took < _SLOW else "warn", f"4 MiB in {took * 1000:.0f} ms at {above}")


@check(
    why="recipes, the schema and the patches of internals were verified with these versions",
    source="tools/schema/versions.py",
    mend="pip install -e . (installs the pinned versions)",
)
def python_packages(patient: Patient) -> Answer:
    """Check that the installed versions of MindSpore and MindFormers are the verified versions."""
    if not patient.root.live:
        return Answer("unknown", "a recorded host does not show this")
    missing = [name for name in verified() if installed(name) is None]
    if missing:
        return Answer("fail", f"not installed: {', '.join(missing)}")
    if found := others():
        return Answer("fail", f"{words(found)} is installed, but tc3 was verified with {words(verified())}")
    return Answer("ok", words(verified()))
