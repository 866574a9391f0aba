"""The error of a dumped tensor, a factor that scales all of it, and how many terms its elements accumulate."""

import math

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from tests.tools.accuracy.dumps.dump_writer import write_dump
from tools.accuracy import judge
from tools.accuracy.dumps import errors as dump_errors
from tools.accuracy.dumps import read
from tools.accuracy.dumps.compare import compare_dumps
from tools.accuracy.dumps.errors import deviation, distance, measure, scaled, scaled_norm, statistics_error
from tools.accuracy.dumps.read import Entry, Item, open_dump, parse
from tools.accuracy.dumps.rows import NOTHING, Counter, _tensors
from tools.accuracy.dumps.write import statistics
from tools.accuracy.judge import SMALLEST, round_bfloat16, rounded, systematic, tolerance

TINY = SMALLEST["float32"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("arrays")


def files(folder, *values):
    paths = [folder / f"{number}.npy" for number in range(len(values))]
    for path, array in zip(paths, values, strict=True):
        np.save(path, array)
    return paths


@st.composite
def pairs(draw):
    """An array and a neighbour of it, of any float type, with whatever floats there are."""
    shape = draw(arrays.array_shapes(max_dims=3, max_side=6))
    types = [draw(st.sampled_from([np.float32, np.float16, np.float64])) for _ in range(2)]
    special = draw(st.booleans())
    want = draw(arrays.arrays(types[0], shape, elements=st.floats(width=16, allow_nan=special, allow_infinity=special)))
    noise = draw(arrays.arrays(np.float64, shape, elements=st.floats(-1e-3, 1e-3)))
    with np.errstate(all="ignore"):
        got = (want.astype(np.float64) * (1 + noise)).astype(types[1])
    return want, got


def test_differences_of_float16_are_not_rounded_to_float16(folder):
    want = np.array([1.0, -1.0, 1.001953125], np.float16)
    got = np.array([-3.001953125, 2.0, 0.0], np.float16)
    found = measure(*files(folder, want, got), 0.0, SMALLEST["float16"])
    assert found.error == pytest.approx(float(judge.errors(got, want, SMALLEST["float16"]).max()), rel=1e-5)


@pytest.mark.slow
@settings(max_examples=150)
@given(pairs(), st.sampled_from([0.0, 1e-4, 4e-3]))
def test_errors_are_those_of_judge(folder, pair, tolerance):
    want, got = pair
    found = measure(*files(folder, want, got), tolerance, TINY)
    reference = judge.errors(got, want, TINY)
    assert found.error == pytest.approx(float(reference.max()), rel=1e-4, abs=1e-12)
    near = np.isclose(reference, tolerance, rtol=1e-4)  # float32 may fall on either side
    assert abs(found.outside - int((reference > tolerance).sum())) <= int(near.sum())
    if want.dtype == got.dtype and np.array_equal(want, got):
        assert found.nans == 0 and found.error == 0
    else:
        assert found.nans == int(np.isnan(got).sum())


@pytest.mark.parametrize("size", [1e-25, 1e-20, 1e-16, 1e15, 1e25])
def test_values_whose_squares_float32_cannot_hold(folder, size):
    """Next to zero an error is relative to the root mean square, whatever that is."""
    rng = np.random.default_rng(0)
    want = (size * rng.normal(size=500)).astype(np.float32)
    want[::10] *= np.float32(1e-3)
    got = want + (1e-5 * size * rng.normal(size=500)).astype(np.float32)
    found = measure(*files(folder, want, got), 1e-4, TINY)
    assert found.error == pytest.approx(float(judge.errors(got, want, TINY).max()), rel=1e-4)


FILLS = [-1e30, float(np.finfo(np.float32).min), -1e9, -1e4, 1e30]


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("added", [False, True])
def test_fills_of_a_mask_hide_no_error_of_the_other_values(folder, monkeypatch, fill, dtype, added):
    monkeypatch.setattr(read, "CHUNK", 100)
    rng = np.random.default_rng(0)
    scores, mask = rng.normal(size=(40, 40)).astype(np.float32), np.triu(np.ones((40, 40), bool), 1)
    allowed = tolerance(dtype, 2000)

    def masked(values):
        values = values + np.float32(fill) * mask if added else np.where(mask, np.float32(fill), values)
        return rounded(values.astype(np.float32), dtype)

    wrong = scores.copy()
    wrong[5, 2] += 1
    want, near, far = masked(scores), masked(scores * np.float32(1 + 1e-6)), masked(wrong)
    unmasked = [judge.errors(got[~mask], want[~mask], TINY).max() for got in (near, far)]  # the oracle: only the scores
    found_ = [measure(*files(folder, want, got), allowed, TINY) for got in (near, far)]
    assert [each.error for each in found_] == pytest.approx(unmasked, rel=1e-3) and unmasked[0] <= allowed < unmasked[1]
    assert [each.hidden for each in found_] == ["", ""]
    assert float(judge.errors(far, want, TINY).max()) == pytest.approx(unmasked[1])
    scale = found(folder, masked(scores), masked(scores * np.float32(1.02)), dtype)
    assert scale is not None and scale.factor == pytest.approx(1.02, abs=2e-3)


def test_what_a_mask_that_was_computed_hides_is_unknown(tmp_path):
    """Where the scores below the mask differ, the masked values do, too, and may be the scale of the others."""
    rng = np.random.default_rng(0)
    scores, mask = rng.normal(size=(40, 40)).astype(np.float32), np.triu(np.ones((40, 40), bool), 1)
    noise = rng.normal(0, 0.01, (40, 40)).astype(np.float32)
    report = of_layers(tmp_path, "Mask", *(values + np.float32(-1e4) * mask for values in (scores, scores + noise)))
    assert not report.findings and report.meaning() == (
        "No tensor diverges of those that could be judged; 1 of 2 are unknown."
    )
    assert any("values of 8.19e+03 and more, as of a mask" in note for note in report.notes())
    assert report.summary().endswith("0 findings; 1 unknown")


def of_statistics(golden, bench, size=8):
    """The judgement of a tensor of which two dumps hold only statistics."""
    head = {"step": 0, "rank": 0, "order": 0, "phase": "forward", "place": "", "name": "", "role": "output"}
    sides = (Item("output.0", "output", "float32", (size,), each) for each in (golden, bench))
    return _tensors(head, *sides, 1, False)


@pytest.mark.parametrize(("largest", "kind"), [(3.0, ""), (3.0 * (1 + 2**-22), ""), (4.5, "value")])
def test_statistics_of_masked_scores_say_only_the_largest(largest, kind):
    tops = (3.0, largest)
    row = of_statistics(*((top, -1e30, -5e29, 2e30) for top in tops))
    assert (row.kind, row.by) == (kind, NOTHING)
    row = of_statistics(*((1e30, -top, 5e29, 2e30) for top in tops))
    assert (row.kind, row.by) == (kind, NOTHING), "positive fills hide an error in all other values"


def test_large_positive_values_of_no_mask_are_judged_by_all_statistics():
    """Squares, of which the smallest says nothing about the others."""
    golden = (20000.0, 0.1, 5000.0, 57000.0)
    assert of_statistics(golden, (20000.0, 0.1003, 5000.0, 57000.0), 64).kind == ""
    assert of_statistics(golden, (20000.0, 0.1, 5500.0, 62000.0), 64).kind == "value"


def test_many_chunks(folder, monkeypatch):
    monkeypatch.setattr(read, "CHUNK", 100)
    rng = np.random.default_rng(0)
    want = rng.normal(size=1050).astype(np.float32)
    for place in (0, 99, 100, 555, 1049):
        got = want.copy()
        got[place] += 0.25
        found = measure(*files(folder, want, got), 1e-4, TINY)
        assert (found.where, found.outside) == (place, 1)
        assert found.error == pytest.approx(float(judge.errors(got, want, TINY).max()), rel=1e-4)
        integers = np.arange(1050)
        other = integers + (integers == place)
        found = measure(*files(folder, integers, other), 0.0, TINY)
        assert (found.where, found.outside, found.error) == (place, 1, math.inf)


@settings(max_examples=150)
@given(
    arrays.arrays(np.float64, st.integers(1, 30), elements=st.floats(-100, 100)),
    st.integers(0, 2**32 - 1),
    st.floats(1e-5, 1e-2),
)
def test_what_passes_by_value_passes_by_statistics(want, seed, tolerance):
    assume(np.any(np.abs(want) > 1e-3))
    scale = np.maximum(np.abs(want), math.sqrt(np.mean(np.square(want))))
    got = want + tolerance * scale * np.random.default_rng(seed).uniform(-1, 1, want.shape)
    first, second = (Item("output.0", "output", "float32", x.shape, statistics(x)) for x in (want, got))
    assert statistics_error(first, second, TINY) <= tolerance * (1 + 1e-6)


def test_statistics_see_a_scaled_tensor():
    want = np.random.default_rng(0).normal(size=100)
    first, second = (Item("output.0", "output", "float32", x.shape, statistics(x)) for x in (want, 1.01 * want))
    assert statistics_error(first, second, TINY) > 5e-3


TYPES = ("float32", "float16", "bfloat16")


def found(folder, want, got, dtype):
    """`scaled`, as a comparison of dumps calls it."""
    files = folder / "want.npy", folder / "got.npy"
    for file, values in zip(files, (want, got), strict=True):
        np.save(file, values)
    return scaled(measure(*files, 0.2, 1e-30), *files, dtype)


def reference(want, got):
    """low, high and the deviation, as the formulas say."""
    w, g = want.astype(np.float64).ravel(), got.astype(np.float64).ravel()
    return (w @ g) / (w @ w), (g @ g) / (w @ g), math.sqrt(np.sum((w * (g - w)) ** 2)) / (w @ w)


@pytest.mark.parametrize("types", [("float32", "float32"), ("float16", "float16"), ("float64", "float32")])
@pytest.mark.parametrize("factor", [1.02, 0.97])
def test_the_sums_are_those_of_the_formulas(folder, monkeypatch, types, factor):
    monkeypatch.setattr(read, "CHUNK", 100)
    rng = np.random.default_rng(0)
    want = rng.normal(size=(33, 35)).astype(types[0])
    got = (want * (factor + 0.01 * rng.normal(size=want.shape))).astype(types[1])
    low, high, spread = reference(want, got)
    files = folder / "a.npy", folder / "b.npy"
    np.save(files[0], want), np.save(files[1], got)
    sums = measure(*files, 0.1, 1e-30).sums
    assert distance(sums) == pytest.approx(low - 1 if factor > 1 else 1 - high, rel=1e-3)
    assert deviation(*files) == pytest.approx(spread, rel=1e-6)


def neighbours(values, dtype, rng):
    """Each value rounded up or down to a number of `dtype`, by chance."""
    near = rounded(values, dtype)
    step = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}[dtype]
    _, exponent = np.frexp(np.minimum(np.abs(near), np.abs(values)))  # below a power of two numbers lie closer
    apart = np.where(near == 0, 0.0, np.ldexp(step, exponent - 1))
    other = rounded((near + np.sign(values - near) * apart).astype(np.float32), dtype)
    return np.where(rng.random(values.shape) < 0.5, near, other).astype(near.dtype)


