"""Started by msrun on three workers: every collective, forward and backward, against NumPy. The last line tells."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn
from mindspore.communication import get_rank, init

from plugins.cpu_backend import expert_parallel, transport
from plugins.cpu_backend.train_step import AllReduceMean, ClipSplitGradNorm
from tests.plugins.cpu_backend.gradients import run

SPLITS = np.array([[1, 0, 3], [2, 2, 0], [0, 1, 4]])  # rows from sender to receiver
ROOM = 12


class Sending(nn.Cell):
    """AllToAllV of the rows alone."""

    def __init__(self, group, send, receive):
        super().__init__(auto_prefix=False)
        self.move = expert_parallel.AllToAllV(group)
        self.send, self.receive = Tensor(send, ms.int32), Tensor(receive, ms.int32)

    def construct(self, rows):
        return self.move(rows, self.send, self.receive, ROOM)


def parts(splits, rows):
    """parts[s][d]: the rows from s to d."""
    return [np.split(value[: split.sum()], np.cumsum(split)[:-1]) for split, value in zip(splits, rows, strict=True)]


def moved(splits, rows, room):
    """Return the rows that each member holds after an all-to-all-v, followed by zeros."""
    cut = parts(splits, rows)
    out = np.zeros((len(rows), room, rows[0].shape[1]), np.float32)
    for member in range(len(rows)):
        arrived = np.concatenate([cut[sender][member] for sender in range(len(rows))])
        out[member, : len(arrived)] = arrived
    return out


def check(ranks, label):
    rng, size = np.random.default_rng(len(ranks)), len(ranks)
    me, net = ranks.index(get_rank()), expert_parallel.Net(ranks)
    small, large = (rng.standard_normal((size, rows, 3)).astype(np.float32) for rows in (2, 2 * size))
    whole, summed = np.concatenate(small), sum(large)
    compare(
        run(net.all_gather(range(size)), [small[me]], large[me]),
        whole,
        summed[2 * me : 2 * me + 2],
        f"{label} gather",
    )
    compare(
        run(net.reduce_scatter(range(size)), [large[me]], small[me]),
        summed[2 * me : 2 * me + 2],
        whole,
        f"{label} scatter",
    )

    splits = SPLITS[:size, :size]
    rows, douts = (rng.standard_normal((size, count, 3)).astype(np.float32) for count in (8, ROOM))
    cell = Sending(ranks, splits[me], splits[:, me])
    back = moved(splits.T, douts, 8)[me]
    compare(run(cell, [rows[me]], douts[me]), moved(splits, rows, ROOM)[me], back, f"{label} all-to-all-v")

    counts = expert_parallel.ExchangeCounts(ranks)(Tensor(np.arange(2 * size).reshape(size, 2) + 10 * me, ms.int32))
    send, receive, arriving = (value.asnumpy().tolist() for value in counts)
    theirs = np.array([[2 * me + 10 * other, 2 * me + 1 + 10 * other] for other in range(size)])
    assert send == [4 * other + 1 + 20 * me for other in range(size)], label
    assert receive == theirs.sum(1).tolist() and arriving == theirs.sum(0).tolist(), label


def compare(result, forward, backward, label):
    out, (gradient,) = result
    np.testing.assert_allclose(out, forward, atol=1e-6, err_msg=label)
    np.testing.assert_allclose(gradient, backward, atol=1e-6, err_msg=f"{label}, gradient")


ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
init()
transport.connect()
transport.connect()  # connected already: nothing to do
check([0, 1, 2], "world")
if get_rank() != 1:
    check([0, 2], "sub-group")
    check([2, 0], "sub-group in another order")
check([get_rank()], "alone")

np.testing.assert_allclose(AllReduceMean(3)(Tensor([float(get_rank())])).asnumpy(), [1.0])

# one weight shared by the ranks, one split over them: [3] in all, of norm sqrt(16 + 1 + 4 + 9)
gradients = (Tensor([4.0]), Tensor([1.0 + get_rank()]))
for max_norm in (1.0, 100.0):
    clipped, norm = ClipSplitGradNorm(max_norm, (False, True))(gradients)
    np.testing.assert_allclose(norm.asnumpy(), [30**0.5], rtol=1e-6)
    scale = min(1.0, max_norm / max(30**0.5, max_norm))
    np.testing.assert_allclose(clipped[0].asnumpy(), [4 * scale], rtol=1e-5)
    np.testing.assert_allclose(clipped[1].asnumpy(), [(1 + get_rank()) * scale], rtol=1e-5)
print("all collectives agree", flush=True)
