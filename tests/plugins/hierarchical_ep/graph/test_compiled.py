"""The dispatcher in MindFormers' semi-auto path, compiled for 16 virtual Ascend devices (see tests/tools/dryrun).

What each rank would call, and in which order, against the planner's programs.
"""

import functools
import json
from collections import Counter

import numpy as np
import pytest

from plugins.ep_overlap.plan import issue_order
from plugins.hierarchical_ep.plan import make_plan
from plugins.hierarchical_ep.programs import programs_of
from plugins.hierarchical_ep.topology import Topology
from tests.tools.dryrun.test_rank import EP, INNER, OUTER, RANK, compile_rank

pytestmark = pytest.mark.slow

TOPOLOGY = Topology(nodes=2, devices_per_node=4, experts=16)
OPS = {"all_to_all": "AlltoAll", "all_to_all_v": "AlltoAllV", "all_gather": "AllGather"}
OPS["reduce_scatter"] = "ReduceScatter"


@pytest.fixture(scope="module")
def compiled(forks, tmp_path_factory):
    """(mode, chunks) -> the worker's report, compiled once."""

    @functools.cache
    def compiled_once(mode, chunks):
        # the map of plugins.expert_balance renames experts on their way here: it adds no collective
        plugins = {"hierarchical_ep": {"mode": mode}, "expert_balance": {"every": 0}}
        if chunks != (1, 1):
            plugins["ep_overlap"] = {"chunks": list(chunks)}
        folder = tmp_path_factory.mktemp("compiled")
        return compile_rank(forks, folder, "--plugins", json.dumps(plugins))

    return compiled_once


def planned(mode, parts):
    """(operator, ranks) of each forward call of rank RANK, in order."""
    routing = [np.arange(8).reshape(2, 4) for _ in range(TOPOLOGY.ep)]
    plan = make_plan(mode, TOPOLOGY, routing)
    names = [step.step for step in plan.forward]
    names = names if len(names) == 4 else ["dispatch.intra", "combine.intra"]
    order = [(chunk, names.index(step)) for chunk, step in issue_order(parts) if step in names]
    calls = programs_of(*[plan] * parts, order=order)[EP.index(RANK)]
    calls = [call for call in calls if "backward" not in call.tag]
    return [(OPS[call.op], tuple(EP[member] for member in call.group)) for call in calls]


def on(report, ranks, role):
    """The collectives of one role over `ranks`, as the compiler orders them."""
    found = [place for place, item in enumerate(report["collectives"]) if item["role"] == role]
    found = [place for place in found if report["collectives"][place]["ranks"] == ranks]
    return [(place, report["collectives"][place]) for place in found]


@pytest.mark.parametrize(
    ("mode", "chunks"),
    [("hierarchical", (1, 1)), ("global", (1, 2)), ("deduplicated", (2, 2))],
)
def test_collectives_and_their_order_are_the_planned_ones(compiled, mode, chunks):
    report = compiled(mode, chunks)
    forward = planned(mode, chunks[0] * chunks[1])
    for ranks in (OUTER, INNER, EP):
        wanted = [op for op, group in forward if group == tuple(ranks)]
        calls = on(report, ranks, "forward")
        # each waits for all before it, so the backend cannot swap them
        waits = {place: {*item["after"], *item["after_depend"]} for place, item in calls}
        ordered = sorted(waits, key=lambda place: len(waits[place] & waits.keys()))
        assert [len(waits[place] & waits.keys()) for place in ordered] == list(range(len(ordered)))
        assert [report["collectives"][place]["op"] for place in ordered] == wanted, ranks


def test_backward_is_the_adjoint_and_only_rows_are_sent_again(compiled):
    report = compiled("hierarchical", (1, 1))
    gradient = Counter(
        (item["op"], tuple(ranks)) for ranks in (OUTER, INNER) for _, item in on(report, ranks, "gradient")
    )
    assert gradient == {
        ("AllGather", tuple(OUTER)): 1,
        ("ReduceScatter", tuple(OUTER)): 2,
        ("AlltoAllV", tuple(INNER)): 3,
    }
    again = [
        (item["op"], item["attributes"].get("block_size"))
        for ranks in (OUTER, INNER)
        for _, item in on(report, ranks, "recompute")
    ]
    # the second All-to-All brings outputs back: MindSpore asks them for a shape that only they have
    assert again == [("AllGather", None), ("AlltoAllV", 128), ("AlltoAllV", 128)]
