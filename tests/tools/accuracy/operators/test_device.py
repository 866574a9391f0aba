"""MindSpore on CPU: what runs, what does not, and that the context is left as it was."""

from dataclasses import replace

import mindspore as ms
import numpy as np
import pytest

from tools.accuracy.operators import golden
from tools.accuracy.operators.device import MindSporeDevice, NotRunnableError, first_line
from tools.accuracy.operators.run import FAIL, NOT_RUNNABLE, PASS, verify
from tools.accuracy.operators.specs.table import SPECS


@pytest.fixture
def device():
    with MindSporeDevice() as entered:
        yield entered


def run(device, name, dtype="float32"):
    spec = SPECS[name]
    case = golden.make_case(spec, spec.shapes[0], dtype, 0)
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
        ("grouped_matmul", "float32", "returned no output, and no error"),
        ("matmul", "hfloat32", "hf32 is a mode of Ascend's matrix unit; the device is CPU"),
    ],
)
def test_a_missing_kernel_is_said_in_mindspores_words(device, name, dtype, words):
    with pytest.raises(NotRunnableError) as caught:
        run(device, name, dtype)
    assert str(caught.value).startswith(words)
    run(device, "add")  # and no later operator is blamed for it


@pytest.mark.parametrize("answers", ["!", "!!", ".!", ".!!", "!.!"])  # of the operators that come after a failed one
def test_a_complaint_that_comes_late_is_waited_for(device, monkeypatch, answers):
    """A busy machine gave the complaint to the next operator; here a queue that is known stands for MindSpore."""
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
    def wrong(ms):
        return lambda x: ms.ops.reshape(x, (7, -1))

    rows = verify(replace(SPECS["exp"], call=wrong, special=""), "float32", device)
    assert rows[0].status == FAIL and "Error: " in rows[0].detail and "\n" not in rows[0].detail


def test_an_exception_on_special_values_is_a_failure(device):
    def picky(ms):
        def call(x):
            if x.shape == (13,):
                raise ValueError("not finite")
            return ms.ops.exp(x)

        return call

    rows = verify(replace(SPECS["exp"], call=picky, grad=None), "float32", device)
    assert [(row.phase, row.status) for row in rows] == [("forward", PASS), ("rerun", PASS), ("special", FAIL)]
    assert rows[-1].detail == "ValueError: not finite"


def test_a_wrong_number_of_outputs_is_a_failure(device):
    rows = verify(replace(SPECS["split"], golden=lambda x: x, grad=None), "float32", device)
    assert rows[0].status == FAIL and rows[0].detail == "2 tensors, should be 1"


def test_bfloat16_reaches_the_device_unchanged(device):
    spec = SPECS["reshape"]
    case = golden.make_case(spec, (3, 4, 5), "bfloat16", 0)
    (out,) = device.forward(spec, case.inputs, "bfloat16")
    assert out.dtype == np.float32 and (out == case.outputs[0]).all()
    double = replace(spec, call=lambda ms: lambda x: x + x if x.dtype == ms.bfloat16 else x)
    assert (device.forward(double, case.inputs, "bfloat16")[0] == 2 * case.inputs[0]).all()


def test_results_are_copies(device):
    (first,) = run(device, "add")
    kept = first.copy()
    run(device, "sub")
    assert (first == kept).all() and first.flags.owndata


def test_first_line():
    rule = "-" * 52
    message = (
        f"\n{rule}\n- Kernel select failed:\n{rule}\nSelect CPU operator[X] fail!\nThe supported ...\n{rule}\n- C++"
    )
    assert first_line(message) == "Select CPU operator[X] fail!"
    assert first_line("") == ""
