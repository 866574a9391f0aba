"""The options of the probe on `tc3 doctor`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from plugins.errors import ClusterError
from tools.doctor.checks import Patient
from tools.doctor.probe.form import Probe


def probe_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --probe (`wants_probe`) and --workers."""
    workers = click.option(
        "--workers", type=int, help="Workers of --probe; default: the recipe's on one host, one for each NPU or core."
    )
    flag = click.option(
        "--probe",
        "wants_probe",
        is_flag=True,
        help="Also measure matrix products, memory, disk and links of each worker, some seconds on all its cores, and "
        "fail for one that is slower than its peers. Not beside a training run: both would be slower.",
    )
    return flag(workers(command))


def probe_if(wanted: bool, patient: Patient, recipe: Path | None, workers: int | None) -> Probe | None:
    """The probe of this host if it is wanted.

    Raises:
        ClusterError: the options do not go together, or the host cannot be probed.
    """
    if not wanted:
        if workers is not None:
            raise ClusterError(f"--workers {workers} is of --probe: add --probe, or leave it out")
        return None
    if not patient.root.live:
        raise ClusterError(f"--root {patient.root.path}: a recorded host cannot be probed; leave out --root or --probe")
    from tools.doctor.probe.run import probe  # brings the solver of the plan

    return probe(recipe, workers, patient.folder)
