"""The only monkeypatches of the CPU backend: lines of MindSpore 2.9.0 / MindFormers 1.9.0 that no hook reaches."""

from __future__ import annotations

from plugins.private_hooks import replace


def before_mindformers(distributed: bool) -> None:
    """Patch what MindFormers copies by `from ... import`: call before mindformers is imported.

    Barrier has no CPU kernel, and nothing lets a caller choose another one: an AllReduce of one element waits
    for the same ranks.
    """
    if not distributed:
        return
    from mindspore import Tensor, ops
    from mindspore.common import dtype as mstype
    from mindspore.communication import comm_func

    def barrier(group=None):
        """Wait for every rank (the group is always the world in MindFormers' calls)."""
        ops.AllReduce()(Tensor([0.0], mstype.float32)).asnumpy()

    replace(comm_func, "barrier", "_get_cache_prim(P.Barrier)(group)", barrier)


def after_context() -> None:
    """Patch MindFormers itself; call when communication is up.

    * `core/callback/callback.py:_get_separate_loss` reads parameters by `asnumpy()` and clears them at once; on
      CPU that array is a view, so 0.0 would be printed. Losses are averaged over ranks here too.
    * `checkpoint/sharded_tensor.py` asks MindSpore's strategy of a sharded graph, which data parallel has not.
    """
    from mindformers.checkpoint import sharded_tensor
    from mindformers.core.callback import callback

    from plugins.cpu_backend import losses, strategy

    replace(callback, "_get_separate_loss", 'parameter_register.get("lm_loss").asnumpy()', losses.separate_losses)
    replace(sharded_tensor, "get_strategy_metadata", ".get_rank_layout(rank_id)", strategy.of_all_ranks)
    replace(sharded_tensor, "get_current_strategy_metadata", ".get_local_rank_layout()", strategy.of_this_rank)
