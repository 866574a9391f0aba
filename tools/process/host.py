"""This module reads facts about a host: the content of its files, the output of its tools (such as `npu-smi`), and
lists of host names.

A recorded host is a folder with copies of some files of a host below `/` (`proc/cmdline`, `sys/bus/pci/...`), and with
the outputs of tools in `outputs/`, each in a file that is named after the command line:
`outputs/npu-smi_info_-t_topo.txt`. Tests use recorded hosts in the place of real hosts.

The module parses the output of `npu-smi` leniently, because columns and words differ between generations of the driver.
The parser was tested with tables of the drivers 22.0 to 26.0 (910A and Atlas A2 with one chip per card, Atlas A3 with
two), and with the layout of Ascend 950, which has other columns (tests/tools/process/outputs/SOURCES.md). If a table is
not understood, the result is None or empty, and the caller says so.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen, TimeoutExpired

from plugins.errors import ClusterError, read_text

OUTPUTS = "outputs"
_PATIENCE = 30.0  # seconds for one tool on a busy host; a driver that hangs is a finding of its own
_GRACE = 0.5  # seconds to wait for one that was killed


@dataclass(frozen=True)
class Root:
    """A `Root` gives access to the files of a host below `path`: to the files of this host if `path` is `/`, otherwise
    to the recorded files of another host.
    """

    path: Path = Path("/")
    _answers: dict[tuple[str, ...], str | None] = field(default_factory=dict, compare=False, repr=False)
    _hung: set[str] = field(default_factory=set, compare=False, repr=False)

    @property
    def live(self) -> bool:
        """Return whether the files belong to the host on which this process runs, so that this process can call the
        host's tools.
        """
        return self.path == Path("/")

    def place(self, path: str) -> Path:
        """Return the path at which this process finds the host's file `path`."""
        return self.path / path.lstrip("/")

    def read(self, path: str) -> str | None:
        """Return the text of a file without surrounding white space; return None if the file does not exist or may not
        be read.
        """
        try:
            return self.place(path).read_text(errors="replace").strip()
        except OSError:
            return None

    def find(self, pattern: str) -> list[str]:
        """Return the paths on the host that match a pattern, sorted."""
        found = self.path.glob(pattern.lstrip("/"))
        return sorted("/" + str(path.relative_to(self.path)) for path in found)

    def has_tool(self, name: str) -> bool:
        """Return whether a program with the given name is installed on the host."""
        if self.live:
            return shutil.which(name) is not None
        return any(
            self.place(f"{folder}/{name}").exists() for folder in ("usr/bin", "bin", "usr/sbin", "usr/local/bin")
        )

    def ask(self, *command: str) -> str | None:
        """Return the output of a tool; return None if the tool is missing, fails or takes more than half a minute.

        Each tool runs only once, because some tools take a second and many checks read the same output. A tool that
        hung is not started again.
        """
        if not self.live:
            return self.read(f"{OUTPUTS}/{'_'.join(command).replace('/', '')}.txt")
        if command not in self._answers:
            self._answers[command] = None if command[0] in self._hung else self._run(command)
        return self._answers[command]

    def _run(self, command: tuple[str, ...]) -> str | None:
        """Run a tool in a separate session, so that its child processes end with it. (A tool that waits inside a driver
        cannot even be killed.)
        """
        from tools.process.children import kill  # more than a worker that only binds itself to cores needs

        try:
            process = Popen(command, stdin=DEVNULL, stdout=PIPE, stderr=DEVNULL, start_new_session=True)
        except OSError:
            return None
        try:
            text = process.communicate(timeout=_PATIENCE)[0].decode(errors="replace")
            return text if process.returncode == 0 else None
        except BaseException as error:
            kill(process)
            with suppress(TimeoutExpired):
                process.wait(_GRACE)
            if not isinstance(error, TimeoutExpired):
                raise
            self._hung.add(command[0])
            return None


# Lists of cores as Linux writes them: ``0-3,8``.

MOST = 1 << 17  # more than any host has cores, and than there are ports


def expand(text: str) -> list[int]:
    """Return the numbers in a Linux list of cores, in the written order: ``"0-3,8"`` gives [0, 1, 2, 3, 8].

    Raises:
        ValueError: the text holds something other than numbers and ranges, or more numbers than any host has.
    """
    cores: list[int] = []
    for part in filter(None, "".join(text.split()).split(",")):
        first, _, last = part.partition("-")
        found = range(int(first), int(last or first) + 1)
        if len(found) + len(cores) > MOST:
            raise ValueError(f"{part}: the list has more than {MOST:,} numbers")
        cores += found
    return cores


