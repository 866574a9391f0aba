"""What a row leaves unsaid, decided by rules that know no measurement."""

from __future__ import annotations

from tools.estimate.configuration import Recompute, Table


def micro_batch(samples: int, pp: int, micro_batches: int | None, assumed: list[str]) -> int:
    """Samples of a micro-batch where the row gives none."""
    if micro_batches:
        return max(1, samples // micro_batches)
    batch = 1
    while pp == 1 and batch < 4 and samples % (2 * batch) == 0:
        batch *= 2
    assumed.append(f"micro-batch {batch} (1 in a pipeline, else up to 4)")
    return batch


def interleaved(layers: int, pp: int, micro_batches: int, assumed: list[str]) -> int:
    """Interleaved chunks where the row gives none: the fewest above 1 that divide a stage's layers."""
    if pp == 1:
        return 1
    each = -(-layers // pp)
    chunks = next((count for count in range(2, each + 1) if each % count == 0), 1)
    chunks = chunks if micro_batches >= pp else 1
    assumed.append(f"vpp {chunks} (fewest above 1 that divide a stage's layers)")
    return chunks


def recomputation(words: str, layers: Table, selective: str) -> Recompute:
    """From words such as "full_recompute_no_sp"; unknown means none."""
    if words.startswith("full"):
        return Recompute(full=layers)
    return Recompute(select=layers, selective=selective) if "selective" in words else Recompute()
