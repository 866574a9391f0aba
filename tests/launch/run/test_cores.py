"""Cores of the workers of a launch: by msrun's file, by the workers themselves, or by nobody, and always said."""

import json
import os
import shlex
import subprocess
import sys

import pytest

from launch.run.cores import of_host, of_launch
from launch.run.msrun import ROOT, worker_environment
from launch.workers.cores import binds_itself, with_bind_file
from tests.tools.process.roots import FOUR, MIXED, PAIRS, atlas, cores_of, cpuset_files, numa_files, write
from tools.recipe.load import load_recipe


@pytest.fixture(autouse=True)
def _no_visible_devices(monkeypatch):
    monkeypatch.delenv("ASCEND_RT_VISIBLE_DEVICES", raising=False)


@pytest.fixture
def host(tmp_path):
    """An Atlas A2 with taskset: its root."""

    return lambda **facts: atlas(tmp_path, **facts)


def plain(tmp_path, cores, nodes=1):
    return write(tmp_path, {**numa_files(nodes, cores, nodes), **cpuset_files(f"0-{cores - 1}")})


def test_msrun_takes_a_file_of_the_plan(tmp_path, host, monkeypatch):
    from mindspore.parallel.cluster import run
    from mindspore.parallel.cluster.process_entity import _bind

    file = tmp_path / "logs" / "cores.json"
    root = host()
    cores = of_host(8, False, file, root)
    assert cores.options == (f"--bind_numa={file}",) and "TC3_CORES" not in cores.environment
    assert not file.exists(), "nothing is written for a dry run"
    cores.write()
    for name in ("MSRUN_BIND_FILE", "MSRUN_BIND_FILE_HASH"):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(_bind, "_check_command_availability", lambda name: name == "taskset")
    taken = run._parse_and_validate_bind_numa(str(file))
    _bind._validate_bind_config_availability(taken, list(range(8)), list(range(192)))
    words = [_bind._generate_bind_prefix_from_config(rank, taken) for rank in range(8)]
    assert words[7] == ["taskset", "-c", "61-71,85-91"], "memory is left to Linux"
    assert cores.environment == {"OMP_NUM_THREADS": "18"}, "threads of the main module"
    assert cores.said[0].startswith("cores: worker 0: 146-156,170-180; worker 1: ")


@pytest.mark.parametrize("what", ["version 2", "no taskset", "a cpuset that msrun does not know"])
def test_where_msrun_cannot_bind_the_workers_do(tmp_path, host, what):
    root = host(version=2) if what == "version 2" else host()
    if what == "no taskset":
        (tmp_path / "usr/bin/taskset").unlink()
    elif what.startswith("a cpuset"):
        write(tmp_path, {"sys/fs/cgroup/cpuset/cpuset.cpus": "0-143", "sys/fs/cgroup/cpuset/deep/cpuset.cpus": "0-191"})
        write(tmp_path, {"proc/self/cgroup": "3:cpuset:/deep\n"})
    cores = of_host(8, False, tmp_path / "cores.json", root)
    lists = cores.environment["TC3_CORES"].split()
    assert cores.options == () and cores.file is None
    assert len(lists) == 8 and lists[0] == "146-156,170-180" and cores.environment["OMP_NUM_THREADS"] == "22"


