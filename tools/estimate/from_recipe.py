"""The run that a MindFormers recipe describes, as a `Configuration`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from plugins.ep_overlap import settings as ep_overlap
from plugins.errors import RecipeError
from plugins.hierarchical_ep.settings import DISPATCHERS
from tools.estimate.configuration import Configuration, Cut, Recompute, Table, spread
from tools.estimate.layer_numbers import table_by_numbers
from tools.estimate.operators import PATTERNS
from tools.hardware.units import short_dtype
from tools.model.architecture import Model, model_of
from tools.recipe.findings import in_file, refusal
from tools.recipe.load import Recipe
from tools.recipe.unresolved import CHUNKS, MODE, OFFSET, OVERLAP, require_resolved
from tools.recipe.view import MODEL, PARALLEL, View
from tools.schema.converter import Built, convert
from tools.schema.keys import refuse_keys
from tools.schema.schema import load_schema
from tools.schema.stages import stage_layers_of, swaps

_SHARD = ("parallel", "parallel_optimizer_config")
_OPTIMIZER = ("optimizer",)
_MORE = "`tc3 check` says more"
LEVEL = (*_SHARD, "optimizer_level")
GRADIENTS = (*_SHARD, "gradient_accumulation_shard")

Reader = Callable[[Any, Table], Table | None]  # a recompute key's value and the layers, as numbers of layers


def from_recipe(recipe: Recipe, ep_mode: str | None = None) -> Configuration:
    """The run that a MindFormers recipe describes.

    Args:
        ep_mode: a dispatch mode to look at instead of the recipe's own, uncut; then `auto` there may stay unresolved.

    Raises:
        RecipeError: it has no model or one of impossible sizes, a key or value that MindFormers has not, an offset or
            degrees that do not fit, or it leaves its dispatch to `auto`.
    """
    view = View(recipe)
    if not view.get(MODEL):
        raise refusal(recipe, MODEL, "missing: this recipe describes no model")
    refuse_keys(recipe)
    built = convert(view, load_schema())
    layers = stage_layers_of(view, built)
    try:
        model = model_of(built.fields)
    except (KeyError, TypeError, ValueError) as error:
        raise refusal(recipe, MODEL, f"its sizes make no model ({error}); {_MORE}") from None
    if layers is None:
        raise refusal(recipe, OFFSET, f"does not fit the layers and stages; {_MORE}")
    table = tuple(tuple(row) for row in layers)
    try:
        recompute = recompute_of(view, table)
    except (TypeError, ValueError):
        text = f"its numbers do not fit the layers and stages; {_MORE}"
        raise refusal(recipe, ("recompute_config",), text) from None
    dispatcher = str(built.fields.get("moe_token_dispatcher_type"))
    dispatch = (ep_mode, None) if ep_mode else _dispatch(view, dispatcher)
    try:
        return _configuration(view, built, model, table, recompute, dispatch)
    except RecipeError as error:
        raise refusal(recipe, PARALLEL, f"{error}; {_MORE}") from None


def _configuration(
    view: View, built: Built, model: Model, layers: Table, recompute: Recompute, dispatch: tuple[str, Cut | None]
) -> Configuration:
    """The run of a recipe whose model, layers and dispatch are known."""
    fields = built.fields
    stored = _stored(view, fields)
    return Configuration(
        model=model,
        **{name: getattr(view, name) for name in ("dp", "tp", "pp", "cp", "ep")},
        layers=layers,
        schedule=view.schedule,
        sequence=built.number("seq_length"),
        batch=view.batch,
        micro_batches=view.micro_batches * view.accumulation,
        dtype=short_dtype(fields.get("compute_dtype"), "fp32"),
        weight_item=stored[0],
        state_item=stored[1],
        matrix_state_item=stored[2],
        recompute=recompute,
        sequence_parallel=view.flag(("parallel_config", "use_seq_parallel")),
        ep_mode=dispatch[0],
        ep_cut=dispatch[1],
        shared_beside=fields.get("moe_shared_expert_overlap") is True,
        shard_optimizer=view.flag(("parallel", "enable_parallel_optimizer")),
        shard_gradients=shards_gradients(view),
        shard_threshold=1024 * _shard_threshold(view),
        shard_size=_shard_size(view),
        flash=fields.get("use_flash_attention") is not False,
        overlap_dp=True,
        shared_whole=True,
        keep_gathered=True,
        training_graph=True,
        fp32_residual=fields.get("fp32_residual_connection") is True,
        ulysses=max(1, view.number(("parallel_config", "ulysses_degree_in_cp"), 1)),
    )


def _stored(view: View, fields: Mapping[str, Any]) -> tuple[int, int, int | None]:
    """(`weight_item`, `state_item`, `matrix_state_item`) of a `Configuration`, by `params_dtype` and `optimizer`.

    AdamW and PmaAdamW have their state in fp32, whatever the weights are in: two moments, one tensor more with the
    fused operator's amsgrad, and one for PmaAdamW's averages; with `swap` none of it is on the device
    (core/optim/adamw.py, fused_adamw.py, pma_adamw.py). Muon's state is cloned from the weights: a moment for each
    matrix of a layer, two for the others (core/optim/muon.py).
    """
    item = 4 if short_dtype(fields.get("params_dtype"), "fp32") == "fp32" else 2
    kind = view.get((*_OPTIMIZER, "type"))
    if kind == "Muon":
        return item, 2 * item, item
    largest = view.flag((*_OPTIMIZER, "use_fused")) and view.flag((*_OPTIMIZER, "amsgrad"))
    tensors = 2 + largest + (kind == "PmaAdamW")
    return item, 0 if view.flag((*_OPTIMIZER, "swap")) else 4 * tensors, None


def _dispatch(view: View, dispatcher: str) -> tuple[str, Cut | None]:
    """How tokens travel, and in which chunks: the plugins' where the recipe has them.

    Raises:
        RecipeError: either is `auto` still, or overlap has settings that it cannot have.
    """
    mode, overlap = view.get(MODE), view.get(OVERLAP)
    if mode is None:
        return DISPATCHERS.get(dispatcher, "global"), None
    if view.ep == 1:
        return "global", None  # a launch refuses it: nobody to send to
    require_resolved(view.recipe, MODE, CHUNKS)
    try:
        return str(mode), Cut(*ep_overlap.read(overlap)) if overlap else None
    except RecipeError as error:
        raise in_file(view.recipe, error) from None


def shards_gradients(view: View) -> bool:
    """Whether accumulated gradients are sharded.

    `optimizer_level: level2` has it so, whatever the flag says (MindSpore 2.9.0, set_parallel_optimizer_config); level1
    and level3 have it off, and MindSpore refuses the flag beside them.
    """
    level = view.get(LEVEL)
    return view.flag(GRADIENTS) if level is None else level == "level2"


def compiles_sharded_gradients(pp: int, lazy_inline: bool = True) -> bool:
    """Whether MindSpore 2.9.0 finishes compiling a layout with sharded gradients, as far as is known (docs/memory.md).

    In a pipeline it looks for a micro-batch along every path of a subgraph that has none; the paths grow exponentially
    with the layers, and three layers do not end. Without lazy inline operators name their micro-batch: that was not
    seen to go on for ever.
    """
    return pp == 1 or not lazy_inline


def _shard_size(view: View) -> int:
    """`optimizer_weight_shard_size`, 0 where there is none; MindSpore ignores 1 (set_optimizer_weight_shard_size)."""
    size = view.number((*_SHARD, "optimizer_weight_shard_size"), 0)
    return 0 if size == 1 else size


def _shard_threshold(view: View) -> int:
    """KiB below which the optimizer shards no weight; 0 shards all of them."""
    value = view.get((*_SHARD, "parallel_optimizer_threshold"))
    return value if type(value) is int and value >= 0 else 64


def recompute_of(view: View, layers: Table) -> Recompute:
    """`recompute_config`, by layer."""
    section, read = ("recompute_config",), reader_of(view)
    return Recompute(
        full=read(view.get((*section, "recompute")), layers),
        select=select_of(view.get((*section, "select_recompute")), layers, read),
        communication=read(view.get((*section, "select_comm_recompute")), layers),
        replay_tp=view.flag((*section, "mp_comm_recompute"), True),
        operators=operators_of(view.get((*section, "select_recompute")), layers, read),
    )


def reader_of(view: View) -> Reader:
    """How recompute keys are read: as counts, or, where activations are swapped, as numbers of layers."""
    if not swaps(view):
        return spread
    return lambda value, layers: table_by_numbers(value, layers, view.schedule)


def select_of(value: Any, layers: Table, read: Reader = spread) -> Table | None:
    """`select_recompute` by layer, as far as it saves memory: where norms run again.

    A flag or numbers stand for MindFormers' default operators, the multiplication and the activation function of an
    MLP, which a fused SwiGLU has not: `tc3 dryrun` sees no byte less.
    """
    if isinstance(value, dict):
        return read({pattern: inner for pattern, inner in value.items() if of_norms(pattern)}, layers)
    return read(value, layers) if patterns_of(value) and any(map(of_norms, value)) else None


def operators_of(value: Any, layers: Table, read: Reader = spread) -> tuple[tuple[str, Table], ...]:
    """Groups of operators that a `select_recompute` names by all their patterns, with the layers that have them all.

    A group of which a pattern is missing, or spelt otherwise, counts as none: it may free nothing.
    """
    if not isinstance(value, dict):
        return ()
    found = []
    for group, patterns in PATTERNS.items():
        tables = [read(value.get(pattern), layers) for pattern in patterns]
        if all(tables):
            rows = [[min(counts) for counts in zip(*lines, strict=True)] for lines in zip(*tables, strict=True)]
            found += [(group, tuple(map(tuple, rows)))] if any(map(any, rows)) else []
    return tuple(found)


def patterns_of(value: Any) -> list[str]:
    """The operator patterns of a recompute key; none where it leaves them to MindFormers."""
    named = isinstance(value, dict) or (isinstance(value, list) and all(isinstance(item, str) for item in value))
    return list(value) if named else []


def of_norms(pattern: str) -> bool:
    """Whether a pattern names a layer's norms: cells below the layer, each part of it matched as a whole."""
    parts = pattern.split(r"\.")
    return any(
        len(path) == len(parts) and all(map(re.fullmatch, parts, path))
        for path in (("input_layernorm",), ("input_layernorm", "norm"))
    )