KINDS = {
    "normal": lambda rng, n: rng.normal(size=n),
    "positive": lambda rng, n: rng.uniform(0.5, 2, n),
    "heavy tails": lambda rng, n: rng.standard_t(1.5, n),
    "one outlier": lambda rng, n: np.where(np.arange(n) == n // 2, 1e3, rng.normal(size=n)),
    "all equal": lambda rng, n: np.full(n, rng.uniform(0.5, 2)),
    "mostly zero": lambda rng, n: rng.normal(size=n) * (rng.random(n) < 0.05),
    "each repeated": lambda rng, n: np.repeat(rng.normal(size=-(-n // 8)), 8)[:n],
}


@pytest.mark.slow
@settings(max_examples=300)
@given(
    st.integers(64, 20000),
    st.sampled_from(sorted(KINDS)),
    st.sampled_from(TYPES),
    st.integers(0, 2**32 - 1),
    st.booleans(),
)
@example(2332, "all equal", "bfloat16", 1031, False)
def test_independent_rounding_is_no_factor(folder, size, kind, dtype, seed, nearest):
    rng = np.random.default_rng(seed)
    exact = KINDS[kind](rng, size).astype(np.float64)
    exact = np.clip(exact, -6e4, 6e4).astype(np.float32 if dtype != "float32" else np.float64)
    got = rounded(exact, dtype) if nearest else neighbours(exact, dtype, rng)
    assert found(folder, exact, got, dtype) is None
    assert found(folder, got, exact.astype(got.dtype), dtype) is None


@settings(max_examples=100)
@given(st.integers(64, 20000), st.floats(1e-4, 0.1), st.floats(1e-4, 0.1), st.integers(0, 2**32 - 1))
def test_independent_errors_of_both_sides_are_no_factor(folder, size, one, other, seed):
    """Of any size: an accumulation's. `low` by itself would be too small by the square of golden's errors."""
    rng = np.random.default_rng(seed)
    exact = rng.normal(size=size)
    want, got = ((exact + error * rng.normal(size=size)).astype(np.float32) for error in (one, other))
    assert found(folder, want, got, "bfloat16") is None


@settings(max_examples=100)
@given(
    st.integers(1000, 20000),
    st.sampled_from(["normal", "positive", "all equal"]),
    st.sampled_from([1.01, 0.99, 1.05, 0.9]),
    st.integers(0, 2**32 - 1),
)
@example(1000, "normal", 0.99, 426411250)
def test_a_factor_of_a_bfloat16_tensor_is_found_and_named(folder, size, kind, factor, seed):
    """Of equal values it is the factor between two numbers of the type: a last place from the one put in.

    Of others it is known to seven of its standard errors: two roundings of either sign, the fewer values the more. By
    Hoeffding's inequality 5e-11 of all draws are farther away.
    """
    exact = KINDS[kind](np.random.default_rng(seed), size).astype(np.float32)
    if kind == "all equal":
        exact[:] = 1.0
    want, got = round_bfloat16(exact), round_bfloat16(exact * np.float32(factor))
    scale = found(folder, want, got, "bfloat16")
    w, g = want.astype(np.float64), got.astype(np.float64)
    uncertain = 2**-8 if kind == "all equal" else 7 * math.sqrt(np.sum((w * (g - factor * w)) ** 2)) / (w @ w)
    assert scale is not None and scale.factor == pytest.approx(factor, abs=uncertain)
    assert uncertain <= 2**-8  # the test says something


@pytest.fixture(scope="module", params=[0.0, 0.5], ids=["mean 0", "mean 0.5"])
def product(request):
    """A matrix product of bfloat16 factors, 2560 terms: in float32, and rounded after every term."""
    rng, depth = np.random.default_rng(1), 2560
    x = round_bfloat16(rng.normal(request.param, 1, (128, depth)).astype(np.float32))
    y = round_bfloat16(rng.normal(0, depth**-0.5, (depth, 96)).astype(np.float32))
    narrow = np.zeros((128, 96), np.float32)
    for column, row in zip(x.T, y, strict=True):
        narrow = round_bfloat16(narrow + round_bfloat16(np.outer(column, row)))
    return x @ y, narrow


def test_accumulated_rounding_is_no_factor(folder, product):
    exact, narrow = product
    wide = round_bfloat16(exact)
    assert np.std(narrow - exact) > 0.05 * np.std(exact)  # the case is what it says
    sides = exact, wide, narrow
    assert [found(folder, want, got, "bfloat16") for want in sides for got in sides] == [None] * 9


@pytest.mark.parametrize("factor", [1.01, 0.99, 1.03])
def test_a_factor_of_a_product_is_found(folder, product, factor):
    exact, _ = product
    got = round_bfloat16(exact * np.float32(factor))
    for want in (exact, round_bfloat16(exact)):
        assert found(folder, want, got, "bfloat16").factor == pytest.approx(factor, abs=2e-4)


def test_few_values_tell_no_factor(folder):
    """n' is a third of the values of a normal distribution, and 140 are needed."""
    rng = np.random.default_rng(0)
    for size, seen in ((64, False), (256, False), (600, True)):
        want = rng.normal(size=size).astype(np.float32)
        assert (found(folder, want, want * np.float32(1.01), "bfloat16") is not None) == seen


def test_the_files_are_read_once_unless_there_may_be_a_factor(folder, monkeypatch):
    monkeypatch.setattr(dump_errors, "deviation", lambda *files: pytest.fail("read again"))
    want = np.random.default_rng(0).normal(size=5000).astype(np.float32)
    assert found(folder, want, want * np.float32(1.003), "bfloat16") is None
    assert found(folder, np.zeros(9, np.float32), want[:9], "bfloat16") is None
    assert found(folder, want, -want, "bfloat16") is None


def of_layers(folder, kind, golden, bench, given=None, task="tensor"):
    """The comparison of two dumps of one call of a cell."""
    sides = []
    for name, out in (("golden", golden), ("bench", bench)):
        call = {"input_args": [golden if given is None else given], "output": [out], "parameters": {}}
        sides.append(open_dump(write_dump(folder / name, [{f"Cell.layers.0.a.{kind}.forward.0": call}], task=task)))
    return compare_dumps(*sides)


@pytest.mark.parametrize("task", ["tensor", "statistics"])
@pytest.mark.parametrize("factor", [0.94, 1.03, 1.06])
@pytest.mark.parametrize(
    ("kind", "shape"), [("CoreAttention", (2048, 1, 64)), ("Linear", (64, 2560))], ids=["attention", "linear"]
)
def test_a_dump_with_a_scaled_tensor(tmp_path, kind, shape, factor, task):
    rng = np.random.default_rng(0)
    given, out = (rng.normal(size=shape).astype(np.float16) for _ in range(2))
    bench = (out.astype(np.float32) * factor).astype(np.float16)
    (row,) = of_layers(tmp_path / "scaled", kind, out, bench, given, task).findings
    assert (row.kind, row.by) == ("scaled", "factor") and row.detail.startswith(f"scaled by {factor:.3g}")
    assert abs(factor - 1) * 0.95 < row.error < abs(factor - 1) * 1.05 and 0.004 < row.tolerance < row.error
    report = of_layers(tmp_path / "same", kind, out, out, given, task)
    assert report.passed and any("up to 7 %" in note and "from 0.4 % on" in note for note in report.notes())


def test_one_percent_in_16_bits_is_found_by_value(tmp_path):
    out = np.random.default_rng(0).normal(size=(2048, 1, 64)).astype(np.float16)
    (row,) = of_layers(tmp_path, "CoreAttention", out, (out.astype(np.float32) * 1.01).astype(np.float16)).findings
    assert row.kind == "scaled" and row.detail == "scaled by 1.01; value by value within Table 2's 0.07"


def test_a_value_finding_names_the_factor_too(tmp_path):
    out = np.random.default_rng(0).normal(size=(40, 50)).astype(np.float32)
    (row,) = of_layers(tmp_path, "Linear", out, out * np.float32(1.01)).findings
    assert row.kind == "value" and row.detail.endswith("all of it scaled by 1.01")


@settings(max_examples=150)
@given(
    st.integers(64, 5000), st.sampled_from(sorted(KINDS)), st.integers(0, 2**32 - 1), st.sampled_from([1, 2000, 200000])
)
def test_independent_errors_within_table_2_are_no_factor_by_statistics(size, kind, seed, count):
    rng = np.random.default_rng(seed)
    want = KINDS[kind](rng, size)
    if not want.any():
        return
    allowed = tolerance("bfloat16", count)
    scale = np.maximum(np.abs(want), math.sqrt(np.mean(np.square(want))))
    sides = [
        Item("output.0", "output", "bfloat16", x.shape, statistics(x))
        for x in (want, want + allowed * scale * rng.choice([-1, 1], size))
    ]
    assert scaled_norm(*sides, allowed, "bfloat16") is None


def test_the_floor_is_the_strictest_row_and_no_less_than_a_rounding():
    for dtype in TYPES:
        assert systematic(dtype) == (tolerance(dtype, 1), 7)


def entry(key, inputs, outputs):
    items = [Item(f"input.{n}", "input", "float32", shape, (0, 0, 0, 0)) for n, shape in enumerate(inputs)]
    items += [Item(f"output.{n}", "output", "float32", shape, (0, 0, 0, 0)) for n, shape in enumerate(outputs)]
    return Entry(parse(key), tuple(items))


@pytest.mark.parametrize(
    ("place", "inputs", "outputs", "counts"),
    [
        ("fc.ColumnParallelLinear", [(128, 8, 2560)], [(128, 8, 512)], (2560, 512, 1024)),
        ("ln.RMSNorm", [(128, 8, 2560)], [(128, 8, 2560)], (2560, 2560, 1024)),
        ("core.CoreAttention", [(128, 8, 4, 48), (4096, 8, 4, 48)], [(128, 8, 192)], (4096, 4096, 1)),
        ("emb.VocabParallelEmbedding", [(8, 4096)], [(8, 4096, 64)], (1, 1, 32768)),
        ("drop.Dropout", [(128, 8, 2560)], [(128, 8, 2560)], (1, 1, 1)),
    ],
)
def test_cells(place, inputs, outputs, counts):
    forward = entry(f"Cell.a.{place}.forward.0", inputs, outputs)
    backward = entry(f"Cell.a.{place}.backward.0", outputs, inputs)
    gradient = Entry(parse(f"Cell.a.{place}.parameters_grad.0"), (Item("weight.0", "gradient", "float32"),))
    counter = Counter([forward, backward, gradient])
    found = tuple(counter.of(each, each.items[-1]) for each in (forward, backward, gradient))
    assert found == counts
    assert counter.of(forward, forward.items[0]) == 1  # an input is whoever's output it was


def test_a_cell_takes_the_largest_count_inside():
    inner = entry("Cell.layers.0.mlp.fc.Dense.forward.0", [(4, 20000)], [(4, 8)])
    outer = entry("Cell.layers.0.mlp.MLP.forward.0", [(4, 20000)], [(4, 8)])
    beside = entry("Cell.layers.0.gate.Gate.forward.0", [(4, 8)], [(4, 8)])
    counter = Counter([inner, outer, beside])
    assert [counter.of(each, each.items[-1]) for each in (inner, outer, beside)] == [20000, 20000, 1]


def test_a_gradient_sums_the_rows_of_all_calls_of_its_cell():
    calls = [entry(f"Cell.expert.Dense.forward.{n}", [(rows, 8)], [(rows, 4)]) for n, rows in enumerate((0, 48, 16))]
    gradient = Entry(parse("Cell.expert.Dense.parameters_grad.0"), (Item("weight.0", "gradient", "float32"),))
    assert Counter(calls).of(gradient, gradient.items[0]) == 64
    assert Counter(calls[:1]).of(gradient, gradient.items[0]) == 1
    assert Counter(calls).of(calls[0], calls[0].items[-1]) == 8


@pytest.mark.parametrize(
    ("function", "inputs", "output", "count"),
    [
        ("linear", [(128, 8, 2560), (512, 2560), (512,)], (128, 8, 512), 2560),
        ("matmul", [(128, 8, 2560), (2560, 512)], (128, 8, 512), 2560),
        ("matmul", [(128, 8, 2560), (2560, 512)], (1024, 512), 2560),
        ("matmul", [(2560, 8), (2560, 512)], (8, 512), 2560),
        ("matmul", [(2, 1, 8, 64), (16, 64, 4)], (2, 16, 8, 4), 64),
        ("matmul", [(2, 8, 64), (64,)], (2, 8), 64),
        ("matmul", [(32,), (8, 32, 64)], (8, 64), 32),
        ("bmm", [(16, 8, 2560), (16, 2560, 4)], (16, 8, 4), 2560),
        ("grouped_matmul", [(1024, 2560), (16, 2560, 512)], (1024, 512), 2560),
        ("grouped_matmul", [(2560, 1024), (1024, 512)], (16, 2560, 512), 64),
        ("baddbmm", [(16, 8, 4), (16, 8, 2560), (16, 2560, 4)], (16, 8, 4), 2560),
        ("addmm", [(4,), (8, 2560), (2560, 4)], (8, 4), 2560),
    ],
)
def test_a_product_sums_the_axis_that_its_factors_share(function, inputs, output, count):
    call = entry(f"Functional.{function}.0.forward", inputs, [output])
    assert Counter([call]).of(call, call.items[-1]) == count


def test_functions_are_counted_call_by_call():
    calls = [entry(f"Functional.matmul.{n}.forward", [(4, size)], [(4, 4)]) for n, size in enumerate((8, 3000))]
    calls.append(entry("Functional.sum.0.forward", [(50, 60)], [(50,)]))
    counter = Counter(calls)
    assert [counter.of(each, each.items[-1]) for each in calls] == [8, 3000, 60]


@pytest.mark.parametrize(("factor", "kind"), [(1 + 2**-22, ""), (1.5, "value")])
def test_a_rounding_of_the_largest_of_masked_scores_is_no_infinity(factor, kind):
    golden, bench = ((largest, -math.inf, -math.inf, math.inf) for largest in (3.0, 3.0 * factor))
    row = of_statistics(golden, bench)
    assert (row.kind, row.by) == (kind, NOTHING)
    hidden = (3.0, 0.0, 1.0, 4.0)
    assert [of_statistics(*each).kind for each in ((golden, hidden), (hidden, golden))] == ["value", "inf"]
