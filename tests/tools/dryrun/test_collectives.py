"""The collectives of a step: as they are read from a compiled graph, and as an executed step is compared with them.

Constants that MindSpore writes over several lines are read as one.
"""

import copy
import json
from pathlib import Path

import numpy as np
import pytest

from plugins.errors import ClusterError
from plugins.semi_auto_cpu.collectives import CallRecord
from plugins.semi_auto_cpu.ranks import made_up_name
from tests.plugins.semi_auto_cpu.collecting import attributes, collectives, on_ranks
from tools.dryrun.collectives import generated_groups, read_collectives
from tools.dryrun.executed import compare_calls
from tools.dryrun.graph_text import GraphText, Node, arguments_of, read_graph, whole_lines

# written by hand after MindSpore 2.9.0's text: a forward and a backward subgraph, a condition, every kind of operand
GRAPH = Path(__file__).with_name("graph.ir")
GROUPS = {"outer": (0, 2), "inner": (0, 1), "hccl_world_group": (0, 1, 2, 3)}


@pytest.fixture(scope="module")
def found():
    return read_collectives(read_graph(GRAPH), GROUPS.get)


def test_program_order_expands_calls_and_both_branches(found):
    assert [(item.role, item.op) for item in found] == [
        ("forward", "AllGather"),
        ("forward", "AlltoAllV"),
        ("forward", "ReduceScatter"),
        ("forward", "AllGather"),
        ("recompute", "AllGather"),
        ("gradient", "ReduceScatter"),
        ("gradient", "AlltoAllV"),  # by a bprop written by hand
        ("step", "AllReduce"),
        ("step", "AllGather"),
    ]


def test_ranks_come_from_the_registry_then_from_the_graph(found):
    # rank_list and group_rank_ids say (0, 1, 2, 3) everywhere; "2-500" states its ranks in one of its two places
    assert [item.ranks for item in found] == [
        *[(0, 2), (0, 1), (0, 2), (0, 3)],
        *[(0, 2), (0, 3), (0, 1), (0, 1, 2, 3), (0, 1)],
    ]


def test_a_group_whose_name_is_the_hash_of_what_its_collective_states():
    """With Muon, the sums over the copies of a matrix's shard state their ranks only so."""
    ranks = (0, 4, 8, 12)
    node = '%1([CNode]1) = AllReduce(%para1_x) primitive_attrs: {group: "GROUP", group_rank_ids: IDS}'
    graphs = {"main": []}
    for group, ids in ((made_up_name(ranks), ranks), ("4-500", ranks), ("dp", (0, 1, 2, 3))):
        text = node.replace("GROUP", group).replace("IDS", str(ids))
        graphs["main"].append(Node("AllReduce", "AllReduce(%para1_x)", text, []))
    assert generated_groups(GraphText("main", graphs)) == {made_up_name(ranks): ranks}


def test_what_travels(found):
    assert found[0].inputs == (("BFloat16", (4, 8)),)
    assert found[0].outputs == (("BFloat16", (8, 8)),)
    assert found[1].inputs == (("BFloat16", (32,)), ("Int64", (2,)))
    assert found[1].outputs == (("BFloat16", (-1,)),)
    assert found[7].inputs == (("Float32", ()),)
    assert found[8].inputs == (("Float32", (1, 2)),)  # a parameter


def test_primitive_attributes(found):
    assert found[0].attributes["recompute"] is False
    assert found[0].attributes["parallel_branch"] == 1
    assert found[1].attributes["block_size"] == 8
    assert found[2].attributes["op"] == "sum"
    assert "duplicated" not in found[4].attributes  # of the node, not of the primitive


def test_source_is_the_innermost_line_of_the_forward(found):
    assert found[0].source == "moe/token_dispatcher.py:321"
    assert found[5].source == "moe/token_dispatcher.py:321"
    assert found[6].source == "hierarchical_ep/adapter.py:19"
    assert (found[0].scope, found[1].scope) == ("Default/AllGather-op0", "")
    assert found[3].source == ""  # inserted by MindSpore


