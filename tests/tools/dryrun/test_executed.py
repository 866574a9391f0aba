import copy
import json

import numpy as np
import pytest

from plugins.semi_auto_cpu.collectives import CallRecord
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
    CallRecord("Send", (0, 2), 8, (2,), "int32", 2, 5),
    CallRecord("Receive", (0, 2), 8, (2,), "int32", 2, 6),
    CallRecord("AllReduce", (0, 1), 4, (), "float32"),
]


def test_the_same_calls_in_the_same_order():
    found = compare_calls(GRAPH, DONE)
    assert (found.calls, found.order) == ([], [])
    assert compare_calls(GRAPH, json.loads(json.dumps(DONE))).calls == []


@pytest.mark.parametrize(
    ("place", "other", "missing", "more"),
    [
        (0, {"shape": (4, 8)}, "AllGather of 8x4 float32 between ranks 0, 1", "AllGather of 4x8 float32 between"),
        (1, {"dtype": "float32"}, "AlltoAllV of routed rows bfloat16 between", "AlltoAllV of 48 float32 between"),
        (2, {"sr_tag": 7}, "Send of 2 int32, sr_tag 5 between ranks 0, 2", "Send of 2 int32, sr_tag 7 between"),
        (4, {"op": "Broadcast"}, "AllReduce of one number float32 between", "Broadcast of one number float32"),
        (4, {"ranks": (1, 0)}, "AllReduce of one number float32 between ranks 0, 1", "between ranks 1, 0"),
    ],
)
def test_what_differs_is_named(place, other, missing, more):
    done = list(DONE)
    done[place] = done[place]._replace(**other)
    first, second = compare_calls(GRAPH, done).calls
    assert first.startswith(f"reported, not executed: {missing}")
    assert second.startswith("executed, not reported: ") and more in second


def test_calls_too_few_and_too_many():
    (line,) = compare_calls(GRAPH, DONE[:-1]).calls
    assert line == "reported, not executed: AllReduce of one number float32 between ranks 0, 1"
    (line,) = compare_calls(GRAPH, [*DONE, DONE[-1], DONE[-1]]).calls
    assert line == "executed, not reported: AllReduce of one number float32 between ranks 0, 1 (2 times)"


def test_calls_that_no_data_joins_may_be_swapped_and_others_not():
    done = [DONE[1], DONE[0], *DONE[2:]]
    assert compare_calls(GRAPH, done) == compare_calls(GRAPH, DONE)
    joined = copy.deepcopy(GRAPH)
    joined["collectives"][1]["after"] = [0]
    assert compare_calls(joined, DONE).order == []
    assert compare_calls(joined, done).order == [
        "executed before what it needs: AlltoAllV of 48 bfloat16 between ranks 0, 1, "
        "which needs the result of AllGather of 8x4 float32 between ranks 0, 1"
    ]


def test_equal_calls_stand_for_each_other_as_their_needs_allow():
    """The second of two equal sums needs nothing, and comes first."""
    graph = copy.deepcopy(GRAPH)
    graph["collectives"] = [graph["collectives"][place] for place in (0, 4, 4)]
    graph["collectives"][1] = graph["collectives"][1] | {"after": [0]}
    assert compare_calls(graph, [DONE[4], DONE[0], DONE[4]]).order == []


def test_messages_of_a_link_keep_their_order():
    graph = copy.deepcopy(GRAPH)
    send = graph["collectives"][2]
    graph["collectives"].append(send | {"tag": 8})
    done = [*DONE[:2], DONE[2]._replace(sr_tag=8), *DONE[2:]]
    (line,) = compare_calls(graph, done).order
    assert line.startswith(
        "message 1 is Send of 2 int32, sr_tag 5 between ranks 0, 2 as reported, Send of 2 int32, sr_tag 8"
    )


def test_what_ranks_record_is_comparable():
    """The record of real calls against a report of them."""
    graph = copy.deepcopy(GRAPH)
    graph["collectives"] = [graph["collectives"][0], graph["collectives"][4]]
    x, whole = np.ones((4, 4), np.float32), np.empty((8, 4), np.float32)
    one, total = np.ones((), np.float32), np.empty((), np.float32)
    with collectives(2) as every:

        def work(rank):
            every[rank].begin_recording()
            every[rank].run("AllGather", attributes((0, 1)), [x], [whole.copy()])
            every[rank].run("AllReduce", attributes((0, 1), op="sum"), [one], [total.copy()])
            return every[rank].end_recording()

        for calls in on_ranks(2, work):
            found = compare_calls(graph, calls)
            assert (found.calls, found.order) == ([], [])
