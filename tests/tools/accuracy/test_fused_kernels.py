"""Kernels as they are read from MindSpore's text and made small; then computed fused, unfused and exactly, against
number after number in Python's own float; and the command."""

import gzip
import json
import math
from collections import Counter

import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.cli import tc3
from plugins.errors import ClusterError
from tests.tools.fusion.small_graphs import node, text_of
from tools.accuracy.fused_kernels import (
    EXACT,
    FUSED,
    UNFUSED,
    Found,
    Kernel,
    Report,
    Row,
    Step,
    UnreadableError,
    allowances,
    constant,
    inputs_of,
    of_nodes,
    predicted,
    replayed,
    run,
    shrunk,
    verdict,
)
from tools.dryrun import compiles
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


def softmax(tmp_path):
    file = tmp_path / "graph.ir"
    file.write_text(f"# IR entry: @main\nsubgraph @main(%para1_x) {{\n{''.join(SOFTMAX)}}}\n")
    return read_graph(file)


def test_a_kernel_is_read_with_constants_and_edges(tmp_path):
    graph = softmax(tmp_path)
    assert of_nodes(graph.graphs["main"], [0, 1, 2], [2]) == WHOLE


def test_predicted_kernels_are_those_of_the_model(tmp_path):
    """The reduction ends the first kernel; the product is alone, and so no kernel to replay."""
    (kernel,) = predicted([softmax(tmp_path)]).kernels.values()
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


ROUND = {"Float32": np.float32, "Float16": np.float16, "BFloat16": ml_dtypes.bfloat16}
SCALAR = {
    "Add": lambda a, b: a + b,
    "Sub": lambda a, b: a - b,
    "Mul": lambda a, b: a * b,
    "Neg": lambda a: -a,
    "Exp": math.exp,
    "Maximum": max,
    "Cast": lambda a: a,
}


def elementwise(kernel, inputs, fused):
    """Results of a kernel of elementwise operators on one shape; unfused ones round after each operator.

    Each operator computes in float64 and rounds to float32 first, as a float32 unit does.
    """
    rows = []
    for numbers in zip(*(each.ravel().tolist() for each in inputs), strict=True):
        values = []
        for place, step in enumerate(kernel.steps):
            taken = [numbers[what] if kind == "input" else values[what] for kind, what in step.arguments]
            value = np.float32(SCALAR[step.op](*taken))
            if not fused or place in kernel.outputs or step.op == "Cast":
                value = np.float32(ROUND[step.output.dtype](value))
            values.append(float(value))
        rows.append(values)
    return [np.array(column, np.float32) for column in zip(*rows, strict=True)]


def of(dtype, *shape):
    return TensorType(dtype, shape)


@st.composite
def chains(draw, dtypes=("Float32", "Float16", "BFloat16")):
    """Kernels of elementwise operators on one shape; each takes from inputs and steps before it."""
    dtype = draw(st.sampled_from(dtypes))
    kind = of(dtype, 5)
    steps = []
    for place in range(draw(st.integers(1, 6))):
        op = draw(st.sampled_from([name for name in SCALAR if name not in ("Exp", "Cast")]))
        known = [("input", 0), ("input", 1), *(("step", each) for each in range(place))]
        count = 1 if op == "Neg" else 2
        steps.append(Step(op, kind, tuple(draw(st.sampled_from(known)) for _ in range(count))))
    kept = draw(st.sets(st.integers(0, len(steps) - 1), max_size=2)) | {len(steps) - 1}
    return Kernel((kind, kind), tuple(steps), tuple(sorted(kept)))


@settings(max_examples=60, deadline=None)
@given(chains(), st.integers(0, 9), st.booleans())
def test_a_chain_is_rounded_where_the_reference_rounds_it(kernel, seed, fused):
    inputs = inputs_of(kernel, seed)
    got, want = run(kernel, inputs, FUSED if fused else UNFUSED), elementwise(kernel, inputs, fused)
    for place in kernel.outputs:
        np.testing.assert_array_equal(got[place], want[place])


