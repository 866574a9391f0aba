"""Activations by layer: what belongs to which, and a chunk put together again."""

from pathlib import Path

import pytest

from tools.dryrun.graph.activations import activations_of
from tools.dryrun.graph.by_layer import BACK, COMMON, FRONT, Moment, owner_place, parts_of, places_of, put_together
from tools.dryrun.graph.text import Node, arguments_of, read_graph

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
    seen = {
        3: [Moment(5, 2), Moment(20, 12), Moment(40, 22)],
        4: [Moment(9, 1), Moment(8, 1), Moment(7, 1), Moment(3, 0)],
    }
    parts = parts_of({FRONT: 2, "0": 10, "1": 10}, forward, backward, lambda nodes: seen[len(nodes)])
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
