"""These tests check what the launch scripts start, with a stand-in for msrun, and how they end it."""

import functools
import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

from launch.run.command import train
from launch.run.cores import of_host
from launch.run.msrun import ROOT
from launch.run.preflight import only_run_in
from launch.run.script import PORT, SCRIPTS
from plugins.errors import ClusterError
from tests.launch.run.scripts import MINI, ascend, generate
from tools.files.locks import is_left

ENVIRONMENT = (
    *("HCCL_CONNECT_TIMEOUT", "ASCEND_PROCESS_LOG_PATH", "LOG_MF_PATH", "TC3_SUPERVISED", "PYTHONPATH"),
    *("SHARED_PATHS", "DEVICE_NUM_PER_NODE", "TC3_CORES", "OMP_NUM_THREADS"),
)
FAKE = f"""#!{sys.executable}
import json, os, subprocess, sys, time
out = os.environ["RECORD"]
environment = {{name: os.environ.get(name) for name in {ENVIRONMENT}}}
with open(out + ".part", "w") as file:
    json.dump({{"argv": sys.argv[1:], "environment": environment, "cwd": os.getcwd()}}, file)
if "WORKER" in os.environ:
    code = "import time; print(flush=True); time.sleep(3600)"
    if "STUBBORN" in os.environ:
        code = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + code
    worker = subprocess.Popen([sys.executable, "-c", code], start_new_session=True, stdout=subprocess.PIPE)
    worker.stdout.readline()  # it has started, and may be deaf now
    open(os.environ["WORKER"], "w").write(str(worker.pid))
    os.replace(out + ".part", out)
    worker.wait()
os.replace(out + ".part", out)
log_dir = next(word.split("=", 1)[1] for word in sys.argv if word.startswith("--log_dir="))
open(log_dir + "/worker_0.log", "w").write(os.environ.get("SAYS", ""))
sys.exit(int(os.environ.get("CODE", "0")))
"""


