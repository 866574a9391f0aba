"""Kernels computed fused, unfused and exactly."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tools.accuracy.fusion.reference import SCALAR, elementwise
from tools.accuracy.fusion.kernel import Kernel, Step
from tools.accuracy.fusion.replay import EXACT, FUSED, UNFUSED, allowances, inputs_of, run, verdict
from tools.dryrun.graph.text import TensorType


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
