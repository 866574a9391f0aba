"""Sums and the like over the members of a group: the same bits whatever comes first."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from plugins.errors import ClusterError

OPERATIONS: dict[str, Callable[..., np.ndarray]] = {
    "sum": np.add,
    "max": np.maximum,
    "min": np.minimum,
    "prod": np.multiply,
}
# added up in float32 and rounded once
LOW_PRECISION = ("float16", "bfloat16")


def combine(parts: Sequence[np.ndarray], operation: str, out: np.ndarray) -> None:
    """Combine the parts one by one, in the order of the group, into `out`, which may be one of them.

    Args:
        parts: [members] arrays of one shape and dtype.
        operation: a key of `OPERATIONS`.
        out: of that shape and dtype. Of booleans, sum and max are "any", prod and min "all".

    Raises:
        ClusterError: an operation that is not known here.
    """
    if operation not in OPERATIONS:
        raise ClusterError(f"no operation {operation!r} over a group: there are {', '.join(OPERATIONS)}")
    function = OPERATIONS[operation]
    first, *others = parts
    if not others:
        out[...] = first
        return
    if first.dtype.name in LOW_PRECISION:
        total = first.astype(np.float32)
        for part in others:
            function(total, part.astype(np.float32), out=total)
        out[...] = total
        return
    in_place = not any(np.may_share_memory(out, part) for part in others[1:])
    total = out if in_place else np.empty_like(out)
    function(first, others[0], out=total)
    for part in others[1:]:
        function(total, part, out=total)
    if not in_place:
        out[...] = total