def compress(cores: Iterable[int]) -> str:
    """Return core numbers as a Linux list of cores: [0, 1, 2, 3, 8] gives ``"0-3,8"``."""
    ranges: list[list[int]] = []
    for core in sorted(cores):
        if ranges and core == ranges[-1][1] + 1:
            ranges[-1][1] = core
        else:
            ranges.append([core, core])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


DEVICES = 8  # of a node, where nothing else is said: Atlas 800T A2
_HOST = re.compile(r"[A-Za-z0-9]([\w.-]*\w)?\.?")
_DOTTED = re.compile(r"[0-9]+(\.[0-9]+)+")  # an address or a slip, never a name
_LINE = re.compile(r"(?P<host>\S+)(\s+(slots=)?(?P<slots>[0-9]+))?")
_DIGITS = 4  # of the number of workers of a host
_NUMBERED = re.compile(r"(.*?)(\d+)(\D*)")


def read_hosts(path: Path, each: int = DEVICES) -> tuple[list[str], int]:
    """Return the names of the hosts in a hosts file, and the number of workers of each host. Each line is NAME or NAME
    WORKERS, and `#` starts a comment; a host without WORKERS has `each` workers. IPv6 addresses lose their brackets,
    because ssh and msrun do not accept brackets, and names lose a dot at their end.

    Raises:
        ClusterError: the file cannot be read, names no host, names a host twice, gives hosts unequal numbers of slots,
            or lists `localhost` or a loopback address beside other hosts.
    """
    seen: dict[str, int] = {}
    hosts: list[str] = []
    slots = 0
    for number, line in enumerate(read_text(path, ClusterError, "--nodes ").splitlines(), 1):
        if not (text := line.split("#")[0].strip()):
            continue
        match = _LINE.fullmatch(text)
        if not match or not (name := _name(match["host"])) or (match["slots"] and not match["slots"].strip("0")):
            wrong = f"each line must be NAME or NAME WORKERS (node0 8), not {text!r}{_hint(text)}"
            raise ClusterError(f"{path}:{number}: {wrong}")
        if len(match["slots"] or "") > _DIGITS:
            raise ClusterError(f"{path}:{number}: {text[:40]!r}: no host has that many workers")
        host, here = name, int(match["slots"] or each)
        if line_before := seen.get(usual_form(host)):
            raise ClusterError(f"{path}:{number}: {host} is already named in line {line_before}")
        if slots and here != slots:
            raise ClusterError(
                f"{path}:{number}: {host} has {here} workers, but {hosts[0]} has {slots}; give all hosts the same "
                "number of workers, because msrun numbers the workers as if all hosts had equally many"
            )
        seen[usual_form(host)], slots = number, here
        hosts.append(host)
    if not hosts:
        raise ClusterError(f"--nodes {path}: the file names no host; write NAME or NAME WORKERS on each line")
    if len(hosts) > 1 and (own := next(filter(_is_each_node, hosts), None)):
        raise ClusterError(
            f"{path}:{seen[usual_form(own)]}: {own} means each node itself; if a file lists several hosts, write the "
            "name or the address by which the others reach this host"
        )
    return hosts, slots


def _name(word: str) -> str | None:
    """Return the host that a word of a hosts file names; None if the word is no host's name or address."""
    if ":" not in word and not _DOTTED.fullmatch(word):
        return word.removesuffix(".") if _HOST.fullmatch(word) else None
    try:
        return None if "%" in word else str(ip_address(word[1:-1] if word[0] + word[-1] == "[]" else word))
    except ValueError:
        return None


def _is_each_node(host: str) -> bool:
    with suppress(ValueError):
        return ip_address(host).is_loopback
    return host.lower() == "localhost"


def _hint(text: str) -> str:
    """Return what a user may have meant by a line of a hosts file that is not understood; "" if nothing is known."""
    if re.search(r"\w\[", text) and ":" not in text:
        return f"; write one host on each line: scontrol show hostnames '{text.split()[0]}' lists them"
    if ":" in text and "%" not in text:
        return "; leave out the port, and write the number of workers after a blank"
    return ""


def usual_form(host: str) -> str:
    """Return a host's name or address in a form that is equal for all spellings of it: with small letters, without
    brackets or a dot at its end, and an IPv6 address in its shortest form.
    """
    text = host.strip("[]").lower().removesuffix(".")
    try:
        return str(ip_address(text))
    except ValueError:
        return text


