"""Operators on a device: what is told of them, and faults, each found in its phase and in the tested type."""

from dataclasses import replace

import mindspore as ms
import numpy as np
import pytest

from tools.accuracy.judge import DEFAULT, round_bfloat16, rounded
from tools.accuracy.operators import run
from tools.accuracy.operators.device import MindSporeDevice, NotRunnableError, first_line
from tools.accuracy.operators.pointwise import BETA1, BETA2, DECAY, EPS, RATE, STEP
from tools.accuracy.operators.products import angles
from tools.accuracy.operators.reductions import RMS_EPS, rms_norm_call
from tools.accuracy.operators.report import SPECS
from tools.accuracy.operators.run import FAIL, NOT_RUNNABLE, PASS, verify
from tools.accuracy.operators.spec import Spec


class NumpyDevice:
    """`spoil_forward` and `spoil_backward`: (inputs[, douts], right results) -> wrong results."""

    name = "NumPy"

    def __init__(self, spoil_forward=None, spoil_backward=None):
        self.spoil_forward, self.spoil_backward = spoil_forward, spoil_backward

    def forward(self, spec, inputs, dtype):
        outs = run.forward(spec, inputs, dtype)
        if self.spoil_forward:
            outs = self.spoil_forward(inputs, outs)
        return tuple(self._stored(spec, out, dtype) for out in outs)

    def backward(self, spec, inputs, douts, dtype):
        grads = run.backward(spec, inputs, douts, dtype)
        if self.spoil_backward:
            grads = self.spoil_backward(inputs, douts, grads)
        return tuple(self._stored(spec, grad, dtype) for grad in grads)

    def _stored(self, spec, values, dtype):
        if spec.name.startswith("cast."):  # it leaves the tested type
            return values.astype(np.float32)
        return rounded(values, dtype)


@pytest.fixture
def device():
    with MindSporeDevice() as entered:
        yield entered


def run_by_name(device, name, dtype="float32"):
    spec = SPECS[name]
    case = run.make_case(spec, spec.shapes[0], dtype, 0)
    return device.forward(spec, case.inputs, dtype)


def test_the_context_is_put_back():
    before = ms.get_context("mode"), ms.get_context("pynative_synchronize")
    with MindSporeDevice() as device:
        assert ms.get_context("mode") == ms.PYNATIVE_MODE
    assert (ms.get_context("mode"), ms.get_context("pynative_synchronize")) == before
    assert device.name == "MindSpore 2.9.0 on CPU"


@pytest.mark.parametrize(
    ("name", "dtype", "words"),
    [
        ("rms_norm.fused", "float32", "The kernel RmsNorm unregistered."),
        ("exp", "bfloat16", "Select CPU operator[Exp] fail! Unsupported data type!"),
        ("sort", "bfloat16", "For primitive[Sort], the input argument[inputx] must be a type of"),
        ("grouped_matmul", "float32", "the operator returned no output, and no error"),
        ("matmul", "hfloat32", "hf32 exists only on Ascend's matrix unit, but the device is CPU"),
    ],
)
def test_a_missing_kernel_is_said_in_mindspores_words(device, name, dtype, words):
    with pytest.raises(NotRunnableError) as caught:
        run_by_name(device, name, dtype)
    assert str(caught.value).startswith(words)
    run_by_name(device, "add")  # and no later operator is blamed for it


@pytest.mark.parametrize("answers", ["!", "!!", ".!", ".!!", "!.!"])  # of the operators that come after a failed one
def test_a_complaint_that_comes_late_is_waited_for(device, monkeypatch, answers):
    left = list(answers)

    class Late:
        def __init__(self, values):
            self.values = values

        def __add__(self, other):
            if left and left.pop(0) == "!":
                raise RuntimeError("The kernel RmsNorm unregistered.")
            return self

        def asnumpy(self):
            return self.values

    monkeypatch.setattr(device, "_ms", type("MindSpore", (), {"Tensor": Late})())
    device._settle()
    assert left == []
    monkeypatch.undo()


def test_a_complaint_that_is_not_said_again_was_of_an_earlier_operator(device, monkeypatch):
    monkeypatch.setattr(device, "_settle", lambda: None)
    monkeypatch.setattr(device, "_array", np.asarray)
    left = ["The kernel RotaryPositionEmbedding unregistered."]

    def run():
        if left:
            raise RuntimeError(left.pop())
        return (1.0,)

    assert device._caught(run, "float32") == (1.0,)
    left += ["The kernel RmsNorm unregistered."] * 2
    with pytest.raises(NotRunnableError, match="RmsNorm"):
        device._caught(run, "float32")
    left += ["another error"]
    with pytest.raises(RuntimeError, match="another error"):
        device._caught(run, "float32")


def test_missing_kernels_are_rows(device):
    (row,) = verify(SPECS["rms_norm.fused"], "float32", device)
    assert (row.phase, row.status, row.detail) == ("forward", NOT_RUNNABLE, "The kernel RmsNorm unregistered.")
    rows = verify(SPECS["strided_slice"], "bfloat16", device)
    assert [(row.phase, row.status) for row in rows] == [
        ("forward", PASS),
        ("rerun", PASS),
        ("backward", NOT_RUNNABLE),
    ]


