"""These tests check the golden functions and gradients of the operators' specs, what the specs accumulate and their
extreme inputs, and that this host computes the golden results that are shipped, or names what differs.
"""

import inspect
import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from plugins.errors import DataError
from tests.tools.accuracy.operators.test_run import NumpyDevice
from tools.accuracy.judge import DEFAULT, SMALLEST, lower_bound
from tools.accuracy.operators import run
from tools.accuracy.operators.report import FAMILIES, SPECS
from tools.accuracy.operators.run import PASS, clip_lower, flushed, grid, poke, specials, verify
from tools.accuracy.operators.shipped import FILE, differences, numbers_of, read_shipped
from tools.accuracy.operators.spec import as_tuple

ASKED = """matmul batch_matmul grouped_matmul softmax log_softmax rms_norm layer_norm rope swiglu silu gelu sigmoid
cross_entropy router_topk permute unpermute index_add gather scatter one_hot sum mean max prod cumsum sort argsort exp
log pow sqrt rsqrt div mul add sub cast.bfloat16 transpose concat split tile where clip embedding embedding_gradient
adamw global_norm_clip"""


def test_what_training_uses_is_there():
    assert set(ASKED.split()) <= set(SPECS)
    assert len({name.split(".")[0] for name in SPECS}) >= 60
    assert sum(map(len, FAMILIES.values())) == len(SPECS)  # names are unique


@pytest.mark.parametrize("name", SPECS)
def test_a_right_device_passes(name):
    spec = SPECS[name]
    for dtype in spec.dtypes:
        rows = verify(spec, dtype, NumpyDevice(), reruns=2)
        assert [row for row in rows if row.status != PASS] == []
        phases = {row.phase for row in rows}
        assert phases == {"forward", "rerun", *["backward"] * bool(spec.grad), *["special"] * bool(spec.special)}


@pytest.mark.parametrize("name", SPECS)
def test_specs_say_where_the_operator_comes_from(name):
    assert len(SPECS[name].source) > 5 and next(iter(inspect.signature(SPECS[name].call).parameters)) == "ms"


LINEAR = [
    "matmul",
    "batch_matmul",
    "grouped_matmul",
    "outer",
    "sum",
    "cumsum",
    "embedding",
    "permute",
    "index_add",
    "scatter_add",
    "tile",
]


def ones(values):
    return np.ones_like(values) if run.is_float(values) else values


@pytest.mark.parametrize("name", LINEAR)
def test_ones_count_terms(name):
    spec = SPECS[name]
    for shape in spec.shapes:
        made = tuple(map(ones, spec.make(run.generator(spec, shape, 0), *shape)))
        counts = spec.counts(*made)
        outs = run.forward(spec, made, "float32")
        for number, out in enumerate(outs):
            assert out.max() == (counts.of("forward", number) or 1)  # moved: one term, nothing computed
        grads = run.backward(spec, made, tuple(map(np.ones_like, outs)), "float32")
        for number, grad in enumerate(grads):
            assert grad.max() == (counts.of("backward", number) or 1)


def test_normalisations_count_the_axis_and_the_rows():
    spec = SPECS["layer_norm"]
    counts = spec.counts(np.ones((3, 5, 7)), np.ones(7), np.ones(7))
    assert counts.of("forward", 0) == 7
    assert [counts.of("backward", number) for number in range(3)] == [7, 15, 15]


def test_the_norm_counts_every_gradient():
    assert SPECS["global_norm_clip"].counts(np.ones((150, 100)), np.ones(100)).of("forward", 2) == 15100


def test_table_2_is_reached_in_every_column():
    """Some case of some operator falls into each row of the table."""
    reached = set()
    for spec in SPECS.values():
        for shape in spec.shapes:
            counts = spec.counts(*spec.make(run.generator(spec, shape, 0), *shape))
            forward = counts.forward if isinstance(counts.forward, tuple) else (counts.forward,)
            reached |= {sum(count >= row for row in (1, 2000, 10000, 20000, 200000)) for count in forward}
    assert reached == {0, 1, 2, 3, 4, 5}


STEP = 1e-6
# a cast rounds: its derivative is 1 by definition, not by difference
DIFFERENTIABLE = [name for name, spec in SPECS.items() if spec.grad and not name.startswith("cast.")]


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradients_are_those_of_the_forward(name):
    """Central differences along a random direction, in float64, for one input at a time."""
    spec = SPECS[name]
    case = run.make_case(spec, spec.shapes[0], "float32", seed=1)
    inputs = [x.astype(np.float64) if run.is_float(x) else x for x in case.inputs]
    rng = np.random.default_rng(2)
    for number, grad in zip(spec.wrt, case.grads, strict=True):
        direction = rng.standard_normal(inputs[number].shape)
        ends = []
        for sign in (1, -1):
            moved = [*inputs]
            moved[number] = inputs[number] + sign * STEP * direction
            outs = [out for out in as_tuple(spec.golden(*moved)) if run.is_float(out)]
            ends.append(sum((out * dout).sum() for out, dout in zip(outs, case.douts, strict=True)))
        difference = (ends[0] - ends[1]) / (2 * STEP)
        assert difference == pytest.approx((grad * direction).sum(), rel=1e-5, abs=1e-6), number


