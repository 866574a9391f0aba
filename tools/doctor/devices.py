"""This module checks a host's network and its NPUs, and whether the host meets the needs of a recipe.

The first checks examine the ports, the host's name and the packet sizes of the network. The checks of NPUs examine
whether npu-smi lists all NPUs, whether the NPUs are healthy, free, linked and at their rated clock, and whether the
versions of their software fit together; the output of npu-smi differs between drivers, so the parser is lenient.
`checkpoint_room` and `memory` check what the recipe needs of a host: disk space for its checkpoints, and memory for its
workers. `tools.doctor.checks` defines a check.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from ipaddress import ip_address

from tools.check.check import table_of
from tools.doctor.checks import REPORT, Answer, Patient, check, told
from tools.doctor.host import free_space
from tools.hardware.units import GIB
from tools.process import host
from tools.process.host import Root, compress, expand
from tools.schema.converter import convert
from tools.schema.schema import load_schema

MASTER_PORT = 8118  # msrun's own default
BYTES, FROZEN = (
    12,
    4,
)  # of a checkpoint for each parameter: weights and both moments of AdamW in float32; of a frozen one
WORKER = GIB  # of one worker of a toy on CPU
_HCCL_BASE, _HCCL_COUNT = 60000, 32  # ports of HCCL, unless HCCL_IF_BASE_PORT says otherwise
_LISTENS = "0A"  # a state of /proc/net/tcp
_ASCEND = "/usr/local/Ascend"
_HCCN = "/usr/local/Ascend/driver/tools/hccn_tool"
_VERSION_FILES = {  # CANN 8.5 calls its folder cann; earlier ones ascend-toolkit
    "driver": [f"{_ASCEND}/driver/version.info"],
    "firmware": [f"{_ASCEND}/firmware/version.info"],
    "CANN": [f"{_ASCEND}/{folder}/*/ascend_toolkit_install.info" for folder in ("ascend-toolkit/latest", "cann")],
}
_NPU_SMI_SILENT = (
    "npu-smi does not answer: there is no driver or no permission (root, group HwHiAiUser), or npu-smi hangs"
)
_RANGE = re.compile(r"\[\s*(\d+\.\d+\.\d+)\s*,\s*(\d+\.\d+\.\d+)\s*\]")
_USAGE = re.compile(r"Aicore Usage Rate\(%\)\s*:\s*(\d+)", re.IGNORECASE)
_CHIP = re.compile(r"Chip ID\s*:\s*(\d+)", re.IGNORECASE)  # of a card that has several
_FREQUENCY = re.compile(r"Aicore\s+(cur)?\s*Freq\(MHZ\)\s*:\s*(\d+)", re.IGNORECASE)


def _hccl_ports() -> range:
    base = os.environ.get("HCCL_IF_BASE_PORT", "")
    first = int(base) if base.isdigit() else _HCCL_BASE
    return range(first, first + _HCCL_COUNT)


@check(
    why="if HCCL's ports lie in the range from which Linux gives ports to clients, a job sometimes fails to start",
    source="CANN, HCCL_IF_BASE_PORT: HCCL uses 60000-60031 by default",
    mend="sysctl -w net.ipv4.ip_local_reserved_ports=60000-60031",
    npu=True,
)
def reserved_ports(patient: Patient) -> Answer:
    """Check that the operating system reserves the ports that HCCL needs, so that no network client is given one of
    them.
    """
    span = patient.root.read("/proc/sys/net/ipv4/ip_local_port_range")
    low, high = map(int, told(span, "the range of client ports cannot be read").split())
    reserved = set(expand(patient.root.read("/proc/sys/net/ipv4/ip_local_reserved_ports") or ""))
    open_ones = [port for port in _hccl_ports() if low <= port <= high and port not in reserved]
    seen = f"clients get ports {low}-{high}"
    return Answer("warn" if open_ones else "ok", seen + (f", {compress(open_ones)} not reserved" if open_ones else ""))


@check(
    why=(
        "HCCL, and the scheduler of a script from tc3 train --script, cannot listen on a port that another process uses"
    ),
    source="msrun --master_port; CANN, HCCL_IF_BASE_PORT",
    mend=(
        "`ss -ltnp` shows which process listens; end this process, or choose other ports (MASTER_PORT, "
        "HCCL_IF_BASE_PORT)"
    ),
)
def free_ports(patient: Patient) -> Answer:
    """Check that no program listens on the ports that a launch needs; tc3 train itself chooses the port of the
    scheduler.
    """
    tables = [patient.root.read(f"/proc/net/{name}") for name in ("tcp", "tcp6")]
    told(tables[0], "/proc/net/tcp cannot be read")  # a host without IPv6 has no tcp6
    rows = [line.split() for table in tables for line in (table or "").splitlines()[1:]]
    listening = {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == _LISTENS}
    needed = set(_hccl_ports()) if patient.wants_npus else set()  # the scheduler's is another where that one is taken
    taken = sorted(listening & {MASTER_PORT, *needed})
    if not taken:
        return Answer("ok", f"{compress({MASTER_PORT, *needed})} free")
    return Answer("fail" if listening & needed else "warn", f"in use: {', '.join(map(str, taken))}")


def card_sizes(root: Root) -> dict[str, str | None]:
    """Return for each network card of the host its packet size (MTU), or None if it cannot be read; software devices
    (bridges, lo) are left out.
    """
    paths = [path for path in root.find("/sys/class/net/*/mtu") if root.find(f"{path.removesuffix('/mtu')}/device*")]
    return {path.split("/")[-2]: root.read(path) or None for path in paths}


@check(
    why="network cards with different packet sizes (MTU) on one network lose large packets without an error",
    source="ip-link(8)",
    mend="ip link set CARD mtu 9000 (as the switch, on every host)",
)
def packet_size(patient: Patient) -> Answer:
    """Check that all network cards of the host have the same packet size; `tc3 doctor --nodes` compares the packet size
    between hosts.
    """
    sizes = told(
        card_sizes(patient.root) or None, "no network card is visible (in a container, run tc3 doctor on its host)"
    )
    seen = ", ".join(f"{card} {size or 'cannot be read'}" for card, size in sizes.items())
    known = set(sizes.values()) - {None}
    return Answer("warn" if len(known) > 1 else "unknown" if None in sizes.values() else "ok", seen)


@check(
    why=(
        "other hosts look for the master under this name; if the name means a loopback address, each host connects "
        "to itself, and a link-local address (fe80::) is not found without the name of a network card"
    ),
    source="hosts(5); Debian writes 127.0.1.1",
    mend="write the host's own address into /etc/hosts, or give msrun an address (MASTER_ADDR)",
)
def host_name(patient: Patient) -> Answer:
    """Check that the host's name resolves to an address that other hosts can reach."""
    name = told(patient.root.read("/proc/sys/kernel/hostname") or None, "the host does not tell its name")
    rows = [line.split("#")[0].split() for line in (patient.root.read("/etc/hosts") or "").splitlines()]
    addresses = [row[0] for row in rows if name in row[1:]]
    if not addresses:
        addresses = (patient.root.ask("getent", "hosts", name) or "").split()[:1]
        if addresses and ip_address(addresses[0]).is_link_local:  # nss-myhostname puts it before an IPv4 address
            addresses += (patient.root.ask("getent", "ahostsv4", name) or "").split()[:1]
    if not addresses:
        return Answer("fail", f"{name} leads nowhere")
    known = [ip_address(address) for address in addresses]
    inside = all(address.is_loopback or address.is_link_local for address in known)
    return Answer("warn" if inside else "ok", f"{name} is {', '.join(addresses)}")