def test_order_by_data_and_by_depend(found):
    order = [(item.after, item.after_depend) for item in found]
    assert order[0] == ((), ())
    assert order[1] == ((), (0,))  # its split list waits, its data does not
    assert order[2] == ((0,), ())  # one part of a tuple, the other part is the AlltoAllV
    assert order[3] == ((0, 2), ())
    assert order[4:6] == [((), ())] * 2  # nothing is said across subgraphs
    assert order[6] == ((5,), ())
    assert order[7:] == [((), ())] * 2


def test_a_subgraph_called_twice_counts_twice(tmp_path):
    text = GRAPH.read_text(encoding="utf-8")
    call = "call @7_▸Model_construct_2(%para4_inputs0, %para5_u)\n"
    first, last = f"  %0(▲CNode_11) = {call}", "  %7(CNode_18) = "
    assert first in text and last in text
    twice = tmp_path / "graph.ir"
    twice.write_text(text.replace(last, f"  %7(▲CNode_19) = {call}  %8(CNode_18) = "), encoding="utf-8")
    found = read_collectives(read_graph(twice), GROUPS.get)
    assert [item.op for item in found[:4]] == [item.op for item in found[8:12]]
    assert [item.after for item in found[8:12]] == [(), (), (8,), (8, 10)]


def test_an_unknown_group_is_refused():
    with pytest.raises(ClusterError, match=r"AlltoAllV at moe/token_dispatcher.py:398 uses group 'inner'"):
        read_collectives(read_graph(GRAPH), {name: ranks for name, ranks in GROUPS.items() if name != "inner"}.get)


def test_another_text_is_refused(tmp_path):
    other = tmp_path / "other.ir"
    other.write_text("nothing\n")
    with pytest.raises(ClusterError, match="not the text of a graph"):
        read_graph(other)


@pytest.mark.parametrize("lines", [0.2, 0.5, 0.9, -1])
def test_a_text_that_is_cut_is_refused(tmp_path, lines):
    """Calls of subgraphs that were cut off were left out, so that operators and collectives were missed."""
    text, cut = GRAPH.read_text(encoding="utf-8").rstrip().splitlines(), tmp_path / "cut.ir"
    cut.write_text("\n".join(text[: int(lines * len(text)) if lines > 0 else lines]), encoding="utf-8")
    with pytest.raises(ClusterError, match=r"the text is cut in subgraph \d of \d"):
        read_graph(cut)


def test_an_order_of_operators_may_follow_the_last_graph(tmp_path):
    """MindSpore writes the order behind some graphs."""
    text = tmp_path / "ordered.ir"
    text.write_text(
        GRAPH.read_text(encoding="utf-8").rstrip() + "\n# Order:\n#   1: @a:CNode_1{[0]: Return}\n", "utf-8"
    )
    assert read_graph(text).graphs.keys() == read_graph(GRAPH).graphs.keys()


TEXT = """# IR entry: @0_Step
subgraph @0_Step(%para1_x) {
  %0(a) = PrimFunc_Mul(%para1_x, Tensor(shape=[2, 1], dtype=Float32, value=
[[ 1.0]
 [ 2.0]]), I64(1)) {instance name: mul}
      : (<Tensor[Float32], (2, 1)>) -> (<Tensor[Float32], (2, 1)>)
  %1(b) = PrimFunc_Neg(%0)
      : (<Tensor[Float32], (2, 1)>) -> (<Tensor[Float32], (2, 1)>)
}
"""


def test_a_constant_over_several_lines_is_one_argument(tmp_path):
    file = tmp_path / "graph.ir"
    file.write_text(TEXT, encoding="utf-8")
    first, second = read_graph(file).graphs["0_Step"]
    wanted = ["%para1_x", "Tensor(shape=[2, 1], dtype=Float32, value= [[ 1.0]  [ 2.0]])", "I64(1)"]
    assert arguments_of(first.head) == wanted and first.outputs[0].shape == (2, 1)
    assert second.operands == [0]


