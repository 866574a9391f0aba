"""Before launch: would the ranks of an EP group, each running its collectives in its order, all come to an end?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from plugins.ep_overlap import settings as ep_overlap
from plugins.ep_overlap.plan import FORWARD_STEPS, chunk_slices
from plugins.hierarchical_ep import settings as hierarchical_ep
from plugins.hierarchical_ep.plan import make_plan
from plugins.hierarchical_ep.programs import check_groups, check_programs, creation_orders, programs_of
from plugins.hierarchical_ep.topology import DEVICES_PER_NODE
from tools.recipe.load import Recipe
from tools.recipe.view import View
from tools.schema.converter import convert
from tools.schema.schema import load_schema

_BATCH, _SEQUENCE = 4, 8  # tokens of a rank in the trial, at least one for each chunk


def check_dispatch(recipe: Recipe) -> None:
    """Play one layer of `plugins.hierarchical_ep`, forward and backward, on all ranks of one EP group.

    All EP groups of a run are the same but for the numbers of their ranks. Routing is random; groups, operations and
    their order do not depend on it, and split lists must agree whatever it is.

    Raises:
        ClusterError: ranks that disagree or wait for each other; names the first of them.
    """
    plugins = recipe.get("plugins") or {}
    if not plugins.get("hierarchical_ep"):
        return
    view = View(recipe)
    fields = convert(view, load_schema()).fields
    settings = hierarchical_ep.read(
        plugins["hierarchical_ep"],
        view.ep,
        fields.get("npu_nums_per_device") or DEVICES_PER_NODE,
        fields["num_moe_experts"],
        rank=0,
    )
    topology, top_k = settings.topology, fields["moe_router_topk"]
    check_groups(creation_orders(topology))
    chunks, stride = _cut(plugins)
    slices = chunk_slices(max(_BATCH, chunks[0]), max(_SEQUENCE, chunks[1]), chunks)
    rng = np.random.default_rng(0)
    plans = []
    for piece in slices:
        scores = rng.random((topology.ep, len(piece), topology.experts))
        plans.append(make_plan(settings.mode, topology, list(np.argsort(scores, axis=-1)[..., :top_k])))
    check_programs(programs_of(*plans, order=_order(plans[0], len(slices), stride)))


def _cut(plugins: Mapping[str, Any]) -> tuple[tuple[int, int], int]:
    return ep_overlap.read(plugins["ep_overlap"]) if plugins.get("ep_overlap") else ((1, 1), 1)


def _order(plan: Any, chunks: int, stride: int) -> list[tuple[int, int]]:
    """The order of issue, of the steps that communicate: (chunk, index among the plan's forward steps)."""
    names = [step.step for step in plan.forward]
    if len(names) == 2:  # one All-to-All each way
        names = ["dispatch.intra", "combine.intra"]
    issued = ep_overlap.order(stride, chunks) if chunks > 1 else [(0, step) for step in FORWARD_STEPS]
    return [(chunk, names.index(step)) for chunk, step in issued if step in names]
