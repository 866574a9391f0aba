"""Kernels as they are read from MindSpore's text, written as cells, and searched for the operator that is wrong."""

import numpy as np
import pytest

from tools.accuracy.fusion import cells, report
from tools.accuracy.fusion.kernels import Kernel, Step, UnreadableError, built, constant, predicted, shrunk
from tools.accuracy.fusion.replay import EXACT, first_wrong, inputs_of, run
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


def text_of(tmp_path, inside):
    """A graph whose entry is `main`, or that has the lines in a subgraph that `main` calls."""
    file = tmp_path / "graph.ir"
    body = "".join(SOFTMAX)
    call = f"  %0(k) = call @f(%para1_x)\n      : ({TENSOR}) -> ({TENSOR})\n"
    head = "# IR entry: @main\nsubgraph @main(%para1_x) {\n"
    file.write_text(f"{head}{call}}}\nsubgraph @f(%para2_x) {{\n{body}}}\n" if inside else f"{head}{body}}}\n")
    return read_graph(file)


def test_a_kernel_is_read_with_constants_and_edges(tmp_path):
    found = built([text_of(tmp_path, inside=True)])
    assert list(found.kernels.values()) == [WHOLE]
    assert not found.skipped


def test_predicted_kernels_are_those_of_the_model(tmp_path):
    """The reduction ends the first kernel; the product is alone, and so no kernel to replay."""
    (kernel,) = predicted([text_of(tmp_path, inside=False)]).kernels.values()
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


def observed(broken):
    """What a device gives whose operator `broken` is off by 3e-4 where its results are small."""
    inputs = inputs_of(WHOLE, 0)
    results = []
    for place, step in enumerate(WHOLE.steps):
        value = run(Kernel(WHOLE.inputs, WHOLE.steps[: place + 1], (place,)), inputs, EXACT)[place]
        if place:  # later operators take what the broken one gave
            taken = {"ReduceSum": results[0].sum(1, keepdims=True)}
            value = taken[step.op] if step.op in taken else results[0] * results[1]
        small = np.abs(value) < np.median(np.abs(value)) if value.size > 4 else value > 0
        results.append(np.where(small, value * (1 + 3e-4), value).astype(np.float32) if step.op == broken else value)
    return inputs, [each.astype(np.float32) for each in results]


@pytest.mark.parametrize("broken", ["Exp", "ReduceSum", "Mul", None])
def test_the_operator_that_is_wrong_is_found_and_not_those_that_take_from_it(broken):
    found = first_wrong(WHOLE, *observed(broken))
    assert (found.op if found else None) == broken


def test_cells_compute_what_the_replay_does(tmp_path):
    """MindSpore's own operators on this CPU, no graph kernels: they agree with NumPy."""
    inputs = inputs_of(WHOLE, 1)
    ((given,),) = cells.results_of([WHOLE], [inputs], cells.OFF, tmp_path)
    np.testing.assert_allclose(given, run(WHOLE, inputs, EXACT)[2], rtol=1e-4)


def test_constants_stay_tensors_but_for_axes():
    one = ("constant", np.array([1]))
    assert "ReduceSum(True)(v0, (1,))" in cells.source([WHOLE])
    kind = TensorType("Int64", (1,))
    add = Kernel((kind,), (Step("Add", kind, (("input", 0), one)), Step("ReduceSum", kind, (("step", 0), one))), (1,))
    text = cells.source([add])
    assert "P.Add()(x0, Tensor(np.array([1], np.int64)" in text and "ReduceSum(False)(v0, (1,))" in text


def test_a_report_names_the_first_wrong_operator(tmp_path, monkeypatch):
    """A device whose Exp is wrong in graph kernels alone."""
    found = built([text_of(tmp_path, inside=True)])

    def results_of(kernels, inputs, flags, folder, every_step=False):
        steps = observed("Exp" if flags == cells.ON else None)[1]
        return [steps if every_step else [steps[2]]]

    monkeypatch.setattr(cells, "results_of", results_of)
    monkeypatch.setattr(report, "inputs_of", lambda kernel, seed: observed(None)[0])
    (row,) = report.measured(found, 0, tmp_path)
    assert (row.culprit, row.passed, row.unfused_passed) == ("Exp", False, True)
    assert report.Report([row]).wrong == [row]
