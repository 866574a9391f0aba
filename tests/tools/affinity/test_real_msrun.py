"""The real msrun with the file of the real host: what cores its workers say they have."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from tools.affinity.cli import affinity
from tools.affinity.plan import make_plan
from tools.affinity.topology import read_host
from tools.process.host import Root

MSRUN = Path(sys.executable).parent / "msrun"
SCRIPT = "import os; print('CORES', os.environ['MS_ROLE'], os.environ['RANK_ID'], *sorted(os.sched_getaffinity(0)))\n"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_workers_run_on_the_cores_of_the_plan(tmp_path):
    host = read_host(Root())
    if not host.msrun or len(host.allowed) < 2 or host.npus:
        pytest.skip("wants two cores in a cpuset of version 1, and no NPU")
    file, script = tmp_path / "bind.json", tmp_path / "show.py"
    script.write_text(SCRIPT)
    assert CliRunner().invoke(affinity, ["--workers", "2", "--bind-file", str(file)]).exit_code == 0
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(MSRUN), "--worker_num=2", "--local_worker_num=2", f"--master_port={port}", "--join=True"]
    words = [*command, f"--log_dir={tmp_path / 'logs'}", f"--bind_numa={file}", str(script)]
    environ = {**os.environ, "PATH": f"{MSRUN.parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(words, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    logs = "".join(path.read_text() for path in (tmp_path / "logs").glob("worker_*.log"))
    seen = {
        int(row[1]): [int(core) for core in row[2].split()] for row in re.finditer(r"CORES MS_WORKER (\d+) (.*)", logs)
    }
    plan = make_plan(host, 2, None)
    assert seen == {worker.rank: sorted(worker.roles["main"]) for worker in plan.workers}
