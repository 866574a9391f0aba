"""What `tc3 --version` prints: the stack on this machine, asked of the packages' metadata, imports nothing of it."""

from __future__ import annotations

import importlib.metadata
import json
import platform
from pathlib import Path

# name -> distribution; msprobe is the import name of the last (the README says which project not to install)
STACK = {"MindSpore": "mindspore", "MindFormers": "mindformers", "mindstudio-probe": "mindstudio-probe"}
_SCHEMA = Path(__file__).resolve().parents[1] / "tools" / "schema" / "schema.json"


def version_text() -> str:
    """One line a part of the stack, and which pair the recipes and tools were verified with."""
    found = {name: _installed(distribution) for name, distribution in STACK.items()}
    lines = [f"tc3 {_installed('telechat3-moe-recipes')}", *(f"{name} {version}" for name, version in found.items())]
    verified = json.loads(_SCHEMA.read_text(encoding="utf-8"))["versions"]
    pair = f"MindSpore {verified['mindspore']} with MindFormers {verified['mindformers']}"
    same = (found["MindSpore"], found["MindFormers"]) == (verified["mindspore"], verified["mindformers"])
    return "\n".join(
        [*lines, f"Python {platform.python_version()}", f"verified: {pair}{'' if same else ' (not what is here)'}"]
    )


def _installed(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
