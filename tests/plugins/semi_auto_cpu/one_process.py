"""Graphs of one process that show what the library does to operators; prints a JSON object. Run by test_library."""

import json
import os

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, lazy_inline, mutable, nn, ops
from mindspore.ops.auto_generate import RmsNorm, SumExt, TopkExt

from plugins.semi_auto_cpu import library
from plugins.semi_auto_cpu.communication import stand_in
from plugins.semi_auto_cpu.ranks import Ranks

ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
seen: dict[str, object] = {}
missing: list[dict[str, int]] = []
summed: list[str] = []  # the groups of AllReduces, in the order in which they ran


def told(value):
    return [list(value.shape), value.dtype.name] if isinstance(value, np.ndarray) else value


def compute(name, attrs, inputs, outputs):
    seen[name] = [[[told(y) for y in x] if isinstance(x, list) else told(x) for x in inputs], attrs.get("block_size")]
    if name == "AlltoAllV":
        library.store(inputs[0][: outputs[0].size], outputs)
    elif name == "AllReduce":
        summed.append(attrs["group"])
        library.store(inputs[0], outputs)
    elif name == "Reshape":
        library.store(inputs[0], outputs)
    elif name == "Concat":
        library.store(np.concatenate(inputs[0], inputs[1]), outputs)
    elif name == "TopkExt":
        order = np.argsort(-inputs[0])[: inputs[1]]
        library.store((inputs[0][order], order), outputs)
    elif name == "Cos":
        library.store(np.cos(inputs[0].astype(np.float32)), outputs)
    elif name == "SumExt":
        library.store(np.sum(inputs[0], inputs[1] or None, keepdims=inputs[2]), outputs)
    else:
        raise ArithmeticError("no such luck")


class Run(nn.Cell):
    """A function as a cell."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def construct(self, *inputs):
        return self.function(*inputs)


class Block(nn.Cell):
    """Kept as a call by MindSpore, forward and backward; one in another."""

    @lazy_inline
    def __init__(self, number, inner=None):
        super().__init__()
        self.weight = Parameter(Tensor(np.float32(number)), name=f"weight{number}")
        self.inner = inner

    def construct(self, x):
        y = ops.square(x * self.weight)
        return y if self.inner is None else self.inner(y) + x


class Stack(nn.Cell):
    """Two nested blocks, and the first of them once more."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Block(1, Block(2)), Block(3)

    def construct(self, x):
        return ops.reduce_sum(self.first(self.second(self.first(x))))


def gradients():
    """Return the value of `Stack` for x, followed by the gradients of its weights."""
    stack = Stack()
    value, gradients = ms.value_and_grad(stack, None, stack.trainable_params())(x / 8)
    return [float(value), *map(float, gradients)]


def outcome(function, *inputs):
    """The result, or the error's words."""
    try:
        return Run(function)(*inputs).asnumpy().tolist()
    except (RuntimeError, ValueError, TypeError) as error:
        return str(error).strip().splitlines()[0]


class Sums(nn.Cell):
    """Two AllReduces that do not depend on each other, of one shape and at one place in the model."""

    def __init__(self, *groups):
        super().__init__()
        self.one, self.two = map(ops.AllReduce, (ops.ReduceOp.SUM,) * 2, groups)

    def construct(self, x):
        return self.one(x * 2) - self.two(x * 3)


def order_of(*groups):
    """Return the order in which the sums over two groups run in a graph that uses the groups in this order."""
    summed.clear()
    Sums(*groups)(x)
    return summed.copy()


class Weighted(nn.Cell):
    """Rows times a weight each, in bfloat16; how many there are shows when the step runs."""

    def construct(self, x, weights, count):
        rows = ops.reshape(move(x, count, count), (-1, 2)).astype(ms.bfloat16)
        weight = ops.reshape(move_one(weights, count, count), (-1, 1)).astype(ms.bfloat16)
        return ops.reduce_sum((rows * weight).astype(ms.float32))


class WeightedGradient(nn.Cell):
    """By weights: a sum over axes that MindSpore computes from the shapes."""

    def __init__(self):
        super().__init__()
        self.gradient, self.network = ops.GradOperation(get_all=True), Weighted()

    def construct(self, x, weights, count):
        return self.gradient(self.network)(x, weights, count)[1]


ranks = Ranks(4, 0)
stand_in(ranks)
ranks.create("near", [0, 1])
ranks.create("far", [0, 2])
loaded = library.load()
loaded.set_host(compute, rank=3)
loaded.set_cluster(ranks)
loaded.add_pass(lambda: None, missing.append)
for name in ("AllReduce", "AlltoAllV", "Concat", "TopkExt", "Sin", "SumExt"):
    loaded.replace(name)
loaded.replace("Cos", low=True)
loaded.replace("ReduceSum", low=True)
loaded.replace("Reshape", low=True)
move_one = ops.AlltoAllV(block_size=1)
move, topk, total, norm = ops.AlltoAllV(block_size=2), TopkExt(), SumExt(), RmsNorm()
x = Tensor(np.arange(4, dtype=np.float32))
result = {}


def rows(x, send, receive):
    return ops.reshape(move(x, send, receive), (-1, 2)) + 1.0


def twice(x):
    return ops.concat((x, 2 * x), -1)


def largest(x):
    return topk(x, 2, -1, True, True)[0]


def along(x, axis):
    return total(x, (axis,), False, None)


def sine(x):
    return ops.sin(x)


def cosine(x):
    return ops.cos(x)


def normed(x):
    return ops.stop_gradient(norm(norm(x, x)[0], x)[0])


def tangent(x):
    return ops.tan(x)


def refuse(nodes):
    raise LookupError("not here")


def counts(*values):
    return Tensor(np.array(values), ms.int64)


for count in (2, 0, 1):
    result[f"rows {count}"] = outcome(rows, x, counts(count), counts(count))
    result[f"call {count}"] = seen.get("AlltoAllV")
result["shape 0"] = list(Run(rows)(x, counts(0), counts(0)).shape)
result["concat"] = [outcome(twice, x), seen.get("Concat")]
result["topk"] = [outcome(largest, x), seen.get("TopkExt")]
result["unknown"] = outcome(along, x, mutable(0))
result["cosines"] = [[float(outcome(cosine, x.astype(kind))[0]), "Cos" in seen] for kind in (ms.float32, ms.bfloat16)]
result["blocks"] = gradients()
result["orders"] = [order_of("near", "far"), order_of("far", "near")]
two = Tensor(np.ones(2, np.float32))
result["weighted"] = [WeightedGradient()(x, two, counts(count)).asnumpy().tolist() for count in (2, 1)]
missing.clear()
for function, value in ((normed, x), (tangent, x.astype(ms.bfloat16))):
    outcome(function, value)
result["missing"] = missing.copy()
result["fault"] = outcome(sine, x)
result["failure"] = repr(loaded.failure)
loaded.add_pass(lambda: None, refuse)
result["refused"] = outcome(tangent, x)
print(json.dumps(result), flush=True)
os._exit(0)
