"""The bind file through msrun's own parser, and msrun's own plan, computed by its own code on recorded hosts."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from launch.run.msrun import free_port
from tests.tools.process.roots import FOUR, MIXED, PAIRS, atlas, cores_of
from tools.affinity import msrun
from tools.affinity.cli import affinity
from tools.affinity.plan import make_plan
from tools.affinity.topology import read_host
from tools.process.host import Root, compress

NPUS = list(range(8))


@pytest.fixture
def installed(monkeypatch):
    """msrun's modules, on a host without npu-smi; what they leave in the environment is taken back."""
    from mindspore.parallel.cluster import run
    from mindspore.parallel.cluster.process_entity import _bind
    from mindspore.runtime import thread_bind_core

    for name in ("MSRUN_BIND_FILE", "MSRUN_BIND_FILE_HASH", "MSRUN_CPU_LIST", "ASCEND_RT_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(_bind, "_check_command_availability", lambda name: True)
    return run, _bind, thread_bind_core


def written(tmp_path, plan, numactl=True):
    path = tmp_path / "bind.json"
    path.write_text(json.dumps(msrun.bind_file(plan, numactl)))
    return path


@pytest.mark.parametrize("numactl", [True, False])
def test_msrun_takes_the_file_and_starts_workers_as_planned(tmp_path, installed, numactl):
    run, bind, _ = installed
    host = read_host(atlas(tmp_path / "host"))
    plan = make_plan(host, 8, NPUS)
    config = run._parse_and_validate_bind_numa(str(written(tmp_path, plan, numactl)))
    bind._validate_bind_config_availability(config, sorted(host.nodes), sorted(host.allowed))
    for worker in plan.workers:
        words = bind._generate_bind_prefix_from_config(worker.rank, config)
        main = compress(worker.roles["main"])
        memory = ["--membind", compress(worker.memory)]
        assert words == (["numactl", *memory, "--physcpubind", main] if numactl else ["taskset", "-c", main])


def test_threads_get_the_cores_of_their_module(tmp_path, installed, monkeypatch):
    """`context.affinity_config: FILE` in a worker that msrun has started."""
    run, _, threads = installed
    plan = make_plan(read_host(atlas(tmp_path / "host")), 8, NPUS)
    path = written(tmp_path, plan)
    run._parse_and_validate_bind_numa(str(path))
    cores, modules, fixed = threads._extract_affinity_from_bind_file(str(path))
    given = sorted(cores_of(cores[0]))
    roles = plan.workers[0].roles
    assert fixed == "True" and {name: [given[i] for i in places] for name, places in modules.items()} == {
        name: sorted(roles[name]) for name in ("runtime", "pynative", "minddata")
    }


def test_msrun_refuses_every_file_on_control_groups_of_version_2(tmp_path, installed):
    _, bind, _ = installed
    host = read_host(atlas(tmp_path, version=2))
    plan = make_plan(host, 8, NPUS)
    with pytest.raises(RuntimeError, match="No available CPU in the environment"):
        bind._validate_bind_config_availability(msrun.bind_file(plan, True), sorted(host.nodes), list(host.msrun))
    assert "No available CPU in the environment" in msrun.obstacle(host, plan)
    assert msrun.own_plan(host, NPUS) == [[]] * 8


def answers(host):
    """npu-smi, lspci and lscpu of a host, for msrun's `execute_command`."""

    def execute(command, timeout=10):
        words = " ".join(command)
        if words == "npu-smi info -m":
            return "NPU ID Chip ID Chip Logic ID Chip Name\n" + "\n".join(f"{n} 0 {n} Ascend" for n in host.npus)
        if words.startswith("npu-smi info -t board"):
            return f"\tPCIe Bus Info                  : 0000:0{command[5]}:00.0\n"
        if words.startswith("lspci"):
            return f"\tNUMA node: {host.npus[int(command[2][6])]}\n"
        rows = [f"NUMA node{node} CPU(s):  {compress(cores)}" for node, cores in host.nodes.items()]
        return "\n".join([f"NUMA node(s): {len(rows)}", *rows])

    return execute


CASES = {
    "pairs": (8, PAIRS, "0-191", 96),
    "mixed": (8, MIXED, "0-191", 72),
    "four nodes": (4, FOUR, "0-191", 0),
    "cut": (8, PAIRS, "0-20,22-95,144-191", 65),
}


@pytest.mark.parametrize("case", CASES)
def test_its_own_plan_is_that_of_its_own_code(tmp_path, installed, monkeypatch, case):
    nodes, npus, cores, remote = CASES[case]
    host = read_host(atlas(tmp_path, nodes, npus, cores))
    _, _, threads = installed
    monkeypatch.setattr(threads, "execute_command", answers(host))
    theirs = threads._auto_generate_bind_core_strategy(8, sorted(host.msrun))
    ours = msrun.own_plan(host, NPUS)
    assert ours == [theirs[npu] for npu in NPUS]
    far = [host.distance[host.npus[npu], host.node_of(core)] >= 20 for npu in NPUS for core in ours[npu]]
    assert sum(far) == remote


@pytest.mark.parametrize("workers", [1, 5, 8])
def test_its_own_plan_without_npus(tmp_path, installed, workers):
    host = read_host(atlas(tmp_path, npus=[]))
    theirs = installed[2]._equal_distribute_cpu_strategy(workers, sorted(host.msrun))
    assert msrun.own_plan(host, [None] * workers) == list(theirs.values())


def test_visible_devices_in_another_order(tmp_path, monkeypatch, installed):
    """The worker that MindSpore takes for device 2's has the cores near NPU 2, under that name."""
    host = read_host(atlas(tmp_path))
    environ = {"ASCEND_RT_VISIBLE_DEVICES": "6,2,4"}
    npus, notes = msrun.visible(environ, list(host.npus))
    assert npus == [2, 4, 6] and "Write 2,4,6" in notes[0]
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "6,2,4")
    monkeypatch.setattr(installed[2].context, "get_context", lambda name: "Ascend")
    assert [installed[2]._get_physical_device_id(rank, "") for rank in range(3)] == npus
    plan = make_plan(host, 3, npus)
    assert [worker.home for worker in plan.workers] == [4, 0, 2]
    assert list(msrun.bind_file(plan, True)["bind_cpu"]) == ["device2", "device4", "device6"]
    assert all(worker.counts(host)["remote"] == 0 for worker in plan.workers)


