"""What is read off a graph: written by hand after MindSpore 2.9.0's text, so that every number can be counted."""

from pathlib import Path

import pytest

from tools.dryrun.activations import activations_of, kept_bytes, peak_bytes, routed_rows
from tools.dryrun.flops import flops_of
from tools.dryrun.graph_report import report_graph
from tools.dryrun.graph_text import TensorType, read_graph, tensors
from tools.dryrun.passes import Pass, chunks_of, in_flight, passes_of

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
    assert in_flight(passes_of(graph)) == {0: 2}


def test_in_flight_counts_chunks_where_together_they_are_most():
    passes = [Pass("F", 0, 0), Pass("F", 1, 0), Pass("F", 0, 1), Pass("B", 0, 1), Pass("F", 1, 1), Pass("B", 1, 1)]
    assert in_flight(passes) == {0: 2, 1: 1}
    assert in_flight([]) == {}


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
    assert peak_bytes(graph.graphs[backward], ROWS) == again + dw  # the last result is the caller's


def test_flops(graph):
    (chunk,) = flops_of(graph, ROWS)
    attention = 2 * 16 * 16 * (6 + 4)  # heads x tokens x tokens x (width of scores + of values), causal
    assert chunk["forward"] == 2 * 16 * 8 * 32 + 2 * ROWS * 32 * 8 + attention
    assert chunk["recompute"] == 2 * 16 * 32 * 8
    assert chunk["gradient"] == 2 * 16 * 8 * 32


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