def test_any_other_exception_is_a_failure(device):
    wrong = replace(SPECS["exp"], call=lambda ms, x: ms.ops.reshape(x, (7, -1)), special="")
    rows = verify(wrong, "float32", device)
    assert rows[0].status == FAIL and "Error: " in rows[0].detail and "\n" not in rows[0].detail


def test_an_exception_on_special_values_is_a_failure(device):
    def picky(ms, x):
        if x.shape == (13,):
            raise ValueError("not finite")
        return ms.ops.exp(x)

    rows = verify(replace(SPECS["exp"], call=picky, grad=None), "float32", device)
    assert [(row.phase, row.status) for row in rows] == [("forward", PASS), ("rerun", PASS), ("special", FAIL)]
    assert rows[-1].detail == "ValueError: not finite"


def test_a_wrong_number_of_outputs_is_a_failure(device):
    rows = verify(replace(SPECS["split"], golden=lambda x: x, grad=None), "float32", device)
    assert rows[0].status == FAIL and rows[0].detail == "the number of tensors is 2, but must be 1"


def test_bfloat16_reaches_the_device_unchanged(device):
    spec = SPECS["reshape"]
    case = run.make_case(spec, (3, 4, 5), "bfloat16", 0)
    (out,) = device.forward(spec, case.inputs, "bfloat16")
    assert out.dtype == np.float32 and (out == case.outputs[0]).all()
    double = replace(spec, call=lambda ms, x: x + x if x.dtype == ms.bfloat16 else x)
    assert (device.forward(double, case.inputs, "bfloat16")[0] == 2 * case.inputs[0]).all()


def test_results_are_copies(device):
    (first,) = run_by_name(device, "add")
    kept = first.copy()
    run_by_name(device, "sub")
    assert (first == kept).all() and first.flags.owndata


def test_first_line():
    rule = "-" * 52
    message = (
        f"\n{rule}\n- Kernel select failed:\n{rule}\nSelect CPU operator[X] fail!\nThe supported ...\n{rule}\n- C++"
    )
    assert first_line(message) == "Select CPU operator[X] fail!"
    assert first_line("") == ""


@pytest.fixture(scope="module")
def mindspore_device():
    with MindSporeDevice() as device:
        yield device


def failed(spec, dtype, device, **settings):
    """phase -> tensors that failed."""
    found = {}
    for row in verify(spec, dtype, device, **{"reruns": 1, **settings}):
        if row.status == FAIL and row.phase != "special":
            found.setdefault(row.phase, set()).add(row.tensor)
    return found


def rope_of_the_next_position(ms, x, freqs):
    return SPECS["rope"].call(ms, x, ms.Tensor(angles(x.shape[0] + 1, x.shape[3])[1:]))


def adam_with_coupled_decay(ms, weight, gradient, m, v):
    """Weight decay added to the gradient, as Adam with L2 does, not to the weight."""
    g = gradient.astype(ms.float32) + DECAY * weight
    m, v = BETA1 * m + (1 - BETA1) * g, BETA2 * v + (1 - BETA2) * g * g
    denominator = ms.ops.sqrt(v / (1 - BETA2**STEP)) + EPS
    return -RATE / (1 - BETA1**STEP) * m / denominator, m, v


def adam_without_decay(ms, weight, gradient, m, v):
    change, m, v = SPECS["adamw"].call(ms, weight, gradient, m, v)
    return change + RATE * DECAY * weight, m, v


def router_without_normalisation(ms, logits, bias):
    scores = ms.ops.sigmoid(logits)
    _, index = ms.ops.TopK()(scores + bias, 4)
    return 2.5 * ms.ops.gather_d(scores, 1, index), index


def unpermute_by_sorted_place(ms, rows, place, probs):
    """Copies taken in the order of experts, not sent back to their tokens."""
    return (rows.reshape(*probs.shape, -1) * ms.ops.expand_dims(probs, -1)).sum(1)


FAULTS = [
    ("softmax", lambda ms, x: ms.ops.softmax(x, -1) * 1.01, DEFAULT[:2], {"forward": {0}, "backward": {0}}),
    ("rms_norm", rms_norm_call(10 * RMS_EPS), ["float32"], {"forward": {0}, "backward": {0, 1}}),
    ("rope", rope_of_the_next_position, DEFAULT, {"forward": {0}, "backward": {0}}),
    ("adamw", adam_with_coupled_decay, DEFAULT, {"forward": {0, 1, 2}}),
    ("adamw", adam_without_decay, DEFAULT, {"forward": {0}}),
    ("router_topk", router_without_normalisation, ["float32"], {"forward": {0}, "backward": {0}}),
    ("unpermute", unpermute_by_sorted_place, DEFAULT[:2], {"forward": {0}, "backward": {0, 2}}),
]


@pytest.mark.parametrize(
    ("name", "call", "dtype", "where"),
    [(name, call, dtype, where) for name, call, dtypes, where in FAULTS for dtype in dtypes],
)
def test_faults_in_mindspore(mindspore_device, name, call, dtype, where):
    spec = SPECS[name]
    if name != "softmax":  # the healthy one passes on the same inputs
        assert failed(spec, dtype, mindspore_device) == {}
    assert failed(replace(spec, call=call), dtype, mindspore_device) == where


