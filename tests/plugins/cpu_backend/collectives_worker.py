"""Started by msrun on three workers: every collective, forward and backward, against NumPy. Exit code tells."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import mindspore as ms
import numpy as np
from mindspore.communication import get_rank, init

from plugins.cpu_backend import collectives as c
from plugins.errors import ClusterError
from tests.plugins.cpu_backend.gradients import run


def gathered(parts):
    return np.concatenate(parts)


def exchanged(parts, index):
    """What member `index` receives in an all-to-all."""
    return np.concatenate([np.split(part, len(parts))[index] for part in parts])


# cell -> (forward, backward): what member i gets from all members' inputs or output gradients
ORACLES = {
    c.AllReduceSum: (lambda parts, i: sum(parts), lambda parts, i: sum(parts)),
    c.AllGather: (lambda parts, i: gathered(parts), lambda parts, i: np.split(sum(parts), len(parts))[i]),
    c.ReduceScatter: (lambda parts, i: np.split(sum(parts), len(parts))[i], lambda parts, i: gathered(parts)),
    c.AllToAll: (exchanged, exchanged),
}


def check(ranks, label):
    group = c.ProcessGroup(ranks)
    rng = np.random.default_rng(len(ranks))
    inputs = [rng.standard_normal((2 * group.size, 3)).astype(np.float32) for _ in ranks]
    for cell, (forward, backward) in ORACLES.items():
        shape = forward(inputs, 0).shape
        douts = [rng.standard_normal(shape).astype(np.float32) for _ in ranks]
        out, (gradient,) = run(cell(group), [inputs[group.rank]], douts[group.rank])
        np.testing.assert_allclose(out, forward(inputs, group.rank), atol=1e-6, err_msg=f"{label} {cell.__name__}")
        np.testing.assert_allclose(
            gradient, backward(douts, group.rank), atol=1e-6, err_msg=f"{label} {cell.__name__} gradient"
        )


def refuses(ranks):
    try:
        c.ProcessGroup(ranks)
    except ClusterError:
        return
    raise AssertionError(f"rank {get_rank()} may not build {ranks}")


ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
init()
assert c.world_group().size == 3
check([0, 1, 2], "world")
if get_rank() != 1:
    check([0, 2], "sub-group")
    check([2, 0], "sub-group in another order")
check([get_rank()], "alone")
refuses([(get_rank() + 1) % 3])
refuses([get_rank(), get_rank()])
mean = c.AllReduceMean(3)(ms.Tensor([float(get_rank())])).asnumpy()
np.testing.assert_allclose(mean, [1.0])
print("all collectives agree", flush=True)
