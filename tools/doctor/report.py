"""This module makes the report of one host that `tc3 doctor --json` prints, and reads such a report again, possibly on
another host.

`gather` collects the facts of a host: the values that must be the same on every host of a run (versions, packet sizes,
recipe and data). The value of a fact is a text, or None if the host does not report the fact; hosts are compared only
by these texts. Facts are not checks: the fact of a single host cannot be wrong.

`Report` holds the findings, the facts and the probe of a host; `read_report` reads a report, and refuses other texts.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, is_dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints, is_typeddict

import tools
from plugins.errors import DataError
from tools.affinity.topology import allowed
from tools.data.index import read_blend
from tools.doctor.checks import Finding, Patient
from tools.doctor.devices import ascend_versions, card_sizes
from tools.doctor.outliers import Probe
from tools.files.atomic import sampled_digest
from tools.process import host
from tools.recipe.dump import recipe_text
from tools.recipe.view import LOADER
from tools.schema.versions import installed

CHECKOUT = Path(tools.__file__).resolve().parents[1]
Facts = dict[str, str | None]
_CODE = ("launch", "plugins", "tools")
_DIGITS = 16  # of a sha256, enough to tell files apart
_DATA_PATH = (*LOADER, "config", "data_path")
_LARGEST = 1e15  # of any measured number
_MEASURES = ("matmul", "memory", "disk", "bandwidth", "latency")


def gather(patient: Patient) -> Facts:
    """Return the facts of a host that `tc3 doctor` compares between hosts, such as versions, the number of cores, and
    the content of the recipe's files on this host.
    """
    facts: Facts = {"tc3": tool_version(), "code": code()}
    facts |= _python_facts(patient)
    if not patient.on_cpu:
        facts |= ascend_versions(patient.root) | {"NPUs": _npu_fact(patient)}
    facts["kernel"] = patient.root.read("/proc/sys/kernel/osrelease")
    may = allowed(patient.root)
    facts["cores"] = None if may is None else str(len(may))
    facts |= {f"packet size of {card}": size for card, size in card_sizes(patient.root).items()}
    return facts | _recipe_facts(patient)


def tool_version() -> str:
    """Return the version of this tool. `tc3 doctor` does not compare the reports of different versions, because the
    same words may have different meanings.
    """
    return installed("telechat3-moe-recipes") or "not installed"


@lru_cache(maxsize=1)
def code() -> str:
    """Return the SHA-256 of the Python files of this repository's checkout. Hosts with different checkouts would train
    different code.
    """
    digest = hashlib.sha256()
    for path in sorted(path for folder in _CODE for path in (CHECKOUT / folder).rglob("*.py")):
        digest.update(str(path.relative_to(CHECKOUT)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:_DIGITS]


def _python_facts(patient: Patient) -> Facts:
    """Return the versions of this process's Python and packages; a recorded host does not state them."""
    versions: Facts = {"Python": platform.python_version()}
    versions |= {name: installed(name) or "not installed" for name in ("mindspore", "mindformers")}
    return versions if patient.root.live else dict.fromkeys(versions)


def _npu_fact(patient: Patient) -> str | None:
    """Return the NPUs as text, such as ``8 x 910B3``; without a name if npu-smi does not state it."""
    chips = Counter(chip.name for chip in host.chips(patient.root.ask("npu-smi", "info") or ""))
    if chips:
        return ", ".join(f"{count} x {name}" for name, count in sorted(chips.items()))
    devices = len(patient.root.find("/dev/davinci[0-9]*"))
    return None if devices else "none"


def _recipe_facts(patient: Patient) -> Facts:
    """Return digests of the flat recipe (with its bases merged in), and of the files at its data's prefixes on this
    host.
    """
    view = patient.recipe
    if view is None:
        return {}
    flat = hashlib.sha256(recipe_text(view.recipe).encode()).hexdigest()[:_DIGITS]
    prefixes: list[str] = []
    if view.megatron and view.get(_DATA_PATH) is not None:
        with suppress(DataError):  # tc3 check says what is wrong with it; the recipe's digest covers it here
            prefixes = read_blend(view.get(_DATA_PATH)).prefixes
    return {"recipe": flat} | {f"data {prefix}": _data_fact(prefix) for prefix in prefixes}