@pytest.fixture
def start(tmp_path):
    """Start a script with a stand-in for msrun and no variables of a cluster manager or other tests: the process."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "msrun").write_text(FAKE)
    (folder / "msrun").chmod(0o755)
    foreign = ("SLURM", "NODE_RANK", "MASTER", "BIND", *ENVIRONMENT)
    clean = {key: value for key, value in os.environ.items() if not key.startswith(foreign)}

    def start(text, *arguments, **environment):
        script = tmp_path / "run.sh"
        script.write_text(text)
        given = {
            **clean,
            "PATH": f"{folder}:{Path(sys.executable).parent}:{clean['PATH']}",  # the scripts' `python` has MindSpore
            "TC3_ROOT": str(ROOT),
            "RUN_DIR": str(tmp_path / "run dir"),
            "RECORD": str(tmp_path / "record"),
            "BIND": "no",  # half a second for each script
            **environment,
        }
        command = ["bash", str(script), *arguments]
        pipe = subprocess.PIPE
        hear = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a background job's children are deaf
        return subprocess.Popen(
            command, env=given, cwd=tmp_path, stderr=pipe, text=True, start_new_session=True, preexec_fn=hear
        )

    return start


@pytest.fixture
def run(start, tmp_path):
    """Run a script to its end: (exit code, what msrun was given or None, stderr)."""

    def run(text, *arguments, **environment):
        (tmp_path / "record").unlink(missing_ok=True)
        process = start(text, *arguments, **environment)
        _, err = process.communicate(timeout=600)
        record = tmp_path / "record"
        return process.returncode, json.loads(record.read_text()) if record.exists() else None, err

    return run


def test_the_command_prints_the_script_and_passes_everything_on(monkeypatch, hosts, tmp_path, run):
    monkeypatch.chdir(tmp_path)
    given = [str(ROOT / MINI), "--script", "--nodes", str(hosts("a 1\nb 1\n")), "--port", "6000", "--steps", "50"]
    given += ["--set", "plugins.held_out_loss.data_path=a b'c", "--run-dir", "here", "--resume", "old/iteration_1"]
    result = CliRunner().invoke(train, given)
    assert result.exit_code == 0 and not list(tmp_path.glob("here"))
    code, record, err = run(result.stdout, "1", RUN_DIR="")
    assert code == 0, err
    argv = record["argv"]
    assert argv[: argv.index("--config")] == [
        "--worker_num=2",
        "--local_worker_num=1",
        "--node_rank=1",
        "--master_addr=a",
        "--master_port=6000",
        "--join=True",
        f"--log_dir={tmp_path}/here/logs/node_1",
        "--tail_worker_log=1",
        f"{ROOT}/launch/train.py",
    ]
    assert argv[argv.index("--config") :] == [
        *("--config", MINI, "--run-dir", f"{tmp_path}/here"),
        *("--set", "plugins.held_out_loss.data_path=a b'c"),
        *("--set", "train_dataset.data_loader.sizes.0=400", "--set", "lr_schedule.total_steps=50"),
        *("--resume", f"{tmp_path}/old/iteration_1"),
    ]


def test_the_mini_script_runs_on_one_node(run, tmp_path):
    code, record, err = run((SCRIPTS / "mini-pretrain_dp2.sh").read_text())
    assert code == 0, err
    assert record["argv"] == [
        "--worker_num=2",
        "--local_worker_num=2",
        "--node_rank=0",
        "--master_addr=127.0.0.1",
        f"--master_port={PORT}",
        "--join=True",
        f"--log_dir={tmp_path}/run dir/logs/node_0",
        "--tail_worker_log=1",
        f"{ROOT}/launch/train.py",
        *("--config", MINI, "--run-dir", f"{tmp_path}/run dir"),
    ]
    environment = record["environment"]
    assert record["cwd"] == str(ROOT) and environment["PYTHONPATH"].split(":")[0] == str(ROOT)
    assert environment["TC3_SUPERVISED"] == "1"
    assert environment["LOG_MF_PATH"] == f"{tmp_path}/run dir/logs/node_0/mindformers"
    assert environment["HCCL_CONNECT_TIMEOUT"] is None, "nothing of Ascend's on CPU"
    assert environment["TC3_CORES"] is None


SLURM = {"SLURM_JOB_NODELIST": "n[0-511]", "SLURM_NODEID": "511", "ASCEND_HOME_PATH": "/cann"}
BOTH = [
    ("mini-pretrain_dp2", [], {"BIND": ""}),
    ("telechat3_438b-pretrain_4k", ["3"], {"ASCEND_HOME_PATH": "/cann", "MASTER_PORT": "9000", "RESUME": "a b"}),
    ("telechat3_438b-pretrain_4k", [], SLURM),
    ("telechat3_438b-pretrain_4k", ["512"], {}),
    ("mini-pretrain", [], {"CODE": "1", "SAYS": "tc3: no such corpus"}),
    ("mini-pretrain", [], {"TC3_ROOT": ""}),
    ("mini-pretrain", [], {"TC3_ROOT": "", "SLURM_SUBMIT_DIR": str(ROOT)}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "arguments", "environment"), BOTH, ids=str)
def test_a_script_that_sources_the_body_does_what_one_that_holds_it_does(run, tmp_path, name, arguments, environment):
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.write_text("#!/bin/sh\nseq -f n%.0f 0 511\n")
    scontrol.chmod(0o755)
    folder, recipe = name.split("-")
    alone = CliRunner().invoke(
        train, [str(ROOT / "recipes" / folder / f"{recipe}.yaml"), "--script", "--run-dir", f"output/{name}"]
    )
    assert alone.exit_code == 0, alone.output
    short = (SCRIPTS / f"{name}.sh").read_text()
    assert len(short.splitlines()) <= 20 < len(alone.stdout.splitlines())
    first, second = run(short, *arguments, **environment), run(alone.stdout, *arguments, **environment)
    assert first == second
    assert (first[1] is None) == (first[0] == 2), first[2]


@pytest.mark.slow
def test_workers_on_cpu_get_this_hosts_cores(run, tmp_path):
    code, record, err = run((SCRIPTS / "mini-pretrain_dp2.sh").read_text(), BIND="")
    assert code == 0, err
    planned = of_host(2, True, tmp_path / "cores.json")
    assert record["environment"]["TC3_CORES"] == planned.environment.get("TC3_CORES")
    assert planned.said and all(f"note: {sentence}\n" in err for sentence in planned.said)
    assert not [word for word in record["argv"] if word.startswith("--bind")]


PLANNER = """#!/bin/sh
[ "$*" = "-m launch.run.cores 8 Ascend $RUN_DIR/logs/node_1/cores.json" ] || exit 9
%s
"""


@pytest.mark.parametrize(
    ("answer", "options", "cores", "threads"),
    [
        (
            "echo 'BINDING=(--bind_numa=/r/cores.json)'; echo export OMP_NUM_THREADS=18",
            ["--bind_numa=/r/cores.json"],
            None,
            "18",
        ),
        ("echo \"export TC3_CORES='0-3,8 4-7'\"; echo export OMP_NUM_THREADS=4", [], "0-3,8 4-7", "4"),
        ("echo 'BINDING=()'", [], None, None),
        ("exit 1", ["--bind_core=True"], None, None),
    ],
    ids=["by msrun", "by each worker", "more workers than cores", "no plan"],
)
def test_on_ascend_the_plan_is_made_where_the_workers_start(run, tmp_path, answer, options, cores, threads):
    (tmp_path / "bin" / "python").write_text(PLANNER % answer)
    (tmp_path / "bin" / "python").chmod(0o755)
    code, record, err = run(generate(ascend(data_parallel=16)), "1", ASCEND_HOME_PATH="/cann", BIND="yes")
    assert code == 0, err
    assert [word for word in record["argv"] if word.startswith("--bind")] == options
    assert ("no plan of cores for this node" in err) == (answer == "exit 1")
    environment = record["environment"]
    assert environment["TC3_CORES"] == cores and threads in (None, environment["OMP_NUM_THREADS"])


def test_mindformers_may_save_the_checkpoint_of_many_nodes(run, hosts, tmp_path, monkeypatch):
    from mindformers.utils import file_utils

    recipe = {**ascend(data_parallel=16), "context": {"device_target": "CPU"}, "checkpoint": {"save_path": "/else"}}
    code, record, err = run(generate(recipe, hosts("a 8\nb-c 8\n")), "0", MASTER_ADDR="10.0.0.1")
    assert code == 0, err
    monkeypatch.setattr(file_utils, "get_real_group_size", lambda: 16)
    folders = [f"{tmp_path}/run dir/checkpoint", "/else/checkpoint"]
    assert [file_utils.is_publicly_accessible_path(folder) for folder in folders] == [False, False], "the test bites"
    for name in ("SHARED_PATHS", "DEVICE_NUM_PER_NODE"):
        monkeypatch.setenv(name, record["environment"][name])
    assert [file_utils.is_publicly_accessible_path(folder) for folder in folders] == [True, True]
    assert record["environment"]["DEVICE_NUM_PER_NODE"] == "8"


def test_long_lists_of_names_with_hyphens_stay_whole(hosts, tmp_path):
    names = [f"gpu-node-{number}.hpc-center.org" for number in range(40)]
    text = generate(ascend(data_parallel=320), hosts("".join(f"{name} 8\n" for name in names)))
    values = text[: text.index("# ----")]
    found = subprocess.run(
        ["bash", "-c", values + 'printf "%s\\n" "${HOSTS[@]}"'], capture_output=True, text=True, check=True
    )
    assert found.stdout.split() == names


@pytest.mark.slow
def test_on_two_nodes_the_rank_comes_from_whoever_knows_it(run, hosts):
    here = os.uname().nodename
    text = generate({**ascend(data_parallel=2), "context": {"device_target": "CPU"}}, hosts(f"first 1\n{here} 1\n"))
    for arguments, environment, rank in [
        ([], {}, 1),  # by its own name
        (["0"], {"NODE_RANK": "1"}, 0),
        ([], {"NODE_RANK": "0", "SLURM_NODEID": "1"}, 0),
        ([], {"SLURM_NODEID": "01"}, 1),
    ]:
        code, record, err = run(text, *arguments, **environment)
        assert code == 0, err
        assert f"--node_rank={rank}" in record["argv"] and "--master_addr=first" in record["argv"]
        assert [word.rsplit("/", 1)[1] for word in record["argv"] if "log_dir" in word] == [f"node_{rank}"]
    assert "--master_addr=10.1.1.1" in run(text, MASTER_ADDR="10.1.1.1")[1]["argv"]
    assert "--node_rank=1" in run(text.replace(here, here.upper()))[1]["argv"], "names are the same in capital letters"


@pytest.mark.slow
def test_slurms_own_list_of_nodes_stands_in_for_the_names_to_edit(run, tmp_path):
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.write_text('#!/bin/sh\n[ "$*" = "show hostnames gpu[7-8]" ] && printf "gpu7\\ngpu8\\n"\n')
    scontrol.chmod(0o755)
    text = generate({**ascend(data_parallel=16), "context": {"device_target": "CPU"}})
    job = {"SLURM_JOB_NODELIST": "gpu[1-8]", "SLURM_STEP_NODELIST": "gpu[7-8]"}  # srun starts a step on some of a job's
    assert {"--master_addr=gpu7", "--node_rank=1"} <= set(run(text, **job, SLURM_NODEID="1")[1]["argv"])
    code, record, err = run(text, SLURM_JOB_NODELIST="gpu[7-8]", SLURM_NODEID="1")
    assert code == 0, err
    assert {"--master_addr=gpu7", "--node_rank=1", "--worker_num=16", "--local_worker_num=8"} <= set(record["argv"])


@pytest.mark.slow
def test_what_is_wrong_on_a_node_is_one_line_and_code_2(run, hosts, tmp_path):
    two = generate(ascend(data_parallel=2), hosts("a 1\nb 1\n"))
    dvm = {"context": {"jit_config": {"jit_level": "O1"}}}
    fused = generate(
        {**ascend(data_parallel=2), "plugins": {"operator_fusion": {"level": "vector"}}, **dvm}, hosts("a 1\nb 1\n")
    )
    local = two.replace("a b", "localhost b")  # as a name that the node's own hosts file maps to 127.0.0.1
    for text, arguments, environment, message in [
        (two, [], {}, "is not in HOSTS; give this node's number, 0 to 1: run.sh NODE_RANK"),
        (two, ["2"], {}, "node rank 2: want a number from 0 to 1"),
        (two, [], {"NODE_RANK": "x"}, "node rank x: want a number"),
        (two, ["0"], {"ASCEND_HOME_PATH": ""}, "CANN is not set up in this shell; source its set_env.sh"),
        (fused, ["0"], {"MS_DEV_GRAPH_KERNEL_FLAGS": "--x"}, "MS_DEV_GRAPH_KERNEL_FLAGS is exported with other flags"),
        (local, ["0"], {}, "localhost is 127.0.0.1 on this node: set MASTER_ADDR"),
        (two.replace("a b", "a b c"), ["0"], {}, "3 hosts x 1 workers = 3, the recipe needs 2: mend HOSTS"),
        (two, ["0"], {"TC3_ROOT": ""}, "no launch/train.py here: start the script from the checkout"),
    ]:
        code, record, err = run(text, *arguments, **environment)
        assert (code, record) == (2, None) and err.startswith("error: ") and err.count("\n") == 1 and message in err
        assert not (tmp_path / "run dir").exists(), message


def test_on_ascend_timeouts_are_long(run, tmp_path):
    text = generate({**ascend(data_parallel=16)})
    code, record, err = run(text, "1", ASCEND_HOME_PATH="/cann", HCCL_CONNECT_TIMEOUT="")
    assert code == 0, err
    assert {"--cluster_time_out=7200", "--node_rank=1"} <= set(record["argv"])
    assert not [word for word in record["argv"] if word.startswith("--bind")], "BIND=no"
    assert record["environment"]["HCCL_CONNECT_TIMEOUT"] == "7200"
    assert record["environment"]["ASCEND_PROCESS_LOG_PATH"] == f"{tmp_path}/run dir/logs/node_1/ascend"
    kept = run(text, "1", ASCEND_HOME_PATH="/cann", HCCL_CONNECT_TIMEOUT="300")[1]["environment"]
    assert kept["HCCL_CONNECT_TIMEOUT"] == "300"
    swap = generate({**ascend(data_parallel=8), "optimizer": {"swap": True}})
    assert "MS_DEV_RUNTIME_CONF=switch_inline:False" in swap and "MS_DEV_RUNTIME_CONF" not in text


def test_two_scripts_do_not_write_one_run_folder(start, run, hosts, tmp_path):
    """Each wrote over the other's logs, metrics and checkpoints."""
    cpu = {"context": {"device_target": "CPU"}}
    own, saves = tmp_path / "run dir", tmp_path / "saves"
    one = generate({**ascend(data_parallel=1), **cpu, "checkpoint": {"save_path": str(saves)}})
    two = generate({**ascend(data_parallel=2), **cpu}, hosts("first 1\nsecond 1\n"))
    first = start(one, WORKER=str(tmp_path / "worker"))
    while not (tmp_path / "record").exists():
        assert first.poll() is None, first.stderr.read()
        time.sleep(0.02)
    below = psutil.Process(first.pid).children(recursive=True)
    try:
        busy = f"a run is in progress in this folder (pid {first.pid})"
        code, record, err = run(two, "0")
        assert (code, record, err) == (2, None, f"error: {own}: {busy}; choose another RUN_DIR\n")
        code, record, err = run(one, RUN_DIR=str(tmp_path / "other"))
        assert (code, record, err) == (2, None, f"error: {saves}: {busy}; choose another checkpoint.save_path\n")
        assert not (tmp_path / "other").exists() and run(two, "1")[0] == 0
        with pytest.raises(ClusterError, match=re.escape(busy)), only_run_in(own):
            pass
        first.kill()
        code, record, err = run(one)
        assert (code, record) == (2, None) and busy in err, "msrun still runs"
    finally:
        for process in (*below, first):
            with suppress(psutil.NoSuchProcess):
                process.kill()
    first.communicate(timeout=600)  # msrun has ended
    assert run(one)[0] == 0 and is_left(own)
    with only_run_in(own / "logs/node_1"):  # as another node of a run locks
        code, record, err = run(two, "1")
        assert (code, record) == (2, None) and f"{own}/logs/node_1: a run is in progress in this folder (pid " in err
    with only_run_in(own, together=True):
        assert run(two, "0")[2] == f"error: {own}: a run is in progress in this folder (agents of tc3 agent); " + (
            "choose another RUN_DIR\n"
        )