def shorten(hosts: Iterable[str]) -> str:
    """Return names of hosts in the short form of Slurm: ``["node3", "node5", "node4", "x"]`` gives ``"node[3-5],x"``.

    Numbers with different numbers of digits are not joined, because ``node1`` and ``node01`` are two names.
    """
    matches = [(host, _NUMBERED.fullmatch(host)) for host in hosts]
    padded = {len(match[2]) for _, match in matches if match and match[2][0] == "0"}
    groups: dict[tuple[str, str, int], list[int]] = {}
    for _, match in matches:
        if match:
            width = len(match[2]) if len(match[2]) in padded else 0
            groups.setdefault((match[1], match[3], width), []).append(int(match[2]))
    words = [host for host, match in matches if match is None]
    for (before, after, width), numbers in groups.items():
        ranges = [part.split("-") for part in compress(numbers).split(",")]
        text = ",".join("-".join(number.zfill(width) for number in ends) for ends in ranges)
        words.append(f"{before}[{text}]{after}" if len(numbers) > 1 else f"{before}{text}{after}")
    return ",".join(sorted(words))


_BUS = re.compile(r"[0-9A-Fa-f]{4}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.\d")
_VERSION = re.compile(r"npu-smi\s+(?:v|V)?(\d\S*)")
_TOPOLOGY = re.compile(r"^\s*NPU(\d+)\s(.*)$", re.MULTILINE)
_CORES = re.compile(r"\d+-\d+(?:,\d+(?:-\d+)?)*")


@dataclass(frozen=True)
class Chip:
    """A `Chip` is one device of `npu-smi info`: its device number, its card, its name, its health as npu-smi reports
    it, and its PCI address (or "").
    """

    device: int
    card: int
    name: str
    health: str
    bus: str


def chips(text: str) -> list[Chip]:
    """Return the devices that the text of `npu-smi info` lists. Devices are numbered from 0 in the order of the table,
    or by `Phy-ID` if the table has this column.

    Each device takes two rows of the table: the first row has card, name and health, and the second row has chip,
    `Phy-ID` and PCI address.
    """
    found: list[Chip] = []
    first: tuple[int, str, str] | None = None
    for cells in _table(text, "Health"):
        if first is None:
            first = _first_row(cells)
        else:
            bus = _BUS.search(" ".join(cells))
            chip = cells[0].split()
            number = int(chip[1]) if len(chip) > 1 and chip[1].isdigit() else len(found)
            found.append(Chip(number, *first, bus[0].lower() if bus else ""))
            first = None
    return found


def _first_row(cells: list[str]) -> tuple[int, str, str] | None:
    """Return (card, name, health) from the first of a device's two rows; card and name share a column, except on Ascend
    950. Return None for any other row.
    """
    words = cells[0].split()
    card, name, health = (words + cells[1:] + ["", "", ""])[:3]
    return (int(card), name, health) if card.isdigit() and name and health.isalpha() else None


def npu_processes(text: str) -> list[tuple[int, int, str]] | None:
    """Return (card, process id, name) of each row in the table of processes of `npu-smi info`; return None if the table
    has an unknown form.
    """
    rows = list(_table(text, "Process id"))
    found = []
    for cells in rows:
        card = cells[0].split()
        if len(cells) > 2 and card and all(word.isdigit() for word in card) and cells[1].isdigit():
            found.append((int(card[0]), int(cells[1]), cells[2]))
        elif not cells[0].startswith("No running processes"):
            return None
    return found if rows else None


def _table(text: str, column: str) -> Iterator[list[str]]:
    """Yield the cells of each row of the table that has a column of this name, without the rows that hold titles or
    lines.
    """
    inside = False
    for line in text.splitlines():
        if "|" not in line:
            continue
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if any(cell.startswith(("NPU ", "Chip", "Bus-Id")) for cell in cells):
            inside = column in cells or (inside and not cells[0].startswith("NPU "))
        elif inside:
            yield cells


def npu_smi_version(text: str) -> str | None:
    """Return the version of the driver's tools from the first line of the text of `npu-smi info`."""
    found = _VERSION.search(text)
    return found[1] if found else None


def core_lists(text: str) -> dict[int, str]:
    """Return for each device the text in its column `CPU Affinity` of `npu-smi info -t topo`, if the table has this
    column.
    """
    found = {}
    for row in _TOPOLOGY.finditer(text):
        words = row[2].split()
        if words and _CORES.fullmatch(words[-1]):
            found[int(row[1])] = words[-1]
    return found
