"""A mini of a recipe that keeps its parallel strategy: the sharded graph with its own operators, on a few CPU workers.

`derive_mini` shrinks the model; this gives back what that takes from a recipe for one worker: the parallel degrees
(scaled down), the pipeline's schedule, recomputation, optimizer sharding, dispatcher and precision.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from plugins.errors import RecipeError
from tools.recipe.load import Recipe
from tools.recipe.view import MODEL, View

WORKERS = 4
# of a recipe for Ascend, and kept: operators, precision, the way tokens go
_OWN = (
    *("hidden_act", "compute_dtype", "fused_norm", "apply_rope_fusion", "bias_swiglu_fusion", "moe_permute_fusion"),
    *("moe_token_dispatcher_type", "moe_shared_expert_overlap", "use_fused_ops_permute"),
)


@dataclass(frozen=True)
class Degrees:
    """Parallel degrees: pipeline, tensor, data, context and expert."""

    pp: int = 1
    tp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1

    @property
    def workers(self) -> int:
        """Processes."""
        return self.pp * self.tp * self.dp * self.cp


def scale_degrees(own: Degrees, workers: int) -> Degrees:
    """Degrees whose product is at most `workers`, each a power of two and no larger than the recipe's own.

    In turn the pipeline, tensor, data and context degree is doubled where the recipe allows it, until no doubling fits.
    Experts are shared by as many data- and tensor-parallel ranks of a stage as the recipe's degree allows.
    """
    sizes = {"pp": 1, "tp": 1, "dp": 1, "cp": 1}
    room, grows = workers, True
    while grows:
        grows = False
        for name in sizes:
            if room >= 2 and sizes[name] * 2 <= getattr(own, name):
                sizes[name] *= 2
                room //= 2
                grows = True
    ep, most = 1, sizes["tp"] * sizes["dp"]  # as MindFormers' ffn.py shares them
    while ep * 2 <= min(own.ep, most):
        ep *= 2
    return Degrees(**sizes, ep=ep)


def keep_strategy(mini: dict[str, Any], recipe: Recipe, batch: int, workers: int = WORKERS) -> None:
    """Give the mini of `recipe` its strategy at `workers` processes (in place); `batch` samples a step.

    Raises:
        RecipeError: the recipe splits nothing, or the batch does not serve the data-parallel ranks.
    """
    view = View(recipe)
    if not view.parallel:
        raise RecipeError(f"{recipe.source}: --parallel keeps how a recipe splits its model; this one is not split")
    degrees = scale_degrees(Degrees(view.pp, view.tp, view.dp, view.cp, view.ep), workers)
    if degrees.workers == 1:
        raise RecipeError(f"{recipe.source}: --parallel needs a degree above 1 that fits {workers} workers")
    model = mini["model"]["model_config"]
    for key in _OWN:
        if (value := view.get((*MODEL, key))) is None:
            model.pop(key, None)
        else:
            model[key] = value
    _degrees(mini, view, degrees, batch)
    _layers(mini, model, view, degrees)
    _memory(mini, view, degrees)


def _degrees(mini: dict[str, Any], view: View, degrees: Degrees, batch: int) -> None:
    """Degrees, micro-batches, and where samples go."""
    mini["use_parallel"] = True
    mini["context"]["dataset_broadcast_opt_level"] = 0  # CPU: otherwise some ranks read no data
    micro_batches = max(batch // degrees.dp, degrees.pp) if degrees.pp > 1 else 1
    size = max(1, batch // (degrees.dp * micro_batches))
    mini["runner_config"]["batch_size"] = mini["model"]["model_config"]["batch_size"] = size
    mini["parallel_config"].update(
        data_parallel=degrees.dp,
        model_parallel=degrees.tp,
        pipeline_stage=degrees.pp,
        context_parallel=degrees.cp,
        expert_parallel=degrees.ep,
        micro_batch_num=micro_batches,
        use_seq_parallel=degrees.tp > 1 and view.flag(("parallel_config", "use_seq_parallel")),
        vocab_emb_dp=view.flag(("parallel_config", "vocab_emb_dp")),
    )
    mini["parallel"].update(
        parallel_mode=1,
        gradients_mean=view.flag(("parallel", "gradients_mean")),
        enable_alltoall=view.flag(("parallel", "enable_alltoall")),
        dataset_strategy=[[degrees.dp, *[1] * (axes - 1)] for axes in (2, 2, 2, 2, 4)],
    )
    for callback in mini["callbacks"]:
        if "micro_batch_num" in callback:
            callback["micro_batch_num"] = micro_batches


def _layers(mini: dict[str, Any], model: dict[str, Any], view: View, degrees: Degrees) -> None:
    """At least one layer for each chunk of each stage; no layer less than the mini has."""
    model["npu_nums_per_device"] = max(1, degrees.ep // 2)  # workers act as two nodes
    if degrees.pp == 1:
        return
    chunks = view.chunks
    model["num_hidden_layers"] = max(model["num_hidden_layers"], degrees.pp * chunks)
    first = model["num_hidden_layers"] - degrees.pp * chunks
    rows = [[first * (chunk == stage == 0) for stage in range(degrees.pp)] for chunk in range(chunks)]
    model.update(pp_interleave_num=chunks, offset=rows if chunks > 1 else rows[0])
    mini["parallel"]["pipeline_config"] = copy.deepcopy(view.get(("parallel", "pipeline_config"), {}))


def _memory(mini: dict[str, Any], view: View, degrees: Degrees) -> None:
    """Recomputation as the recipe has it, layer for layer, and optimizer sharding."""
    shape = (view.chunks, degrees.pp) if view.chunks > 1 and degrees.pp > 1 else (degrees.pp,)
    for key, value in (view.get(("recompute_config",)) or {}).items():
        mini["recompute_config"][key] = _recomputed(value, shape)
    sharding = view.get(("parallel", "parallel_optimizer_config"))
    mini["parallel"]["enable_parallel_optimizer"] = view.flag(("parallel", "enable_parallel_optimizer"))
    if sharding:
        mini["parallel"]["parallel_optimizer_config"] = {**sharding, "parallel_optimizer_threshold": 0}  # toy weights


def _recomputed(value: Any, shape: tuple[int, ...]) -> Any:
    """A recomputation setting for one layer a chunk: counts and lists of counts become 0 or 1, in the mini's shape."""
    if isinstance(value, dict):
        return {key: _recomputed(each, shape) for key, each in value.items()}
    if isinstance(value, list) and all(isinstance(each, (int, list)) and not isinstance(each, bool) for each in value):
        one = int(any(sum(each) if isinstance(each, list) else each for each in value))
        row = [one] * shape[-1]
        return [list(row) for _ in range(shape[0])] if len(shape) > 1 else row
    return value
