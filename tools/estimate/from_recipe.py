"""This module converts a MindFormers recipe to a `Configuration`, which describes the training run for the estimator.
The module also reads and writes the recipe's recompute keys.

`recompute_config` holds flags or counts of layers, for whole layers or for patterns of operators. A count in a table
[chunks][stages] selects that many layers from the first layer of the chunk on. If activations are swapped
(`model_config.swap`), MindFormers expects the numbers of single layers instead of counts: `LayerSetting`
(parallel_core/training_graph/transformer/utils.py) accepts a flag, a list of layers, or a mapping from operator
patterns to flags or lists; it refuses a list of patterns.

MindFormers 1.9.0 can compile context parallelism that exchanges heads (`ulysses_degree_in_cp`) only for some models;
`require_ulysses` refuses the other models.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from plugins.cpu_backend.plan import documents_apart
from plugins.ep_overlap import plan as ep_overlap
from plugins.errors import RecipeError
from plugins.hierarchical_ep.settings import DISPATCHERS
from plugins.lora import plan as lora
from tools.estimate.configuration import PATTERNS, Configuration, Cut, Recompute, Table, places, spread
from tools.hardware.units import short_dtype
from tools.model import Adapters, Model, model_of
from tools.recipe.findings import ERROR, Findings, in_file, refusal, refused
from tools.recipe.load import Recipe
from tools.recipe.override import dotted
from tools.recipe.view import CHUNKS, LOADER, MODE, MODEL, OFFSET, OVERLAP, PARALLEL, View, require_resolved
from tools.schema.converter import Built, convert
from tools.schema.keys import refuse_keys
from tools.schema.schema import load_schema
from tools.schema.stages import check_recompute, stage_layers_of, swaps


def numbers_of(table: Table | None, layers: Table, schedule: str) -> list[int]:
    """Return the numbers of the layers that a table of counts [chunks][stages] selects; a count selects the first
    layers of the chunk and stage.
    """
    if table is None:
        return []
    where = places(layers, schedule)
    return [number for number, (chunk, stage, place) in enumerate(where) if place < table[chunk][stage]]


def table_of_numbers(numbers: Iterable[int], layers: Table, schedule: str) -> Table:
    """Count the layers with the given `numbers` in each chunk and stage, and return the counts [chunks][stages].

    Raises:
        ValueError: one of `numbers` is not the number of a layer of the model.
    """
    where, counts = places(layers, schedule), Counter[tuple[int, int]]()
    for number in set(numbers):
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < len(where):
            raise ValueError(
                f"{number!r} is not the number of a layer; the layers of this model are numbered 0 to {len(where) - 1}"
            )
        counts[where[number][:2]] += 1
    return tuple(tuple(counts[chunk, stage] for stage in range(len(row))) for chunk, row in enumerate(layers))


def table_by_numbers(value: Any, layers: Table, schedule: str) -> Table | None:
    """Convert the value of a recompute key, which lists layer numbers, to the number of layers in each [chunk][stage].
    If the value maps operator patterns to layer numbers, use the pattern with the most layers.

    Raises:
        ValueError, TypeError: the value is neither a flag, nor a list of layer numbers, nor a mapping from operator
            patterns to flags or such lists.
    """
    if isinstance(value, dict):
        tables = [table for table in (table_by_numbers(inner, layers, schedule) for inner in value.values()) if table]
        return max(tables, key=lambda table: sum(map(sum, table)), default=None)
    if not value:
        return None
    return layers if value is True else table_of_numbers(value, layers, schedule)


_SHARD = ("parallel", "parallel_optimizer_config")
_OPTIMIZER = ("optimizer",)
_MORE = "run `tc3 check` for the details"
LEVEL = (*_SHARD, "optimizer_level")
GRADIENTS = (*_SHARD, "gradient_accumulation_shard")

Reader = Callable[[Any, Table], Table | None]  # a recompute key's value and the layers, as numbers of layers


def from_recipe(recipe: Recipe, ep_mode: str | None = None) -> Configuration:
    """Return the training run that a MindFormers recipe describes, as a `Configuration`.

    Args:
        ep_mode: a dispatch mode without chunks that replaces the mode of the recipe; the mode in the recipe may then
            still be `auto`.

    Raises:
        RecipeError: the recipe has no model, or a model of impossible sizes; a key or value is unknown to MindFormers;
            an offset, a degree or a recompute setting does not fit; the optimizer cannot train the model's weights; or
            the dispatch mode is `auto`.
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
        raise refusal(recipe, MODEL, f"no model can have these sizes ({error}); {_MORE}") from None
    if model.latent is None and view.get((*_OPTIMIZER, "type")) == "Muon":
        raise refusal(
            recipe,
            (*_OPTIMIZER, "type"),
            f"Muon works only for models with multi-latent attention; write AdamW, or {_MORE}",
        )
    if layers is None:
        raise refusal(recipe, OFFSET, f"the offset does not fit the layers and stages; {_MORE}")
    table = tuple(tuple(row) for row in layers)
    found = Findings(recipe, load_schema().line)
    check_recompute(view, model.layers, found)
    if errors := [finding for finding in found.found if finding.severity == ERROR]:
        raise refused(errors)
    recompute = recompute_of(view, table)
    dispatcher = str(built.fields.get("moe_token_dispatcher_type"))
    dispatch = (ep_mode, None) if ep_mode else _dispatch(view, dispatcher)
    try:
        return _configuration(view, built, model, table, recompute, dispatch)
    except RecipeError as error:
        raise refusal(recipe, PARALLEL, f"{error}; {_MORE}") from None