def _npu_files(patient: Patient) -> list[str]:
    return patient.root.find("/dev/davinci[0-9]*")


def _npu_smi_table(patient: Patient) -> str:
    return told(patient.root.ask("npu-smi", "info"), _NPU_SMI_SILENT)


@check(
    why="every worker drives one NPU",
    source="launch/run/preflight.py",
    mend=(
        "pass the devices with docker --device=/dev/davinciN (and davinci_manager, devmm_svm, hisi_hdc), or use "
        "fewer devices per node"
    ),
    npu=True,
)
def npus(patient: Patient) -> Answer:
    """Check that the host has as many NPUs as the recipe has workers on a node."""
    count = len(_npu_files(patient))
    if not count and patient.recipe is None:
        return Answer(
            "unknown", "there is no /dev/davinci*, and without a recipe it is unknown whether NPUs are wanted"
        )
    return Answer("ok" if count >= patient.workers else "fail", f"{count} of {patient.workers} (/dev/davinci*)")


@check(
    why="an NPU that is not healthy fails or slows the whole run",
    source="npu-smi info",
    mend="`npu-smi info -t health -i ID` says more; take the host out of the list",
    npu=True,
)
def npu_health(patient: Patient) -> Answer:
    """Check that npu-smi reports every NPU as OK."""
    text = _npu_smi_table(patient)
    unknown = f"npu-smi {host.npu_smi_version(text) or ''}: tc3 cannot read the form of this table"
    chips = told(host.chips(text) or None, unknown)
    bad = [f"NPU {chip.device} {chip.health}" for chip in chips if chip.health != "OK"]
    if not bad and len(chips) < (files := len(_npu_files(patient))):
        return Answer("unknown", f"{len(chips)} OK, of {files} (/dev/davinci*) npu-smi shows no more")
    return Answer("fail" if bad else "ok", ", ".join(bad) or f"{len(chips)} OK")


