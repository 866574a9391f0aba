"""This module measures the spread of values in a way that outliers do not change; the rules in the table below, which
find outliers among numbers, use this module.

The median of the absolute deviations from a centre (MAD), times 1.4826, equals the standard deviation of normal noise,
even if up to half of the values are outliers (Rousseeuw and Croux, 1993, "Alternatives to the median absolute
deviation").

| rule | of what | how it decides |
|---|---|---|
| `tools.doctor.outliers.slow` | workers, links and disks in one probe | above a limit in all rounds, against peers |
| `plugins.straggler_probe.plan.slow_ranks` | ranks of a run | evidence summed over probes, against peers |
| `plugins.spike_guard.plan`, `tools.runs.study.spikes` | losses and norms | above a limit, against the steps before |
| `plugins.expert_balance.routers` | measures of routers | outside a range, against the steps before |

The module is pure Python and NumPy.
"""

from __future__ import annotations

import numpy as np

TO_SIGMA = 1.4826  # of normal noise: standard deviation over median absolute deviation


def deviation(values: np.ndarray, centre: float | np.ndarray = 0.0, axis: int | None = None) -> np.ndarray:
    """Return the robust standard deviation of `values` around `centre`, over all values or along `axis`.

    NaN counts as a missing value; the result is NaN if there are no values.
    """
    return np.asarray(TO_SIGMA * np.nanmedian(np.abs(values - centre), axis))