def _data_fact(prefix: str) -> str | None:
    """Return the sizes of .idx and .bin, and a digest of up to 16 MiB of each file, spread over the file. (Corpora with
    other text have documents of other lengths.)
    """
    index, tokens = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    try:
        sizes = f".idx {index.stat().st_size:,} bytes, .bin {tokens.stat().st_size:,} bytes"
        both = hashlib.sha256((sampled_digest(index) + sampled_digest(tokens)).encode()).hexdigest()[:_DIGITS]
    except FileNotFoundError:
        return "not there"
    except OSError:
        return None
    return f"{sizes}, {both}"


class ReportError(ValueError):
    """This error means that a text is not a report of `tc3 doctor --json`, or that another version wrote the report.
    When a command prints this error, the host's name stands before the message.
    """


@dataclass(frozen=True)
class Report:
    """A `Report` holds the findings about one host, the facts of the host, and the speeds of its workers if they were
    measured.
    """

    findings: Sequence[Finding]
    facts: Facts
    probe: Probe | None = None

    def text(self) -> str:
        """Return the report as JSON, in one line."""
        return json.dumps(
            {"findings": [asdict(item) for item in self.findings], "facts": self.facts, "probe": self.probe}
        )


def read_report(text: str) -> Report:
    """Return the report of `tc3 doctor --json` that a text holds.

    Raises:
        ReportError: the text is not complete JSON, or does not have the form that `Report.text` of this version writes.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        start = " ".join(text.split())[:60]
        raise ReportError(f"the text is not complete JSON: {start!r}..." if start else "the text is empty") from None
    if isinstance(data, list):
        raise ReportError("an earlier version of tc3 wrote this report; update the checkout on that host")
    facts = data.get("facts") if isinstance(data, dict) else None
    if not isinstance(facts, dict) or not all(isinstance(value, str | None) for value in facts.values()):
        raise ReportError("the JSON is not a report of tc3 doctor")
    if facts.get("tc3") != tool_version():
        raise ReportError(
            f"version {facts.get('tc3')} of tc3 wrote this report, but this is version {tool_version()}, and reports "
            "of different versions are not compared; update the older checkout"
        )
    findings, probe = data.get("findings"), data.get("probe")
    if not _are_findings(findings) or not _is_probe(probe):
        raise ReportError(
            "the report is incomplete: its findings or its probe cannot be read; make it again on that host"
        )
    return Report([Finding(**item) for item in findings], facts, probe)


def _are_findings(value: Any) -> bool:
    """Return whether a value is a list of findings that names no check twice, except the probe."""
    if not isinstance(value, list) or not all(_has_form(item, Finding) for item in value):
        return False
    names = [item["check"] for item in value if item["check"] != "probe"]
    return 0 < len(names) == len(set(names))


def _is_probe(value: Any) -> bool:
    """Return whether a value is None, or a probe whose links are between its workers, and whose rates and times are not
    zeros.
    """
    if value is None or not _has_form(value, Probe):
        return value is None
    ends = {link[end] for link in value["links"] for end in ("source", "target")}
    numbers = [row[key] for row in value["workers"] + value["links"] for key in _MEASURES if key in row]
    known = ends <= set(range(len(value["workers"]))) and all(number > 0 for rounds in numbers for number in rounds)
    return known and all(map(_is_whole, value["workers"] + value["links"]))


def _is_whole(row: Mapping[str, Any]) -> bool:
    """Return whether a worker that did not fail was measured as often in each respect, and whether a link that was
    measured has the shares that it waited.
    """
    if "matmul" not in row:
        return bool(row["waited"]) or not (row["bandwidth"] or row["latency"])
    names = ("matmul", "memory", "disk", "waited", "throttled")
    return bool(row["failed"]) or len({len(row[name]) for name in names}) == 1


@lru_cache  # a cluster's report holds thousands of each form
def _kinds(form: Any) -> dict[str, Any]:
    return get_type_hints(form)


def _has_form(value: Any, form: Any) -> bool:
    """Return whether a value that was read from JSON has the form that a type describes: a TypedDict or dataclass, a
    list, a choice of words, or a plain type.
    """
    if is_typeddict(form) or is_dataclass(form):
        kinds = _kinds(form)
        return (
            isinstance(value, dict)
            and value.keys() == kinds.keys()
            and all(_has_form(value[k], kinds[k]) for k in kinds)
        )
    if get_origin(form) is list:
        return isinstance(value, list) and all(_has_form(item, get_args(form)[0]) for item in value)
    if get_origin(form) is Literal:
        return value in get_args(form)
    if get_args(form):
        return any(_has_form(value, one) for one in get_args(form))
    if form is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < _LARGEST  # nor is NaN
    return isinstance(value, form)