def _configuration(
    view: View, built: Built, model: Model, layers: Table, recompute: Recompute, dispatch: tuple[str, Cut | None]
) -> Configuration:
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
        # the graphs have no attention without a flash kernel, whatever `use_flash_attention` says (gpt_layer_specs.py)
        keeps_scores=view.cpu_classes and not documents_apart(view.get(LOADER) or {}),
        overlap_dp=True,
        shared_whole=True,
        keep_gathered=True,
        training_graph=True,
        fp32_residual=fields.get("fp32_residual_connection") is True,
        adapters=adapters_of(view, fields),
        ulysses=max(1, view.number(("parallel_config", "ulysses_degree_in_cp"), 1)),
    )


def adapters_of(view: View, fields: Mapping[str, Any]) -> Adapters | None:
    """Return the adapters that `plugins.lora` trains; return None if all weights are trained.

    Raises:
        RecipeError: the settings of the plugin are not allowed.
    """
    written = view.get(("plugins", "lora"), False)
    if written is False:
        return None
    settings, layers = lora.Settings.read(written), lora.layers_of(fields)
    return Adapters(settings.rank, tuple(layers[name] for name in lora.chosen(settings, layers)))


def _stored(view: View, fields: Mapping[str, Any]) -> tuple[int, int, int | None]:
    """Return (`weight_item`, `state_item`, `matrix_state_item`) of a `Configuration`, by `params_dtype` and
    `optimizer`.

    AdamW and PmaAdamW keep their state in fp32, whatever the type of the weights: two moments, one more tensor with
    amsgrad of the fused operator, and one for PmaAdamW's averages. With `swap` the state is not on the device
    (core/optim/adamw.py, fused_adamw.py, pma_adamw.py). Muon's state has the type of the weights: one moment for each
    matrix of a layer, and two for other weights (core/optim/muon.py).
    """
    item = 4 if short_dtype(fields.get("params_dtype"), "fp32") == "fp32" else 2
    kind = view.get((*_OPTIMIZER, "type"))
    if kind == "Muon":
        return item, 2 * item, item
    largest = view.flag((*_OPTIMIZER, "use_fused")) and view.flag((*_OPTIMIZER, "amsgrad"))
    tensors = 2 + largest + (kind == "PmaAdamW")
    return item, 0 if view.flag((*_OPTIMIZER, "swap")) else 4 * tensors, None