def test_a_bfloat16_softmax_scaled_by_one_percent():
    device = NumpyDevice(lambda inputs, outs: (1.01 * outs[0],))
    assert failed(SPECS["softmax"], "bfloat16", device) == {"forward": {0}}


def bfloat16_sum(x):
    """Each partial sum of [R, n] stored in bfloat16."""
    total = np.zeros(x.shape[0], np.float32)
    for column in x.T:
        total = round_bfloat16(total + column)
    return total


@pytest.mark.parametrize("n", [1900, 20480])
def test_accumulation_in_bfloat16(n):
    device = NumpyDevice(lambda inputs, outs: (bfloat16_sum(inputs[0].astype(np.float32)),))
    long = replace(SPECS["sum"], shapes=((14, n),), special="")
    for dtype in ("float32", "bfloat16"):
        assert failed(long, dtype, device) == {"forward": {0}}


def test_a_matmul_that_accumulates_in_bfloat16():
    def spoil(inputs, outs):
        x, w = (values.astype(np.float32) for values in inputs)
        products = x[:, None] * w[None]
        return (bfloat16_sum(products.reshape(-1, products.shape[-1])).reshape(outs[0].shape),)

    spec = replace(SPECS["matmul"], shapes=((4, 20480, 4),))
    assert failed(spec, "bfloat16", NumpyDevice(spoil)) == {"forward": {0}}


def test_a_transposed_gradient():
    device = NumpyDevice(spoil_backward=lambda inputs, douts, grads: (grads[0], grads[1].T))
    rows = verify(SPECS["matmul"], "bfloat16", device, reruns=1)
    (row, *_) = [row for row in rows if row.status == FAIL]
    assert (row.phase, row.tensor) == ("backward", 1) and "the shape is [64, 24], but must be [24, 64]" in row.detail
    square = replace(SPECS["matmul"], shapes=((16, 32, 32),))
    assert failed(square, "bfloat16", device) == {"backward": {1}}


def test_a_missing_term_of_the_gradient():
    """RMSNorm's gradient without the part through the statistics."""

    def spoil(inputs, douts, grads):
        x, gamma = (values.astype(np.float32) for values in inputs)
        r = 1 / np.sqrt(np.square(x).mean(-1, keepdims=True) + RMS_EPS)
        return r * douts[0] * gamma, grads[1]

    assert failed(SPECS["rms_norm"], "float32", NumpyDevice(spoil_backward=spoil)) == {"backward": {0}}


def test_an_expert_with_another_ones_weight():
    def spoil(inputs, outs):
        rows, weight, ends = inputs
        return SPECS["grouped_matmul"].golden(rows, weight[[1, 0, *range(2, len(weight))]], ends)[None]

    assert failed(SPECS["grouped_matmul"], "bfloat16", NumpyDevice(spoil)) == {"forward": {0}}


def test_runs_that_differ_in_the_last_bit():
    count = iter(range(1000))

    def spoil(inputs, outs):
        next_up = next(count) == 2
        return tuple(np.nextafter(out.astype(np.float32), np.inf) if next_up else out for out in outs)

    spec = replace(SPECS["add"], special="", grad=None)
    assert failed(spec, "float32", NumpyDevice(spoil), reruns=2) == {}  # the third run is the one that differs
    count = iter(range(1000))
    rows = verify(spec, "float32", NumpyDevice(spoil), reruns=3)
    assert [(row.phase, row.status) for row in rows] == [("forward", "pass"), ("rerun", FAIL)]
    assert rows[1].outside > 0


def tiny_factor(rng, rows, n):
    x = rng.uniform(0.6, 1.6, (rows, n)).astype(np.float32)
    x[:, 3] = 1e-6
    return (x,)


def test_prod_needs_the_lower_bound():
    """Report section 3.1 (3): the product of a tiny input is stored with an acceptable error; dividing magnifies it."""

    def divide(inputs, douts, grads):
        (x,) = (values.astype(np.float32) for values in inputs)
        stored = x.prod(-1, keepdims=True).astype(np.float16).astype(np.float32)  # the forward's own output
        return (douts[0].astype(np.float32)[:, None] * stored / x,)

    spec: Spec = replace(SPECS["prod"], make=tiny_factor)
    device = NumpyDevice(spoil_backward=divide)
    unclipped = replace(spec, clip=False)
    assert failed(unclipped, "float16", device) == {"backward": {0}}
    (row,) = [row for row in verify(unclipped, "float16", device) if row.status == FAIL]
    assert row.detail.endswith("32 inputs are below 0.03125 or not finite")
    assert failed(spec, "float16", device) == {}


def test_a_lost_nan():
    device = NumpyDevice(lambda inputs, outs: tuple(np.nan_to_num(out) for out in outs))
    rows = verify(SPECS["max"], "bfloat16", device, reruns=1)
    assert {(row.phase, row.status) for row in rows if row.status == FAIL} == {("special", FAIL)}
