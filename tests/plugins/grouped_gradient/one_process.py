"""Gradients of grouped weights, added up in one graph on CPU with and without the pass; prints a JSON object.

    python -m tests.plugins.grouped_gradient.one_process on|off CASE [FOLDER for MindSpore's graphs]

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

EXPERTS, WIDTH, INNER = 4, 6, 10
ENDS = (3, 3, 8, 16)  # an expert without rows
STEPS = 3


class Layer(nn.Cell):
    """rows [m, WIDTH], weight [EXPERTS * WIDTH, INNER] -> [m, INNER]."""

    def __init__(self, twice):
        super().__init__()
        self.twice = twice

    def construct(self, rows, weight, ends):
        weight = ops.reshape(weight, (EXPERTS, WIDTH, INNER))
        out = GroupedMatmul(split_item=3, group_type=0)([rows], [weight], None, None, None, None, None, ends)[0]
        if self.twice:
            out += GroupedMatmul(split_item=3, group_type=0)([-rows], [weight], None, None, None, None, None, ends)[0]
        return out


class Step(nn.Cell):
    """Adds the gradient of the weight to `accumulator`, as a micro-batch does."""

    def __init__(self, kind, layer, shape):
        super().__init__()
        self.accumulator = Parameter(Tensor(np.zeros(shape, kind)), name="accumulator")
        self.of = ops.GradOperation(get_all=True, sens_param=True)(layer)

    def construct(self, rows, weight, ends, sens):
        of_rows, of_weight, _ = self.of(rows, weight, ends, sens)
        return ops.depend(of_rows, ops.assign_add(self.accumulator, of_weight))


class Whole(nn.Cell):
    """A step as of a pipeline: two micro-batches, then the sum is read, as an optimizer does, and set to zero."""

    def __init__(self, kind, layer, shape):
        super().__init__()
        self.accumulator = Parameter(Tensor(np.zeros(shape, kind)), name="accumulator")
        self.of = ops.GradOperation(get_all=True, sens_param=True)(layer)

    def construct(self, rows, weight, ends, sens):
        ops.assign_add(self.accumulator, self.of(rows, weight, ends, sens)[1])
        ops.assign_add(self.accumulator, self.of(rows + rows, weight, ends, sens)[1])
        read = self.accumulator * 1.0
        ops.assign(self.accumulator, ops.zeros_like(self.accumulator))
        return read


def compute(name, attrs, inputs, outputs):
    asked[name] = asked.get(name, 0) + 1
    library.store((KERNELS | LOW_PRECISION)[name](attrs, *inputs), outputs)


asked: dict[str, int] = {}
switch, case, *folder = sys.argv[1:]
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
step = (Whole if case == "whole" else Step)(np.float32, Layer(case == "twice"), (EXPERTS * WIDTH, INNER))
weight = Tensor(random.normal(size=(EXPERTS * WIDTH, INNER)), low)
result = {"rows": [], "given": []}
try:
    for _ in range(STEPS):
        rows, sens = (Tensor(random.normal(size=(ENDS[-1], size)), low) for size in (WIDTH, INNER))
        given = step(rows, weight, Tensor(ENDS, ms.int64), sens)  # gradients of the rows, or sums that were read
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
