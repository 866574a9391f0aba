"""These tests check by which number a gradient is multiplied between the loss and the optimizer, read from the text of
a graph.
"""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.dryrun.gradients import judge_gradients, seeds_of
from tools.dryrun.graph_text import read_graph
from tools.dryrun.report import scale_report
from tools.dryrun.scale import Numbers, Scale, judge_scale, number_of

ONE = "<Tensor[Float32], (1)>"
WHOLE = "<Tensor[Float32], (8)>"
STAGE = (0, 1, 2, 3)
MICRO_BATCHES = 2
GOOD = ("PrimFunc_Divs(%1, I64(2))", "PrimFunc_RealDiv(%2, Tensor(shape=[], dtype=Float32, value=4))")


def node(number, text, types, scope="Default"):
    return f"  %{number}(x) = {text}\n      : {types}\n      # Fullname with scope: ({scope})\n"


def written(lines, root="@0_Step_construct_1", parameters="%para1_w, %para2_scale_sense"):
    return f"# IR entry: {root}\nsubgraph {root}({parameters}) {{\n{''.join(lines)}}}\n"


@pytest.fixture
def read(tmp_path):
    def graph(text):
        file = tmp_path / "step.ir"
        file.write_text(text, encoding="utf-8")
        return read_graph(file)

    return graph


def pipeline(seed=GOOD, behind="PrimFunc_Mul(%8, %9)", clipped="PrimFunc_Mul(%10, %11)"):
    """The last stage: two micro-batches whose gradients add up in `accu_grads.w`, and what is done behind."""
    backward = "%4[@Partial(@2_◂Model_construct_3)](%3)"
    root = [
        node(0, "Load(%para2_scale_sense, UMonad[U])", f"({ONE}) -> ({ONE})"),
        node(1, "PrimFunc_Mul(Tensor(shape=[1], dtype=Float32, value=[ 1.00000000e+00]), %0)", f"({ONE}) -> ({ONE})"),
        node(2, seed[0], f"({ONE}) -> ({ONE})"),
        node(3, seed[1], f"({ONE}) -> ({ONE})", "Gradients/Default/Grad__VirtualDiv/RealDiv-op0"),
        node(4, "call @1_▸Model_construct_2(%para3_accu_grads.w)", f"({WHOLE}) -> (<Func, NoShape>)"),
        node(5, backward, f"({ONE}) -> ({WHOLE})"),
        node(6, backward, f"({ONE}) -> ({WHOLE})"),
        node(7, "Depend(%para3_accu_grads.w, %6)", f"({WHOLE}) -> ({WHOLE})"),
        node(8, 'AllReduce(%7) primitive_attrs: {group: "stage", op: "sum"}', f"({WHOLE}) -> ({WHOLE})"),
        node(9, "PrimFunc_Reciprocal(%0)", f"({ONE}) -> ({ONE})"),
        node(10, behind, f"({WHOLE}, {ONE}) -> ({WHOLE})"),
        node(11, "PrimFunc_Minimum(%12)", f"({ONE}) -> ({ONE})", "Default/clip_grad_norm-ClipGradNorm/Minimum-op0"),
        node(12, clipped, f"({WHOLE}, {ONE}) -> ({WHOLE})", "Default/clip_grad_norm-ClipGradNorm/Mul-op0"),
        node(13, "Load(%para4_adam_m.w, U)", f"({WHOLE}) -> ({WHOLE})"),
        node(14, "PrimFunc_Mul(%13, F32(0.9))", f"({WHOLE}, {ONE}) -> ({WHOLE})"),
        node(15, "PrimFunc_Mul(%12, F32(0.1))", f"({WHOLE}, {ONE}) -> ({WHOLE})"),
        node(16, "PrimFunc_Add(%14, %15)", f"({WHOLE}, {WHOLE}) -> ({WHOLE})"),
        node(
            17,
            "PrimFunc_Assign(%para4_adam_m.w, %16)",
            f"({WHOLE}, {WHOLE}) -> (<Ref[Tensor[Float32]], (8), ref_key=adam_m.w, is_parameter>)",
        ),
    ]
    forward = node(0, "Partial(@2_◂Model_construct_3, %para5_accu_grads.w)", f"({WHOLE}) -> (<Func, NoShape>)")
    passed = node(0, "PrimFunc_MatMul(%para7_dout, %para7_dout)", f"({ONE}) -> ({WHOLE})") + node(
        1,
        "PrimFunc_AssignAdd(%para6_accu_grads.w, %0)",
        f"({WHOLE}, {WHOLE}) -> (<Ref[Tensor[Float32]], (8), ref_key=accu_grads.w, is_parameter>)",
    )
    return (
        written(root, parameters="%para1_w, %para2_scale_sense, %para3_accu_grads.w, %para4_adam_m.w")
        + f"subgraph @1_▸Model_construct_2(%para5_accu_grads.w) {{\n{forward}}}\n"
        + f"subgraph @2_◂Model_construct_3(%para6_accu_grads.w, %para7_dout) {{\n{passed}}}\n"
    )


