"""A rank to which nobody sends: Ascend's row operations, whose shapes follow the data, on a simulated group.

MindSpore's AlltoAllV of no rows returns a scalar, and no reshape makes rows of that.
"""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops
from mindspore.ops import operations as P

from plugins.hierarchical_ep.graph import ascend
from plugins.hierarchical_ep.graph.dispatcher import Dispatcher, pack
from plugins.hierarchical_ep.graph.order import first_turn
from plugins.hierarchical_ep.topology import Topology

TOKENS, TOP_K, HIDDEN, EXPERTS = 5, 2, 3, 8
TWO_NODES = Topology(2, 2, EXPERTS)


class Rows(ascend.Rows):
    """Ascend's, from operators that a CPU has."""

    def __init__(self):
        super().__init__()
        self.ascending = P.Sort(axis=0)
        self.select = lambda values, axis, index: ops.gather(values, index, axis)
        self.cumsum = ops.cumsum


class Silent:
    """The net of the last rank of a group whose other members send nothing and return zeros."""

    def all_to_all_v(self, group, width, small=False):
        """Own rows, behind zeros for what the others return."""

        def move(rows, send, receive, room):
            assert rows.shape[0] > 0, "AlltoAllV of nothing to send"
            assert sum(receive) > 0, "AlltoAllV that brings nothing has shape ()"
            own = rows[rows.shape[0] - int(send[-1]) :]
            return ops.concat((ops.zeros((int(sum(receive[:-1])), width), rows.dtype), own))

        return move

    def exchange_counts(self, group):
        """Only the own counts arrive."""

        def exchange(counts):
            send = counts.asnumpy().sum(1)
            receive = np.zeros_like(send)
            receive[-1] = send[-1]
            return send, receive, ops.cast(counts[-1], ms.float32)

        return exchange

    def all_gather(self, group, small=False):
        """Rows of zeros from the others."""
        return lambda rows: ops.concat((ops.zeros(((len(group) - 1) * rows.shape[0], *rows.shape[1:])), rows))

    def reduce_scatter(self, group):
        """The own part."""
        return lambda rows: rows[-(rows.shape[0] // len(group)) :]


class ThereAndBack(nn.Cell):
    """Dispatch and combine with experts that change nothing."""

    def __init__(self, mode, topology, pad):
        super().__init__(auto_prefix=False)
        self.dispatcher = Dispatcher(mode, topology, topology.ep - 1, HIDDEN, TOP_K, Silent(), Rows(), pad)

    def construct(self, tokens, probs, ids):
        rows, meta, first, turn = self.dispatcher.to_nodes(tokens, pack(probs, ids), first_turn(tokens))
        copies, ends, second, turn = self.dispatcher.to_experts(rows, meta, turn)
        sums, turn = self.dispatcher.from_experts(copies, second, turn)
        return self.dispatcher.from_nodes(sums, first, turn)[0], ends


@pytest.mark.parametrize("pad", [False, True])
@pytest.mark.parametrize(
    ("mode", "topology"),
    [("global", Topology(1, 4, EXPERTS)), ("hierarchical", TWO_NODES), ("deduplicated", TWO_NODES)],
)
@pytest.mark.parametrize("chosen", ["first", "own"])
def test_a_rank_without_rows_finishes_and_adds_nothing(mode, topology, pad, chosen):
    ms.set_context(mode=ms.PYNATIVE_MODE)
    rng = np.random.default_rng(1)
    values = rng.standard_normal((TOKENS, HIDDEN)).astype(np.float32)
    weights = rng.random((TOKENS, TOP_K)).astype(np.float32)
    first = 0 if chosen == "first" else EXPERTS - TOP_K
    ids = Tensor(np.tile(np.arange(first, first + TOP_K, dtype=np.int32), (TOKENS, 1)))
    cell = ThereAndBack(mode, topology, pad)

    def total(tokens, probs):
        out, ends = cell(tokens, probs, ids)
        return ops.reduce_sum(out), out, ends

    step = ms.value_and_grad(total, (0, 1), has_aux=True)
    (_, out, ends), gradients = step(Tensor(values), Tensor(weights))
    here = chosen == "own"
    # one row more than arrived, for the first own expert, and a row for each where padded
    counts = np.array([TOKENS * here + 1, TOKENS * here]) + pad
    np.testing.assert_array_equal(ends.asnumpy(), np.cumsum(counts))
    np.testing.assert_allclose(out.asnumpy(), here * values * weights.sum(1, keepdims=True), rtol=1e-6)
    scale = here * weights.sum(1, keepdims=True)
    np.testing.assert_allclose(gradients[0].asnumpy(), np.broadcast_to(scale, values.shape), rtol=1e-6)
    expected = here * np.broadcast_to(values.sum(1, keepdims=True), weights.shape)
    np.testing.assert_allclose(gradients[1].asnumpy(), expected, rtol=1e-5, atol=1e-6)
