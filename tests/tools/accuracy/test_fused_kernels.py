"""Kernels as they are read from MindSpore's text and made small."""

import numpy as np
import pytest

from tools.accuracy.fused_kernels import Kernel, Step, UnreadableError, constant, of_nodes, predicted, shrunk
from tools.accuracy.fused_replay import EXACT, inputs_of, run
from tools.dryrun.graph_text import TensorType, read_graph

FULL, ROWS = TensorType("Float32", (4, 64)), TensorType("Float32", (4, 1))
TENSOR, ROW = "<Tensor[Float32], (4, 64)>", "<Tensor[Float32], (4, 1)>"
SOFTMAX = [  # exp, its sum, and a product of both
    f"  %0(a) = PrimFunc_Exp(%para2_x)\n      : ({TENSOR}) -> ({TENSOR})\n",
    "  %1(b) = PrimFunc_ReduceSum(%0, (I64(1))) primitive_attrs: {keep_dims: Bool(1)}\n"
    f"      : ({TENSOR}, <Tuple[Int64], TupleShape(NoShape), elements_use_flags={{[const vector]{{1}}}}>) -> ({ROW})\n",
    f"  %2(c) = PrimFunc_Mul(%0, %1)\n      : ({TENSOR}, {ROW}) -> ({TENSOR})\n",
    "  Return(%2)\n      : (<Tensor[Float32], (4, 64)>)\n",
]
WHOLE = Kernel(
    (FULL,),
    (
        Step("Exp", FULL, (("input", 0),)),
        Step("ReduceSum", ROWS, (("step", 0), ("constant", (1,))), True),
        Step("Mul", FULL, (("step", 0), ("step", 1))),
    ),
    (2,),
)


def text_of(tmp_path):
    file = tmp_path / "graph.ir"
    file.write_text(f"# IR entry: @main\nsubgraph @main(%para1_x) {{\n{''.join(SOFTMAX)}}}\n")
    return read_graph(file)


def test_a_kernel_is_read_with_constants_and_edges(tmp_path):
    graph = text_of(tmp_path)
    assert of_nodes(graph.graphs["main"], [0, 1, 2], [2]) == WHOLE


def test_predicted_kernels_are_those_of_the_model(tmp_path):
    """The reduction ends the first kernel; the product is alone, and so no kernel to replay."""
    (kernel,) = predicted([text_of(tmp_path)]).kernels.values()
    assert kernel.name == "Exp-ReduceSum" and kernel.outputs == (0, 1)
    assert kernel.inputs == (TensorType("Float32", (4, 33)),)


def test_a_kernel_made_small_keeps_what_is_equal_and_what_broadcasts():
    large, rows, some = (TensorType("BFloat16", shape) for shape in ((-1, 4096, 7168), (-1, 4096, 1), (7168,)))
    steps = (Step("Mul", large, (("input", 0), ("input", 1))), Step("Add", large, (("step", 0), ("input", 2))))
    small = shrunk(Kernel((large, rows, some), steps, (1,)))
    assert [kind.shape for kind in small.inputs] == [(33, 34, 35), (33, 34, 1), (35,)]
    assert run(small, inputs_of(small, 0), EXACT)[1].shape == small.steps[1].output.shape == (33, 34, 35)
    with pytest.raises(UnreadableError, match="Reshape"):
        shrunk(Kernel((large,), (Step("Reshape", some, (("input", 0),)),), (0,)))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("F32(0.5)", 0.5),
        ("I64(-1)", -1),
        ("(I64(1), I64(0))", (1, 0)),
        ("()", ()),
        ("Tensor(shape=[], dtype=Int32, value=128)", 128),
        ("Tensor(shape=[1], dtype=Float32, value=[ 9.5e-01])", [np.float32(0.95)]),
        ("Tensor(shape=[4], dtype=Int64, value=[128   8   4  16])", [128, 8, 4, 16]),
        ("Tensor(shape=[2], dtype=Bool, value=[ True False])", [True, False]),
    ],
)
def test_constants(text, value):
    found = constant(text)
    assert (found.tolist() if isinstance(found, np.ndarray) else found) == value


@pytest.mark.parametrize("text", ["Tensor(shape=[2, 1], dtype=Int32, value=[...])", "None", "abc"])
def test_a_constant_that_the_text_does_not_show(text):
    with pytest.raises(UnreadableError):
        constant(text)
