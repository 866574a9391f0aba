"""Matrix products from the shapes of a kernel's tensors."""

from __future__ import annotations

from math import prod

from tools.estimate.layer_model import Matmul
from tools.profile.kernels import Kernel, Shapes


def matmul_of(kernel: Kernel) -> Matmul | None:
    """The product that a matmul kernel computes; None where its shapes leave that open.

    Grouped matmuls have [rows, depth] and [experts, depth, columns], rows taken as evenly spread.
    """
    sizes = [shape for shape in kernel.inputs if len(shape) >= 2][:2]
    if len(sizes) < 2:
        return None
    one, two = sizes
    if len(one) == 2 and len(two) == 3 and one[1] in two[1:]:
        columns = two[2] if one[1] == two[1] else two[1]
        return Matmul(one[0] / two[0], columns, one[1], two[0])
    if len(two) == 2 and len(one) > 2:
        one = (prod(one[:-1]), one[-1])
    if len(one) != len(two):
        return None
    depth = _depth(one[-2:], two[-2:], kernel.outputs)
    if depth is None:
        return None
    return Matmul(one[-2] * one[-1] / depth, two[-2] * two[-1] / depth, depth, max(prod(one[:-2]), prod(two[:-2])))


def _depth(one: tuple[int, ...], two: tuple[int, ...], outputs: Shapes) -> int | None:
    """The size that both share and the result has not; None where several could be it."""
    common = [size for size in set(one) if size in two]
    if outputs and len(outputs[0]) >= 2:
        rows, columns = outputs[0][-2:]
        common = [size for size in common if (one[0] * one[1] * two[0] * two[1]) == size * size * rows * columns]
    return common[0] if len(common) == 1 else None
