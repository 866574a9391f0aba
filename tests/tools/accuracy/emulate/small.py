"""A model that is emulated in a tenth of a second, and every way to cut it."""

from functools import cache

from tools.accuracy.emulate.run import emulate
from tools.accuracy.emulate.sizes import Sizes
from tools.accuracy.emulate.strategy import Strategy

SMALL = Sizes(
    batch=4, length=8, vocabulary=32, hidden=16, heads=4, layers=2, dense=1, q_rank=12, kv_rank=8, nope=4, rope=4,
    value=6, ffn=24, experts=8, top_k=2, expert_ffn=8, shared_ffn=8, scaling=2.8, rate=3e-3, clip=0.5,
)  # fmt: skip
STRATEGIES = (
    Strategy(dp=2),
    Strategy(micro=2),
    Strategy(tp=2),
    Strategy(tp=4),
    Strategy(tp=2, sequence_parallel=True),
    Strategy(cp=2),
    Strategy(cp=4, dp=2),
    Strategy(pp=2, micro=2),
    Strategy(pp=2, micro=4),
    Strategy(dp=2, ep=2),
    Strategy(dp=4, ep=4),
    Strategy(dp=4, ep=4, mode="hierarchical"),
    Strategy(dp=4, ep=4, mode="deduplicated"),
    Strategy(dp=4, ep=2, mode="hierarchical"),
    Strategy(dp=2, ep=2, chunks=(1, 4)),
    Strategy(dp=2, ep=2, tp=2, micro=2),
    Strategy(dp=2, ep=4, tp=2, sequence_parallel=True, mode="hierarchical"),
    Strategy(dp=2, cp=2, tp=2, ep=2, pp=2, sequence_parallel=True),
    Strategy(cp=2, tp=2, ep=2, micro=2),
    Strategy(dp=4, zero=True),
    Strategy(dp=4, ep=2, tp=2, zero=True),
)


@cache
def reference(seed, steps):
    """The unsharded run."""
    return emulate(SMALL, steps=steps, seed=seed)
