"""Whether a node may take part again: by the gate of `tc3 doctor`, and nobody is kept out by what cannot be told."""

import pytest

from launch.agent.node.fit import unfit
from plugins.errors import ClusterError
from tools.doctor.probe import run


def report(*rates):
    """A probe of workers that multiply at these rates."""
    workers = [
        {
            "rank": rank, "place": "", "kind": "Ascend 910B", "cores": "", "matmul": [rate] * 7, "memory": [10.0] * 7,
            "disk": [100.0] * 7, "waited": [0.0] * 7, "throttled": [0.0] * 7, "failed": "",
        }
        for rank, rate in enumerate(rates)
    ]  # fmt: skip
    return {"device": "Ascend", "rounds": 7, "folder": "/", "workers": workers, "links": [], "notes": []}


@pytest.mark.parametrize(
    ("rates", "count"),
    [((100.0, 100.0, 101.0, 99.0), 0), ((100.0, 100.0, 20.0, 99.0), 1), ((20.0,), 0)],
    ids=["alike", "one slow", "alone"],
)
def test_a_node_with_a_slow_worker_is_not_fit(monkeypatch, tmp_path, rates, count):
    monkeypatch.setattr(run, "probe", lambda recipe, workers, folder: report(*rates))
    reasons = unfit(len(rates), tmp_path)
    assert len(reasons) == count and all("worker 2" in reason for reason in reasons)


def test_a_node_that_cannot_be_probed_is_not_kept_out(monkeypatch, tmp_path):
    def probe(recipe, workers, folder):
        raise ClusterError("no cores can be told")

    monkeypatch.setattr(run, "probe", probe)
    assert unfit(8, tmp_path) == []
