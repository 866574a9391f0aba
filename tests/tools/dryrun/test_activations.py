"""These tests check what is read from a graph, and its activations by layer.

The graph was written by hand after MindSpore 2.9.0's text, so that every number can be counted.
"""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.dryrun.activations import (
    BACK,
    COMMON,
    FRONT,
    Moment,
    activations_of,
    kept_bytes,
    moments_of,
    owner_place,
    parts_of,
    peak_bytes,
    places_of,
    put_together,
    routed_rows,
)
from tools.dryrun.collectives import flops_of, node_flops
from tools.dryrun.graph_text import (
    Node,
    Pass,
    TensorType,
    arguments_of,
    chunks_of,
    most_saved,
    passes_of,
    read_graph,
    tensors,
)
from tools.dryrun.rank import report_graph

ROWS = 16  # that the dispatch sends: 512 numbers in blocks of 32


@pytest.fixture(scope="module")
def graph():
    return read_graph(Path(__file__).with_name("pipeline.ir"))


def test_types_of_tuples_are_taken_apart():
    text = (
        "(<Tuple[Tensor[Float32]*2,Ref[Tensor[BFloat16]]], TupleShape((1, 2), (3), (4, -1)), more>, <Tensor[Bool], ()>)"
    )
    assert tensors(text) == (
        TensorType("Float32", (1, 2)),
        TensorType("Float32", (3,)),
        TensorType("BFloat16", (4, -1)),
        TensorType("Bool", ()),
    )


def test_passes_in_the_order_of_the_root(graph):
    assert [(f[-10:], b[-10:]) for f, b in chunks_of(graph)] == [("onstruct_2", "onstruct_3")]
    assert passes_of(graph) == [Pass("F", 0, 0), Pass("F", 1, 0), Pass("B", 0, 0), Pass("B", 1, 0)]
    assert most_saved(passes_of(graph), [7]) == 14


def test_the_fullest_moment_is_the_one_of_most_bytes():
    """Chunk 0 leaves 10 bytes, chunk 1 one: 3 micro-batches wait as 12 bytes, and later 2 as 20."""
    order = [("F", 0, 0), ("F", 0, 1), ("F", 1, 1), ("B", 0, 1), ("B", 1, 1), ("F", 1, 0), ("B", 0, 0), ("B", 1, 0)]
    passes = [Pass(*item) for item in order]
    assert most_saved(passes, [10, 1]) == 20
    assert most_saved(passes, [1, 1]) == 3
    assert most_saved([], []) == 0


PASSES = st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=30)


@given(PASSES, st.lists(st.integers(0, 50), min_size=3, max_size=3))
def test_the_fullest_moment_by_counting_at_every_moment(steps, sizes):
    passes = [Pass("F" if forward else "B", 0, chunk) for chunk, forward in steps]
    moments = [
        sum(sizes[item.chunk] * (1 if item.kind == "F" else -1) for item in passes[:end])
        for end in range(len(passes) + 1)
    ]
    assert most_saved(passes, sizes) == max(moments)


def test_rows_that_routing_decides_are_those_the_dispatch_sends(graph):
    assert routed_rows(graph, even=7) == ROWS
    assert routed_rows(graph, even=100) == 100


def test_activations(graph):
    (chunk,) = activations_of(graph, ROWS)
    product, attention = 16 * 32 * 2, (2 * 2 * 16 * 8 * 4 + 2 * 16 * 4 * 2)
    # the MatMul is bound twice, once through a Reshape; of the attention its whole result, of which one part is bound
    assert chunk["saved"] == product + attention
    assert chunk["forward"] > chunk["saved"]
    assert kept_bytes(graph, ROWS) == {"w": 32 * 8 * 2}  # the gathered weight, not what is received for one micro-batch


def test_peak_is_the_most_alive_at_once(graph):
    _, backward = chunks_of(graph)[0]
    again, dw = 16 * 8 * 2, 8 * 32 * 4
    assert peak_bytes(moments_of(graph.graphs[backward], ROWS)) == again + dw  # the last result is the caller's


def test_flops(graph):
    (chunk,) = flops_of(graph, ROWS)
    attention = 2 * 16 * 16 * (6 + 4)  # heads x tokens x tokens x (width of scores + of values), causal
    assert chunk["forward"] == 2 * 16 * 8 * 32 + 2 * ROWS * 32 * 8 + attention
    assert chunk["recompute"] == 2 * 16 * 32 * 8
    assert chunk["gradient"] == 2 * 16 * 8 * 32


@pytest.mark.parametrize(
    ("layout", "query", "key", "value"),
    [
        (1, "(1, 4, 4096, 128)", "(1, 4, 4096, 128)", "(1, 4, 4096, 64)"),  # BNSD
        (4, "(4096, 4, 128)", "(4096, 4, 128)", "(4096, 4, 64)"),  # TND
        (0, "(1, 4096, 512)", "(1, 4096, 512)", "(1, 4096, 256)"),  # BSH: context parallelism without the EOD mask
        (0, "(1, 4096, 512)", "(1, 4096, 256)", "(1, 4096, 128)"),  # two heads of keys and values for four of queries
        (2, "(4096, 1, 512)", "(4096, 1, 512)", "(4096, 1, 256)"),  # SBH
        (3, "(1, 4096, 4, 128)", "(1, 4096, 4, 128)", "(1, 4096, 4, 64)"),  # BSND
    ],
)
@pytest.mark.parametrize(("op", "products"), [("Score", 128 + 64), ("ScoreGrad", 3 * 128 + 2 * 64)])
def test_flops_of_attention_in_every_layout(layout, query, key, value, op, products):
    arguments = f"I64(4), F32(1), F32(0.0721688), I64(2147483647), I64(0), I64(0), I64({layout}), I64(2)"
    types = ", ".join(f"<Tensor[BFloat16], {shape}>" for shape in (query, key, value))
    name = f"FlashAttention{op}"
    node = Node(name, f"PrimFunc_{name}(%1, %2, %3, None, {arguments})", "", [], types=(f"({types})", ""))
    assert node_flops(node, ROWS) == 4 * 4096 * 4096 * products


