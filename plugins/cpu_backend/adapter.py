"""This module points a recipe's MindFormers config at the classes of the CPU backend, and patches code of MindFormers
that cannot be replaced through the config.

`launch/train.py` uses this module only if `context.device_target` is CPU: it calls `before_mindformers` first, and
`enable` when the context is built. The CPU backend's only monkeypatches are in two functions of this module; each patch
replaces code of MindSpore 2.9.0 or MindFormers 1.9.0. MindSpore and MindFormers are imported only when they are needed.
"""

from __future__ import annotations

import importlib

from plugins.cpu_backend.plan import documents_apart, refused_dtype
from plugins.errors import RecipeError
from plugins.private_hooks import replace

# MindFormers' class -> ours, by the key that names it
ARCHITECTURES = {
    "TeleChat3MoeForCausalLM": "CpuTeleChat3MoeForCausalLM",
    "TeleChat3ForCausalLM": "CpuTeleChat3ForCausalLM",
}
WRAPPERS = {"MFTrainOneStepCell": "CpuTrainOneStepCell"}


def before_mindformers(distributed: bool) -> None:
    """Patch functions that MindFormers copies by `from ... import`; call this before importing mindformers.

    The operator Barrier has no CPU kernel, and MindFormers has no setting to use another operator: the patch uses an
    AllReduce of one element, which waits for the same ranks.
    """
    if not distributed:
        return
    from mindspore import Tensor, ops
    from mindspore.common import dtype as mstype
    from mindspore.communication import comm_func

    def barrier(group=None):
        """Wait until every rank has called this function; the only group that MindFormers passes is the group of all
        ranks.
        """
        ops.AllReduce()(Tensor([0.0], mstype.float32)).asnumpy()

    replace(comm_func, "barrier", "_get_cache_prim(P.Barrier)(group)", barrier)


def after_context() -> None:
    """Patch MindFormers' own functions; call this when the communication between ranks is initialised.

    * `core/callback/callback.py:_get_separate_loss` reads parameters by `asnumpy()` and clears them at once; on
      CPU that array is a view, so 0.0 would be printed. Losses are averaged over ranks here too.
    * `checkpoint/sharded_tensor.py` asks MindSpore's strategy of a sharded graph, which data parallel has not.
    """
    from mindformers.checkpoint import sharded_tensor
    from mindformers.core.callback import callback

    from plugins.cpu_backend import train_step

    replace(callback, "_get_separate_loss", 'parameter_register.get("lm_loss").asnumpy()', train_step.separate_losses)
    replace(sharded_tensor, "get_strategy_metadata", ".get_rank_layout(rank_id)", train_step.strategy_of_all_ranks)
    replace(
        sharded_tensor, "get_current_strategy_metadata", ".get_local_rank_layout()", train_step.strategy_of_this_rank
    )


def enable(config) -> None:
    """Rewrite `config` (a MindFormerConfig) in place so that MindFormers builds a model that a CPU can run.

    Call before `Trainer(config)` and after `build_context(config)`. The recipe file itself stays stock.

    Raises:
        RecipeError: the recipe has a setting that a CPU cannot execute.
    """
    check(config)
    after_context()
    for module in ("model", "train_step"):
        importlib.import_module(f"plugins.cpu_backend.{module}")
    apart = documents_apart(config.train_dataset.data_loader)
    importlib.import_module("plugins.cpu_backend.attention").follow_documents(apart)
    model_config = config.model.model_config
    model_config.architectures = [ARCHITECTURES[name] for name in model_config.architectures]
    config.runner_wrapper.type = WRAPPERS[config.runner_wrapper.type]


def check(config) -> None:
    """Refuse settings that would fail deep inside MindSpore on CPU, or would silently make the run slower or wrong."""
    model_config = config.model.model_config
    parallel = config.parallel_config
    workers = parallel.data_parallel if config.use_parallel else 1
    rules = [
        (config.context.mode == 0, "context.mode", "0 (graph mode; PyNative is 20 to 40 times slower)"),
        (not config.runner_config.sink_mode, "runner_config.sink_mode", "False"),
        (config.runner_wrapper.type in WRAPPERS, "runner_wrapper.type", " or ".join(WRAPPERS)),
        (
            config.runner_wrapper.get("use_clip_grad", True),
            "runner_wrapper.use_clip_grad",
            "True (a step cannot return None for the norm; to clip nothing, take a large max_grad_norm)",
        ),
        (
            not (why := refused_dtype(model_config.compute_dtype)),
            "model.model_config.compute_dtype",
            f"float32 ({why})",
        ),
        (not model_config.fused_norm, "model.model_config.fused_norm", "False"),
        (model_config.hidden_act == "swiglu", "model.model_config.hidden_act", "'swiglu'"),
        (config.parallel.parallel_mode == 0, "parallel.parallel_mode", "0 (data parallel)"),
        (parallel.model_parallel == 1, "parallel_config.model_parallel", "1"),
        (parallel.pipeline_stage == 1, "parallel_config.pipeline_stage", "1"),
        (parallel.expert_parallel in (1, workers), "parallel_config.expert_parallel", f"1 or all workers ({workers})"),
        (
            parallel.expert_parallel == 1 or (config.get("plugins") or {}).get("hierarchical_ep"),
            "parallel_config.expert_parallel",
            "1, or switch on plugins.hierarchical_ep, which brings tokens to the experts of other workers",
        ),
    ]
    for holds, key, right in rules:
        if not holds:
            raise RecipeError(f"{key}: this value does not work with context.device_target: CPU; write {right}")
    unknown = [name for name in model_config.architectures if name not in ARCHITECTURES]
    if unknown:
        raise RecipeError(
            f"model.model_config.architectures: {unknown[0]!r} has no implementation for CPU; the architectures that "
            "run on CPU are: " + ", ".join(ARCHITECTURES)
        )