def report(graph):
    ranks = {"stage": STAGE}.get
    found = judge_gradients(graph, ranks, {"w": STAGE}, 0)
    assert found["w"]["verdict"] == "right"
    results = [{"rank": 0, "stage": 0, "gradients": found, "seeds": seeds_of(graph, ranks)}]
    return scale_report(results, MICRO_BATCHES, len(STAGE))


def test_the_loss_scale_and_the_divisors_are_read_from_the_seed_to_the_optimizer(read):
    graph = read(pipeline())
    assert seeds_of(graph, {"stage": STAGE}.get) == [Scale(1 / 8, 1)] * MICRO_BATCHES
    assert report(graph) == {"weights": 1, "right": 1, "wrong": [], "unknown": []}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"seed": ("TensorMove(%1)", GOOD[1])}, "multiplied by 0.25 (0.25 before the backward pass, 1 behind it)"),
        ({"seed": (GOOD[0], "TensorMove(%2)")}, "multiplied by 0.5 (0.5 before the backward pass"),
        ({"seed": ("PrimFunc_Divs(%1, I64(4))", GOOD[1])}, "2 micro-batches and 4 devices of a stage want 0.125"),
        ({"behind": "TensorMove(%8)"}, "holds the loss scale to the power of 1"),
        ({"behind": "PrimFunc_Mul(%8, %0)"}, "holds the loss scale to the power of 2"),
        ({"clipped": "PrimFunc_Mul(%10, F32(2))"}, "multiplied by 0.25 (0.125 before the backward pass, 2 behind it)"),
    ],
)
def test_a_divisor_that_is_missing_or_doubled_is_wrong(read, change, said):
    found = report(read(pipeline(**change)))
    assert found["right"] == 0 and len(found["wrong"]) == 1
    assert found["wrong"][0].startswith("rank 0 (stage 0): w: its gradient ") and said in found["wrong"][0]


def test_what_is_not_read_is_unknown_and_not_right(read):
    found = report(read(pipeline(behind="PrimFunc_Mul(%8, %11)")))
    assert found["right"] == 0 and found["wrong"] == [] and "multiplied by Minimum" in found["unknown"][0]
    assert judge_scale([Scale(senses=-1)], [], 1, 1) == (
        True,
        "the seed of the backward pass, or the way behind it, was not found in the graph",
    )


