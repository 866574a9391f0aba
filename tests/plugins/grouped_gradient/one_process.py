"""Gradients of grouped weights, added up in one graph on CPU with and without the pass; prints a JSON object.

    python -m tests.plugins.grouped_gradient.one_process on|off CASE CHUNKS [FOLDER for MindSpore's graphs]

CHUNKS are the parts in which the rows go through the weights, as a micro-batch's tokens do with `plugins.ep_overlap`.
With a FOLDER, "graph" has the lines of the operators that MindSpore's validator has passed.

The gradient is MindSpore's own derivative of GroupedMatmul, the weights have two dimensions as MindFormers' have, and
the two operators that CPU lacks are those of `plugins.semi_auto_cpu.kernels`. Run by test_pass.
"""

import json
import os
import re
import sys
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.ops.auto_generate import GroupedMatmul

from plugins.grouped_gradient import adapter
from plugins.semi_auto_cpu import library
from plugins.semi_auto_cpu.communication import stand_in
from plugins.semi_auto_cpu.kernels import KERNELS, LOW_PRECISION
from plugins.semi_auto_cpu.ranks import Ranks
from tests.plugins.test_grouped_gradient import ENDS

EXPERTS, WIDTH, INNER, ROWS = 4, 6, 10, 16
STEPS = 3


class After(nn.Cell):
    """The rows of a chunk, whose gradient is computed before that of the chunk `before`."""

    def construct(self, rows, before):
        return rows

    def bprop(self, rows, before, out, dout):
        return dout, ops.depend(ops.zeros_like(before), dout)


class Layer(nn.Cell):
    """rows [m, WIDTH], weight [EXPERTS * WIDTH, INNER], ends int64 [chunks, EXPERTS] -> [m, INNER]."""

    def __init__(self, sizes):
        super().__init__()
        self.ends = np.cumsum(sizes).tolist()
        self.starts = [0, *self.ends[:-1]]
        self.count = len(sizes)
        self.after = After()

    def construct(self, rows, weight, ends):
        weight = ops.reshape(weight, (EXPERTS, WIDTH, INNER))
        outs = ()
        for chunk in range(self.count):
            part = rows[self.starts[chunk] : self.ends[chunk]] if self.count > 1 else rows
            if chunk:
                part = self.after(part, outs[-1])
            product = GroupedMatmul(split_item=3, group_type=0)
            outs += (product([part], [weight], None, None, None, None, None, ends[chunk])[0],)
        return ops.concat(outs) if self.count > 1 else outs[0]


class Step(nn.Cell):
    """Adds the gradient of the weight to `accumulator`, as a micro-batch does."""

    def __init__(self, kind, layer, shape):
        super().__init__()
        self.accumulator = Parameter(Tensor(np.zeros(shape, kind)), name="accumulator")
        self.of = ops.GradOperation(get_all=True, sens_param=True)(layer)

    def construct(self, rows, weight, ends, sens):
        of_rows, of_weight, _ = self.of(rows, weight, ends, sens)
        return ops.depend(of_rows, ops.assign_add(self.accumulator, of_weight))


class Whole(Step):
    """A step as of a pipeline: two micro-batches, then the sum is read, as an optimizer does, and set to zero."""

    def construct(self, rows, weight, ends, sens):
        ops.assign_add(self.accumulator, self.of(rows, weight, ends, sens)[1])
        ops.assign_add(self.accumulator, self.of(rows + rows, weight, ends, sens)[1])
        read = self.accumulator * 1.0
        ops.assign(self.accumulator, ops.zeros_like(self.accumulator))
        return read


class Waits(Step):
    """Two gradients are added to each other, and the second is computed after the first."""

    def construct(self, rows, weight, ends, sens):
        first = self.of(rows, weight, ends, sens)[1]
        of_rows, second, _ = self.of(rows + rows, weight, ends, ops.depend(sens, first))
        return ops.depend(of_rows, ops.assign_add(self.accumulator, second + first))


class Used(Step):
    """Two gradients are added to each other, and the first is wanted, too."""

    def construct(self, rows, weight, ends, sens):
        first = self.of(rows, weight, ends, sens)[1]
        second = self.of(rows + rows, weight, ends, sens)[1]
        return ops.depend(first, ops.assign_add(self.accumulator, second + first))


class Other(Step):
    """The gradient and something else are added to each other."""

    def construct(self, rows, weight, ends, sens):
        of_rows, of_weight, _ = self.of(rows, weight, ends, sens)
        return ops.depend(of_rows, ops.assign_add(self.accumulator, of_weight + weight * weight))


def compute(name, attrs, inputs, outputs):
    asked[name] = asked.get(name, 0) + 1
    library.store((KERNELS | LOW_PRECISION)[name](attrs, *inputs), outputs)


asked: dict[str, int] = {}
switch, case, chunks, *folder = sys.argv[1:]
low = {"float16": ms.float16, "float32": ms.float32}.get(case, ms.bfloat16)
ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
if folder:
    ms.set_context(save_graphs=1, save_graphs_path=folder[0])
stand_in(Ranks(1, 0))
if switch == "on":
    adapter.add_pass()  # before the one that gives operators other names
loaded = library.load()
loaded.set_host(compute)
loaded.add_pass(lambda: None, lambda nodes: None)
for name in KERNELS:
    loaded.replace(name)
for name in LOW_PRECISION:
    loaded.replace(name, low=True)
random = np.random.default_rng(0)
ends = ENDS[int(chunks)]
layer = Layer([each[-1] for each in ends])
kinds = {"whole": Whole, "waits": Waits, "used": Used, "other": Other}
step = kinds.get(case, Step)(np.float32, layer, (EXPERTS * WIDTH, INNER))
weight = Tensor(random.normal(size=(EXPERTS * WIDTH, INNER)), low)
result = {"rows": [], "given": []}
try:
    for _ in range(STEPS):
        rows, sens = (Tensor(random.normal(size=(ROWS, size)), low) for size in (WIDTH, INNER))
        given = step(rows, weight, Tensor(ends, ms.int64), sens)  # gradients of the rows, or sums that were read
        result["given"].append([each.astype(ms.float32).asnumpy().tolist() for each in (rows, sens)])
        result["rows"].append(given.astype(ms.float32).asnumpy().tolist())
    result["accumulator"] = step.accumulator.asnumpy().tolist()
except RuntimeError as error:
    result["error"] = str(error).strip().splitlines()[0]
if folder:
    (file,) = Path(folder[0]).glob("[0-9]*_validate_*.ir")
    result["graph"] = re.findall(r"^  (%\d+)\(\S*\) = (\w+)\((.*?)\)(?: |$)", file.read_text(), re.MULTILINE)
print(json.dumps(result | {"asked": asked}), flush=True)
os._exit(0)