@check(
    why="a process that an earlier run left behind still holds the NPU's memory",
    source="npu-smi info",
    mend="kill the named processes after you have made sure that they are yours",
    npu=True,
)
def npu_processes(patient: Patient) -> Answer:
    """Check that no process uses the NPUs."""
    found = host.npu_processes(_npu_smi_table(patient))
    if found is None:
        return Answer("unknown", "npu-smi shows no table of processes that tc3 can read")
    rows = [f"{name or 'process'} {pid} on NPU {card}" for card, pid, name in found]
    return Answer("warn" if rows else "ok", ", ".join(rows) or "none")


@check(
    why="an idle NPU lowers its clock; the TeleChat3 report gained 25-30 % with another idle threshold in the firmware",
    source=REPORT,
    mend=(
        "ask Huawei's support for the firmware's idle threshold; `npu-smi info -t common -i ID` shows the clock "
        "during a run"
    ),
    npu=True,
)
def npu_clock(patient: Patient) -> Answer:
    """Check that busy AI cores run at their rated clock. A lower clock of idle AI cores does not matter."""
    table = _npu_smi_table(patient)
    chips = host.chips(table)
    seen, slow, resting = [], False, False
    for card in sorted({chip.card for chip in chips}):
        text = patient.root.ask("npu-smi", "info", "-t", "common", "-i", str(card)) or ""
        _, *parts = _CHIP.split(text) if len(_CHIP.findall(text)) > 1 else ("", "", text)
        for number, part in zip(parts[::2], parts[1::2], strict=True):
            clocks = {bool(row[1]): int(row[2]) for row in _FREQUENCY.finditer(part)}
            if len(clocks) == 2:
                who = f"NPU {card} chip {number}" if number else f"NPU {card}"
                seen.append(f"{who} {clocks[True]} of {clocks[False]} MHz")
                low, usage = clocks[True] < clocks[False], _USAGE.search(part)
                works = usage is not None and int(usage[1]) > 0
                slow, resting = slow or (low and works), resting or (low and not works)
    told(seen or None, "npu-smi does not tell the clock of the AI cores")
    if resting and not slow:
        return Answer("unknown", f"the NPUs are idle; check again during a run ({', '.join(seen)})")
    if not slow and len(seen) < (count := max(len(chips), len(_npu_files(patient)))):
        return Answer(
            "unknown", f"only {len(seen)} of {count} NPUs tell the clock of their AI cores: {', '.join(seen)}"
        )
    return Answer("warn" if slow else "ok", ", ".join(seen))


@check(
    why="if a link is down, the first collective between hosts ends in a time-out",
    source="HCCN Tool, -link -g",
    mend=(
        "check the cable and the switch of the port; `hccn_tool -i ID -link_stat -g` shows since when the link is down"
    ),
    npu=True,
)
def npu_links(patient: Patient) -> Answer:
    """Check that the network port of every NPU is up."""
    states = {}
    for path in _npu_files(patient):
        number = path.removeprefix("/dev/davinci")
        text = next(
            (text for tool in ("hccn_tool", _HCCN) if (text := patient.root.ask(tool, "-i", number, "-link", "-g"))), ""
        )
        if state := re.search(r"link status:\s*(\w+)", text):
            states[number] = state[1]
    told(states or None, "hccn_tool does not answer (it needs root)")
    down = [f"NPU {number} {state}" for number, state in states.items() if state != "UP"]
    if down:
        return Answer("fail", ", ".join(down))
    count = len(_npu_files(patient))
    return Answer("ok" if len(states) == count else "unknown", f"{len(states)} of {count} UP")


