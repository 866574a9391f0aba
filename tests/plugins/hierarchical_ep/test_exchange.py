import os
import subprocess
import sys
from pathlib import Path

import pytest

from launch.run.msrun import free_port

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