@pytest.mark.parametrize("name", SPECS)
def test_the_baseline_stays_in_the_promoted_type(name):
    spec = SPECS[name]
    for dtype, want in (("float32", np.float64), ("float16", np.float32)):
        case = run.make_case(spec, spec.shapes[0], dtype, seed=0)
        for values in (*case.outputs, *case.grads):
            assert values.dtype == want or not run.is_float(values)
        assert len(case.grads) == (len(spec.wrt) if spec.grad else 0)


def test_inputs_depend_on_the_seed_only():
    spec = SPECS["rms_norm"]
    first, again, other = (run.make_case(spec, (4, 8), "float16", seed) for seed in (0, 0, 1))
    assert all((a == b).all() for a, b in zip(first.inputs, again.inputs, strict=True))
    assert (first.inputs[0] != other.inputs[0]).any()
    fused = run.make_case(SPECS["rms_norm.fused"], (4, 8), "float16", 0)
    assert (first.inputs[0] == fused.inputs[0]).all()  # variants see the same numbers


def test_inputs_are_clipped_rounded_and_kept_where_fixed():
    for dtype in DEFAULT:
        case = run.make_case(SPECS["sum"], (24, 64), dtype, 0)
        assert case.extreme == 0 and np.abs(case.inputs[0]).min() >= lower_bound()
        raw = run.make_case(replace(SPECS["sum"], clip=False), (24, 64), dtype, 0)
        changed = raw.inputs[0] != case.inputs[0]
        assert raw.extreme == changed.sum() > 0 and np.abs(raw.inputs[0]).min() < lower_bound()
    weight, gradient, m, v = run.make_case(SPECS["adamw"], (8, 4), "float16", 0).inputs
    assert (weight.dtype, gradient.dtype, m.dtype, v.dtype) == (np.float32, np.float16, np.float32, np.float32)


VALUES = arrays.arrays(np.float32, st.integers(1, 20), elements=st.floats(-100, 100, width=32))


@given(VALUES)
def test_clipping_bounds_magnitudes_and_keeps_signs(values):
    clipped = clip_lower(values, 0.03125)
    assert np.abs(clipped).min() >= 0.03125
    assert (np.signbit(clipped) == np.signbit(values)).all()
    large = np.abs(values) >= 0.03125
    assert (clipped[large] == values[large]).all()
    assert clipped.dtype == np.float32 and (clip_lower(clipped, 0.03125) == clipped).all()


def test_special_values_survive_their_type():
    for dtype in DEFAULT:
        size = np.abs(specials(dtype).astype(np.float64))
        denormal = (size > 0) & (size < SMALLEST[dtype])
        assert [int(each.sum()) for each in (np.isnan(size), np.isinf(size), size == 0, denormal)] == [1, 2, 1, 2]


def test_grid_has_every_pair():
    first, second = grid("float16", 2)
    number = len(specials("float16"))
    assert first.shape == (number**2,)
    pairs = {(a.tobytes(), b.tobytes()) for a, b in zip(first, second, strict=True)}
    assert len(pairs) == number**2


def test_poke_changes_one_element_a_row():
    values = np.ones((20, 5), np.float32)
    poked = poke(values, "float32")
    assert (values == 1).all()
    changed = poked != values
    assert changed.sum() == len(specials("float32")) - 1  # one of the special values is 1
    assert not np.delete(changed, 2, 1).any()


def test_flushed():
    values = np.float32([1e-40, -1e-40, 1, np.inf])
    np.testing.assert_array_equal(flushed(values, "float32", True), np.float32([0, -0.0, 1, np.inf]))
    assert np.signbit(flushed(values, "float32", True)).tolist() == [False, True, False, False]
    assert not np.signbit(flushed(values, "float32", False)).any()


PAIRS = [(spec, dtype) for spec in SPECS.values() for dtype in spec.dtypes]


def test_this_host_computes_what_is_shipped_for_every_operator_and_type():
    shipped = read_shipped()
    compared, lines = differences(PAIRS, shipped)
    assert lines == []
    assert compared == len(shipped["results"]) > 500
    assert FILE.stat().st_size < 100_000
    assert shipped["made"] >= "2026-11-27"


def test_a_result_that_is_a_little_off_is_named_with_both_numbers():
    spec = SPECS["matmul"]
    shipped = {"results": numbers_of(spec, "float16")}
    name = next(iter(shipped["results"]))
    rms, first, *rest = shipped["results"][name]
    shipped["results"][name] = [rms, first + 2e-4 * max(abs(first), rms), *rest]
    (line,) = differences([(spec, "float16")], shipped)[1]
    assert line.startswith(f"{name}: this host computes {first:.6g}, shipped is")
    shipped["results"][name] = [rms, first + 5e-5 * max(abs(first), rms), *rest]
    assert differences([(spec, "float16")], shipped)[1] == []
    del shipped["results"][name]
    assert "do not have this tensor" in differences([(spec, "float16")], shipped)[1][0]


@pytest.mark.parametrize(
    ("text", "words"), [("{", "is not JSON"), ("[]", "holds no golden"), ("{}", "holds no golden")]
)
def test_a_damaged_file_is_refused(tmp_path, text, words):
    (tmp_path / "g.json").write_text(text)
    with pytest.raises(DataError, match=words):
        read_shipped(tmp_path / "g.json")
    with pytest.raises(DataError, match="cannot be read"):
        read_shipped(tmp_path / "none.json")


def test_the_file_is_json_that_names_its_numpy():
    assert set(json.loads(FILE.read_text())) == {"made", "numpy", "results"}
