"""The only monkeypatches of the CPU backend: lines of MindSpore 2.9.0 / MindFormers 1.9.0 that no hook reaches.

Each patch names the line it stands in for; when that line is gone, it refuses instead of patching blindly.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any


class OutdatedPatchError(RuntimeError):
    """The code that a patch stands in for has changed: check whether the patch is still needed."""


def replace(module: ModuleType, name: str, line: str, replacement: Callable[..., Any]) -> None:
    """Set `module.name` to `replacement` if the source of the original still holds `line`.

    Raises:
        OutdatedPatchError: when it does not.
    """
    original = getattr(module, name)
    if getattr(original, "tc3_patch", False):
        return
    if line not in inspect.getsource(original):
        raise OutdatedPatchError(
            f"{module.__name__}.{name} no longer contains {line!r}: the CPU backend was written for MindSpore 2.9.0 "
            "and MindFormers 1.9.0; install the versions in constraints.txt"
        )
    replacement.tc3_patch = True  # type: ignore[attr-defined]
    setattr(module, name, replacement)


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
