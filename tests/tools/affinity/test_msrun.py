"""`tc3 affinity` from the command line, and the bind file that it writes through msrun's own parser.

msrun's own plan is computed by its own code on recorded hosts.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from launch.run.msrun import free_port
from plugins.errors import ClusterError, RecipeError
from tests.tools.process.roots import FOUR, MIXED, PAIRS, atlas, cores_of, cpuset_files, numa_files, write
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


ROOT = Path(__file__).resolve().parents[3]
MINI, LARGE = str(ROOT / "recipes/mini/pretrain_dp2.yaml"), str(ROOT / "recipes/telechat3_438b/pretrain_4k.yaml")


@pytest.fixture(autouse=True)
def _no_visible_devices(monkeypatch):
    monkeypatch.delenv("ASCEND_RT_VISIBLE_DEVICES", raising=False)


def call(root, *arguments):
    """Standard output of `tc3 affinity --root ...`."""
    result = CliRunner().invoke(affinity, ["--root", str(root.path), *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_recipe_for_a_cluster_fills_a_node(tmp_path):
    out = call(atlas(tmp_path), LARGE)
    assert "node 6  144-167  IS0000000000011111111111  <- NPU 0, 1" in out
    assert "worker 7 (NPU 7, node 2): 0 remote; main 61-71,85-91, runtime 63-71,85-91, minddata 92-95" in out
    assert "cores of another socket than their NPU's: 0 here, 96 under msrun --bind_core=True" in out
    assert "msrun --bind_numa FILE" in out and "IRQBALANCE_BANNED_CPULIST=2-23,26-47" in out


def test_json_and_the_file_agree(tmp_path):
    file = tmp_path / "bind.json"
    answer = json.loads(call(atlas(tmp_path / "host"), LARGE, "--bind-file", str(file), "--json"))
    assert json.loads(file.read_text()) == answer["bind_file"]
    first = answer["workers"][0]
    assert (first["npu"], first["remote"], first["msrun_bind_core"]["remote"]) == (0, 0, 0)
    assert first["prefix"] == "numactl --membind 6-7 --physcpubind 146-156,170-180"
    assert answer["msrun_refuses"] is None and answer["notes"] == []


def test_prefixes_where_msrun_cannot_bind(tmp_path):
    out = call(atlas(tmp_path, version=2), LARGE)
    assert "  worker 7: numactl --membind 2-3 --physcpubind 61-71,85-95" in out
    assert "and msrun --bind_core=True would bind nothing" in out and "msrun --bind_numa FILE" not in out


def test_a_recipe_on_cpu_takes_no_npu(tmp_path):
    answer = json.loads(call(atlas(tmp_path), MINI, "--json"))
    assert [row["npu"] for row in answer["workers"]] == [None, None]
    assert list(answer["bind_file"]["bind_cpu"]) == ["device0", "device1"]


def test_a_recipe_for_npus_on_a_host_without(tmp_path):
    root = write(tmp_path, {**numa_files(2, 64, 2), **cpuset_files("0-63")})
    answer = json.loads(call(root, LARGE, "--json"))
    assert len(answer["workers"]) == 8 and "no NPU is seen here" in answer["notes"][0]


def test_more_workers_than_cores(tmp_path):
    root = write(tmp_path, {**numa_files(1, 2, 1), **cpuset_files("0-1")})
    out = call(root, "--workers", "4")
    assert "worker 3: not bound" in out and "note: 4 workers, but 2 cores are allowed" in out
    with pytest.raises(ClusterError, match="none is bound"):
        call(root, "--workers", "4", "--bind-file", str(tmp_path / "bind.json"))
    assert not (tmp_path / "bind.json").exists()


def test_what_is_refused(tmp_path):
    root = write(tmp_path, {**numa_files(1, 2, 1), **cpuset_files("0-1")})
    with pytest.raises(ClusterError, match="name a RECIPE, or give the number of --workers"):
        call(root)
    with pytest.raises(ClusterError, match="--workers 0 is out of range"):
        call(root, "--workers", "0")
    with pytest.raises(RecipeError, match="no such recipe"):
        call(root, "missing.yaml")


def test_this_host():
    """On any host the command makes a plan for one worker, from real files and tools."""
    result = CliRunner().invoke(affinity, ["--workers", "1", "--json"])
    assert result.exit_code == 0 and json.loads(result.stdout)["workers"][0]["cores"]
