"""The file beside a recipe that says what `offset: auto` stands for, like a lock file: made once, read at every launch.

`pretrain.yaml` has `pretrain.layout.yaml`. It holds what the answer depends on (`inputs`, and their digest), the answer
in MindFormers' own shapes, and what the model predicted for it. A launch whose recipe has other inputs refuses it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from plugins.errors import RecipeError, refuse_unknown
from tools.files.atomic import write_atomically
from tools.hardware.own_yaml import read_yaml
from tools.recipe.dump import recipe_text

ENDING = ".layout.yaml"
# of the model of time and memory: raised when its predictions change, or what is asked of them (3: a margin to the
# limit, Ulysses), so that no launch takes an older one's answer; tests/tools/auto/test_model_version.py notices
MODEL_VERSION = 4


_HEAD = "# What `offset: auto` stands for."


@dataclass(frozen=True)
class LayoutFile:
    """One answer.

    Args:
        digest: of `inputs`.
        inputs: what the answer depends on, by dotted name.
        cluster: what times were predicted for.
        offset: of `model.model_config`.
        recompute, select_recompute, select_comm_recompute: of `recompute_config`.
        predicted: step_s and bound_s in seconds; stage_gib and cap_gib of memory, memory_margin of it that had to stay
            free, and how many published runs would fit so near to the limit.
    """

    digest: str
    inputs: Mapping[str, Any]
    cluster: str
    offset: Any
    recompute: Any
    select_recompute: Any
    select_comm_recompute: Any
    predicted: Mapping[str, Any]


def path_of(recipe: str) -> Path:
    """The file of a recipe's file."""
    return Path(recipe).with_suffix(ENDING)


def is_layout_file(path: Path) -> bool:
    """Whether a file is one of these, which may be made anew."""
    try:
        with path.open(encoding="utf-8") as file:
            return file.readline().startswith(_HEAD)
    except (OSError, UnicodeDecodeError):
        return False


def digest_of(inputs: Mapping[str, Any]) -> str:
    """Sixteen letters that tell inputs from others."""
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:16]


def write_layout(layout: LayoutFile, path: Path, command: str) -> None:
    """Write the file; `command` made it.

    Raises:
        DataError: the folder cannot be written to.
    """
    head = f"{_HEAD} Made by `{command}`; read at every launch.\n"
    write_atomically(path, head + recipe_text(asdict(layout)))


def read_layout(path: Path) -> LayoutFile:
    """Read a file.

    Raises:
        RecipeError: it cannot be read, or a key is missing or unknown.
    """
    content = read_yaml(path, RecipeError)
    wanted = [field.name for field in fields(LayoutFile)]
    if not isinstance(content, dict) or not set(wanted) <= set(content):
        raise RecipeError(f"{path}: want a mapping of {', '.join(wanted)}; make it anew")
    refuse_unknown(f"{path}: ", content, wanted)
    return LayoutFile(**content)


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What differs between inputs, as "pp 8, was 4"."""
    names = [*now, *(name for name in before if name not in now)]
    return [
        f"{name} {now.get(name, 'absent')}, was {before.get(name, 'absent')}"
        for name in names
        if now.get(name) != before.get(name)
    ]
