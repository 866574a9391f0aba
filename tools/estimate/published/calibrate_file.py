"""A cluster file with efficiencies of its own: a hardware file and, under `efficiency`, what its devices reach."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import yaml

from tools.estimate.efficiency import cluster_file
from tools.estimate.published.calibrate import Calibration


def cluster_text(cluster: str, name: str, found: Calibration, source: str) -> str:
    """The file of `cluster` (a name or file) under another `name`, with the efficiencies that were found.

    Args:
        source: of the measurements.
    """
    content: dict[str, Any] = yaml.safe_load(cluster_file(cluster).read_text(encoding="utf-8"))
    content["name"] = name
    content["efficiency"] = {key: _short(value) for key, value in asdict(found.efficiency).items()}
    worst = max(abs(after) for _, after in found.errors.values())
    head = [
        f"{name}: {cluster} with efficiencies fitted to {len(found.errors)} measured steps ({source}).",
        f"Fitted: {', '.join(found.fitted) or 'none'}; step times miss by {worst:.1%} at most. Others as they were:",
        *(f"  {key}: {why}" for key, why in found.kept.items()),
    ]
    body = yaml.safe_dump(content, sort_keys=False, width=110)
    return "".join(f"# {line}\n" for line in head) + body


def _short(value: float | bool) -> float | bool:
    return value if isinstance(value, bool) else float(f"{value:.4g}")
