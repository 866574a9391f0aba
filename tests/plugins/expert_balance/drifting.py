"""Synthetic loads: log weights of experts walk, tokens are counted.

The log weight of an expert is an AR(1) walk: stationary distribution normal(0, `spread`), of which a period keeps
`keep`; the tokens of a period are a multinomial draw of `tokens` by those weights. Mild loads: spread 0.15 and 0.3 with
keep 0.99 (with 0.3, devices of 4 experts start at a max/mean of 1.4, of 16 experts at 1.16).
"""

from __future__ import annotations

import numpy as np

from plugins.expert_balance.copies import next_state, none
from plugins.expert_balance.plan import Prediction, due, moved
from plugins.expert_balance.record import Moved, Record
from plugins.expert_balance.settings import Settings

MILD = ((0.15, 0.99), (0.3, 0.99))  # (spread, keep)


def drifting(
    seed: int, spread: float, keep: float, periods: int, layers: int, experts: int, tokens: int = 64 * 4096 * 8
) -> np.ndarray:
    """int64 [periods, layers, experts]."""
    rng = np.random.default_rng(seed)
    walk, found = rng.normal(0, spread, (layers, experts)), []
    for _ in range(periods):
        weights = np.exp(walk)
        found.append([rng.multinomial(tokens, weight / weight.sum()) for weight in weights])
        walk = keep * walk + np.sqrt(1 - keep**2) * rng.normal(0, spread, walk.shape)
    return np.array(found, np.int64)


def live(
    settings: Settings,
    steps: int = 13,
    devices: int = 4,
    layers: int = 3,
    experts: int = 32,
    spread: float = 0.5,
    nodes: int = 1,
) -> list[Record]:
    """Return the records of a simulated run with the plugin, made by the plugin's own functions for prediction and
    planning.
    """
    slots, prediction, records = np.tile(np.arange(experts), (layers, 1)), Prediction(settings.memory), []
    copies = none(layers, devices, settings.spare)
    for step, tokens in enumerate(drifting(0, spread, 0.9, steps, layers, experts, tokens=128 * experts), 1):
        prediction.see(tokens)
        (before, held), gone = (slots, copies), None
        if due(step, settings.every):
            slots, copies = next_state(settings, prediction.loads, before, held, devices, step=step, nodes=nodes)
            told = copies if settings.spare else None
            gone = Moved(slots, moved(slots, before, devices), 0, 0.0, 0.25, told)
        numbers, held = tuple(range(1, layers + 1)), held if settings.spare else None
        records.append(Record(step, devices, numbers, tokens, before, (None,) * layers, gone, nodes, held))
    return records
