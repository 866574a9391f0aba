"""`tc3 agent --slurm` and `--volcano`: what of the command line is in the file."""

import copy
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from launch.agent.cli import agent
from launch.agent.cluster import Allocation, pod_script, sbatch_file, volcano_job
from launch.run.msrun import ROOT
from plugins.errors import ClusterError
from tests.launch.agent.openapi import broken

MINI = str(ROOT / "recipes/mini/pretrain_dp2.yaml")


def printed(*words):
    done = CliRunner().invoke(agent, [MINI, *words])
    assert done.exit_code == 0, done.output
    return done.stdout


def test_the_agents_get_what_the_command_line_says(tmp_path):
    hosts = tmp_path / "hosts.txt"
    hosts.write_text("a 1\nb 1\nc 1\n")
    words = ["--nodes", str(hosts), "--spares", "1", "--set", "optimizer.weight_decay=0.2", "--steps", "30"]
    text = printed("--slurm", *words, "--no-bind", "--lost-after", "6", "--resume", "output/a/iteration_5")
    assert "\n#SBATCH --nodes=3\n" in text and "\nSLOTS=1 " in text
    assert "|| RUN_DIR=output/mini-pretrain_dp2\n" in text
    options = "--set optimizer.weight_decay=0.2 --steps 30 --no-bind --lost-after 6.0 --resume output/a/iteration_5"
    assert f"\nOPTIONS=({options} --spares 1)\n" in text
    recipe = "recipes/mini/pretrain_dp2.yaml"
    assert text.splitlines()[1].endswith(f": tc3 agent {recipe} --slurm --nodes {hosts} --spares 1 {options}")


def test_the_same_for_volcano():
    job = yaml.safe_load(printed("--volcano", "--restarts", "7", "--run-dir", str(ROOT / "output/my_run")))
    script = job["spec"]["tasks"][0]["template"]["spec"]["containers"][0]["args"][0]
    assert job["metadata"]["name"] == "my-run" and "\nOPTIONS=(--restarts 7)\n" in script
    assert "\nRUN_DIR=output/my_run\n" in script


def test_without_hosts_the_nodes_are_those_of_the_recipe():
    done = CliRunner().invoke(agent, [str(ROOT / "recipes/xing4_29b/pretrain_4k.yaml"), "--slurm"])
    assert "\nSLOTS=16 " in done.stdout and "\n#SBATCH --nodes=8\n" in done.stdout, "128 devices, 16 on each node"


@pytest.mark.parametrize("words", [["--slurm", "--volcano"], []])
def test_one_of_them_or_hosts(words):
    assert CliRunner().invoke(agent, [MINI, *words]).exit_code == 2


SLURM_AGENT = """#!/bin/sh
echo "$@" >>"$RECORD"
[ -n "$DECISION" ] || exit $CODE
mkdir -p "$RUN_DIR/attempts/0001"
echo "{\\"decision\\": \\"$DECISION\\"}" >"$RUN_DIR/attempts/0001/verdict.json"
exit $CODE
"""
SCONTROL = (
    '#!/bin/sh\n[ "$1" = show ] && printf "n0\\nn1\\nn2\\n"\n[ "$1" != requeue ] || echo "requeue $2" >>"$RECORD"\n'
)
SRUN = """#!/bin/bash
[ "${*:1:6}" = "--ntasks=3 --ntasks-per-node=1 --no-kill --kill-on-bad-exit=0 --wait=0 --label" ] || exit 99
shift 6
SLURMD_NODENAME=n1 "$@"
"""


def slurm_job(**other):
    given = {"recipe": "recipes/mini/pretrain_dp2.yaml", "run_dir": "output/a run", "workers": 2, "slots": 1}
    return Allocation(**{**given, "spares": 1, "options": ("--restarts", "5", "--set", "a=b c'd"), **other})


