"""What `tc3 --version` prints: the stack on this machine, asked of the packages' metadata, imports nothing of it."""

from __future__ import annotations

import platform

from tools.schema.versions import installed, verified

# name -> distribution; msprobe is the import name of the last (the README says which project not to install)
STACK = {"MindSpore": "mindspore", "MindFormers": "mindformers", "mindstudio-probe": "mindstudio-probe"}


def version_text() -> str:
    """One line a part of the stack, and which pair the recipes and tools were verified with."""
    names = {"tc3": "telechat3-moe-recipes", **STACK}
    lines = [f"{name} {installed(distribution) or 'not installed'}" for name, distribution in names.items()]
    wanted = verified()
    pair = f"MindSpore {wanted['mindspore']} with MindFormers {wanted['mindformers']}"
    same = all(installed(distribution) == version for distribution, version in wanted.items())
    return "\n".join(
        [*lines, f"Python {platform.python_version()}", f"verified: {pair}{'' if same else ' (not what is here)'}"]
    )