@pytest.mark.parametrize("version", [1, 2])
def test_visible_devices_in_another_order(tmp_path, host, monkeypatch, version):
    """MindSpore sorts them: the first worker drives NPU 2, whose near cores it gets, whoever binds it."""
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "6,2,4")
    cores = of_host(3, False, tmp_path / "cores.json", host(version=version))
    lists = [cores_of(text) for text in cores.said[0].replace(";", "").split() if text[0].isdigit() and text[-1] != ":"]
    sockets = [set(range(96, 144)), set(range(0, 48)), set(range(48, 96))]  # those of NPU 2, 4 and 6
    assert len(lists) == 3 and all(given <= near for given, near in zip(lists, sockets, strict=True))
    assert "Write 2,4,6" in cores.said[1]
    if version == 1:
        assert list(cores.file[1]["bind_cpu"]) == ["device2", "device4", "device6"]
    else:
        assert [cores_of(text) for text in cores.environment["TC3_CORES"].split()] == lists


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    ("nodes", "npus", "allowed", "remote"),
    [(8, PAIRS, "0-191", 0), (8, MIXED, "0-191", 0), (4, FOUR, "0-191", 0), (8, PAIRS, "0-20,22-95,144-191", 32)],
    ids=["pairs", "mixed", "four nodes", "a cut cpuset"],
)
def test_no_remote_core_where_none_is_needed(tmp_path, host, nodes, npus, allowed, remote, version):
    """On both public topologies, with one node a socket, and where the cpuset leaves workers 2 and 3 no near core."""
    cores = of_host(8, False, tmp_path / "cores.json", host(nodes=nodes, npus=npus, allowed=allowed, version=version))
    if version == 1:
        lists = [set().union(*map(cores_of, roles.values())) for roles in cores.file[1]["bind_cpu"].values()]
    else:
        lists = [cores_of(text) for text in cores.environment["TC3_CORES"].split()]
    assert set().union(*lists) <= cores_of(allowed) and sum(map(len, lists)) == len(set().union(*lists)), (
        "no core twice"
    )
    socket_of = [min(cores_of(near)) // 48 for near in npus]
    assert sum(core // 48 != socket for given, socket in zip(lists, socket_of, strict=True) for core in given) == remote


def test_workers_on_cpu_divide_the_cores(tmp_path):
    cores = of_host(2, True, tmp_path / "cores.json", plain(tmp_path, 8))
    assert cores.environment == {"TC3_CORES": "0-3 4-7", "OMP_NUM_THREADS": "4"} and cores.options == ()
    assert of_host(1, True, tmp_path / "cores.json", plain(tmp_path, 8)).environment == {}, "nothing to divide"


def test_more_workers_than_cores_is_said_and_not_refused(tmp_path):
    cores = of_host(4, True, tmp_path / "cores.json", plain(tmp_path, 2))
    assert cores.said == ("cores: 4 workers, but 2 cores are allowed: none is bound, and all share them",)
    assert (cores.options, cores.environment, cores.file) == ((), {}, None)


@pytest.mark.parametrize(
    "files",
    [{}, {**numa_files(2, 8, 2), "proc/self/status": "Cpus_allowed_list:\t0-x\n"}, {**numa_files(1, 8, 1)}],
    ids=["nothing there", "a broken list", "no NPU"],
)
def test_a_plan_that_fails_stops_nothing(tmp_path, files):
    cores = of_host(2, False, tmp_path / "cores.json", write(tmp_path, files))
    assert cores.options == ("--bind_core=True",), "msrun's own choice, which a script had before"
    assert len(cores.said) == 1 and cores.said[0].startswith("cores: no plan for this host, msrun --bind_core=True")
    if "proc/self/status" in files or not files:
        cores = of_host(2, True, tmp_path / "cores.json", write(tmp_path, files))
        assert cores.options == () and "none is bound" in cores.said[0]


def test_any_error_is_a_plan_that_fails(tmp_path, monkeypatch):
    monkeypatch.setattr("launch.run.cores.make_plan", lambda *arguments: 1 / 0)
    assert "none is bound: division by zero" in of_host(2, True, tmp_path / "c.json", plain(tmp_path, 8)).said[0]


def test_a_recipe_that_binds_itself_is_left_alone(tmp_path, monkeypatch):
    own = {"context": {"device_target": "CPU", "affinity_cpu_list": {"device_0": ["0-1"]}}}
    cores = of_launch(own, 2, tmp_path / "cores.json")
    assert cores.environment == {} and "the recipe has its own" in cores.said[0]
    assert not any(binds_itself(load_recipe(path)) for path in (ROOT / "recipes").glob("*/pretrain*.yaml"))
    monkeypatch.setenv("MSRUN_BIND_FILE", "/r/cores.json")
    assert with_bind_file(own) == own


def test_threads_follow_the_file_that_msrun_took():
    recipe = {"context": {"device_target": "Ascend", "max_device_memory": "59GB"}}
    assert with_bind_file(recipe, {}) is recipe
    bound = with_bind_file(recipe, {"MSRUN_BIND_FILE": "/r/cores.json"})
    assert bound["context"] == {**recipe["context"], "affinity_config": "/r/cores.json"}
    assert "affinity_config" not in recipe["context"], "the run's own recipe stays as it was"
    assert with_bind_file(recipe, {"MSRUN_BIND_FILE": "/r/cores"}) is recipe, "MindFormers would take it for a mapping"


def test_what_the_user_set_stays(tmp_path):
    cores = {"TC3_CORES": "0-3 4-7", "OMP_NUM_THREADS": "4"}
    given = worker_environment(2, tmp_path, {"OMP_NUM_THREADS": "7"}, cores)
    assert (given["TC3_CORES"], given["OMP_NUM_THREADS"]) == ("0-3 4-7", "7")
    assert worker_environment(2, tmp_path, {"TC3_CORES": "1 0"}, cores)["TC3_CORES"] == "1 0"


def words(tmp_path, *arguments, **environment):
    """(stdout, stderr) of the command of a script, on this host, whatever it is."""
    command = [sys.executable, "-m", "launch.run.cores", *arguments, str(tmp_path / "cores.json")]
    environ = {**os.environ, "TC3_CORES": "", "OMP_NUM_THREADS": "", **environment}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=True)
    return done.stdout, done.stderr


def test_what_a_script_evaluates(tmp_path):
    out, err = words(tmp_path, "100000", "Ascend")
    assert out == "BINDING=(--bind_core=True)\n" and err.startswith("note: cores: no plan for this host")
    assert not (tmp_path / "cores.json").exists()
    planned = of_host(2, True, tmp_path / "cores.json").environment
    if planned:
        lists = shlex.quote(planned["TC3_CORES"])
        wanted = f"BINDING=()\nexport TC3_CORES={lists}\nexport OMP_NUM_THREADS={planned['OMP_NUM_THREADS']}\n"
        assert words(tmp_path, "2", "CPU")[0] == wanted
        assert "OMP_NUM_THREADS" not in words(tmp_path, "2", "CPU", OMP_NUM_THREADS="3")[0], "what the user set stays"


def test_the_file_is_json(tmp_path, host):
    cores = of_host(2, False, tmp_path / "new" / "cores.json", host())
    cores.write()
    assert list(json.loads((tmp_path / "new" / "cores.json").read_text())["bind_cpu"]) == ["device0", "device1"]