def test_the_whole_report(graph):
    report = report_graph(graph, 4, {"ep": (4, 5)}.get, even_rows=1)
    assert report["groups"] == [[4, 5], [0, 4]]
    gather, first, exchange, second, again = report["collectives"]
    assert (gather["op"], gather["bytes"], gather["role"]) == ("AllGather", 32 * 8 * 2, "step")
    assert (first["peer"], first["me"], first["tag"], first["micro"]) == (0, 4, 5, 0)
    assert first["bytes"] == 16 * 8 * 4
    assert second["micro"] == 1
    assert exchange == again
    assert (exchange["bytes"], exchange.get("routed")) == (512 * 2, None)  # what it sends is known


def test_what_a_collective_needs_is_told_by_its_nearest():
    """The second gather needs the sum, which needs the first gather."""
    other = read_graph(Path(__file__).with_name("graph.ir"))
    report = report_graph(other, 0, lambda name: (0, 1, 2, 3), even_rows=1)
    assert [(item["op"], item["after"]) for item in report["collectives"][:4]] == [
        ("AllGather", []), ("AlltoAllV", []), ("ReduceScatter", [0]), ("AllGather", [2])
    ]  # fmt: skip


MODEL = "Default/network-Net/model-GPTModel/"
LAYER = MODEL + "decoder-TransformerBlock/layers-CellList/{}-TransformerLayer/"


def node(scope="", head="", operands=()):
    return Node(op="Add", head=head, text=head, operands=list(operands), scope=scope)


def test_places_follow_the_path_of_cells_and_else_the_operators_in_front():
    nodes = [
        node(MODEL + "embedding-Embedding/Cast-op1"),
        node("Default/Cast-op2"),
        node(LAYER.format(0) + "Add-op1"),
        node("Default/MoveTo-op1"),
        node("recompute_" + LAYER.format(1) + "Add-op2"),
        node(LAYER.format(0) + "Add-op1"),  # an operator that two layers share keeps the first one's path
        node("Default/Depend-op1"),
        node(MODEL + "decoder-TransformerBlock/final_layernorm-Norm/Cast-op3"),
        node(MODEL + "decoder-TransformerBlock/Depend-op4"),
    ]
    back = 1 << 30
    assert places_of(nodes) == [-1, -1, 0, 0, 1, 0, 1, back, back]


@pytest.mark.parametrize(
    ("own", "readers", "part"),
    [
        (3, [3], "3"),
        (3, [], "3"),
        (3, [4], "4"),  # the input of the next layer, which starts from it again
        (-1, [0], "0"),
        (0, [0, 1, 2], COMMON),  # angles of rotary positions, made where they are first needed
        (-1, [0, 1], COMMON),
        (-1, [], FRONT),
        (1 << 30, [1 << 30], BACK),
    ],
)
def test_what_only_a_later_layer_reads_is_that_layers(own, readers, part):
    assert owner_place(own, readers) == part


def test_parts_and_the_whole_that_they_make():
    forward = [node(MODEL + "embedding-E/X"), node(LAYER.format(0) + "A"), node(LAYER.format(1) + "A")]
    backward = [
        node(head="AssignAdd(%para1_accu_grads.output_layer.weight, %0)"),
        node(head="AssignAdd(%para2_accu_grads.decoder.layers.1.w, %0)"),
        node(head="AssignAdd(%para3_accu_grads.decoder.layers.0.w, %0)"),
        node(head="AssignAdd(%para4_accu_grads.embedding.word_embeddings.weight, %0)"),
    ]
    seen = (
        [Moment(5, 2), Moment(20, 12), Moment(40, 22)],
        [Moment(9, 1), Moment(8, 1), Moment(7, 1), Moment(3, 0)],
    )
    parts = parts_of({FRONT: 2, "0": 10, "1": 10}, forward, backward, seen)
    assert parts == {
        FRONT: {"saved": 2, "forward": 5, "backward": 3},
        "0": {"saved": 10, "forward": 18, "backward": 7},
        "1": {"saved": 10, "forward": 28, "backward": 8},
        BACK: {"saved": 0, "forward": 0, "backward": 9},
    }
    assert put_together([parts[FRONT], parts["0"], parts["1"]]) == {"saved": 22, "forward": 40, "backward": 8}
    assert put_together([parts["0"]] * 3) == {"saved": 30, "forward": 38, "backward": 7}
    assert put_together([]) == {"saved": 0, "forward": 0, "backward": 0}


def test_the_parts_of_a_graph_add_up_to_what_its_chunks_keep():
    for name in ("graph.ir", "pipeline.ir"):
        for chunk in activations_of(read_graph(Path(__file__).with_name(name)), rows=4):
            assert sum(part["saved"] for part in chunk["parts"].values()) == chunk["saved"]


def test_arguments_of_a_call():
    assert arguments_of("call @f(%1, %para4_x, (1, (2, 3)), I64(0))") == ["%1", "%para4_x", "(1, (2, 3))", "I64(0)"]
