import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from mindspore import Tensor, nn

from launch.run.msrun import free_port
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
def test_every_mode_on_four_workers(tmp_path):
    msrun = Path(sys.executable).with_name("msrun")
    command = [msrun, "--worker_num=4", "--local_worker_num=4", f"--master_port={free_port()}", "--join=True"]
    command += [f"--log_dir={tmp_path}", WORKER]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": f"{msrun.parent}:{os.environ['PATH']}"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=env)
    logs = {path.name: path.read_text() for path in tmp_path.glob("worker_*.log")}
    for rank in range(4):
        assert "all modes agree" in logs[f"worker_{rank}.log"], logs[f"worker_{rank}.log"][-3000:]
    assert done.returncode == 0, done.stdout + done.stderr
