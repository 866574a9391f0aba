"""`plugins.attention_balance` of a recipe, and what the plugin takes from the rest of the recipe. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from plugins.attention_balance.plan import Layout
from plugins.attention_balance.samples.cost import MEASURED, UNITS, Cost
from plugins.attention_balance.samples.eod import check_apart
from plugins.attention_balance.schedule.objective import objective_of
from plugins.errors import RecipeError
from plugins.semi_auto_cpu.chosen import splits_model
from plugins.settings import section_of, whole_number

KEY = "plugins.attention_balance"
COST = ("per_pair", "per_token", "unit")
SETTINGS = ("window", *COST)
INTERLEAVE = "micro_batch_interleave_num"
LOADER = "BlendedMegatronDatasetDataLoader"
# MindSpore reads it once a process: a pipeline then cuts each rank's own batch into micro-batches
OWN_BATCHES = "PIPELINE_SLICE_SKIP_REDISTRIBUTION"


@dataclass(frozen=True)
class Settings:
    """window: steps whose samples may change places; cost: of a sample, None where the recipe has none yet."""

    window: int = 1
    cost: Cost | None = None


@dataclass(frozen=True)
class Schedule:
    """What a loader needs to put its samples in order.

    layout: how a step is divided; cost: of a sample; gathered: as in `plan.delivery_order`;
    eod_pad_length: documents that the compressed mask holds, None with a full mask.
    """

    layout: Layout
    cost: Cost
    gathered: bool
    eod_pad_length: int | None


def read(settings: Any) -> Settings:
    """`{window: n, per_pair: cost, per_token: cost, unit: s | FLOP}`, all optional, the costs together.

    A launch writes the costs into the effective recipe where they are missing, in FLOP; measured ones are in seconds.

    Raises:
        RecipeError: an unknown key, or a value that is no such thing.
    """
    section = section_of(KEY, settings, SETTINGS, f"write `window: 1` under it, or {KEY}: False to leave it off")
    window = whole_number(KEY, section, "window", "write a number of steps, 1 to keep each step's own samples")
    return Settings(window, _cost(section))


def _cost(section: Mapping[str, Any]) -> Cost | None:
    written = [name for name in COST if name in section]
    if not written:
        return None
    if missing := [name for name in COST[:2] if name not in section]:
        raise RecipeError(f"{KEY}.{written[0]}: costs come as two, per_pair and per_token; write {missing[0]} as well")
    for name in COST[:2]:
        value = section[name]
        if type(value) not in (int, float) or not 0 <= value < math.inf:
            raise RecipeError(f"{KEY}.{name}: {value!r}; write measured seconds, 0 or more")
    if not section["per_pair"]:
        raise RecipeError(f"{KEY}.per_pair: 0 says that attention costs nothing: then there is nothing to balance")
    unit = section.get("unit", MEASURED)
    if unit not in UNITS:
        raise RecipeError(f"{KEY}.unit: {unit!r}; write {' or '.join(UNITS)}, or leave it out for measured seconds")
    return Cost(float(section["per_pair"]), float(section["per_token"]), unit)


def schedule_of(recipe: Mapping[str, Any], environment: Mapping[str, str]) -> Schedule:
    """The schedule of a recipe whose `plugins.attention_balance` is on.

    Args:
        recipe: a flat recipe or a MindFormerConfig.
        environment: variables of the training process.

    Raises:
        RecipeError: as `check`, or a recipe without the cost of a sample.
    """
    settings, layout = check(recipe)
    if settings.cost is None:
        raise RecipeError(
            f"{KEY}.per_pair: missing, as per_token is: tc3 train, tc3 recipe show and launch/train.py write what the "
            "model costs into the effective recipe; train that one, or write measured seconds"
        )
    data = _section(recipe, "train_dataset.data_loader.config")
    own = layout.objective.stages > 1 and environment.get(OWN_BATCHES) == "1"
    return Schedule(
        layout,
        settings.cost,
        gathered=layout.micro_batches > 1 and not own,
        eod_pad_length=_eod_pad_length(data) if data.get("create_compressed_eod_mask") else None,
    )


def check(recipe: Mapping[str, Any]) -> tuple[Settings, Layout]:
    """What the plugin is to do in a recipe, which may lack the cost of a sample.

    Raises:
        RecipeError: settings that are wrong, or a recipe in which the plugin cannot work or cannot gain.
    """
    settings = read(_at(recipe, KEY))
    loader = _section(recipe, "train_dataset.data_loader")
    if loader.get("type") != LOADER:
        raise RecipeError(f"train_dataset.data_loader.type: {KEY} orders {LOADER}, not {loader.get('type')!r}")
    if loader.get("shuffle"):
        raise RecipeError(f"train_dataset.data_loader.shuffle: it would undo the order of {KEY}; write False")
    if _at(recipe, "context.mode") in (1, "PYNATIVE_MODE"):
        raise RecipeError(f"context.mode: {KEY} is for graph mode; PyNative builds its loader another way; write 0")
    check_apart(_section(loader, "config"), _section(recipe, "model.model_config"))
    return settings, layout_of(recipe, settings.window)


def layout_of(recipe: Mapping[str, Any], window: int = 1) -> Layout:
    """How a recipe's step is divided: as MindFormers' `_check_global_batch_size_for_auto_parallel` does it.

    Micro-batches are `micro_batch_num` with a pipeline, `gradient_accumulation_steps` without one, and one outside
    semi-auto parallel, where MindFormers switches accumulation off.

    Raises:
        RecipeError: EP groups that do not consist of whole data-parallel ranks, or interleaved parts of micro-batches.
    """
    interleaved = _number(recipe, INTERLEAVE)
    if interleaved > 1:
        raise RecipeError(
            f"{INTERLEAVE}: {interleaved}; MindFormers then takes as many times more samples and cuts each micro-batch "
            f"again, which {KEY} does not follow; write 1"
        )
    parallel = recipe.get("use_parallel") is True
    split = parallel and splits_model(_at(recipe, "parallel.parallel_mode", 1))
    stages = _number(recipe, "parallel_config.pipeline_stage") if split else 1
    micro_batches = "parallel_config.micro_batch_num" if stages > 1 else "runner_config.gradient_accumulation_steps"
    ranks = _number(recipe, "parallel_config.data_parallel") if parallel else 1
    objective = objective_of(
        data_parallel=ranks,
        expert_parallel=_number(recipe, "parallel_config.expert_parallel") if parallel else 1,
        context_parallel=_number(recipe, "parallel_config.context_parallel") if split else 1,
        tensor_parallel=_number(recipe, "parallel_config.model_parallel") if split else 1,
        pipeline_stages=stages,
        recomputed=recomputed_share(recipe),
    )
    slots = _number(recipe, "runner_config.batch_size")
    return Layout(ranks, _number(recipe, micro_batches) if split else 1, slots, objective, window)


def recomputed_share(recipe: Mapping[str, Any]) -> float:
    """Share of the forward pass that `recompute_config.recompute` repeats, 0 to 1.

    Selective recompute is left out: it repeats cheap operators.
    """
    recompute = _at(recipe, "recompute_config.recompute")
    if not isinstance(recompute, (list, tuple)):
        return float(bool(recompute))
    chunks, layers = _flat(recompute), _number(recipe, "model.model_config.num_hidden_layers")
    # True is a whole chunk, taken here as an equal part of the model
    repeated = sum(layers / len(chunks) if chunk is True else chunk for chunk in chunks if isinstance(chunk, int))
    return min(repeated / layers, 1.0)


def _flat(rows: Any) -> list[Any]:
    return [item for row in rows for item in _flat(row)] if isinstance(rows, (list, tuple)) else [rows]


def _eod_pad_length(data: Mapping[str, Any]) -> int:
    """As MindFormers reads it: two spellings, 128 where none is written."""
    return data.get("eod_pad_length", data.get("compressed_eod_mask_length", 128))


def _number(recipe: Mapping[str, Any], path: str) -> int:
    """A positive integer; 1, as in MindFormers, for what is not written (and for what `tc3 check` refuses)."""
    value = _at(recipe, path)
    return value if type(value) is int and value > 0 else 1


def _section(recipe: Mapping[str, Any], path: str) -> Mapping[str, Any]:
    value = _at(recipe, path)
    return value if isinstance(value, Mapping) else {}


def _at(recipe: Any, path: str, default: Any = None) -> Any:
    """The value at a dotted path."""
    for key in path.split("."):
        if not isinstance(recipe, Mapping) or key not in recipe:
            return default
        recipe = recipe[key]
    return recipe
