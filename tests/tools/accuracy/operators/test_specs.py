"""The list of operators, and that a right device passes all of it."""

import inspect

import pytest

from tests.tools.accuracy.operators.numpy_device import NumpyDevice
from tools.accuracy.operators.run import PASS, verify
from tools.accuracy.operators.specs.table import FAMILIES, SPECS

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
    assert len(SPECS[name].source) > 5 and len(inspect.signature(SPECS[name].call).parameters) == 1
