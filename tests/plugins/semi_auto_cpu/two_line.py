"""mean((relu(x w1) w2)^2), w1 split by columns and w2 by rows: three steps of gradient descent. Run by test_library.

DP ranks split the batch, and what they hold of the weights (optimizer sharding); TP ranks split columns and rows.

Usage: python two_line.py RANK DP TP FOLDER; prints a JSON object with the losses, the weights, the operators asked of
Python, and how many graphs were compiled.
"""

import json
import os
import sys
import time
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from plugins.cpu_backend.transport import Mesh
from plugins.semi_auto_cpu.adapter import Host
from plugins.semi_auto_cpu.communication import stand_in
from plugins.semi_auto_cpu.compile import FrontEnd
from plugins.semi_auto_cpu.ranks import Ranks

rank, dp, tp, folder = *map(int, sys.argv[1:4]), Path(sys.argv[4])
size = dp * tp
asked: list[str] = []
compiled: list[bool] = []


def connect() -> Mesh:
    """A mesh whose addresses are told through files."""
    mesh = Mesh(rank, size)
    own = folder / f"{rank}.part"
    own.write_text(json.dumps(mesh.listen()))
    own.rename(folder / f"{rank}.address")
    while len(list(folder.glob("*.address"))) < size:
        time.sleep(0.05)
    mesh.connect([tuple(json.loads((folder / f"{peer}.address").read_text())) for peer in range(size)])
    return mesh


def compute(name, attrs, inputs, outputs):
    asked.append(name)
    host.run(name, attrs, inputs, outputs)


def passed():
    compiled.append(True)
    front_end.done()


class Net(nn.Cell):
    def __init__(self):
        super().__init__()
        rng = np.random.default_rng(0)
        self.w1 = Parameter(Tensor(rng.normal(size=(8, 16)).astype(np.float32) * 0.1), name="w1")
        self.w2 = Parameter(Tensor(rng.normal(size=(16, 8)).astype(np.float32) * 0.1), name="w2")
        self.first = ops.MatMul().shard(((dp, 1), (1, tp)))
        self.relu = ops.ReLU().shard(((dp, tp),))
        self.second = ops.MatMul().shard(((dp, tp), (tp, 1)))
        self.square = ops.Square().shard(((dp, 1),))
        # its gradient is a constant, and the AllReduce of one a product with the number of ranks, see csrc/cluster.cc
        self.mean = ops.ReduceMean().shard(((dp, 1),))

    def construct(self, x):
        y = self.second(self.relu(self.first(x, self.w1)), self.w2)
        return self.mean(self.square(y))


ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
ranks = Ranks(size, rank)
stand_in(ranks)
front_end = FrontEnd(ranks)
host = Host(ranks, connect(), passed)
host.library.set_host(compute, rank)
front_end.around_compiles()
if size > 1:
    ms.set_auto_parallel_context(parallel_mode="semi_auto_parallel", device_num=size, global_rank=rank, full_batch=True)
    sharding = {"parallel_optimizer_threshold": 0}
    ms.set_auto_parallel_context(enable_parallel_optimizer=dp > 1, parallel_optimizer_config=sharding)

net = Net()
step = nn.TrainOneStepCell(net, nn.Momentum(net.trainable_params(), 1.0, 0.0))
step.set_train()
losses = []
for number in range(3):
    x = Tensor(np.random.default_rng(number).normal(size=(4, 8)).astype(np.float32))
    losses.append(step(x).asnumpy().item())
weights = {item.name: item.asnumpy().tolist() for item in step.get_parameters()}
print(json.dumps({"losses": losses, "weights": weights, "asked": asked, "compiled": len(compiled)}), flush=True)
os._exit(0)  # MindSpore would finalize what it never initialized
