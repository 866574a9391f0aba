from pathlib import Path

import numpy as np
import pytest
from mindspore import Tensor, nn

from plugins.cpu_backend import transport
from plugins.cpu_backend.expert_parallel import Net, Rows
from plugins.cpu_backend.transport import Mesh
from plugins.hierarchical_ep.dispatcher import Dispatcher, first_turn, pack
from plugins.hierarchical_ep.topology import Topology

EXPERTS, TOP_K, HIDDEN = 4, 4, 2


class Alone(nn.Cell):
    """There and back on one rank, with experts that change nothing."""

    def __init__(self):
        super().__init__(auto_prefix=False)
        self.dispatcher = Dispatcher("global", Topology(1, 1, EXPERTS), 0, HIDDEN, TOP_K, Net([0]), Rows())

    def construct(self, tokens, probs, ids):
        copies, ends, route, turn = self.dispatcher.to_experts(tokens, pack(probs, ids), first_turn(tokens))
        out, turn = self.dispatcher.from_experts(copies, route, turn)
        return out, ends


@pytest.mark.usefixtures("graph_mode")
def test_more_rows_than_the_root_of_what_int32_holds(monkeypatch):
    monkeypatch.setattr(transport, "_open", [Mesh(0, 1)])
    rng, count = np.random.default_rng(3), 16_000
    tokens = rng.standard_normal((count, HIDDEN)).astype(np.float32)
    probs = rng.random((count, TOP_K)).astype(np.float32)
    ids = rng.permuted(np.tile(np.arange(EXPERTS, dtype=np.int32), (count, 1)), axis=1)
    assert (count * TOP_K) ** 2 > 2**31
    out, ends = Alone()(Tensor(tokens), Tensor(probs), Tensor(ids))
    np.testing.assert_allclose(out.asnumpy(), tokens * probs.sum(1, keepdims=True), atol=1e-5)
    np.testing.assert_array_equal(ends.asnumpy(), count * np.arange(1, EXPERTS + 1))


WORKER = Path(__file__).with_name("exchange_worker.py")


@pytest.mark.slow
def test_every_mode_on_four_workers(workers, tmp_path):
    codes, logs = workers.cluster(4, [WORKER], tmp_path)
    for log in logs[1:]:
        assert "all modes agree" in log, log[-3000:]
    assert not any(codes), codes
