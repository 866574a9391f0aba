"""Whether the steps of a profile are alike: other work on the machine makes them differ, or longer than quiet ones."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_WIDE = 0.1  # of the median, between the quartiles
_LONGER = 1.25  # usual steps over one of quiet operators


def spread_notes(lengths: Sequence[float], quiet: float | None = None) -> tuple[str, ...]:
    """What there is to say about the lengths of steps; () where they are alike, or fewer than two.

    Args:
        lengths: seconds of each step.
        quiet: seconds of a step that is made of each operator's quiet executions.
    """
    if len(lengths) < 2:
        return ()
    low, middle, high = np.percentile(np.array(lengths, float), (25, 50, 75))
    found = []
    if high - low > _WIDE * middle:
        found.append(
            f"steps differ widely: half of them take {low:.4g} to {high:.4g} s; other work, or a shared link, was "
            "beside the run, and what is fitted holds for that: profile again on a quiet machine"
        )
    if quiet and middle > _LONGER * quiet:
        found.append(
            f"a usual step takes {middle:.4g} s, {middle / quiet:.2f} times one of quiet operators, which is fitted: "
            "the machine was not quiet"
        )
    return tuple(found)
