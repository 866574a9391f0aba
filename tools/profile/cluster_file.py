"""The cluster file that a fit makes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import yaml

from tools.profile.fit import Fit
from tools.profile.kernels import Profile


class _Whole(yaml.SafeDumper):
    """Writes what stands twice twice."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def file_text(content: Mapping[str, Any], name: str, found: Fit, profile: Profile, like: str) -> str:
    """The file of a cluster under a name, with the efficiencies that were found.

    Args:
        content: of the hardware's own file.
        like: what that file is called.
    """
    values = {key: value if isinstance(value, bool) else float(f"{value:.5g}")
              for key, value in asdict(found.efficiency).items()}  # fmt: skip
    measured, after = found.measured.seconds, sum(found.after.values())
    head = [
        f"{name}: {like} with efficiencies fitted to one profiled step of {measured:.4g} s ({profile.device}).",
        f"Fitted: {', '.join(found.fitted)}; the model's step is {after / measured - 1:+.1%} off it. Others:",
        *(f"  {key}: {why}" for key, why in found.kept.items()),
    ]
    body = yaml.dump({**content, "name": name, "efficiency": values}, Dumper=_Whole, sort_keys=False, width=110)
    return "".join(f"# {line}\n" for line in head) + body