@pytest.mark.parametrize("written", ["[ 0 1\n ]", "[ 0\n          1]", "\n[ 0\n 1]"])
def test_a_constant_may_end_anywhere_on_a_later_line(written, tmp_path):
    own = (
        f"  %0(a) = PrimFunc_Add(%para1_x, Tensor(shape=[2], dtype=Int32, value={written}), I64(1)) cnode_attrs: {{}}\n"
    )
    text = f"# IR entry: @0_Step\nsubgraph @0_Step(%para1_x) {{\n{own}      : (<null>) -> (<Tensor[Int32], (2)>)\n}}\n"
    file = tmp_path / "graph.ir"
    file.write_text(text, encoding="utf-8")
    (node,) = read_graph(file).graphs["0_Step"]
    first, constant, last = arguments_of(node.head)
    assert (first, last) == (
        "%para1_x",
        "I64(1)",
    ) and constant.split() == f"Tensor(shape=[2], dtype=Int32, value={written})".split()


def test_each_line_keeps_its_number():
    lines = TEXT.splitlines(keepends=True)
    assert [number for number, _ in whole_lines(lines)] == [1, 2, 3, 6, 7, 8, 9]


COMPILED = {
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
    found = compare_calls(COMPILED, DONE)
    assert (found.calls, found.order) == ([], [])
    assert compare_calls(COMPILED, json.loads(json.dumps(DONE))).calls == []


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
    first, second = compare_calls(COMPILED, done).calls
    assert first.startswith(f"reported, not executed: {missing}")
    assert second.startswith("executed, not reported: ") and more in second


def test_calls_too_few_and_too_many():
    (line,) = compare_calls(COMPILED, DONE[:-1]).calls
    assert line == "reported, not executed: AllReduce of one number float32 between ranks 0, 1"
    (line,) = compare_calls(COMPILED, [*DONE, DONE[-1], DONE[-1]]).calls
    assert line == "executed, not reported: AllReduce of one number float32 between ranks 0, 1 (2 times)"


def test_calls_that_no_data_joins_may_be_swapped_and_others_not():
    done = [DONE[1], DONE[0], *DONE[2:]]
    assert compare_calls(COMPILED, done) == compare_calls(COMPILED, DONE)
    joined = copy.deepcopy(COMPILED)
    joined["collectives"][1]["after"] = [0]
    assert compare_calls(joined, DONE).order == []
    assert compare_calls(joined, done).order == [
        "executed before what it needs: AlltoAllV of 48 bfloat16 between ranks 0, 1, "
        "which needs the result of AllGather of 8x4 float32 between ranks 0, 1"
    ]


def test_equal_calls_stand_for_each_other_as_their_needs_allow():
    """The second of two equal sums needs nothing, and comes first."""
    graph = copy.deepcopy(COMPILED)
    graph["collectives"] = [graph["collectives"][place] for place in (0, 4, 4)]
    graph["collectives"][1] = graph["collectives"][1] | {"after": [0]}
    assert compare_calls(graph, [DONE[4], DONE[0], DONE[4]]).order == []


def test_messages_of_a_link_keep_their_order():
    graph = copy.deepcopy(COMPILED)
    send = graph["collectives"][2]
    graph["collectives"].append(send | {"tag": 8})
    done = [*DONE[:2], DONE[2]._replace(sr_tag=8), *DONE[2:]]
    (line,) = compare_calls(graph, done).order
    assert line.startswith(
        "message 1 is Send of 2 int32, sr_tag 5 between ranks 0, 2 as reported, Send of 2 int32, sr_tag 8"
    )


def test_what_ranks_record_is_comparable():
    """The record of real calls against a report of them."""
    graph = copy.deepcopy(COMPILED)
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