@settings(max_examples=60, deadline=None)
@given(chains(), st.integers(0, 9))
def test_the_last_rounding_alone_is_within_the_table(kernel, seed):
    """Products and sums of few numbers: neither way leaves its tolerance, and float32 is the same both ways."""
    inputs = inputs_of(kernel, seed)
    exact, fused, unfused = (run(kernel, inputs, way) for way in (EXACT, FUSED, UNFUSED))
    for place in kernel.outputs:
        allowed = allowances(kernel)[place]
        assert allowed.tolerance(UNFUSED) >= allowed.tolerance(FUSED)
        if allowed.dtype == "float32":
            np.testing.assert_array_equal(fused[place], unfused[place])
            assert verdict(fused[place], exact[place], allowed, FUSED).passed


HALF = of("BFloat16", 2)
TWO = Kernel(
    (HALF, HALF),
    (Step("Add", HALF, (("input", 0), ("input", 1))), Step("Sub", HALF, (("step", 0), ("input", 0)))),
    (1,),
)


def test_a_bfloat16_chain_keeps_what_one_rounding_after_each_operator_loses():
    """256 + 1 is 256 in bfloat16, so that (256 + 1) - 256 is 0 unfused, and 1 fused."""
    inputs = [np.array([256, 2], np.float32), np.array([1, 1], np.float32)]
    assert run(TWO, inputs, UNFUSED)[1].tolist() == [0, 1]
    assert run(TWO, inputs, FUSED)[1].tolist() == [1, 1]
    assert not verdict(run(TWO, inputs, UNFUSED)[1], run(TWO, inputs, EXACT)[1], allowances(TWO)[1], UNFUSED).passed


def test_a_cast_rounds_inside_a_kernel_too():
    wide = of("Float32", 1)
    half = of("BFloat16", 1)
    kernel = Kernel((wide,), (Step("Cast", half, (("input", 0),)), Step("Cast", wide, (("step", 0),))), (1,))
    assert run(kernel, [np.array([257], np.float32)], FUSED)[1].tolist() == [256]


@pytest.mark.parametrize(
    ("step", "shape", "want"),
    [
        (Step("ReduceSum", of("Float32", 2), (("input", 0), ("constant", (1,)))), (2, 3), [3, 12]),
        (Step("ReduceSum", of("Float32", 1, 3), (("input", 0), ("constant", 0)), True), (2, 3), [[3, 5, 7]]),
        (Step("ReduceSum", of("Float32"), (("input", 0), ("constant", ()))), (2, 3), 15),
        (
            Step("Transpose", of("Float32", 3, 2), (("input", 0), ("constant", (1, 0)))),
            (2, 3),
            [[0, 3], [1, 4], [2, 5]],
        ),
        (Step("Reshape", of("Float32", 6), (("input", 0), ("constant", (-1,)))), (2, 3), [0, 1, 2, 3, 4, 5]),
        (Step("BroadcastTo", of("Float32", 2, 2), (("input", 0), ("constant", (2, 2)))), (1, 2), [[0, 1], [0, 1]]),
    ],
    ids=lambda each: each.op if isinstance(each, Step) else None,
)
def test_operators_that_change_shapes(step, shape, want):
    values = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    kernel = Kernel((TensorType("Float32", shape),), (step,), (0,))
    assert run(kernel, [values], FUSED)[0].tolist() == want


def test_what_the_table_allows():
    rows, full, one = of("Float32", 4), of("Float32", 4, 3000), of("BFloat16", 4)
    total = Kernel((full,), (Step("ReduceSum", rows, (("input", 0), ("constant", 1))),), (0,))
    assert [(a.dtype, a.count, a.stores) for a in allowances(total)] == [("float32", 3000, 0)]
    moved = Kernel((full,), (Step("Reshape", of("Float32", 12000), (("input", 0),)),), (0,))
    assert allowances(moved)[0].tolerance(FUSED) == 0
    down = Kernel((full,), (*total.steps, Step("Cast", one, (("step", 0),)), Step("Neg", one, (("step", 1),))), (2,))
    last = allowances(down)[2]
    assert (last.dtype, last.count, last.stores, last.casts) == ("bfloat16", 3000, 2, 1)
    assert last.tolerance(FUSED) == last.tolerance(UNFUSED) == 0.07 + 2**-8