@pytest.fixture
def submit(tmp_path):
    """Run a file as Slurm would: (exit code, lines of what was called, stderr)."""
    folder = tmp_path / "bin"
    folder.mkdir()
    programs = {"tc3": SLURM_AGENT, "scontrol": SCONTROL, "srun": SRUN, "sleep": "#!/bin/sh\n"}
    for name, text in programs.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    record = tmp_path / "record"

    def submit(text, **environment):
        script, run_dir = tmp_path / "job.sh", tmp_path / "run"
        script.write_text(text)
        record.unlink(missing_ok=True)
        given = {"PATH": f"{folder}:{os.environ['PATH']}", "RECORD": str(record), "RUN_DIR": str(run_dir)}
        given |= {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[0-2]", "SLURM_JOB_NUM_NODES": "3"}
        given |= {"SLURM_SUBMIT_DIR": str(ROOT), "CODE": "0", "DECISION": "", **environment}
        done = subprocess.run(["bash", script], env=given, capture_output=True, text=True, check=False, timeout=300)
        return done.returncode, record.read_text().splitlines() if record.exists() else [], done.stderr

    return submit


def test_the_file_is_clean(tmp_path):
    texts = [
        sbatch_file(slurm_job()),
        sbatch_file(slurm_job(options=(), spares=0, workers=4096, slots=8, run_dir="/a/$(x) b")),
    ]
    files = [tmp_path / f"{number}.sh" for number in range(len(texts))]
    for file, text in zip(files, texts, strict=True):
        file.write_text(text)
    shellcheck = Path(sys.executable).with_name("shellcheck")
    sources = (ROOT / "launch/agent").glob("*.sh")
    done = subprocess.run([shellcheck, *files, *sources], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_slurm_is_asked_for_the_nodes_a_notice_and_a_job_that_outlives_a_node():
    text = sbatch_file(slurm_job(workers=4096, slots=8, spares=4, made_by=("tc3", "agent", "x", "--slurm")))
    asked = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")]
    assert asked == [
        *("--job-name=a-run", "--nodes=516", "--ntasks-per-node=1", "--exclusive", "--no-kill"),
        *("--signal=TERM@300", "--requeue", "--open-mode=append", "--output=%x-%j.out"),
    ]
    assert text.splitlines()[1] == "# 4,096 workers on 512 nodes and 4 spares. Written by: tc3 agent x --slurm"


def test_an_agent_on_each_node_gets_the_nodes_of_the_job(submit, tmp_path):
    code, called, err = submit(sbatch_file(slurm_job()), DECISION="done")
    hosts = tmp_path / "run.slurm-7.hosts"
    assert code == 0, err
    assert called == [
        f"agent recipes/mini/pretrain_dp2.yaml --nodes {hosts} --run-dir {tmp_path}/run "
        "--restarts 5 --set a=b c'd --spares 1 --host n1"
    ]
    assert hosts.read_text() == "n0 1\nn1 1\nn2 1\n"
    assert list((tmp_path / "run").glob("*")) == [tmp_path / "run/attempts"], "a run's folder holds only the run"
    called = submit(sbatch_file(slurm_job(options=("--resume", "old/iteration_3"))), SLURM_RESTART_COUNT="1")[1]
    assert called[0].endswith("--resume old/iteration_3 --spares 1 --resume auto --host n1"), (
        "not from the old one again"
    )


@pytest.mark.parametrize(
    ("code", "decision", "restarts", "ends", "requeued"),
    [
        (0, "done", "0", 0, False),
        (137, "done", "0", 0, False),  # a node was lost, and the others finished
        (0, "", "0", 0, False),  # complete before it began
        (2, "", "0", 2, False),
        (130, "leave", "0", 130, False),
        (1, "give up", "0", 1, True),
        (143, "leave", "2", 143, True),
        (143, "leave", "3", 143, False),
    ],
)
def test_the_job_is_requeued_when_the_agents_cannot_go_on(submit, code, decision, restarts, ends, requeued):
    found, called, err = submit(
        sbatch_file(slurm_job()), CODE=str(code), DECISION=decision, SLURM_RESTART_COUNT=restarts
    )
    assert (found, called[1:]) == (ends, ["requeue 7"] if requeued else []), err
    assert f"agents ended with {code}, their last decision: {decision or 'none'}" in err


@pytest.mark.parametrize(("code", "requeued"), [(1, True), (2, False)])
def test_what_an_earlier_job_decided_says_nothing_of_this_one(submit, code, requeued):
    """A run that was done is to train more steps, and its agents fail before their first attempt."""
    assert submit(sbatch_file(slurm_job()), DECISION="done")[0] == 0
    found, called, err = submit(sbatch_file(slurm_job()), CODE=str(code))
    assert (found, called[1:]) == (code, ["requeue 7"] if requeued else []), err
    assert f"agents ended with {code}, their last decision: none" in err


def test_what_is_wrong_is_said(submit, tmp_path):
    code, called, err = submit(sbatch_file(slurm_job()), SLURM_SUBMIT_DIR=str(tmp_path))
    assert (code, called) == (2, []) and err.startswith(f"error: no launch/train.py in {tmp_path}: submit from the")
    with pytest.raises(ClusterError, match="12 workers do not fill whole nodes of 8"):
        slurm_job(workers=12, slots=8)


NAME = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
EVENTS = ["*", "PodPending", "PodFailed", "PodEvicted", "Unknown", "TaskCompleted", "TaskFailed", "JobUpdated"]
ACTIONS = ["AbortJob", "RestartJob", "RestartTask", "RestartPod", "TerminateJob", "CompleteJob", "ResumeJob"]
WORDS = {
    "string": {"type": "string"},
    "integer": {"type": "integer"},
    "name": {"type": "string", "pattern": NAME, "maxLength": 63},
    "size": {"type": "integer", "minimum": 0},
    "event": {"type": "string", "enum": EVENTS},
    "action": {"type": "string", "enum": ACTIONS},
    "quantity": {"x-kubernetes-int-or-string": True},
}


def schema_of(short):
    """volcano_job.yaml's short form as a schema."""
    if isinstance(short, str):
        return WORDS[short]
    if isinstance(short, list):
        return {"type": "array", "items": schema_of(short[0])}
    if "*" in short:
        return {"type": "object", "additionalProperties": schema_of(short["*"])}
    return {"type": "object", "properties": {name: schema_of(each) for name, each in short.items()}}


SCHEMA = schema_of(yaml.safe_load((ROOT / "tests/launch/agent/volcano_job.yaml").read_text()))


def big_job(**other):
    given = {"recipe": "recipes/a.yaml", "run_dir": "output/telechat3_105b-pretrain_4k", "workers": 4096, "slots": 8}
    return Allocation(**{**given, "spares": 4, "options": ("--restarts", "5", "--set", "a=b: {c'd"), **other})


def content(**other):
    return yaml.safe_load(volcano_job(big_job(**other), Path("/shared/my: checkout")))


@pytest.mark.parametrize("other", [{}, {"workers": 1, "slots": 1, "spares": 0, "target": "CPU", "options": ()}])
def test_the_job_keeps_to_the_schema(other):
    assert list(broken(SCHEMA, content(**other), "job")) == []


def test_the_schema_bites():
    found = content()
    for place, value in [("queue", "A b"), ("minAvailable", -1), ("maxRetry", True), ("minAvailible", 2)]:
        other = copy.deepcopy(found)
        other["spec"][place] = value
        assert [said.split(":")[0] for said in broken(SCHEMA, other, "job")] == [f"job.spec.{place}"]
    found["spec"]["policies"][-1]["events"] += ["PodGone"]
    assert next(broken(SCHEMA, found, "job")).startswith("job.spec.policies[2].events[2]: 'PodGone' is none of")


def test_pods_come_back_one_by_one_and_what_was_given_up_stays():
    spec = content()["spec"]
    assert (spec["minAvailable"], spec["tasks"][0]["replicas"], spec["minSuccess"]) == (512, 516, 1)
    assert spec["policies"] == [
        {"exitCode": 1, "action": "AbortJob"},
        {"exitCode": 2, "action": "AbortJob"},
        {"events": ["PodFailed", "PodEvicted"], "action": "RestartPod"},
    ]
    pod = spec["tasks"][0]["template"]["spec"]
    assert pod["restartPolicy"] == "Never" and pod["terminationGracePeriodSeconds"] == 300
    assert pod["containers"][0]["resources"] == {"limits": {"huawei.com/Ascend910": 8}}
    assert pod["containers"][0]["workingDir"] == "/shared/my: checkout"


def test_the_script_in_the_yaml_is_the_one_that_is_checked(tmp_path):
    found = content()["spec"]["tasks"][0]["template"]["spec"]["containers"][0]
    assert found["args"] == [pod_script(big_job()) + "\n"]
    script = tmp_path / "pod.sh"
    script.write_text("#!/usr/bin/env bash\n" + found["args"][0])
    shellcheck = Path(sys.executable).with_name("shellcheck")
    done = subprocess.run([shellcheck, script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


VOLCANO_AGENT = """#!/bin/bash
printf '%s|' "$@" >"$RECORD"; cat "${4}" >>"$RECORD"
mkdir -p run/attempts/0010
[ -z "$DECISION" ] || echo "{\\"decision\\": \\"$DECISION\\"}" >run/attempts/0010/verdict.json
trap 'echo told >>"$RECORD"; kill $!; exit 143' TERM
[ -z "$STAYS" ] || { touch stays; sleep 3600 & wait; }
exit $CODE
"""


@pytest.fixture
def pod(tmp_path):
    """Start the script of a pod, whose list of hosts lies in this folder."""
    (tmp_path / "tc3").write_text(VOLCANO_AGENT)
    (tmp_path / "tc3").chmod(0o755)
    (tmp_path / "node.host").write_text("a-node-0.a\na-node-1.a\n")
    text = pod_script(big_job(run_dir="run", workers=2, slots=1, spares=0))
    text = text.replace("/etc/volcano/", f"{tmp_path}/").replace("/tmp/hosts.txt", f"{tmp_path}/hosts.txt")

    def start(**environment):
        given = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "RECORD": str(tmp_path / "record"), "CODE": "0"}
        given |= {"DECISION": "", "STAYS": "", "HOSTNAME": "a-node-1", **environment}
        return subprocess.Popen(["bash", "-c", text], env=given, cwd=tmp_path)

    return start


@pytest.mark.parametrize(
    ("code", "decision", "ends"), [(0, "done", 0), (1, "give up", 1), (1, "restart", 75), (1, "", 75), (2, "", 2)]
)
def test_only_what_was_given_up_ends_the_job(pod, tmp_path, code, decision, ends):
    assert pod(CODE=str(code), DECISION=decision).wait(300) == ends
    words = (tmp_path / "record").read_text().split("|")
    wanted = ["agent", "recipes/a.yaml", "--nodes", f"{tmp_path}/hosts.txt", "--host", "a-node-1.run"]
    assert words[:6] == wanted and words[6:8] == ["--run-dir", "run"]
    assert words[-1] == "a-node-0.a 1\na-node-1.a 1\n"


def test_a_pod_that_fails_by_itself_after_the_job_was_given_up_and_resumed_is_replaced(pod, tmp_path):
    assert pod(CODE="1", DECISION="give up").wait(300) == 1
    assert pod(CODE="1").wait(300) == 75


def test_a_pod_that_takes_anothers_place_goes_on_from_the_newest_checkpoint(pod, tmp_path):
    for more in ("", "--resume|auto|"):
        assert pod(DECISION="restart").wait(300) == 0
        assert f"--set|a=b: {{c'd|{more}a-node-0" in (tmp_path / "record").read_text()


def test_the_end_of_a_pod_reaches_its_agent(pod, tmp_path):
    process = pod(STAYS="1")
    deadline = time.monotonic() + 300
    while not (tmp_path / "stays").exists():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    assert process.wait(300) == 143 and (tmp_path / "record").read_text().endswith("told\n")