def _first_value(root: Root, patterns: Sequence[str], key: str) -> str | None:
    """Return the value of `key=` in the first of some files that has it."""
    for path in (path for pattern in patterns for path in root.find(pattern)):
        if found := re.search(rf"^\s*{key}\s*=\s*(\S+)", root.read(path) or "", re.MULTILINE | re.IGNORECASE):
            return found[1]
    return None


def ascend_versions(root: Root) -> dict[str, str | None]:
    """Return the versions of the NPU driver, its firmware and CANN; a version is None if it was not found."""
    return {name: _first_value(root, places, "version") for name, places in _VERSION_FILES.items()}


@check(
    why=(
        "MindSpore loads CANN at its start; CANN needs a driver that is not older than CANN itself, and the driver "
        "needs its firmware"
    ),
    source="CANN, installation guide; compatible_version_fw in the driver's version.info",
    mend="install driver and firmware of one release; source set_env.sh below /usr/local/Ascend for CANN",
    npu=True,
)
def ascend_software(patient: Patient) -> Answer:
    """Check that driver and CANN are installed, and that the driver supports the firmware; whether it does is unknown
    if the firmware or the driver's ranges cannot be read. The check does not compare the versions that CANN itself
    needs.
    """
    found = ascend_versions(patient.root)
    seen = ", ".join(f"{name} {version}" if version else f"no {name} seen" for name, version in found.items())
    taken = _first_value(patient.root, _VERSION_FILES["driver"], "compatible_version_fw")
    takes = _takes_firmware(taken, found["firmware"]) if taken and found["firmware"] else None
    if takes is False:
        return Answer("fail", f"{seen}: this driver takes firmware {taken}")
    if takes is None and found["driver"]:
        hint = "" if found["firmware"] else " (in a container, run tc3 doctor on its host)"
        seen += f": it is unknown whether the driver takes the firmware{hint}"
    return Answer("ok" if takes and found["CANN"] else "unknown", seen)


def _takes_firmware(ranges: str, version: str) -> bool | None:
    """Return whether a version lies in one of the ranges of a text such as ``[6.4.0,6.4.99],[7.0.0,8.9.9]``; both ends
    belong to a range, and versions are compared number by number. Return None if the version is in none of the
    ranges, but the version or one of the ranges has another form.
    """
    numbers = _numbers(version)[:3]
    if any(_numbers(low) <= numbers <= _numbers(high) for low, high in _RANGE.findall(ranges) if len(numbers) == 3):
        return True
    return False if len(numbers) == 3 and not _RANGE.sub("", ranges).strip(", ") else None


def _numbers(version: str) -> list[int]:
    return [int(word) for word in re.findall(r"\d+", version)]


@check(
    why="the run ends if a checkpoint does not fit on the disk; if the folder is shared, all nodes write to this disk",
    source="12 bytes a parameter: weights and AdamW's moments in float32",
    mend="write the run to a disk with more room (tc3 train --run-dir FOLDER), or keep fewer checkpoints",
)
def checkpoint_room(patient: Patient) -> Answer:
    """Check that the disk has room for a whole checkpoint of the recipe."""
    if patient.recipe is None:
        return Answer("unknown", "no recipe was named")
    table = table_of(patient.recipe, convert(patient.recipe, load_schema()))
    found = free_space(patient, str(patient.folder))
    if table is None or found is None:
        return Answer("unknown", "the size of the model or of the disk is unknown")
    total, trained = table["parameters_total"], table["parameters_trained"]
    need, free = (trained * BYTES + total * FROZEN if trained != total else total * BYTES), found[2]
    seen = f"{need / GIB:,.1f} GiB each, {free / GIB:,.0f} GiB free at {found[0]}"
    return Answer("ok" if free >= need else "fail", seen)


@check(
    why="the kernel kills a worker when memory ends",
    source="launch/run/preflight.py: about 1 GiB for a worker of a toy on CPU",
    mend="use fewer workers, or end other processes that use memory",
)
def memory(patient: Patient) -> Answer:
    """Check that the host has enough memory for the workers. For workers with an NPU the needed memory is unknown."""
    row = patient.find(r"^MemAvailable:\s+(\d+) kB", "/proc/meminfo", "/proc/meminfo does not tell")
    free, need = int(row[1]) * 1024, patient.workers * WORKER
    seen = f"{free / GIB:.0f} GiB available for {patient.workers} worker{'s' * (patient.workers > 1)}"
    return Answer("fail" if free < need else "ok" if patient.on_cpu else "unknown", seen)
