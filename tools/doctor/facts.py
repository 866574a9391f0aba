"""What a host says of itself that has to be the same on every host of a run: versions, packet sizes, recipe, data.

A fact is a text, or None where the host does not tell; a name and its value say everything, so that hosts are compared
by looking at texts alone. Facts are no checks: on one host alone nothing is wrong with any of them.
"""

from __future__ import annotations

import hashlib
import platform
from collections import Counter
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

import tools
from plugins.errors import DataError
from tools.affinity.cpuset import allowed
from tools.data.index import read_blend
from tools.doctor.checks import Patient
from tools.doctor.network import card_sizes
from tools.doctor.npu import ascend_versions
from tools.files.atomic import sampled_digest
from tools.process import host
from tools.recipe.dump import recipe_text
from tools.recipe.view import LOADER
from tools.schema.versions import installed

CHECKOUT = Path(tools.__file__).resolve().parents[1]
_CODE = ("launch", "plugins", "tools")
_DIGITS = 16  # of a sha256, enough to tell files apart
_DATA_PATH = (*LOADER, "config", "data_path")

Facts = dict[str, str | None]


def gather(patient: Patient) -> Facts:
    """The facts of a host, and of the recipe and its data as that host sees them."""
    facts: Facts = {"tc3": tool_version(), "code": code()}
    facts |= _python(patient)
    if not patient.on_cpu:
        facts |= ascend_versions(patient.root) | {"NPUs": _npus(patient)}
    facts["kernel"] = patient.root.read("/proc/sys/kernel/osrelease")
    may = allowed(patient.root)
    facts["cores"] = None if may is None else str(len(may))
    facts |= {f"packet size of {card}": size for card, size in card_sizes(patient.root).items()}
    return facts | _recipe(patient)


def tool_version() -> str:
    """Of the tool that gathers facts: reports of another one may mean other things by the same words."""
    return installed("telechat3-moe-recipes") or "not installed"


@lru_cache(maxsize=1)
def code() -> str:
    """sha256 of the checkout's Python files: a stale copy on one host trains something else."""
    digest = hashlib.sha256()
    for path in sorted(path for folder in _CODE for path in (CHECKOUT / folder).rglob("*.py")):
        digest.update(str(path.relative_to(CHECKOUT)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:_DIGITS]


def _python(patient: Patient) -> Facts:
    """Of this process; a recorded host does not say."""
    versions: Facts = {"Python": platform.python_version()}
    versions |= {name: installed(name) or "not installed" for name in ("mindspore", "mindformers")}
    return versions if patient.root.live else dict.fromkeys(versions)


def _npus(patient: Patient) -> str | None:
    """``8 x 910B3``; devices without a name where npu-smi does not tell."""
    chips = Counter(chip.name for chip in host.chips(patient.root.ask("npu-smi", "info") or ""))
    if chips:
        return ", ".join(f"{count} x {name}" for name, count in sorted(chips.items()))
    devices = len(patient.root.find("/dev/davinci[0-9]*"))
    return None if devices else "none"


def _recipe(patient: Patient) -> Facts:
    """Digests of the flat recipe (bases merged in), and of what lies at its data's prefixes on this host."""
    view = patient.recipe
    if view is None:
        return {}
    flat = hashlib.sha256(recipe_text(view.recipe).encode()).hexdigest()[:_DIGITS]
    prefixes: list[str] = []
    if view.megatron and view.get(_DATA_PATH) is not None:
        with suppress(DataError):  # tc3 check says what is wrong with it; the recipe's digest covers it here
            prefixes = read_blend(view.get(_DATA_PATH)).prefixes
    return {"recipe": flat} | {f"data {prefix}": _data(prefix) for prefix in prefixes}


def _data(prefix: str) -> str | None:
    """Sizes of .idx and .bin, and a digest of up to 16 MiB of each, spread over it. Other text has other lengths."""
    index, tokens = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    try:
        sizes = f".idx {index.stat().st_size:,} bytes, .bin {tokens.stat().st_size:,} bytes"
        both = hashlib.sha256((sampled_digest(index) + sampled_digest(tokens)).encode()).hexdigest()[:_DIGITS]
    except FileNotFoundError:
        return "not there"
    except OSError:
        return None
    return f"{sizes}, {both}"
