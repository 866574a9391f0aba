"""Started by msrun on four workers as two nodes of two: every mode, uncut and in chunks, against the dense reference.

Outputs, all gradients, and the bytes that each rank sent to each other. Exit code and last line tell.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.communication import get_rank, init

from plugins.cpu_backend import transport
from plugins.cpu_backend.expert_parallel import Net, Rows, SparseGroupedMatmul
from plugins.ep_overlap.plan import chunk_slices, issue_order
from plugins.hierarchical_ep import reference
from plugins.hierarchical_ep.dispatcher import UNCUT, Dispatcher, RoutedLayer, cut
from plugins.hierarchical_ep.plan import MODES, make_plan
from plugins.hierarchical_ep.topology import Topology
from plugins.hierarchical_ep.traffic import per_rank_bytes

BATCH, SEQUENCE, HIDDEN, WIDTH, EXPERTS, TOP_K, RANKS = 2, 10, 16, 12, 8, 3, 4
TOKENS = BATCH * SEQUENCE
TOPOLOGY = Topology(nodes=2, devices_per_node=2, experts=EXPERTS)


def routings(rng):
    """name -> int32 [RANKS, TOKENS, TOP_K], distinct in a row."""

    def top(bias):
        scores = bias + rng.gumbel(size=(RANKS, TOKENS, EXPERTS))
        return np.argsort(-scores, axis=-1)[..., :TOP_K].astype(np.int32)

    token = np.arange(RANKS * TOKENS).reshape(RANKS, TOKENS, 1)
    return {
        "balanced": ((token * TOP_K + np.arange(TOP_K)) % EXPERTS).astype(np.int32),
        "skewed": top(np.linspace(4, 0, EXPERTS)),
        "empty experts": top(np.array([0, -99, 0, 0, -99, -99, 0, -99.0])),
        "all to one": top(np.array([99, 98, 97, 0, 0, 0, 0, 0.0])),
    }


class SpareRows(Rows):
    """With the row to oneself that Ascend's exchanges need."""

    spare = 1


class Experts(nn.Cell):
    """SwiGLU experts on sorted rows."""

    def __init__(self):
        super().__init__(auto_prefix=False)
        self.matmul = SparseGroupedMatmul()

    def construct(self, copies, ends, w1, w2):
        gate, up = ops.chunk(self.matmul(copies, w1, ends), 2, -1)
        return self.matmul(gate * ops.sigmoid(gate) * up, w2, ends)


class Probe(nn.Cell):
    """sum(layer(...) * weight), whose gradients are those of the layer for `weight`."""

    def __init__(self, layer):
        super().__init__(auto_prefix=False)
        self.layer = layer

    def construct(self, tokens, probs, ids, w1, w2, weight):
        out = self.layer(tokens, probs, ids, w1, w2)
        return ops.reduce_sum(out * weight), out


def layer(mode, chunks, pad=False, recompute=False, rows=None):
    slices = chunk_slices(BATCH, SEQUENCE, chunks)
    rows, net = rows or Rows(), Net(range(RANKS))
    dispatchers = [Dispatcher(mode, TOPOLOGY, get_rank(), HIDDEN, TOP_K, net, rows, pad) for _ in slices]
    order = issue_order(len(slices)) if len(slices) > 1 else UNCUT
    cell = RoutedLayer(dispatchers, *cut(slices), order, Experts(), rows, streams=1)
    if recompute:
        cell.recompute()
    return cell, slices


def check(cell, slices, mode, label, exact_bytes=True):
    rank, rng = get_rank(), np.random.default_rng(5)
    tokens, weight = rng.standard_normal((2, RANKS, TOKENS, HIDDEN)) / 4
    probs = rng.random((RANKS, TOKENS, TOP_K))
    w1 = rng.standard_normal((EXPERTS, HIDDEN, 2 * WIDTH)) / 4
    w2 = rng.standard_normal((EXPERTS, WIDTH, HIDDEN)) / 4
    first, end = TOPOLOGY.expert_bounds[rank : rank + 2]
    step = ms.value_and_grad(Probe(cell), (0, 1, 3, 4), has_aux=True)
    for name, ids in routings(rng).items():
        own = [tokens[rank], probs[rank], w1[first:end], w2[first:end], weight[rank]]
        x, p, a, b, dout = (Tensor(value.astype(np.float32)) for value in own)
        before = np.array(transport.mesh().sent_bytes)
        (_, out), gradients = step(x, p, Tensor(ids[rank]), a, b, dout)
        gradients = [gradient.asnumpy() for gradient in gradients]
        sent = np.array(transport.mesh().sent_bytes) - before

        flat = [value.reshape(-1, value.shape[-1]) for value in (tokens, probs, ids, weight)]
        expected = reference.moe(*flat[:3], w1, w2).reshape(tokens.shape)[rank]
        dx, dp, da, db = reference.moe_backward(*flat[:3], w1, w2, flat[3])
        dx, dp = dx.reshape(tokens.shape)[rank], dp.reshape(probs.shape)[rank]
        for what, got, want in [
            ("output", out.asnumpy(), expected),
            ("tokens", gradients[0], dx),
            ("probabilities", gradients[1], dp),
            ("w1", gradients[2], da[first:end]),
            ("w2", gradients[3], db[first:end]),
        ]:
            worst = np.abs(got - want).max() / max(1.0, np.abs(want).max())
            assert worst < 1e-6, f"{label}, {name}, rank {rank}: {what} is off by {worst:.1e}"
        planned = planned_bytes(mode, ids, slices)[rank]
        if exact_bytes:
            assert sent.tolist() == planned.tolist(), f"{label}, {name}: rank {rank} sent {sent}, planned {planned}"


def planned_bytes(mode, ids, slices):
    """[RANKS, RANKS] bytes forward and backward, by the plan of each chunk."""
    total = np.zeros((RANKS, RANKS))
    for piece in slices:
        plan = make_plan(mode, TOPOLOGY, [ids[rank][piece] for rank in range(RANKS)])
        for direction in ("forward", "backward"):
            total += sum(step.inter + step.intra for step in per_rank_bytes(plan, HIDDEN, 4, direction))
    return total


ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
init()
transport.connect()
# each chunk is compiled by itself; four of them are compiled for Ascend in test_ascend.py
for mode, chunks, rows in zip(MODES, ((2, 1), (1, 1), (1, 2)), (Rows, Rows, SpareRows), strict=True):
    check(*layer(mode, chunks, rows=rows()), mode, f"{mode} {chunks}")
for mode in ("hierarchical", "deduplicated"):
    padded = layer(mode, (1, 1), pad=True, recompute=True)
    check(*padded, mode, f"{mode}, padded and recomputed", exact_bytes=False)
print("all modes agree", flush=True)