def test_what_else_is_wrong_with_visible_devices():
    assert msrun.visible({}, NPUS) == (NPUS, [])
    npus, notes = msrun.visible({"ASCEND_RT_VISIBLE_DEVICES": "1, 2"}, NPUS)
    assert npus == [1] and "up to the first other character" in notes[0]
    npus, notes = msrun.visible({"ASCEND_RT_VISIBLE_DEVICES": "1,9"}, NPUS)
    assert npus == [1] and "no NPU 9" in notes[0]


def test_a_core_that_msrun_does_not_know_is_said(tmp_path):
    """Its own folder of the cpuset is deeper than the one that msrun reads."""
    root = atlas(tmp_path)
    (tmp_path / "sys/fs/cgroup/cpuset/deep").mkdir()
    (tmp_path / "sys/fs/cgroup/cpuset/deep/cpuset.cpus").write_text("0-191")
    (tmp_path / "sys/fs/cgroup/cpuset/cpuset.cpus").write_text("0-143")
    (tmp_path / "proc/self/cgroup").write_text("3:cpuset:/deep\n")
    host = read_host(root)
    assert "takes cores 146-167" in msrun.obstacle(host, make_plan(host, 2, [0, 1]))


MSRUN = Path(sys.executable).parent / "msrun"
SCRIPT = "import os; print('CORES', os.environ['MS_ROLE'], os.environ['RANK_ID'], *sorted(os.sched_getaffinity(0)))\n"


@pytest.mark.slow
def test_workers_run_on_the_cores_of_the_plan(tmp_path):
    host = read_host(Root())
    if not host.msrun or len(host.allowed) < 2 or host.npus:
        pytest.skip("wants two cores in a cpuset of version 1, and no NPU")
    file, script = tmp_path / "bind.json", tmp_path / "show.py"
    script.write_text(SCRIPT)
    assert CliRunner().invoke(affinity, ["--workers", "2", "--bind-file", str(file)]).exit_code == 0
    command = [str(MSRUN), "--worker_num=2", "--local_worker_num=2", f"--master_port={free_port()}", "--join=True"]
    words = [*command, f"--log_dir={tmp_path / 'logs'}", f"--bind_numa={file}", str(script)]
    environ = {**os.environ, "PATH": f"{MSRUN.parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(words, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr
    logs = "".join(path.read_text() for path in (tmp_path / "logs").glob("worker_*.log"))
    seen = {
        int(row[1]): [int(core) for core in row[2].split()] for row in re.finditer(r"CORES MS_WORKER (\d+) (.*)", logs)
    }
    plan = make_plan(host, 2, None)
    assert seen == {worker.rank: sorted(worker.roles["main"]) for worker in plan.workers}
