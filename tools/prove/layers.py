"""This module says how the results of norms and gated activations are distributed over the ranks, from the distribution
of their inputs.
"""

from __future__ import annotations

from dataclasses import replace

from tools.prove.call import Call, Value, rule
from tools.prove.moves import reduce_sum
from tools.prove.spread import (
    Spread,
    by_element,
    extent,
    multiply,
    refusal,
    require_home,
    tidy,
)


@rule("RmsNorm", says="It is not linear: the arguments must be plain, and the last dimension must be whole.")
def _norm(call: Call) -> Value:
    x = by_element(call.spread(0))
    whole_last(x)
    scale = by_element(x, by_element(call.spread(1)))
    return [scale, Spread((*x.dims[:-1], ()), loose=x.loose)]


@rule("RmsNormGrad", says="It is linear in the gradient; the gradient of the weight is a sum over all dimensions "
      "except the last.")  # fmt: skip
def _norm_gradient(call: Call) -> Value:
    gradient, x = call.spread(0), by_element(call.spread(1))
    whole_last(x)
    both = multiply(gradient, x)
    return [both, reduce_sum(both, range(len(x.dims) - 1), False)]


def whole_last(x: Spread) -> None:
    """Raise an error if the last dimension of a value is cut over ranks."""
    require_home(x)
    if any(not isinstance(atom, int) for atom in x.dims[-1]):
        raise refusal((x,), "the operator needs the whole last dimension, which is cut")


@rule("Swiglu", says="It is not linear: the argument must be plain. Each rank halves its piece of a dimension.")
def _swiglu(call: Call) -> Value:
    x = by_element(call.spread(0))
    axis = call.values[1] if len(call.values) > 1 and call.values[1] is not None else -1
    return _resized(x, axis, call.outputs[0].shape[axis])


@rule("SwigluGrad", says="It is linear in the gradient. Each rank doubles its piece of a dimension.")
def _swiglu_gradient(call: Call) -> Value:
    x = by_element(call.spread(1))
    axis = call.values[2] if len(call.values) > 2 and call.values[2] is not None else -1
    found = multiply(call.spread(0), _resized(x, axis, extent(x.dims[axis]) // 2))
    return _resized(found, axis, call.outputs[0].shape[axis])


def _resized(x: Spread, axis: int, size: int) -> Spread:
    dims = list(x.dims)
    dims[axis] = tidy((*(atom for atom in dims[axis] if isinstance(atom, str)), size))
    return replace(x, dims=tuple(dims))
