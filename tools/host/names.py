"""Names of hosts: the file that lists them, and many of them in few words."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from plugins.errors import ClusterError
from tools.host.root import compress

DEVICES = 8  # of a node, where nothing else is said: Atlas 800T A2
_HOST = re.compile(r"[A-Za-z0-9\[][\w.:\[\]-]*")
_LINE = re.compile(r"(?P<host>\S+)(\s+(slots=)?(?P<slots>\d+))?")
_DIGITS = 4  # of the number of workers of a host
_NUMBERED = re.compile(r"(.*?)(\d+)(\D*)")


def read_hosts(path: Path) -> tuple[list[str], int]:
    """Names and workers a host of a hosts file: a line each, HOST or HOST SLOTS; `#` starts a comment.

    Raises:
        ClusterError: the file cannot be read, names a host twice or none at all, or hosts with unequal slots.
    """
    try:
        if path.exists() and not path.is_file():
            raise ClusterError(f"--nodes {path}: cannot be read (not an ordinary file)")
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ClusterError(f"--nodes {path}: cannot be read: byte {error.start + 1} is not UTF-8") from None
    except OSError as error:
        raise ClusterError(f"--nodes {path}: cannot be read ({error.strerror})") from None
    seen: dict[str, int] = {}
    slots = 0
    for number, line in enumerate(lines, 1):
        if not (text := line.split("#")[0].strip()):
            continue
        match = _LINE.fullmatch(text)
        if not match or not _HOST.fullmatch(match["host"]) or match["slots"] == "0":
            raise ClusterError(f"{path}:{number}: want HOST or HOST SLOTS (node0 8), got {text!r}")
        if len(match["slots"] or "") > _DIGITS:
            raise ClusterError(f"{path}:{number}: {text[:40]!r}: no host has so many slots")
        host, here = match["host"], int(match["slots"] or DEVICES)
        if host in seen:
            raise ClusterError(f"{path}:{number}: {host} stands in line {seen[host]} already")
        if slots and here != slots:
            wrong = f"{host} has {here} slots, {next(iter(seen))} has {slots}"
            raise ClusterError(f"{path}:{number}: {wrong}; msrun numbers workers as if every node had as many")
        seen[host], slots = number, here
    if not seen:
        raise ClusterError(f"--nodes {path}: names no host; want a line each: HOST or HOST SLOTS")
    return list(seen), slots


def shorten(hosts: Iterable[str]) -> str:
    """``["node3", "node5", "node4", "x"]`` -> ``"node[3-5],x"``, as Slurm writes lists of hosts.

    Numbers of other widths stand apart, for ``node1`` and ``node01`` are two names.
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
