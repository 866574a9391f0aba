"""This module gives a mini recipe (a small version for CPU) the parallel strategy of the full recipe. The strategy
consists of the parallel degrees (scaled down to a few processes), the pipeline schedule, recomputation and optimizer
sharding.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from plugins.errors import RecipeError
from plugins.pipeline_layout import fewest_to_fill
from tools.recipe.load import Recipe
from tools.recipe.view import MODEL, View

WORKERS = 4  # of a recipe with expert-parallel dispatch; one otherwise
OPTIMIZER = ("optimizer", "type")
MOVES, SENDS = ("expert_balance",), ("hierarchical_ep", "ep_overlap")  # plugins that move experts, or send tokens
LATENT, GROUPED = "telechat3_moe", "telechat3"  # model types: multi-latent (see `shares_keys`), grouped-query attention
# of a recipe for Ascend, and kept: operators, precision, the way tokens go
_OWN = (
    *("hidden_act", "compute_dtype", "fused_norm", "apply_rope_fusion", "bias_swiglu_fusion", "moe_permute_fusion"),
    *("moe_token_dispatcher_type", "moe_shared_expert_overlap", "use_fused_ops_permute"),
)


def shares_keys(model: Mapping[str, Any]) -> bool:
    """Return whether several query heads may share a key and value head, which multi-head latent attention does not
    allow.
    """
    return model.get("model_type") == GROUPED or model.get("multi_latent_attention") is False


@dataclass(frozen=True)
class Degrees:
    """A `Degrees` holds the pipeline-, tensor-, data-, context- and expert-parallel degrees of a mini recipe."""

    pp: int = 1
    tp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1

    @property
    def workers(self) -> int:
        """Return the number of processes that these degrees need."""
        return self.pp * self.tp * self.dp * self.cp


def scale_degrees(own: Degrees, workers: int) -> Degrees:
    """Return degrees whose product is at most `workers`. Each parallel degree is a power of two, and is not larger than
    the degree in the recipe. The function doubles the pipeline, tensor, data and context degrees in turn, as far as the
    recipe allows, until no further doubling fits into `workers`. The expert-parallel degree is the largest degree that
    the recipe and the number of data- and tensor-parallel ranks allow.
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
    """Change the recipe `mini`, which was derived from `recipe`, so that it has the parallel strategy of `recipe` on
    `workers` processes. A step of `mini` has `batch` samples, or more if the pipeline needs more micro-batches.

    Raises:
        RecipeError: the recipe does not split the model or the batch, or the batch cannot be divided among the
            data-parallel ranks.
    """
    view = View(recipe)
    if not view.parallel:
        wrong = (
            "--parallel keeps the parallel strategy of a recipe, but this recipe does not split its model over "
            "devices; leave out --parallel"
        )
        raise RecipeError(f"{recipe.source}: {wrong}")
    degrees = degrees_for(mini, view, workers)
    if degrees.workers == 1:
        wrong = (
            f"--parallel needs a parallel degree above 1 that fits {workers} workers; give more workers, or leave out "
            "--parallel"
        )
        raise RecipeError(f"{recipe.source}: {wrong}")
    wanted = max(batch, degrees.dp * least_micro_batches(view, degrees))
    give_strategy(mini, view, degrees, wanted, degrees)
    loader = mini["train_dataset"]["data_loader"]
    loader["sizes"] = [loader["sizes"][0] * wanted // batch, *loader["sizes"][1:]]
    for name in (*MOVES, *SENDS) if degrees.ep == 1 else ():  # they need experts on other workers
        (mini.get("plugins") or {}).pop(name, None)


def degrees_for(mini: dict[str, Any], view: View, workers: int) -> Degrees:
    """Return the recipe's parallel degrees, scaled down to at most `workers` processes of the mini recipe."""
    model = mini["model"]["model_config"]
    # tensor parallelism deals whole heads; those of keys and values, where query heads share them
    heads = model["num_key_value_heads" if shares_keys(model) else "num_attention_heads"]
    experts = min(view.ep, model.get("n_routed_experts") or 1)
    return scale_degrees(Degrees(view.pp, min(view.tp, heads), view.dp, view.cp, experts), workers)


def least_micro_batches(view: View, degrees: Degrees) -> int:
    """Return the smallest number of micro-batches with which a recipe's own pipeline schedule keeps all stages busy."""
    return fewest_to_fill(degrees.pp, view.scheduler) if degrees.pp > 1 else 1


def give_strategy(mini: dict[str, Any], view: View, degrees: Degrees, batch: int, deepest: Degrees) -> None:
    """Give a mini recipe (in place) the parallel degrees `degrees` and the operators of the full recipe (`view`), for
    steps of `batch` samples. The mini recipe gets as many layers as a pipeline with the degrees `deepest` needs. All
    mini recipes of a recipe then have the same weights, even if their degrees differ.
    """
    model = mini["model"]["model_config"]
    for key in _OWN:
        if (value := view.get((*MODEL, key))) is None:
            model.pop(key, None)
        else:
            model[key] = value
    _degrees(mini, view, degrees, batch)
    _layers(mini, model, view, degrees, deepest)
    _memory(mini, view, degrees)


def _degrees(mini: dict[str, Any], view: View, degrees: Degrees, batch: int) -> None:
    """Set degrees, micro-batches, and where samples go."""
    mini["use_parallel"] = True
    mini["context"]["dataset_broadcast_opt_level"] = 0  # CPU: otherwise some ranks read no data
    micro_batches = max(batch // degrees.dp, least_micro_batches(view, degrees)) if degrees.pp > 1 else 1
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


def _layers(mini: dict[str, Any], model: dict[str, Any], view: View, degrees: Degrees, deepest: Degrees) -> None:
    """Set at least one layer for each chunk of each stage of the deepest pipeline; the mini recipe loses no layer."""
    if model.get("n_routed_experts"):
        model["npu_nums_per_device"] = max(1, degrees.ep // 2)  # workers act as two nodes
    chunks = view.chunks
    if deepest.pp > 1:
        model["num_hidden_layers"] = max(model["num_hidden_layers"], deepest.pp * chunks)
    if degrees.pp == 1:
        return
    first = model["num_hidden_layers"] % (degrees.pp * chunks)
    rows = [[first * (chunk == stage == 0) for stage in range(degrees.pp)] for chunk in range(chunks)]
    model.update(pp_interleave_num=chunks, offset=rows if chunks > 1 else rows[0])
    mini["parallel"]["pipeline_config"] = copy.deepcopy(view.get(("parallel", "pipeline_config"), {}))


def _memory(mini: dict[str, Any], view: View, degrees: Degrees) -> None:
    """Set recomputation as the recipe has it, layer for layer, and optimizer sharding."""
    shape = (view.chunks, degrees.pp) if view.chunks > 1 and degrees.pp > 1 else (degrees.pp,)
    for key, value in (view.get(("recompute_config",)) or {}).items():
        mini["recompute_config"][key] = _recomputed(value, shape)
    sharding = view.get(("parallel", "parallel_optimizer_config"))
    muon = view.get(OPTIMIZER) == "Muon"  # it refuses shards of one rank
    cuts = view.flag(("parallel", "enable_parallel_optimizer")) and not (muon and degrees.dp == 1)
    mini["parallel"]["enable_parallel_optimizer"] = cuts
    if sharding and cuts:
        own = mini["parallel"]["parallel_optimizer_config"] = {**sharding, "parallel_optimizer_threshold": 0}  # toys
        size, copies = own.get("optimizer_weight_shard_size"), degrees.dp * (1 if muon else degrees.cp)
        if muon or (type(size) is int and size > 0):
            own["optimizer_weight_shard_size"] = math.gcd(size or 0, copies)


def _recomputed(value: Any, shape: tuple[int, ...]) -> Any:
    """Return a recomputation setting for one layer of each chunk: counts become 0 or 1, in the mini recipe's shape."""
    if isinstance(value, dict):
        return {key: _recomputed(each, shape) for key, each in value.items()}
    if isinstance(value, list) and all(isinstance(each, (int, list)) for each in value):
        one = int(any(sum(each) if isinstance(each, list) else each for each in value))
        row = [one] * shape[-1]
        return [list(row) for _ in range(shape[0])] if len(shape) > 1 else row
    return value
