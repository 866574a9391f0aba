"""Kernels take as many inputs as MindSpore's operators hand over, in the installed version."""

import ast
import importlib.util
import inspect
from pathlib import Path

import pytest

from plugins.semi_auto_cpu.kernels import KERNELS, LOW_PRECISION

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
