import copy
import json

import numpy as np
import pytest

from plugins.semi_auto_cpu.exchange.calls import CallRecord
from tests.plugins.semi_auto_cpu.collecting import attributes, collectives, on_ranks
from tools.dryrun.executed import compare_calls

GRAPH = {
    "groups": [[0, 1], [0, 2]],
    "collectives": [
        {"op": "AllGather", "group": 0, "shape": [8, 4], "dtype": "Float32", "bytes": 128},
        {"op": "AlltoAllV", "group": 0, "shape": [-1], "dtype": "BFloat16", "bytes": 640, "routed": True},
        {"op": "Send", "group": 1, "shape": [2], "dtype": "Int32", "bytes": 8, "me": 0, "peer": 2, "tag": 5,
         "micro": 0, "chunk": 0},
        {"op": "Receive", "group": 1, "shape": [2], "dtype": "Int32", "bytes": 8, "me": 0, "peer": 2, "tag": 6,
         "micro": 0, "chunk": 0},
        {"op": "AllReduce", "group": 0, "shape": [], "dtype": "Float32", "bytes": 4},
    ],
}  # fmt: skip
DONE = [
    CallRecord("_MicroStepAllGather", (0, 1), 128, (8, 4), "float32"),
    CallRecord("AlltoAllV", (0, 1), 96, (48,), "bfloat16"),
    CallRecord("AllReduce", (0,), 4, (), "float32"),
    CallRecord("Send", (0, 2), 8, (2,), "int32", 2, 5),
    CallRecord("Receive", (0, 2), 8, (2,), "int32", 2, 6),
    CallRecord("AllReduce", (0, 1), 4, (), "float32"),
]


def test_the_same_calls_in_the_same_order():
    found = compare_calls(GRAPH, DONE)
    assert (found.calls, found.order) == ([], "")
    assert compare_calls(GRAPH, json.loads(json.dumps(DONE))).calls == []


@pytest.mark.parametrize(
    ("place", "other", "line"),
    [
        (0, {"bytes": 64}, "group of ranks 0, 1: call 1 is AllGather of 8x4 float32 as reported, AllGather of 8x4"),
        (0, {"shape": (4, 8)}, "as reported, AllGather of 4x8 float32 as executed"),
        (1, {"dtype": "float32"}, "call 2 is AlltoAllV of routed rows bfloat16 as reported, AlltoAllV of 48 float32"),
        (3, {"sr_tag": 7}, "link of ranks 0, 2: call 1 is Send of 2 int32, sr_tag 5 as reported, Send of 2 int32, sr_"),
        (5, {"op": "Broadcast"}, "call 3 is AllReduce of one number float32 as reported, Broadcast of one number"),
        (5, {"ranks": (1, 0)}, "call 3 is AllReduce"),
    ],
)  # fmt: skip
def test_what_differs_is_named(place, other, line):
    done = list(DONE)
    done[place] = done[place]._replace(**other)
    (found,) = compare_calls(GRAPH, done).calls
    assert line in found


def test_calls_too_few_and_too_many():
    (line,) = compare_calls(GRAPH, DONE[:-1]).calls
    assert "call 3 is AllReduce of one number float32 as reported, not there as executed (of 3 reported and 2" in line
    (line,) = compare_calls(GRAPH, [*DONE, DONE[-1]]).calls
    assert "call 4 is not there as reported, AllReduce of one number float32 as executed" in line


def test_another_order_across_groups_is_told_apart():
    done = [*DONE[:3], DONE[5], DONE[3], DONE[4]]
    found = compare_calls(GRAPH, done)
    assert found.calls == []
    assert found.order == (
        "call 3 is Send of 2 int32, sr_tag 5 of ranks 0, 2 as reported, "
        "AllReduce of one number float32 of ranks 0, 1 as executed"
    )


def test_what_ranks_record_is_comparable():
    """The record of real calls against a report of them."""
    graph = copy.deepcopy(GRAPH)
    graph["collectives"] = [graph["collectives"][0], graph["collectives"][4]]
    x, whole = np.ones((4, 4), np.float32), np.empty((8, 4), np.float32)
    one, total = np.ones((), np.float32), np.empty((), np.float32)
    with collectives(2) as every:

        def work(rank):
            every[rank].begin_step(3)
            every[rank].run("AllGather", attributes((0, 1)), [x], [whole.copy()])
            every[rank].run("AllReduce", attributes((0, 1), op="sum"), [one], [total.copy()])
            return every[rank].recorded(3)

        for calls in on_ranks(2, work):
            found = compare_calls(graph, calls)
            assert (found.calls, found.order) == ([], "")
