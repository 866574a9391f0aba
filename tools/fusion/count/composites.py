"""Composite operators that Ascend opens before it fuses, each as the one operator that stands for it in the count.

A composite is one kernel whether it is opened or not, so that its bytes alone are counted before: what its parts hand
to each other never leaves the chip. Opened, it has the shape rules of its main part: a sum over a dimension (SumExt) is
a reduction, an addition with a factor (AddExt) is elementwise. Types are those that DVM takes of that part.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from plugins.operator_fusion.operators import CUBE, EXPANDED, VECTOR
from plugins.operator_fusion.plan import Fusion
from tools.fusion.graph import Operator
from tools.fusion.support import refusal

_SUMS = ("SumExt", "ReduceMean", "MeanExt", "BiasAddGrad", "ClipByNormNoDivSum")
_WHOLE_NUMBERS = ("AddExt", "AddN", "SubExt", "AssignAdd", "Muls", "Square")  # int32, too
_BROADCASTS = ("Tile",)
_OTHERS = "Exp"  # floats alone


def main_part(name: str) -> str:
    """The operator that stands for a composite; any other stands for itself."""
    if name not in EXPANDED:
        return name
    if name in _SUMS:
        return "ReduceSum"
    if name in _BROADCASTS:
        return "BroadcastTo"
    return "Mul" if name in _WHOLE_NUMBERS else _OTHERS


def listed(fusion: Fusion) -> Collection[str]:
    """Operators that are fused at a level, composites too, less those that a recipe disables.

    `cube` counts as `vector`: how products are joined with their neighbours is not modelled.
    """
    known = () if fusion.level == "off" else (*VECTOR, *EXPANDED)
    return frozenset(known) - set(fusion.disable)


def refused(operator: Operator, fusion: Fusion) -> str:
    """Why DVM leaves an operator alone; "" where it may fuse it."""
    names = listed(fusion)
    if fusion.level == "off":
        return "nothing is fused"
    if operator.name in fusion.disable:
        return f"{operator.name} is in plugins.operator_fusion.disable"
    if fusion.level == "cube" and operator.name in CUBE:
        return f"{operator.name}: fused at level cube, which is not modelled"
    part = main_part(operator.name)
    if operator.name in EXPANDED and part in fusion.disable:
        return f"{part}, which it is opened into, is in plugins.operator_fusion.disable"
    if operator.name not in names:
        return refusal(operator)
    why = refusal(replace(operator, name=part))
    return f"{why} (opened into {part})" if why and part != operator.name else why
