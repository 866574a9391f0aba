"""Which operators DVM takes, by their names and types, and why it refuses the others (DvmSupportChecker of MindSpore).

Source: graph_kernel_cluster_cloud.cc; where 2.9.0 differs from what is public (it mixes types), its passes were asked.
"""

from __future__ import annotations

from collections.abc import Collection

from plugins.operator_fusion.operators import CUBE, VECTOR
from tools.fusion.graph import Operator
from tools.fusion.rules import DVM, Rules

FLOATS = frozenset(("Float16", "Float32", "BFloat16"))
_NUMBERS = FLOATS | {"Int32"}
_CASTS = _NUMBERS | {"Bool"}
_WHOLE = frozenset(("Add", "Sub", "Mul", "Maximum", "Minimum", "Neg", "Abs", "Assign", "BroadcastTo"))  # int32, too
_COMPARISONS = frozenset(("Equal", "NotEqual", "Greater", "GreaterEqual", "Less", "LessEqual", "IsFinite"))
_PRODUCTS = frozenset(CUBE) - {"Reshape"}


def refusal(operator: Operator, listed: Collection[str] = VECTOR, rules: Rules = DVM) -> str:
    """Why an operator is in no cluster; "" where it may be in one.

    Args:
        listed: operators of the level, less those that a recipe disables.
    """
    if operator.opened:
        return ""
    if operator.name not in listed:
        return f"{operator.name} is not fused at this level"
    return _type(operator) if rules.types else ""


def _type(operator: Operator) -> str:
    """Which type keeps it out."""
    name, result, taken = operator.name, operator.output.dtype, [tensor.dtype for tensor in operator.takes]
    first = taken[0] if taken else ""
    if name == "Cast":
        return _wants(first, _CASTS, "takes") or _wants(result, _CASTS, "gives")
    if name in _COMPARISONS:
        return _wants(first, FLOATS if name == "IsFinite" else _NUMBERS, "takes")
    if name == "Select":
        other = next((dtype for dtype in taken[1:] if dtype != result), "")
        return _wants(result, FLOATS, "gives") or (f"mixes {other} and {result}" if other else "")
    if name == "ReduceSum":
        return _wants(result, FLOATS, "gives") or (f"takes {first} and gives {result}" if first != result else "")
    if name == "Transpose":
        return _wants(result, FLOATS - {"BFloat16"}, "gives")
    if name in _PRODUCTS:
        return _wants(result, FLOATS - {"Float32"}, "gives")
    if name == "Reshape":
        return ""
    wrong = _wants(result, _NUMBERS if name in _WHOLE else FLOATS, "gives")
    return wrong or next(filter(None, (_wants(dtype, _CASTS, "takes") for dtype in taken)), "")


def _wants(dtype: str, known: Collection[str], verb: str) -> str:
    return "" if dtype in known else f"{verb} {dtype or 'no tensor'}"
