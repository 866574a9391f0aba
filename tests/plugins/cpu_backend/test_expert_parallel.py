from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("exchange_worker.py")


@pytest.mark.slow
def test_every_collective_on_three_workers(workers, tmp_path):
    codes, logs = workers.cluster(3, [WORKER], tmp_path)
    for log in logs[1:]:
        assert "all collectives agree" in log, log[-3000:]
    assert not any(codes), codes
