"""NPUs: seen, healthy, free, linked, at their clock. Formats differ by driver and are read leniently."""

from __future__ import annotations

import re

from tools.doctor.checks import REPORT, Answer, Patient, check
from tools.host import npu_smi

_HCCN = "/usr/local/Ascend/driver/tools/hccn_tool"
_USAGE = re.compile(r"Aicore Usage Rate\(%\)\s*:\s*(\d+)", re.IGNORECASE)
_FREQUENCY = re.compile(r"Aicore\s+(cur)?\s*Freq\(MHZ\)\s*:\s*(\d+)", re.IGNORECASE)


def _devices(patient: Patient) -> list[str]:
    return patient.root.find("/dev/davinci[0-9]*")


def _table(patient: Patient) -> str | None:
    return patient.root.ask("npu-smi", "info")


@check(
    why="every worker drives one NPU",
    source="launch/run/preflight.py",
    mend="docker --device=/dev/davinciN (and davinci_manager, devmm_svm, hisi_hdc), or fewer devices a node",
    npu=True,
)
def npus(patient: Patient) -> Answer:
    """As many NPUs are seen as the recipe has workers on a node."""
    count = len(_devices(patient))
    if not count and patient.recipe is None:
        return Answer("unknown", "no /dev/davinci*, and no recipe says whether NPUs are wanted")
    return Answer("ok" if count >= patient.workers else "fail", f"{count} of {patient.workers} (/dev/davinci*)")


@check(
    why="an NPU that is not healthy fails or slows the whole run",
    source="npu-smi info",
    mend="npu-smi info -t health -i ID says more; take the host out of the list",
    npu=True,
)
def npu_health(patient: Patient) -> Answer:
    """npu-smi calls every NPU OK."""
    text = _table(patient)
    if text is None:
        return Answer("unknown", "npu-smi does not answer: no driver, or no permission (root, group HwHiAiUser)")
    chips = npu_smi.chips(text)
    if not chips:
        return Answer("unknown", "its table is of a form that is not known here")
    bad = [f"NPU {chip.device} {chip.health}" for chip in chips if chip.health != "OK"]
    return Answer("fail" if bad else "ok", ", ".join(bad) or f"{len(chips)} OK")


@check(
    why="what an earlier run left behind holds the NPU's memory",
    source="npu-smi info",
    mend="kill the processes it names, once you know that they are yours",
    npu=True,
)
def npu_processes(patient: Patient) -> Answer:
    """Nobody uses the NPUs."""
    text = _table(patient)
    if text is None:
        return Answer("unknown", "npu-smi does not answer")
    rows = [f"{name or 'process'} {pid} on NPU {card}" for card, pid, name in npu_smi.processes(text)]
    return Answer("warn" if rows else "ok", ", ".join(rows) or "none")


@check(
    why="an idle NPU clocks down; another threshold in the firmware gained 25-30 % in the report (its number)",
    source=REPORT,
    mend="ask Huawei's support for the firmware's idle threshold; npu-smi info -t common -i ID during a run",
    npu=True,
)
def npu_clock(patient: Patient) -> Answer:
    """AI cores that work run at their rated clock; of those without work, a lower one says nothing."""
    chips = npu_smi.chips(_table(patient) or "")
    seen, slow, resting = [], False, False
    for card in sorted({chip.card for chip in chips}):
        text = patient.root.ask("npu-smi", "info", "-t", "common", "-i", str(card)) or ""
        clocks = {bool(row[1]): int(row[2]) for row in _FREQUENCY.finditer(text)}
        if len(clocks) == 2:
            seen.append(f"NPU {card} {clocks[True]} of {clocks[False]} MHz")
            low, usage = clocks[True] < clocks[False], _USAGE.search(text)
            works = usage is not None and int(usage[1]) > 0
            slow, resting = slow or (low and works), resting or (low and not works)
    if not seen:
        return Answer("unknown", "npu-smi does not tell the clock of the AI cores")
    if resting and not slow:
        return Answer("unknown", f"without work; ask again during a run ({', '.join(seen)})")
    return Answer("warn" if slow else "ok", ", ".join(seen))


@check(
    why="a link that is down ends the first collective between hosts in a time-out",
    source="HCCN Tool, -link -g",
    mend="cable and switch of the port; hccn_tool -i ID -link_stat -g says since when",
    npu=True,
)
def npu_links(patient: Patient) -> Answer:
    """The network port of every NPU is up."""
    states = {}
    for path in _devices(patient):
        number = path.removeprefix("/dev/davinci")
        text = next(
            (text for tool in ("hccn_tool", _HCCN) if (text := patient.root.ask(tool, "-i", number, "-link", "-g"))), ""
        )
        if state := re.search(r"link status:\s*(\w+)", text):
            states[number] = state[1]
    if not states:
        return Answer("unknown", "hccn_tool does not answer (root)")
    down = [f"NPU {number} {state}" for number, state in states.items() if state != "UP"]
    if down:
        return Answer("fail", ", ".join(down))
    count = len(_devices(patient))
    return Answer("ok" if len(states) == count else "unknown", f"{len(states)} of {count} UP")


@check(
    why="MindSpore loads CANN at start, and CANN wants a driver that is not older than its own",
    source="CANN, installation guide",
    mend="source /usr/local/Ascend/ascend-toolkit/set_env.sh; whether both go together is in CANN's release notes",
    npu=True,
)
def ascend_software(patient: Patient) -> Answer:
    """Driver and CANN are installed; whether they go together is not known here."""
    places = {
        "driver": ["/usr/local/Ascend/driver/version.info"],
        "CANN": patient.root.find("/usr/local/Ascend/ascend-toolkit/latest/*/ascend_toolkit_install.info"),
    }
    found = {}
    for name, paths in places.items():
        for path in paths:
            if version := re.search(r"^version\s*=\s*(\S+)", patient.root.read(path) or "", re.M | re.I):
                found[name] = version[1]
    missing = [name for name in places if name not in found]
    seen = ", ".join(
        [*(f"{name} {version}" for name, version in found.items()), *(f"no {name} seen" for name in missing)]
    )
    return Answer("unknown" if missing else "ok", seen)
