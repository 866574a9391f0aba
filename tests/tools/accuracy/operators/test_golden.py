"""The golden baseline itself: gradients against differences, types, seeds, clipping."""

import numpy as np
import pytest

from tools.accuracy.operators import golden
from tools.accuracy.operators.spec import as_tuple
from tools.accuracy.operators.specs.table import SPECS
from tools.accuracy.promotion import DEFAULT
from tools.accuracy.tolerance import lower_bound

STEP = 1e-6
# a cast rounds: its derivative is 1 by definition, not by difference
DIFFERENTIABLE = [name for name, spec in SPECS.items() if spec.grad and not name.startswith("cast.")]


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradients_are_those_of_the_forward(name):
    """Central differences along a random direction, in float64, for each input alone."""
    spec = SPECS[name]
    case = golden.make_case(spec, spec.shapes[0], "float32", seed=1)
    inputs = [x.astype(np.float64) if golden.is_float(x) else x for x in case.inputs]
    rng = np.random.default_rng(2)
    for number, grad in zip(spec.wrt, case.grads, strict=True):
        direction = rng.standard_normal(inputs[number].shape)
        ends = []
        for sign in (1, -1):
            moved = [*inputs]
            moved[number] = inputs[number] + sign * STEP * direction
            outs = [out for out in as_tuple(spec.golden(*moved)) if golden.is_float(out)]
            ends.append(sum((out * dout).sum() for out, dout in zip(outs, case.douts, strict=True)))
        difference = (ends[0] - ends[1]) / (2 * STEP)
        assert difference == pytest.approx((grad * direction).sum(), rel=1e-5, abs=1e-6), number


@pytest.mark.parametrize("name", SPECS)
def test_the_baseline_stays_in_the_promoted_type(name):
    spec = SPECS[name]
    for dtype, want in (("float32", np.float64), ("float16", np.float32)):
        case = golden.make_case(spec, spec.shapes[0], dtype, seed=0)
        for values in (*case.outputs, *case.grads):
            assert values.dtype == want or not golden.is_float(values)
        assert len(case.grads) == (len(spec.wrt) if spec.grad else 0)


def test_inputs_depend_on_the_seed_only():
    spec = SPECS["rms_norm"]
    first, again, other = (golden.make_case(spec, (4, 8), "float16", seed) for seed in (0, 0, 1))
    assert all((a == b).all() for a, b in zip(first.inputs, again.inputs, strict=True))
    assert (first.inputs[0] != other.inputs[0]).any()
    fused = golden.make_case(SPECS["rms_norm.fused"], (4, 8), "float16", 0)
    assert (first.inputs[0] == fused.inputs[0]).all()  # variants see the same numbers


def test_inputs_are_clipped_rounded_and_kept_where_fixed():
    for dtype in DEFAULT:
        case = golden.make_case(SPECS["sum"], (24, 64), dtype, 0)
        assert case.extreme == 0 and np.abs(case.inputs[0]).min() >= lower_bound()
        raw = golden.make_case(SPECS["sum"], (24, 64), dtype, 0, clip=False)
        changed = raw.inputs[0] != case.inputs[0]
        assert raw.extreme == changed.sum() > 0 and np.abs(raw.inputs[0]).min() < lower_bound()
    weight, gradient, m, v = golden.make_case(SPECS["adamw"], (8, 4), "float16", 0).inputs
    assert (weight.dtype, gradient.dtype, m.dtype, v.dtype) == (np.float32, np.float16, np.float32, np.float32)
