"""This module compares a measured training step of one pipeline stage with its prediction, and fits the estimator's
terms to the measurement: efficiencies of operators and links, and the terms of the memory model.

Efficiencies are fitted by `tools.profile.fit`, from the seconds of each term of the step. Memory is fitted by linear
least squares. The peak of a device of stage s, in a run r, is modelled as

    peak = static + a * (activations + working) + b * buffers + reserve

where static, activations, working and buffers are the values of `tools.estimate.memory`, and peak was measured. a, b
and reserve are determined only if the runs differ in more than one way (stages, and two sizes of a micro-batch).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from launch.firsthour.checks import Finding
from tools.estimate.configuration import Configuration
from tools.estimate.memory.model import all_stages
from tools.hardware.units import GIB
from tools.measured import MemoryTerms

FACTOR = 2.0  # the gate of the check `stage`: a worse prediction is not worth calibrating before it is explained
NEAR = 0.01  # the gate of the check `calibrate`
_ALIKE = 1e-6  # of the largest singular value: columns of the fit that cannot be told apart


def memory_row(config: Configuration, stage: int, peak: float) -> dict[str, float]:
    """Return the predicted memory of one stage of a run and the measured peak of this stage, in bytes. If memory is
    fullest during the optimizer's update, after all forward and backward passes, no activations are held, and all bytes
    except the buffers count as static.
    """
    memory = all_stages(config)[stage]
    updates = memory.in_update > memory.in_passes
    return {
        "stage": stage,
        "batch": config.batch,
        "static": memory.in_update - memory.buffers if updates else memory.static,
        "activations": 0.0 if updates else memory.activations + memory.working,
        "buffers": memory.buffers,
        "peak": peak,
    }


def fit_memory(rows: Sequence[Mapping[str, float]]) -> MemoryTerms | None:
    """Return the terms of the memory model that fit the measured peaks best; return None if the runs do not determine
    them. The number of runs must be larger than the number of terms, because as many terms as runs would fit any peaks
    without an error.
    """
    if not rows:
        return None
    known = np.array([[row["activations"], row["buffers"], GIB] for row in rows])
    left = np.array([row["peak"] - row["static"] for row in rows])
    scale = np.abs(known).max(axis=0)
    used = scale > 0
    columns = known[:, used] / scale[used]
    if len(rows) <= used.sum() or np.linalg.svd(columns, compute_uv=False)[-1] < _ALIKE * np.sqrt(len(rows)):
        return None
    found = np.ones(3)
    found[used] = np.linalg.lstsq(columns, left, rcond=None)[0] / scale[used]
    activations, buffers, reserve = map(float, found)
    peaks = np.array([row["peak"] for row in rows])
    error = float(np.abs((known @ found - left) / peaks).max())
    return MemoryTerms(activations, buffers, reserve * GIB, error)


def judge_stage(evidence: Mapping[str, Any]) -> list[Finding]:
    """Return the findings about a measured step and its memory.

    Args:
        evidence: "seconds" of the step; "predicted": its terms, modelled before any calibration; "memory": rows of
            `memory_row`, or nothing where the device does not tell; "why_no_memory": the reason for that.
    """
    seconds, predicted = evidence["seconds"], sum(evidence["predicted"].values())
    ratio = seconds / predicted
    seen = f"a step took {seconds:.4g} s, {predicted:.4g} s were predicted ({ratio - 1:+.0%})"
    near = 1 / FACTOR <= ratio <= FACTOR
    found = [Finding("ok" if near else "warn", "step time", seen, remedy="" if near else "tc3 search explain")]
    if not evidence["memory"]:
        return [*found, Finding("unknown", "memory", evidence["why_no_memory"])]
    modelled = ((row["static"] + row["activations"] + row["buffers"]) / row["peak"] for row in evidence["memory"])
    off = max(abs(share - 1) for share in modelled)
    words = f"peaks of {len(evidence['memory'])} stages and runs, predicted within {off:.1%}"
    return [*found, Finding("ok" if off < 1 - 1 / FACTOR else "warn", "memory", words)]


def judge_fit(seconds: float, after: Mapping[str, float], fitted: Sequence[str], memory: MemoryTerms | None,
              why_no_memory: str) -> list[Finding]:  # fmt: skip
    """Return the findings about the fit of the estimator's terms to the measurements.

    Args:
        seconds: the seconds of the measured step.
        after: the predicted terms of this step with the fitted efficiencies, whose names are `fitted`.
        memory: the fitted terms of memory; None if they are unknown, for the reason `why_no_memory`.
    """
    off = sum(after.values()) / seconds - 1
    words = f"{len(fitted)} efficiencies fitted ({', '.join(fitted)}); the model's step is {off:+.2%} off"
    found = [Finding("ok" if abs(off) <= NEAR else "warn", "efficiencies", words)]
    if memory is None:
        return [*found, Finding("unknown", "memory", why_no_memory)]
    words = (
        f"activations x {memory.activations:.3f}, buffers x {memory.buffers:.3f}, "
        f"{memory.reserve_bytes / GIB:.2f} GiB beside the model; the runs are fitted within {memory.error:.2%}"
    )
    possible = min(memory.activations, memory.buffers, memory.reserve_bytes) >= 0
    return [*found, Finding("ok" if memory.error <= NEAR and possible else "warn", "memory", words)]