SQUARE = ("Float32", (64, 64))
KNOWN = [node("Exp", ["x"], [SQUARE], SQUARE, "a/x-op"), node("Neg", [0], [SQUARE], SQUARE, "a/y-op")]
# two more in a chain, of which one is a number that the text does not hold
ELIDED = [
    node("Cos", [1], [SQUARE], SQUARE, "a/z-op"),
    node("Add", [2], [SQUARE], SQUARE, "a/u-op", more=["Tensor(shape=[64, 64], dtype=Float32, value=[...])"]),
    node("Neg", [3], [SQUARE], SQUARE, "a/v-op"),
]


def run_command(file, *words):
    return CliRunner().invoke(tc3, ["accuracy", "fusion", str(file), *words], catch_exceptions=False)


@pytest.mark.parametrize("ending", ["ir", "ir.gz"])
def test_kernels_of_a_graph_are_replayed(tmp_path, ending):
    text = text_of(KNOWN).encode()
    file = tmp_path / f"graph.{ending}"
    file.write_bytes(gzip.compress(text) if ending == "ir.gz" else text)
    done = run_command(file, "--json")
    report = json.loads(done.stdout)
    assert [row["name"] for row in report["rows"]] == ["Exp-Neg"]
    assert (done.exit_code, report["passed"], report["unknown"]) == (0, True, 0)
    assert "all within tolerance" in run_command(file).stdout


def test_a_kernel_that_cannot_be_replayed_is_unknown_and_not_passed(tmp_path):
    file = tmp_path / "graph.ir"
    file.write_text(text_of(KNOWN + ELIDED))
    done = run_command(file, "--json")
    report = json.loads(done.stdout)
    assert (done.exit_code, report["passed"], report["unknown"]) == (2, None, 1)
    assert [row["passed"] for row in report["rows"]] == [True]
    assert "unknown of 1 kernels; the others are within tolerance" in run_command(file).stdout


def test_a_kernel_whose_results_are_all_nan_is_unknown():
    kind = TensorType("Float32", (4, 8))
    steps = Step("Neg", kind, (("input", 0),)), Step("Sqrt", kind, (("step", 0),))
    kernel = Kernel((kind,), steps, (1,))
    report = replayed(Found({kernel.key: kernel}, Counter({kernel.key: 5})), 0)
    assert report.passed is None and report.unknown == 5 and not report.rows


def test_a_graph_without_a_fused_kernel_is_unknown(tmp_path):
    file = tmp_path / "graph.ir"
    file.write_text(text_of([]))
    done = run_command(file)
    assert done.exit_code == 2 and "so nothing was compared" in done.stdout and "within tolerance" not in done.stdout


def test_an_infinite_error_is_a_text_in_json():
    row = Row("Exp-Neg", "", 1, "float16", math.inf, 0.5, 1e-3, False, False, "")
    told = json.loads(json.dumps(Report([row]).as_json(), allow_nan=False))["rows"][0]
    assert (told["fused"], told["unfused"]) == ("inf", 0.5)


def test_a_recipe_is_replayed_on_the_graph_that_it_compiles_to(tmp_path, monkeypatch):
    """A recipe for the CPU is compiled as if it were for Ascend."""
    asked = []
    file = tmp_path / "graph.ir"
    file.write_text(text_of(KNOWN))

    def compile_all(plan, *_, **words):
        asked.append([(job.recipe["context"]["device_target"], words) for job in plan.jobs])
        return [{"rank": 0}]

    monkeypatch.setattr(compiles, "compile_all", compile_all)
    monkeypatch.setattr(compiles, "text_of", lambda job: file)
    done = run_command("recipes/mini/pretrain.yaml")
    assert asked == [[("Ascend", {"texts": True})]]
    assert done.exit_code == 0 and "DVM, replayed: 1 kernels of 1 kinds, 0 kinds out of tolerance" in done.stdout


def test_a_recipe_that_does_not_compile_is_unknown(monkeypatch):
    refused = {"rank": 0, "error": {"type": "ValueError", "message": "the offset is wrong"}}
    monkeypatch.setattr(compiles, "compile_all", lambda *_, **__: [refused])
    done = CliRunner().invoke(tc3, ["accuracy", "fusion", "recipes/mini/pretrain.yaml"])
    assert isinstance(done.exception, ClusterError)
    assert "unknown, because the recipe does not compile: rank 0: model.model_config.offset" in str(done.exception)