def _dispatch(view: View, dispatcher: str) -> tuple[str, Cut | None]:
    """Return the dispatch mode and the chunks of the plugins, if the recipe has these plugins.

    Raises:
        RecipeError: one of the two is still `auto`, or the settings of ep_overlap are not allowed.
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
    """Return whether accumulated gradients are sharded. With `optimizer_level: level2` the gradients are sharded,
    whatever `gradient_accumulation_shard` says (MindSpore 2.9.0, set_parallel_optimizer_config). With `optimizer_level`
    level1 or level3 the gradients are not sharded, and MindSpore refuses `gradient_accumulation_shard`.
    """
    level = view.get(LEVEL)
    return view.flag(GRADIENTS) if level is None else level == "level2"


def compiles_sharded_gradients(pp: int, lazy_inline: bool = True, micro_steps: int = 1) -> bool:
    """Return whether MindSpore 2.9.0 is known to compile a layout with sharded gradients to the end (see
    docs/memory.md). `micro_steps` is the number of micro-batches whose gradients are accumulated without a pipeline.

    With several micro-batches MindSpore searches along every path of a subgraph for the number of the micro-batch, if
    the subgraph does not state this number. The number of paths grows exponentially with the operators, and the
    compile does not end. Without lazy inline the operators state the number of their micro-batch, and no endless
    compile was seen.
    """
    return (pp == 1 and micro_steps == 1) or not lazy_inline


def _shard_size(view: View) -> int:
    """Return `optimizer_weight_shard_size`, or 0; MindSpore ignores 1 (set_optimizer_weight_shard_size)."""
    size = view.number((*_SHARD, "optimizer_weight_shard_size"), 0)
    return 0 if size == 1 else size


def _shard_threshold(view: View) -> int:
    """Return the size in KiB below which the optimizer does not shard a weight; with 0 all weights are sharded."""
    value = view.get((*_SHARD, "parallel_optimizer_threshold"))
    return value if type(value) is int and value >= 0 else 64


def recompute_of(view: View, layers: Table) -> Recompute:
    """Return how many layers of each chunk and stage a recipe recomputes, for each recompute option. In a recompute
    key, a list of zeros means the same as False.
    """
    section, read = ("recompute_config",), reader_of(view)
    return Recompute(
        full=not_empty(read(view.get((*section, "recompute")), layers)),
        select=not_empty(select_of(view.get((*section, "select_recompute")), layers, read)),
        communication=not_empty(read(view.get((*section, "select_comm_recompute")), layers)),
        replay_tp=view.flag((*section, "mp_comm_recompute"), True),
        operators=operators_of(view.get((*section, "select_recompute")), layers, read),
    )


def reader_of(view: View) -> Reader:
    """Return the function that reads a recipe's recompute keys: the values of these keys are counts of layers or, in
    recipes that swap activations, lists of layer numbers.
    """
    if not swaps(view):
        return spread
    return lambda value, layers: table_by_numbers(value, layers, view.schedule)


def select_of(value: Any, layers: Table, read: Reader = spread) -> Table | None:
    """Return the number of layers in each [chunk][stage] in which a value of `select_recompute` saves memory. Selective
    recomputation saves memory only if it recomputes norms. A flag or a number of layers selects MindFormers' default
    operators: the multiplication and the activation function of an MLP. According to `tc3 dryrun`, recomputing
    MindFormers' default operators saves no memory; with a fused SwiGLU these operators do not exist.
    """
    if isinstance(value, dict):
        return read({pattern: inner for pattern, inner in value.items() if of_norms(pattern)}, layers)
    return read(value, layers) if patterns_of(value) and any(map(of_norms, value)) else None


def operators_of(value: Any, layers: Table, read: Reader = spread) -> tuple[tuple[str, Table], ...]:
    """Return the groups of operators (such as attention) that a value of `select_recompute` recomputes completely. For
    each group, the result holds the numbers of layers [chunks][stages] in which the group is recomputed. A group counts
    only if all operator patterns of the group are present in the same spelling, because recomputing a part of the group
    may free no memory. If `select_recompute` holds a list of patterns, the patterns apply to all layers.
    """
    each = value if isinstance(value, dict) else dict.fromkeys(patterns_of(value), True)
    found = []
    for group, patterns in PATTERNS.items():
        tables = [read(each.get(pattern), layers) for pattern in patterns]
        if all(tables):
            rows = [[min(counts) for counts in zip(*lines, strict=True)] for lines in zip(*tables, strict=True)]
            found += [(group, tuple(map(tuple, rows)))] if any(map(any, rows)) else []
    return tuple(found)


def patterns_of(value: Any) -> list[str]:
    """Return the operator patterns in the value of a recompute key; return [] if there are none, in which case
    MindFormers chooses the operators.
    """
    named = isinstance(value, dict) or (isinstance(value, list) and all(isinstance(item, str) for item in value))
    return list(value) if named else []


def of_norms(pattern: str) -> bool:
    """Return whether an operator pattern matches the norms of a layer. MindFormers compares each part of the pattern
    with one part of the operator's module path.
    """
    parts = pattern.split(r"\.")
    return any(
        len(path) == len(parts) and all(map(re.fullmatch, parts, path))
        for path in (("input_layernorm",), ("input_layernorm", "norm"))
    )


_SELECT = "select_recompute"
# the operators of a `select_recompute` that saves memory: MindFormers' default leaves the norms out, all that a fused
# SwiGLU has
SELECTED = (r".*\.norm", r"mlp\.mul", r"mlp\.activation_func\.silu", r"mlp\.shared_experts\.activation_func\.silu")


def table_of(key: str, value: Any, layers: Table, read: Reader = spread) -> Table | None:
    """Return the number of layers [chunks][stages] to which the value of a recompute key applies. Return None if the
    value applies to no layers, and () if the operator patterns in the value apply to different layers.
    """
    if key == _SELECT and select_of(value, layers, read) is None:
        return None
    if isinstance(value, dict):
        tables = {not_empty(read(inner, layers)) for inner in value.values()}
        return tables.pop() if len(tables) == 1 else ()
    return not_empty(read(value, layers))


def swapped_value(key: str, table: Table | None, config: Configuration, now: Any) -> Any:
    """Return the new value of a recompute key in a recipe that swaps activations: the layer numbers for each operator
    pattern in the key's present value `now`. The patterns are written as a mapping, because MindFormers refuses a list
    of patterns in a recipe that swaps activations.
    """
    layers = config.layers
    value: Any = True if table == layers else numbers_of(table, layers, config.schedule)
    written = with_patterns(key, value, now)
    if isinstance(written, list) and patterns_of(written):
        return dict.fromkeys(written, value)
    return False if written == [] else written


def named_layers(value: Any, layers: Table) -> set[int]:
    """Return the numbers of the layers that the value of a recompute key lists; recipes that swap activations list
    layer numbers.
    """
    if isinstance(value, dict):
        return set().union(*(named_layers(inner, layers) for inner in value.values()))
    return set(range(sum(map(sum, layers)))) if value is True else set(value or [])


def not_empty(table: Table | None) -> Table | None:
    """Return a table of layer counts [chunks][stages] unchanged, or None if all counts are 0."""
    return table if table and any(map(any, table)) else None


def has_counts(value: Any) -> bool:
    """Return whether the value of a recompute key holds lists with a number of layers for each pipeline stage. Such a
    list fits only layouts of its shape: one number for each pipeline stage or, with several model chunks, one row of
    such numbers for each chunk.
    """
    if isinstance(value, dict):
        return any(map(has_counts, value.values()))
    return isinstance(value, list) and not patterns_of(value)


def plain_value(table: Table | None, layers: Table) -> Any:
    """Convert a table of layer counts [chunks][stages] to the value of a recompute key: a flag, or a list of counts in
    the shape of the key `offset`.
    """
    if table == layers:
        return True
    return [list(row) for row in table] if table and len(table) > 1 else list(table[0]) if table else False


def with_patterns(key: str, value: Any, now: Any) -> Any:
    """Return the new value of a recompute key with which `value` applies to each operator pattern in the key's present
    value `now`.

    If the patterns of `select_recompute`, or MindFormers' default patterns, would save no memory, patterns that save
    memory replace them. Patterns that apply to all layers are written as a list if there is no mapping yet, because a
    child recipe cannot replace a plain value by a mapping.
    """
    patterns = patterns_of(now)
    if key == _SELECT and value and not any(map(of_norms, patterns)):
        patterns += [pattern for pattern in SELECTED if pattern not in patterns]
    if isinstance(now, dict) or (patterns and value and (now is None or value is not True)):
        return dict.fromkeys(patterns, value)
    return patterns if patterns and value else value


def with_groups(
    recompute: Recompute,
    layers: Table,
    now: Any,
    read: Reader = spread,
    write: Callable[[Table | None, Table], Any] = plain_value,
    off: Any = False,
) -> dict[str, Any] | None:
    """Return the new value of `select_recompute` if the present or the new value names groups of operators (such as
    attention); return None if the value does not change.

    The new value switches off every other pattern except the patterns of the norms, because MindFormers cannot build an
    operator that two patterns name. It is not enough to leave the other patterns out, because the mapping of a child
    recipe is merged with the mapping of its base recipe.

    Args:
        read, write, off: functions and a value that say how the key names layers (see `grouped_value`); by default, the
            key holds counts of layers.
    """
    select = not_empty(recompute.select)
    same = (not_empty(select_of(now, layers, read)), operators_of(now, layers, read)) == (select, recompute.operators)
    known = {*SELECTED, *(one for patterns in PATTERNS.values() for one in patterns)}
    if same and all(one in known or (isinstance(now, dict) and now[one] == off) for one in patterns_of(now)):
        return None
    norms = dict.fromkeys(SELECTED if select else (), write(select, layers))
    tables = dict(recompute.operators)
    groups = {
        one: write(tables.get(name), layers)
        for name, patterns in PATTERNS.items()
        for one in patterns
        if name in tables or one in patterns_of(now)
    }
    return {**dict.fromkeys(patterns_of(now), off), **norms, **groups}


def grouped_value(view: View, config: Configuration, now: Any, kept: bool) -> Any:
    """Return a value of `select_recompute` with which a recipe recomputes the same groups of operators as `config`. If
    the present value `now` already has this effect, it is returned unchanged. Unless `kept` is True, the layers in
    `now` are ignored, because they belong to another pipeline layout.
    """

    def read(value: Any, layers: Table) -> Table | None:
        return table_by_numbers(value, layers, config.schedule)

    def write(table: Table | None, layers: Table) -> Any:
        return True if table == layers else numbers_of(table, layers, config.schedule)

    # MindFormers refuses False where it wants numbers
    ways = (read, write, []) if swaps(view) else (spread, plain_value, False)
    was = now if kept or not has_counts(now) else dict.fromkeys(patterns_of(now), ways[-1])
    written = with_groups(config.recompute, config.layers, was, *ways)
    return was if written is None else written


def names_groups(value: Any) -> bool:
    """Return whether the value of a recompute key holds at least one operator pattern of a known group (such as
    attention).
    """
    return any(one in patterns_of(value) for patterns in PATTERNS.values() for one in patterns)


DEGREE = (*PARALLEL, "ulysses_degree_in_cp")


def not_compiled(model: Model) -> tuple[str, str] | None:
    """Return the reason why a `ulysses_degree_in_cp` above 1 does not compile for a model, and the name of the rule of
    `tc3 check`; return None if it compiles.
    """
    if not model.latent:
        return (
            "without MLA, MindFormers 1.9.0 splits heads along the axis of the batch, which does not compile",
            "ulysses_grouped",
        )
    if model.qk_dim != model.v_dim:
        widths = f"values of width {model.v_dim} as if they were as wide as queries ({model.qk_dim})"
        return f"MindFormers 1.9.0 splits {widths}, which does not compile", "ulysses_latent"
    return None


def require_ulysses(recipe: Recipe, model: Model, degree: int) -> None:
    """Raise an error for a `ulysses_degree_in_cp` above 1 if MindFormers 1.9.0 cannot compile it for this model, as
    `tc3 dryrun` shows.

    Raises:
        RecipeError: the degree is above 1, and the attention is not MLA or has queries and values of different widths.
    """
    if degree > 1 and (refused := not_compiled(model)):
        why, rule = refused
        raise RecipeError(f"{recipe.source}: {dotted(DEGREE)}: {why}: write 1 [{load_schema().line(rule)}]")
