"""The quick dry run: each kind of layer compiled once, in two stages, and the real stages put together from them.

Sharding depends on the devices of a stage, not on how many stages there are or how deep they are: a layer of each kind,
the embedding, the head and the MTP layers on two stages of the same size have the layouts of the whole model. What adds
up by layers is exact (weights, optimizer state, gradients, gathered weights); activations are estimates on top of
estimates; traffic is not given.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from tools.check.view import View
from tools.dryrun.job import Job
from tools.dryrun.jobs import Plan
from tools.dryrun.layout import Held
from tools.dryrun.stages import EXCLUDE, RECOMPUTE, Stage, stages_of, swaps
from tools.model.architecture import DENSE, MOE
from tools.recipe.load import Recipe
from tools.search.activations import saved
from tools.search.from_recipe import from_recipe

_LAYER = "decoder.layers."


def quick_plan(recipe: Recipe) -> Plan:
    """Two compiles (one without a pipeline) that stand for all stages: `compose` takes them apart."""
    view = View(recipe)
    small = _reduced(recipe, view)
    per_stage = view.devices // view.pp
    jobs = [Job(small, stage * per_stage, stage) for stage in range(View(small).pp)]
    return Plan(stages_of(view), jobs, [], View(small).micro_batches)


def _reduced(recipe: Recipe, view: View) -> Recipe:
    """One layer of each kind in front; behind, one of the last kind with the head."""
    small = copy.deepcopy(recipe)
    model = small["model"]["model_config"]
    kinds = _front(stages_of(view))
    pp = 2 if view.pp > 1 else 1
    model["num_hidden_layers"] = len(kinds) + (pp == 2)
    if MOE in kinds:  # whichever way the recipe spells its layers, or leaves to a default
        model |= {"first_k_dense_replace": kinds.count(DENSE), "moe_layer_freq": 1}
    elif "first_k_dense_replace" in model:
        model["first_k_dense_replace"] = min(model["first_k_dense_replace"] or 0, model["num_hidden_layers"])
    if pp == 2:
        model["offset"] = [len(kinds) - 1, 0] if len(kinds) > 1 else 0
        model["pp_interleave_num"] = 1
        small["parallel_config"] |= {"pipeline_stage": 2, "micro_batch_num": 2}
        small["parallel"]["pipeline_config"] = {"pipeline_interleave": False, "pipeline_scheduler": "1f1b"}
    else:
        model["offset"] = 0
    section = small.get("recompute_config") or {}
    keys = EXCLUDE if swaps(view) else (*RECOMPUTE, *EXCLUDE)  # lists of layers' numbers hold for fewer layers as well
    section |= {key: _flat(section[key]) for key in keys if key in section}
    return small


def _front(stages: Sequence[Stage]) -> list[str]:
    """The kinds of layer that the model has, dense first."""
    found = {kind for stage in stages for kind in stage.kinds}
    return [kind for kind in (DENSE, MOE) if kind in found]


def _flat(setting: Any) -> Any:
    """A recompute setting by stages as one for all: on where it is on for some layer."""
    if isinstance(setting, dict):
        return {key: _flat(value) for key, value in setting.items()}
    if isinstance(setting, list) and not any(isinstance(item, str) for item in setting):
        return any(any(item) if isinstance(item, list) else item for item in setting)
    return setting


def layer_shares(recipe: Recipe) -> dict[str, float]:
    """By the estimator, bytes that a layer of each kind keeps for its backward: to take one compile's sum apart."""
    config = from_recipe(recipe)
    options = (("full", config.recompute.full), ("select", config.recompute.select))
    option = next((name for name, table in options if table), "none")
    return {kind: saved(config, kind, option) for kind in (DENSE, MOE)}


def compose(
    stages: Sequence[Stage], results: Sequence[Mapping[str, Any]], shares: Mapping[str, float]
) -> list[tuple[list[Held], dict[str, Any]]]:
    """For each stage of the real pipeline: what it holds, and a graph's summary without traffic.

    Args:
        results: of `quick_plan`'s jobs.
        shares: `layer_shares`.
    """
    held = [[Held(**item) for item in result["held"]] for result in results]
    kept = [result["graph"]["kept"] for result in results]
    kinds = _front(stages)
    front = results[0]["graph"]["activations"][0]
    one = front["saved"] / sum(shares[kind] for kind in kinds)
    layer = {kind: int(one * shares[kind]) for kind in kinds}
    back = results[-1]["graph"]["activations"][0]
    found = []
    for stage in stages:
        names = [f"{_LAYER}{kinds.index(kind)}." for kind in stage.kinds]
        chunks = []
        for chunk, (_, chunk_kinds) in enumerate(stage.chunks):
            last = "head" in stage.ends and chunk == len(stage.chunks) - 1
            behind = max(back["saved"] - layer[kinds[-1]], 0) if last else 0
            left = sum(layer[kind] for kind in chunk_kinds) + behind
            chunks.append({"saved": left, **{key: (back if last else front)[key] for key in ("forward", "backward")}})
        own = {
            f"{place}:{name}": size
            for place, prefix in enumerate(names)
            for both in kept
            for name, size in both.items()
            if prefix in name
        }
        own |= {name: size for both in _ends(kept, stage) for name, size in both.items() if _LAYER not in name}
        parts = [item for prefix in names for both in held for item in both if prefix in item.name]
        outside = {item.name: item for both in _ends(held, stage) for item in both if _LAYER not in item.name}
        graph = {"activations": chunks, "kept": own, "flops": [], "collectives": []}
        found.append(([*parts, *outside.values()], graph))
    return found


def _ends(both: Sequence[Any], stage: Stage) -> list[Any]:
    """Of what the front and the back compile hold beside layers, that of the stage's ends; its middle has nothing."""
    return [both[place] for place, end in ((0, "embedding"), (-1, "head")) if end in stage.ends]