def inline(devices="PrimFunc_RealDiv(%4, Tensor(shape=[], dtype=Float32, value=4))"):
    """Without a pipeline the backward of the loss stands in the root: here over the number of tokens."""
    backward = "Gradients/Default/loss/Grad_Div/Div-op0"
    return written(
        [
            node(0, "Load(%para2_scale_sense, UMonad[U])", f"({ONE}) -> ({ONE})"),
            node(
                1, "PrimFunc_Mul(Tensor(shape=[1], dtype=Float32, value=[ 1.00000000e+00]), %0)", f"({ONE}) -> ({ONE})"
            ),
            node(2, "PrimFunc_SumExt(%para1_w)", f"({WHOLE}) -> ({ONE})"),
            node(3, "PrimFunc_Div(%1, %2)", f"({ONE}, {ONE}) -> ({ONE})", backward),
            node(4, "PrimFunc_SumExt(%3)", f"({ONE}) -> ({ONE})", backward),
            node(5, devices, f"({ONE}) -> ({ONE})", "Gradients/Default/Grad__VirtualDiv/RealDiv-op0"),
        ]
    )


def test_the_backward_of_the_loss_is_no_part_of_the_seed(read):
    assert seeds_of(read(inline()), {}.get) == [Scale(1 / 4, 1)]
    assert seeds_of(read(inline("TensorMove(%4)")), {}.get) == [Scale(1, 1)]


STEPS = st.lists(
    st.tuples(st.sampled_from(["Mul", "Muls", "Div", "Divs", "RealDiv", "Reciprocal", "Cast"]), st.integers(0, 99)),
    min_size=1,
    max_size=8,
)
NUMBERS = st.sampled_from([1.0, 0.5, 2.0, 4.0, 1024.0])


@given(STEPS, st.lists(NUMBERS, min_size=3, max_size=3), NUMBERS)
def test_a_number_is_read_as_it_is_computed(tmp_path_factory, steps, numbers, loss_scale):
    """Against the arithmetic itself: each operator takes values that stand before it."""
    texts = ["%para2_scale_sense", *[f"Tensor(shape=[], dtype=Float32, value={number:g})" for number in numbers]]
    values = [loss_scale, *numbers]
    lines = []
    for place, (op, draw) in enumerate(steps):
        first, second = draw % len(values), draw * 7 % len(values)
        computed = {"Reciprocal": 1 / values[first], "Cast": values[first]}.get(op)
        if computed is None:
            computed = values[first] * (values[second] if op in ("Mul", "Muls") else 1 / values[second])
        alone = op in ("Reciprocal", "Cast")
        given = texts[first] if alone else f"{texts[first]}, {texts[second]}"
        lines.append(node(place, f"PrimFunc_{op}({given})", f"({ONE}) -> ({ONE})"))
        texts.append(f"%{place}")
        values.append(computed)
    file = tmp_path_factory.mktemp("numbers") / "step.ir"
    file.write_text(written(lines), encoding="utf-8")
    graph = read_graph(file)
    found = Numbers(graph, lambda *_: []).scalar(graph.root, texts[-1])
    assert not found.unread and math.isclose(found.by * loss_scale**found.senses, values[-1], rel_tol=1e-9)


@given(NUMBERS, st.integers(1, 64), st.integers(1, 64), st.sampled_from([0.5, 1.0, 2.0, 1 / 3]))
def test_a_scale_is_right_exactly_if_the_gradient_is_the_mean(loss_scale, micro_batches, devices, fault):
    """Against the mean of a gradient of 1 on each device and micro-batch, whatever the loss scale is."""
    seed, behind = Scale(fault / (micro_batches * devices), 1), Scale(1.0, -1)
    gradient = sum(seed.by * loss_scale for _ in range(micro_batches * devices)) / loss_scale * behind.by
    fine, why = judge_scale([behind], [seed], micro_batches, devices)
    assert fine == math.isclose(gradient, 1, rel_tol=1e-6) and bool(why) != fine


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("I64(-2)", -2),
        ("F32(1e-05)", 1e-5),
        ("Tensor(shape=[1], dtype=Float32, value=[ 5.00000000e-01])", 0.5),
        ("Tensor(shape=[2], dtype=Float32, value=[ 1.0 2.0])", None),
        ("%3", None),
        ("Bool(1)", None),
    ],
)
def test_constants_are_read(text, number):
    assert number_of(text) == number
