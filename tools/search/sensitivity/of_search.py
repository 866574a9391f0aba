"""The doubt about a search's answer: its placed layouts and the recipe's own, under the estimator's error."""

from __future__ import annotations

import math

from tools.estimate.configuration import Configuration
from tools.estimate.efficiency import known_error
from tools.estimate.time_model import TimeModel
from tools.search.ranking.run import Found
from tools.search.sensitivity.doubt import Doubt, doubt
from tools.search.sensitivity.terms import UNKNOWN_ERROR, scaled, slopes


def doubt_of(found: Found, times: TimeModel) -> Doubt | None:
    """How sure the first place is; None without an answer.

    The recipe's own layout takes part where it is the same question and keeps the memory.
    """
    entries = {str(number): entry for number, entry in enumerate(found.entries, 1)}
    if not entries:
        return None
    if found.own and not found.request.changed and found.own.peak <= found.request.room:
        entries["recipe"] = found.own
    known = known_error(times.hardware)
    slope = scaled(slopes(times, [entry.config for entry in entries.values()]), known)
    return doubt(
        list(entries),
        [entry.seconds for entry in entries.values()],
        slope,
        found.request.node,
        known.mean if known else UNKNOWN_ERROR,
        known is not None,
        [least_devices(entry.config) for entry in entries.values()],
        whole=found.complete,
    )


def least_devices(config: Configuration) -> int:
    """Devices of one copy of the pipeline, with as many data-parallel ranks as its expert groups need."""
    return config.pp * math.lcm(config.tp * config.cp, config.ep)
