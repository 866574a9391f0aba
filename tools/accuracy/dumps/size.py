"""How much `tc3 accuracy dump` will write, before it starts: counted from the model's cells, calibrated on the mini.

At L0 every cell is dumped with what goes in and comes out, forward and backward, so that a value that passes through
five cells is written ten times. Values of one step, with T tokens per worker and P weights:

    a layer      T (47 h + 12 F + attention + 5 s)        h hidden size, F MLP width, s a row of the mask, in 5 cells
    a MoE layer  T (57 h + 12 F_shared + attention + 5 s), and its experts, whose weights go in too:
                 2 (T k + 128 E) (2 h + 3 F_expert) + 6 E h F_expert
    attention    8 (q rank + kv rank) + n (6 nope + 10 rope + 8 v) with latent attention, n 8 d + 6 g d without
    each loss    T (15 V + 2 h), each MTP layer T 47 h more; embeddings T 24 h
    weights      2 P (with their gradients), and P behind the last step

Everything is written in 4 bytes, bfloat16 too. In `recipes/mini/pretrain.yaml` this is 594 MB per step, and 596 MB were
written; other levels are multiples measured there, statistics a text for each tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tools.model.architecture import DENSE, model_of
from tools.model.weights import parameters
from tools.recipe.load import Recipe
from tools.recipe.view import LOADER, View
from tools.schema.converter import convert
from tools.schema.schema import load_schema

VALUE = 4  # bytes
BLOCK = 128  # rows that the CPU's grouped product pads an expert's tokens to, at most
TEXT = 180_000  # bytes that statistics of one layer and step take, at L0
# of what L0 writes: values, and statistics, measured in recipes/mini/pretrain.yaml
LEVELS = {"L0": (1.0, 1.0), "L1": (4.7, 5.8), "mix": (6.1, 7.0), "L2": (4.7, 1.0)}


def bytes_of_dump(recipe: Recipe, level: str, task: str, steps: int) -> int | None:
    """Bytes of a dump by all workers, within a factor of two or so; None for a model whose sizes are not known."""
    view = View(recipe)
    fields = convert(view, load_schema()).fields
    try:
        layers = fields["num_layers"] + 2 * (fields.get("mtp_num_layers") or 0) + 1
        if task == "statistics":
            return round(view.devices / view.pp * steps * layers * TEXT * LEVELS[level][1])
        weights = parameters(model_of(fields))
        values = steps * (LEVELS[level][0] * _step(fields, _tokens(view), _length(view)) + 2 * weights) + weights
    except (KeyError, TypeError, ValueError):
        return None
    return round(VALUE * values * (view.dp if view.parallel else view.devices))  # a split model is written once


def text(recipe: Recipe, level: str, task: str, steps: int, size: int | None) -> str:
    """One line: what will be written, and how that is known."""
    what = f"{steps} step{'s' * (steps > 1)}, {level}, {task}"
    if size is None:
        return f"dump: {what}; how much cannot be told for this model"
    basis = "each tensor's max, min, mean and norm as text"
    if task == "tensor":
        view = View(recipe)
        basis = f"every tensor that a cell reads or makes, of {_tokens(view):,} tokens per worker, and the weights"
    return f"dump: {what}: about {words(size)} ({basis}; estimated from the model's sizes)"


def words(size: float) -> str:
    """``1.2 GB``."""
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{max(size / 1e6, 1):.0f} MB"


def _length(view: View) -> int:
    return view.number((*LOADER, "config", "seq_length"), 4096)


def _tokens(view: View) -> int:
    """Of a worker's step."""
    return view.batch * view.micro_batches * view.accumulation * _length(view)


def _step(fields: Mapping[str, Any], tokens: int, length: int) -> float:
    """Values of one step at L0 without the weights."""
    hidden, losses = fields["hidden_size"], 1 + (fields.get("mtp_num_layers") or 0)
    pattern = model_of(fields).pattern
    pattern = (*pattern, *pattern[-1:] * (losses - 1))
    common = _attention(fields) + 5 * length
    total = tokens * (losses * (15 * fields["vocab_size"] + 2 * hidden) + 24 * hidden + (losses - 1) * 47 * hidden)
    for kind in pattern:
        if kind == DENSE:
            total += tokens * (47 * hidden + 12 * fields["ffn_hidden_size"] + common)
            continue
        shared = (fields.get("moe_shared_expert_intermediate_size") or 0) if fields.get("shared_expert_num") else 0
        width, experts = fields["moe_ffn_hidden_size"], fields["num_moe_experts"]
        rows = tokens * fields["moe_router_topk"] + BLOCK * experts
        total += tokens * (57 * hidden + 12 * shared + common)
        total += 2 * rows * (2 * hidden + 3 * width) + 6 * experts * hidden * width
    return total


def _attention(fields: Mapping[str, Any]) -> int:
    """Values of a token, beside those of hidden size."""
    heads = fields["num_attention_heads"]
    if not fields.get("multi_latent_attention"):
        return (8 * heads + 6 * fields["num_query_groups"]) * fields["kv_channels"]
    ranks = (fields.get("q_lora_rank") or 0) + fields["kv_lora_rank"]
    nope, rope, value = fields["qk_head_dim"], fields["qk_pos_emb_head_dim"], fields["v_head_dim"]
    return 8 * ranks + heads * (8 * nope + 10 * rope + 8 * value)
