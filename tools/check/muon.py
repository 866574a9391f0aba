"""This module checks settings that cannot be combined with the optimizers Muon and PmaAdamW."""

from __future__ import annotations

import math
from dataclasses import replace

from plugins.errors import RecipeError
from plugins.sealed_checkpoint.router_state import AVERAGING
from tools.estimate.configuration import Configuration, weight_copies, weight_shards
from tools.estimate.from_recipe import from_recipe
from tools.estimate.memory.model import counted_weights
from tools.estimate.muon import orthogonal
from tools.hardware.units import short_dtype
from tools.model import Weight
from tools.recipe.findings import Findings
from tools.recipe.view import MODEL, RUNNER, View
from tools.schema.converter import Built

_KIND = ("optimizer", "type")
_SHARDED = ("parallel", "enable_parallel_optimizer")
_WHOLE = 0.999  # of the weights, in an average of equal ones
_SHARDS = ("parallel", "parallel_optimizer_config")


def check_muon(view: View, built: Built, found: Findings) -> None:
    """Report settings with which Muon fails after the launch, and settings of Muon that a CPU cannot compute."""
    if built.fields.get("multi_latent_attention") is not True:
        wrong = "Muon handles only the weights of multi-latent attention"
        found.error(_KIND, wrong, "write AdamW, or use a model with multi_latent_attention: True", rule="muon_latent")
    elif built.fields.get("mla_qkv_concat"):
        wrong = "Muon would orthogonalize the fused projections as one matrix, and QK-clip would not find them"
        found.error((*MODEL, "mla_qkv_concat"), wrong, "write False", rule="muon_parts")
    if short_dtype(built.fields.get("params_dtype"), "fp32") != "fp32":
        wrong = "Muon's moments get this type, but Muon computes them in float32, and MindSpore refuses the assignment"
        found.error((*MODEL, "params_dtype"), wrong, "write float32, or use AdamW", rule="muon_moments")
    if view.flag(("optimizer", "swap")):
        found.error(("optimizer", "swap"), "Muon cannot swap its state to the host", "write False", rule="muon_swap")
    if view.get(("optimizer", "ns_steps"), 5) != 5:
        wrong = "Muon does not read this key and always takes five Newton-Schulz steps"
        found.error(("optimizer", "ns_steps"), wrong, "leave the key out", rule="muon_steps")
    threshold = view.get(("optimizer", "qk_clip_threshold"), 100)
    if type(threshold) in (int, float) and threshold <= 0:
        wrong = "QK-clip would scale the weights of every head to zero"
        found.error(("optimizer", "qk_clip_threshold"), wrong, "write a positive logit, such as 100", rule="muon_clip")
    if view.parallel and view.flag(_SHARDED):
        path = (*_SHARDS, "optimizer_weight_shard_size")
        size = view.get(path, -1)
        if type(size) is int and size <= 1:  # MindSpore ignores 1
            wrong = "Muon gathers whole matrices, and needs the number of ranks that share a matrix"
            right = f"write a divisor above 1 of data_parallel {view.dp}, or enable_parallel_optimizer: False"
            found.error(path, wrong, right, rule="muon_shard_size")
        elif type(size) is int and size > view.dp:
            wrong = f"Muon cuts a matrix over data-parallel ranks, but there are only {view.dp}, not {size}"
            found.error(path, wrong, f"write at most {view.dp}", rule="muon_shard_ranks")
        else:
            _muon_shards(view, found)
    if view.cpu_classes:
        wrong = "Muon needs communication groups and bfloat16, which on CPU exist only in semi-auto parallel mode"
        found.error(_KIND, wrong, "write AdamW, or set use_parallel: True and parallel.parallel_mode: 1")
    elif not view.flag(("use_parallel",)):
        wrong = "Muon needs communication groups even on one device, and MindSpore makes none without use_parallel"
        found.error(_KIND, wrong, "write AdamW, or set use_parallel: True")


def check_averages(view: View, found: Findings) -> None:
    """Report settings of PmaAdamW with which the averaged weights would be too small; each average of `fused_num`
    states replaces the weights. MindFormers starts the exponential average at zero and does not correct this bias: the
    average of n equal values w is (1 - (1 - ema_alpha)^n) w.
    """
    defaults = {"fused_algo": AVERAGING["fused_algo"], "ema_alpha": 0.2, "fused_num": AVERAGING["fused_num"]}
    algorithm, alpha, count = (view.get(("optimizer", key), default) for key, default in defaults.items())
    if algorithm != "ema" or type(alpha) is not float or type(count) is not int or not 0 < alpha < 1 or count < 1:
        return  # an average of all alike (sma), or values that the schema refuses
    share = -math.expm1(count * math.log1p(-alpha))
    between = view.get(("optimizer", "interleave_step"), AVERAGING["interleave_step"])
    steps = view.number((*RUNNER, "epochs"), 1) * view.ramp.steps_of(view.samples)
    if share < _WHOLE and not (type(between) is int and 0 < steps < count * between):
        wrong = (
            f"the average begins at zero, so that it is {share:.1%} of {count:,} equal weights (ema_alpha {alpha:g}), "
            "and takes their place"
        )
        least = math.ceil(math.log(1 - _WHOLE) / math.log1p(-alpha))
        right = (
            f"write fused_algo: sma, or fused_num: {least:,} or more; a run that has begun such averages goes on as a "
            "new run from its weights (--run-dir ANOTHER --set checkpoint.load_path=FOLDER, without --resume)"
        )
        found.error(("optimizer", "fused_num"), wrong, right, rule="pma_begins")


def _muon_shards(view: View, found: Findings) -> None:
    """Report weights that MindSpore does not cut in the way that Muon assumes."""
    try:
        config = from_recipe(view.recipe)
    except RecipeError:
        return  # other rules say why
    for weight in _matrices(config):
        sharing = min(config.shard_size, weight_copies(weight, config))
        if weight.split == "experts" and config.model.experts % (config.ep * sharing):
            own = config.model.experts // config.ep
            wrong = f"the {own} experts of a rank cannot be divided over {sharing} shards without cutting an expert"
            found.error(
                (*_SHARDS, "optimizer_weight_shard_size"), wrong, f"write a divisor of {own}", rule="muon_experts"
            )
    if whole := left_whole(config):
        wrong = (
            f"MindSpore does not shard the matrix {whole.name} [{whole.rows}, {whole.columns}], which is below "
            "this threshold, but Muon would gather it as if it were a shard, and compute too small an update"
        )
        found.error((*_SHARDS, "parallel_optimizer_threshold"), wrong, "write 0", rule="muon_threshold")


def _matrices(config: Configuration) -> list[Weight]:
    """Return the different matrices that Muon updates in a run."""
    held = (weight for stage in range(config.pp) for weight, _ in counted_weights(config, stage))
    return list(dict.fromkeys(each for each in held if orthogonal(each, config)))


def left_whole(config: Configuration) -> Weight | None:
    """Return a matrix that Muon treats as a shard, although it is too small for MindSpore to shard it; return None if
    the model has no matrix of this kind.
    """
    every = replace(config, shard_threshold=0)
    others = (weight for weight in _matrices(config) if weight.split != "experts")
    return next((one for one in others if weight_shards(one, every) > weight_shards(one, config)), None)
