"""What C++ writes of a launch, read back: dtypes, shapes, lists of tensors and constants; results into memory."""

import ctypes
import json
import math

import ml_dtypes
import numpy as np
import pytest

from plugins.semi_auto_cpu import call


def text(inputs, outputs=(), arguments=None, **attrs):
    told = {"name": "Some", "attrs": attrs, "inputs": list(inputs), "outputs": list(outputs)}
    return json.dumps(told | ({} if arguments is None else {"arguments": arguments})).encode()


def tensor(array, kind):
    return {"type": kind, "bytes": array.nbytes, "shape": list(array.shape)}


def addresses(*arrays):
    return (ctypes.c_void_p * len(arrays))(*(None if a is None else a.ctypes.data for a in arrays))


@pytest.mark.parametrize("kind", call.DTYPES)
def test_every_dtype_is_a_view_of_the_memory(kind):
    memory = np.arange(6).reshape(2, 3).astype(call.DTYPES[kind])
    (view,) = call.parse(text([tensor(memory, kind)])).take(addresses(memory))
    assert view.dtype == memory.dtype and view.shape == (2, 3) and np.shares_memory(view, memory)
    view[0, 0] = 1
    assert memory[0, 0] == 1


def test_names_of_dtypes_are_numpys():
    own = {"BFloat16": np.dtype(ml_dtypes.bfloat16)}
    assert {kind: np.dtype(kind.lower()) for kind in call.DTYPES if kind not in own} | own == call.DTYPES


def test_a_scalar_and_an_empty_tensor():
    memory = np.array(3, np.float32)
    none = np.empty((0, 4), np.float32)
    got = call.parse(text([tensor(memory, "Float32"), tensor(none, "Float32")])).take(addresses(memory, None))
    assert got[0] == 3 and got[0].shape == () and got[1].shape == (0, 4)


def test_a_type_that_numpy_does_not_have_is_named():
    with pytest.raises(TypeError, match="Int4 have no NumPy type"):
        call.parse(text([{"type": "Int4", "bytes": 1, "shape": [2]}]))


def test_arguments_in_the_operators_own_order():
    a, b, c = (np.full(2, n, np.float32) for n in range(3))
    arguments = [{"value": 7}, {"list": 2}, {"value": None}, {}, {"value": [1, [2, 3]]}, {"list": 0}]
    one = call.parse(text([tensor(x, "Float32") for x in (a, b, c)], arguments=arguments))
    number, items, none, last, nested, nothing = one.take(addresses(a, b, c))
    assert (number, none, nested, nothing) == (7, None, (1, (2, 3)), [])
    assert [item[0] for item in items] == [0, 1] and last[0] == 2


def test_without_arguments_the_inputs_are_taken_as_they_are():
    a = np.zeros(2, np.int64)
    got = call.parse(text([tensor(a, "Int64"), {"value": "sum"}])).take(addresses(a, None))
    assert np.shares_memory(got[0], a) and got[1] == "sum"


@pytest.mark.parametrize(
    ("words", "value"),
    [
        ("true", True),
        ("null", None),
        ("-3", -3),
        ("1e-06", 1e-6),
        ("9.9999999747524271e-07", float(np.float32(1e-6))),
        ("2.0", 2.0),
        ("-Infinity", -math.inf),
        ('"a|b=\\"c\\";d"', 'a|b="c";d'),
        ('["x", [1, 2.5]]', ("x", (1, 2.5))),
        ('"true"', "true"),
    ],
)
def test_constants_keep_their_kind(words, value):
    told = text([], arguments=[{"value": "#"}]).decode().replace('"#"', words).encode()
    (got,) = call.parse(told).take(addresses())
    assert got == value and type(got) is type(value)


def test_attributes_are_text():
    assert call.parse(text([], group="2-0|1", op="sum")).attrs == {"group": "2-0|1", "op": "sum"}


def test_a_text_is_parsed_once():
    told = text([], op="only here")
    assert call.parse(told) is call.parse(bytes(bytearray(told)))


def test_store_rounds_reshapes_and_leaves_alone():
    outputs = [np.zeros((2, 2), ml_dtypes.bfloat16), np.full(1, 5, np.int32), np.zeros(2, np.float32)]
    call.store((np.full(4, 1.003, np.float32), None), outputs)
    assert outputs[0].astype(float).tolist() == [[1.0, 1.0]] * 2 and outputs[1][0] == 5
    call.store(np.float64(2), outputs[1:2])
    assert outputs[1][0] == 2


def test_store_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match=r"result 0 is \(3,\) where MindSpore expects \(2,\)"):
        call.store(np.zeros(3), [np.zeros(2)])
    with pytest.raises(ValueError, match="2 results where MindSpore expects 1"):
        call.store((np.zeros(2), np.zeros(2)), [np.zeros(2)])