@pytest.mark.parametrize("made", [True, False])
def test_a_refused_script_leaves_the_run_folder_as_it_was(run, tmp_path, made):
    """It removed an empty folder of the user, and left its lock where the folder of checkpoints cannot be made."""
    own, saves = tmp_path / "run dir", tmp_path / "saves"
    cpu = {"context": {"device_target": "CPU"}}
    text = generate({**ascend(data_parallel=1), **cpu, "checkpoint": {"save_path": str(saves)}})
    if made:
        own.mkdir()
    with only_run_in(saves):
        assert run(text)[0] == 2
    assert not any(own.iterdir()) if made else not own.exists()
    (saves / ".lock").unlink()
    saves.rmdir()
    saves.touch()
    code, record, err = run(text)
    assert (code, record, err) == (2, None, f"error: {saves}: this folder cannot be made\n")
    assert not any(own.iterdir()) if made else not own.exists()


@pytest.mark.slow
def test_msruns_exit_code_is_the_scripts_and_the_workers_errors_are_shown(run):
    code, _, err = run((SCRIPTS / "mini-pretrain.sh").read_text(), CODE="1", SAYS="x\ntc3: no such corpus\ny")
    assert code == 1 and "failed; what the workers of this node say" in err
    assert err.endswith("/logs/node_0/worker_0.log:tc3: no such corpus\n")
    assert "failed" not in run((SCRIPTS / "mini-pretrain.sh").read_text())[2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code", "send", "stubborn"),
    [(signal.SIGTERM, 143, os.kill, True), (signal.SIGINT, 130, os.killpg, False)],
    ids=["SIGTERM, and a worker that ignores it", "Ctrl-C"],
)
def test_an_interrupted_script_leaves_no_process_behind(start, tmp_path, number, code, send, stubborn):
    """The worker is in a session of its own, as msrun's are."""
    worker = tmp_path / "worker"
    text = (SCRIPTS / "mini-pretrain.sh").read_text()
    process = start(text, WORKER=str(worker), **({"STUBBORN": "1"} if stubborn else {}))
    deadline = time.monotonic() + 300
    while not (tmp_path / "record").exists():
        assert time.monotonic() < deadline and process.poll() is None, process.stderr.read()
        time.sleep(0.05)
    below = psutil.Process(process.pid).children(recursive=True)
    assert int(worker.read_text()) in {child.pid for child in below}
    send(process.pid, number)
    _, err = process.communicate(timeout=300)
    assert process.returncode == code and "interrupted: ending 2 processes" in err
    assert psutil.wait_procs(below, timeout=300)[1] == []


@pytest.mark.slow
def test_msrun_itself_understands_the_arguments(run, monkeypatch):
    from mindspore.parallel.cluster.run import get_args

    for text, arguments in [
        ((SCRIPTS / "mini-pretrain.sh").read_text(), []),
        (generate(ascend(data_parallel=16)), ["1"]),
    ]:
        argv = run(text, *arguments, ASCEND_HOME_PATH="/cann", BIND="yes")[1]["argv"]
        monkeypatch.setattr(sys, "argv", ["msrun", *argv])
        parsed = get_args()
        assert parsed.join is True and parsed.task_script == f"{ROOT}/launch/train.py"
        assert parsed.node_rank == int(bool(arguments))
        assert bool(parsed.bind_core or parsed.bind_numa) is bool(arguments), "without NPUs here msrun chooses"
