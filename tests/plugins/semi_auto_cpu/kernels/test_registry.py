"""These tests check what the decorator does to inputs and outputs, and that kernels accept the inputs of MindSpore's
operators.
"""

import ast
import importlib.util
import inspect
from pathlib import Path

import numpy as np
import pytest

from plugins.semi_auto_cpu.kernels import KERNELS, LOW_PRECISION
from plugins.semi_auto_cpu.kernels.registry import kernel
from tests.plugins.semi_auto_cpu.kernels.derivative import BFLOAT16, LOW


def test_no_operator_stands_in_both_tables():
    assert not KERNELS.keys() & LOW_PRECISION.keys()


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_low_precision_arrives_as_float32_also_in_lists(dtype):
    seen = []
    table = {}

    @kernel(table)
    def Operator(attrs, x, others, number):
        seen.extend([x, *others, number])
        return x

    table["Operator"]({}, np.ones(2, dtype), [np.ones(1, dtype), np.ones(1, np.int32)], 3)
    assert [item.dtype if isinstance(item, np.ndarray) else item for item in seen] == ["float32", "float32", "int32", 3]


def test_what_moves_values_sees_them_as_they_are():
    x = np.ones(2, BFLOAT16)
    assert KERNELS["MoveTo"]({}, x, "CPU", True) is x


@pytest.mark.parametrize("dtype", (np.float32, *LOW), ids=str)
def test_an_update_reaches_the_input(dtype):
    table = {}

    @kernel(table, updates=1)
    def Operator(attrs, value, variable):
        variable += value
        return variable

    variable = np.ones(3, dtype)
    result = table["Operator"]({}, np.full(3, 2, dtype), variable)
    np.testing.assert_array_equal(variable, np.full(3, 3, dtype))
    np.testing.assert_array_equal(result, np.full(3, 3, dtype))


ALL = KERNELS | LOW_PRECISION
# not among the generated operators: classes written by hand, or known to the graph only
ELSEWHERE = {"ClipByValue", "MoveTo", "StridedSliceGrad", "TensorMove", "Tile"}


@pytest.fixture(scope="module")
def operators():
    """Name -> inputs, those of the call and those of the constructor, without an import of MindSpore."""
    spec = importlib.util.find_spec("mindspore")
    source = (Path(spec.origin).parent / "ops/auto_generate/gen_ops_prim.py").read_text()
    found = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and node.name in ALL:
            methods = {item.name: item.args.args for item in node.body if isinstance(item, ast.FunctionDef)}
            found[node.name] = [item.arg for name in ("__call__", "__init__") for item in methods.get(name, ())[1:]]
    return found


def test_the_generated_operators_are_found(operators):
    assert ALL.keys() - operators.keys() == ELSEWHERE


@pytest.mark.parametrize("name", sorted(ALL.keys() - ELSEWHERE))
def test_as_many_inputs(operators, name):
    parameters = inspect.signature(inspect.unwrap(ALL[name])).parameters.values()
    if any(item.kind is item.VAR_POSITIONAL for item in parameters):
        return  # attention and cuts count for themselves
    assert len(parameters) - 1 == len(operators[name]), operators[name]
