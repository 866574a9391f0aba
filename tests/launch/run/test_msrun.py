"""The msrun command of a recipe, its environment and its port."""

import os
import socket
import sys
from pathlib import Path

import pytest

from launch.run import msrun
from launch.run.msrun import (
    ROOT,
    TOGETHER,
    Node,
    check_port,
    cluster_environment,
    free_port,
    msrun_command,
    worker_count,
    worker_environment,
)
from plugins.errors import ClusterError, RecipeError

SIZES = {"data_parallel": 4, "model_parallel": 8, "pipeline_stage": 16, "context_parallel": 2, "expert_parallel": 4}


@pytest.mark.parametrize(
    ("recipe", "count"),
    [
        ({}, 1),
        ({"use_parallel": False, "parallel_config": SIZES}, 1),
        ({"use_parallel": True}, 1),
        ({"use_parallel": True, "parallel_config": {"data_parallel": 2}}, 2),
        ({"use_parallel": True, "parallel_config": SIZES}, 4 * 8 * 16 * 2),  # expert_parallel lies within these
    ],
)
def test_worker_count(recipe, count):
    assert worker_count(recipe) == count


@pytest.mark.parametrize("size", [0, -1, 2.0, True, "2", None])
def test_a_parallel_size_that_is_no_positive_integer_is_refused(size):
    with pytest.raises(RecipeError, match=r"parallel_config.model_parallel: .* is not a positive integer"):
        worker_count({"use_parallel": True, "parallel_config": {"model_parallel": size}})


def test_the_command_is_exact():
    recipe = {"use_parallel": True, "parallel_config": {"data_parallel": 2}}
    command = msrun_command(recipe, Path("/r"), 5000, Path("/c/iteration_3"))
    assert command == [
        str(Path(sys.executable).parent / "msrun"),
        "--worker_num=2",
        "--local_worker_num=2",
        "--master_addr=127.0.0.1",
        "--master_port=5000",
        "--join=True",
        "--log_dir=/r/logs",
        "--tail_worker_log=2",
        str(ROOT / "launch" / "train.py"),
        "--config",
        "/r/recipe.yaml",
        "--run-dir",
        "/r",
        "--resume",
        "/c/iteration_3",
    ]
    assert msrun_command({}, Path("/r"), 5000)[-1] == "/r"
    bound = msrun_command(recipe, Path("/r"), 5000, Path("/c/iteration_3"), ("--bind_numa=/f.json",))
    train = command.index(str(ROOT / "launch" / "train.py"))
    assert bound == [*command[:train], "--bind_numa=/f.json", *command[train:]]


def test_a_python_without_msrun_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(ClusterError, match="install mindspore"):
        msrun_command({}, Path("/r"), 5000)


@pytest.mark.parametrize(("cores", "workers", "threads"), [(8, 2, "4"), (8, 3, "2"), (2, 4, "1")])
def test_the_workers_share_the_cores(monkeypatch, cores, workers, threads):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    assert worker_environment(workers, Path("/r"), {})["OMP_NUM_THREADS"] == threads


def test_the_environment_keeps_what_the_user_has_set_and_finds_this_python_and_repository():
    given = {"OMP_NUM_THREADS": "7", "GLOG_v": "1", "PATH": "/bin", "PYTHONPATH": "/mine", "OTHER": "x"}
    environment = worker_environment(2, Path("/r"), given)
    assert (environment["OMP_NUM_THREADS"], environment["GLOG_v"], environment["OTHER"]) == ("7", "1", "x")
    assert environment["PATH"].split(":") == [str(Path(sys.executable).parent), "/bin"]
    assert environment["PYTHONPATH"].split(":") == [str(ROOT), "/mine"]
    assert worker_environment(1, Path("/r"), {})["GLOG_v"] == "3"
    assert worker_environment(16, Path("/r"), {})["DEVICE_NUM_PER_NODE"] == "16"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "glibc.malloc.hugetlb=1"),
        ({"GLIBC_TUNABLES": ""}, ""),
        ({"GLIBC_TUNABLES": "glibc.rtld.nns=8"}, "glibc.rtld.nns=8"),
    ],
)
def test_workers_allocate_on_huge_pages_unless_told_otherwise(given, expected):
    assert worker_environment(1, Path("/r"), given)["GLIBC_TUNABLES"] == expected


def test_a_port_in_use_is_refused_and_a_free_one_is_not():
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        with pytest.raises(ClusterError, match="in use"):
            check_port(busy.getsockname()[1])
    check_port(free_port())


def test_a_free_port_is_none_that_a_connection_gets_by_itself(monkeypatch):
    assert {free_port() in msrun.PORTS for _ in range(20)} == {True} and max(msrun.PORTS) < 32768
    with socket.socket() as busy:
        busy.bind((msrun.MASTER, free_port()))
        taken = busy.getsockname()[1]
        monkeypatch.setattr(msrun, "PORTS", range(taken, taken + 1))
        assert free_port() != taken


@pytest.mark.parametrize("port", [0, 80, 1023, 65536])
def test_a_port_that_msrun_does_not_take_is_refused(port):
    with pytest.raises(ClusterError, match="from 1024 to 65535"):
        check_port(port)


def test_a_node_of_several_starts_what_the_launch_script_starts(tmp_path):
    """Both say the same to msrun and to the workers; the script in bash, for it runs where nothing is installed."""
    body = (ROOT / "launch" / "script_body.sh").read_text()
    recipe = {"use_parallel": True, "parallel_config": {"data_parallel": 16}, "checkpoint": {"save_path": "/saves"}}
    node, logs = Node(1, 2, 8, "node0"), tmp_path / "logs"
    command = msrun_command(recipe, Path("/r"), 5000, logs=logs, node=node)
    for name in ("worker_num", "local_worker_num", "node_rank", "master_addr", "master_port", "join", "log_dir"):
        assert f"--{name}=" in body and any(word.startswith(f"--{name}=") for word in command)
    assert {"--worker_num=16", "--local_worker_num=8", "--node_rank=1", "--master_addr=node0"} <= set(command)
    assert (
        f"--cluster_time_out={TOGETHER}" in command and f"--cluster_time_out=${{CLUSTER_TIME_OUT:-{TOGETHER}}}" in body
    )
    environment = worker_environment(8, Path("/r"), {}, logs=logs) | cluster_environment(recipe, Path("/r"), logs)
    for name in (
        "HCCL_CONNECT_TIMEOUT",
        "ASCEND_PROCESS_LOG_PATH",
        "SHARED_PATHS",
        "DEVICE_NUM_PER_NODE",
        "LOG_MF_PATH",
    ):
        assert f"export {name}=" in body and name in environment
    assert f"HCCL_CONNECT_TIMEOUT=${{HCCL_CONNECT_TIMEOUT:-{environment['HCCL_CONNECT_TIMEOUT']}}}" in body
    assert (environment["SHARED_PATHS"], environment["DEVICE_NUM_PER_NODE"]) == ("/r,/saves", "8")
    on_cpu = {**recipe, "context": {"device_target": "CPU"}}
    assert list(cluster_environment(on_cpu, Path("/r"), logs)) == ["SHARED_PATHS"]
