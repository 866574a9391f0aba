"""y = relu(x w1) w2, w1 split by columns and w2 by rows: three steps of SGD. Run by test_library.

Usage: python two_line.py RANK SIZE FOLDER; prints a JSON object with the losses, the weights, the operators asked of
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

from plugins.cpu_backend.network.transport import Mesh
from plugins.semi_auto_cpu.communication import stand_in
from plugins.semi_auto_cpu.compile import FrontEnd
from plugins.semi_auto_cpu.host import Host
from plugins.semi_auto_cpu.ranks import Ranks

rank, size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
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
        self.first = ops.MatMul().shard(((1, 1), (1, size)))
        self.relu = ops.ReLU().shard(((1, size),))
        self.second = ops.MatMul().shard(((1, size), (size, 1)))
        self.square = ops.Square().shard(((1, 1),))
        self.mean = ops.ReduceMean().shard(((1, 1),))

    def construct(self, x):
        return self.mean(self.square(self.second(self.relu(self.first(x, self.w1)), self.w2)))


ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
ranks = Ranks(size, rank)
stand_in(ranks)
front_end = FrontEnd(ranks)
host = Host(ranks, connect(), passed)
host.library.set_host(compute, rank)
front_end.around_compiles()
if size > 1:
    ms.set_auto_parallel_context(parallel_mode="semi_auto_parallel", device_num=size, global_rank=rank, full_batch=True)

net = Net()
step = nn.TrainOneStepCell(net, nn.SGD(net.trainable_params(), learning_rate=1.0))
step.set_train()
losses = []
for number in range(3):
    x = Tensor(np.random.default_rng(number).normal(size=(4, 8)).astype(np.float32))
    losses.append(float(step(x).asnumpy()))
weights = {item.name: item.asnumpy().tolist() for item in step.get_parameters()}
print(json.dumps({"losses": losses, "weights": weights, "asked": asked, "compiled": len(compiled)}), flush=True)
os._exit(0)  # MindSpore would finalize what it never initialized
