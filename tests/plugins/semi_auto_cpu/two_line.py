"""y = relu(x w1) w2, w1 split by columns and w2 by rows: three steps of SGD. Run by test_library.

Usage: python two_line.py RANK SIZE FOLDER; prints a JSON object with the losses and what the library was asked.
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
from plugins.semi_auto_cpu import call, library

rank, size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
asked: list[str] = []
missing: list[dict[str, int]] = []


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


class Communication:
    """Stands in for MindSpore's CollectiveManager: all ranks, or groups of one."""

    def __init__(self):
        self.groups = {"hccl_world_group": list(range(size))}

    def get_instance(self):
        return self

    def initialized(self):
        return True

    def create_group(self, group, ranks, options=None):
        self.groups[group] = list(ranks)
        return True

    def get_rank_id(self, group):
        return self.groups[group].index(rank)

    def get_group_size(self, group):
        return len(self.groups[group])


def stand_in() -> None:
    from mindspore.communication import _comm_helper

    _comm_helper.CollectiveManager = Communication()
    _comm_helper.GlobalComm.INITED = True
    _comm_helper.GlobalComm.BACKEND = "hccl"
    _comm_helper.GlobalComm.WORLD_COMM_GROUP = "hccl_world_group"


def target(name: str) -> None:
    """Ascend during the front end, CPU from then on."""
    from mindspore._c_expression import AutoParallelContext, DeviceManagerConf

    context = AutoParallelContext.get_instance()
    context.set_device_num(size)
    context.set_global_rank(rank)
    context.set_hccl_test_avaible(name == "Ascend")
    DeviceManagerConf.get_instance().set_device(name, 0, True)


def compute(name, attrs, inputs, outputs):
    asked.append(name)
    if name == "AllReduce":
        assert attrs["op"] == "sum"
        parts = mesh.all_to_all_v(range(size), 0, [inputs[0].reshape(-1)] * size)
        call.store(sum(parts), outputs)
    else:
        assert name == "Square"
        call.store(inputs[0] ** 2, outputs)


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
loaded = library.load()
loaded.set_host(compute, rank)
loaded.replace("Square")
if size > 1:
    mesh = connect()
    stand_in()
    loaded.replace("AllReduce")
    ms.set_auto_parallel_context(parallel_mode="semi_auto_parallel", device_num=size, global_rank=rank, full_batch=True)
loaded.add_pass(lambda: target("CPU") if size > 1 else None, missing.append)

net = Net()
step = nn.TrainOneStepCell(net, nn.SGD(net.trainable_params(), learning_rate=1.0))
step.set_train()
losses = []
for number in range(3):
    x = Tensor(np.random.default_rng(number).normal(size=(4, 8)).astype(np.float32))
    if number == 0 and size > 1:
        target("Ascend")
    losses.append(float(step(x).asnumpy()))
print(json.dumps({"losses": losses, "asked": asked, "missing": missing}), flush=True)
os._exit(0)  # MindSpore would finalize what it never initialized
