"""The Volcano job: against the summary of its schema, and what its pods run, with a stand-in for the agent."""

import copy
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from launch.agent.cluster.allocation import Allocation
from launch.agent.cluster.volcano import pod_script, volcano_job
from launch.run.msrun import ROOT
from tests.launch.agent.cluster.openapi import broken

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


def job(**other):
    given = {"recipe": "recipes/a.yaml", "run_dir": "output/telechat3_105b-pretrain_4k", "workers": 4096, "slots": 8}
    return Allocation(**{**given, "spares": 4, "options": ("--restarts", "5", "--set", "a=b: {c'd"), **other})


def content(**other):
    return yaml.safe_load(volcano_job(job(**other), Path("/shared/my: checkout")))


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
    assert found["args"] == [pod_script(job()) + "\n"]
    script = tmp_path / "pod.sh"
    script.write_text("#!/usr/bin/env bash\n" + found["args"][0])
    shellcheck = Path(sys.executable).with_name("shellcheck")
    done = subprocess.run([shellcheck, script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


AGENT = """#!/bin/bash
printf '%s|' "$@" >"$RECORD"; cat "${4}" >>"$RECORD"
mkdir -p run/attempts/0010
[ -z "$DECISION" ] || echo "{\\"decision\\": \\"$DECISION\\"}" >run/attempts/0010/verdict.json
trap 'echo told >>"$RECORD"; kill $!; exit 143' TERM
[ -z "$STAYS" ] || { touch stays; sleep 30 & wait; }
exit $CODE
"""


@pytest.fixture
def pod(tmp_path):
    """Start the script of a pod, whose list of hosts lies in this folder."""
    (tmp_path / "tc3").write_text(AGENT)
    (tmp_path / "tc3").chmod(0o755)
    (tmp_path / "node.host").write_text("a-node-0.a\na-node-1.a\n")
    text = pod_script(job(run_dir="run", workers=2, slots=1, spares=0))
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
    assert pod(CODE=str(code), DECISION=decision).wait(60) == ends
    words = (tmp_path / "record").read_text().split("|")
    wanted = ["agent", "recipes/a.yaml", "--nodes", f"{tmp_path}/hosts.txt", "--host", "a-node-1.run"]
    assert words[:6] == wanted and words[6:8] == ["--run-dir", "run"]
    assert words[-1] == "a-node-0.a 1\na-node-1.a 1\n"


def test_a_pod_that_takes_anothers_place_goes_on_from_the_newest_checkpoint(pod, tmp_path):
    for more in ("", "--resume|auto|"):
        assert pod(DECISION="restart").wait(60) == 0
        assert f"--set|a=b: {{c'd|{more}a-node-0" in (tmp_path / "record").read_text()


def test_the_end_of_a_pod_reaches_its_agent(pod, tmp_path):
    process = pod(STAYS="1")
    deadline = time.monotonic() + 60
    while not (tmp_path / "stays").exists():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 143 and (tmp_path / "record").read_text().endswith("told\n")
