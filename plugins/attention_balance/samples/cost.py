"""What a sample costs the device that trains it. NumPy only.

cost = per_pair * (pairs of tokens that attend) + per_token * tokens. A document of n tokens under a causal mask has
n * (n + 1) / 2 pairs; everything else in the model is linear in tokens. Devices of one tensor- or context-parallel
group share a sample, so the cost is relative: it compares samples, whatever the group's size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from plugins.attention_balance.samples.gpt_index import GPTIndex
from plugins.attention_balance.samples.segments import Segments, segments_in_stream_order

UNITS = MEASURED, COMPUTED = "s", "FLOP"


def causal_pairs(segments: Segments) -> np.ndarray:
    """int64 [samples], pairs of tokens that attend, the sum of n * (n + 1) / 2 over a sample's segments."""
    return np.add.reduceat(segments.values * (segments.values + 1) // 2, segments.offsets[:-1])


@dataclass(frozen=True)
class Cost:
    """What the model costs, computed from its sizes (`unit` is "FLOP") or measured ("s").

    per_pair: `unit` for each attending pair of tokens; per_token: `unit` for each token.
    """

    per_pair: float
    per_token: float
    unit: str = COMPUTED

    def of(self, segments: Segments) -> np.ndarray:
        """float64 [samples], in `unit`."""
        tokens = np.add.reduceat(segments.values, segments.offsets[:-1])
        return self.per_pair * causal_pairs(segments) + self.per_token * tokens

    def of_dataset(self, index: GPTIndex) -> np.ndarray:
        """float64 [items], in `unit`, for a dataset in its own order. Memory: 16 bytes per sample and one chunk."""
        in_stream = np.empty(len(index))
        for start, segments in segments_in_stream_order(index):
            in_stream[start : start + len(segments)] = self.of(segments)
        return in_stream[index.shuffle_index]

    def attention_only(self) -> Cost:
        """The same without the part that is linear in tokens."""
        return replace(self, per_token=0.0)
