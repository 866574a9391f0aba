"""The sbatch file: its text, and what it does with stand-ins for Slurm and the agents; benchmarks/ has a real Slurm."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from launch.agent.cluster.allocation import Allocation
from launch.agent.cluster.slurm import sbatch_file
from launch.run.msrun import ROOT
from plugins.errors import ClusterError

AGENT = """#!/bin/sh
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


def job(**other):
    given = {"recipe": "recipes/mini/pretrain_dp2.yaml", "run_dir": "output/a run", "workers": 2, "slots": 1}
    return Allocation(**{**given, "spares": 1, "options": ("--restarts", "5", "--set", "a=b c'd"), **other})


@pytest.fixture
def submit(tmp_path):
    """Run a file as Slurm would: (exit code, lines of what was called, stderr)."""
    folder = tmp_path / "bin"
    folder.mkdir()
    programs = {"tc3": AGENT, "scontrol": SCONTROL, "srun": SRUN, "sleep": "#!/bin/sh\n"}
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
        done = subprocess.run(["bash", script], env=given, capture_output=True, text=True, check=False, timeout=30)
        return done.returncode, record.read_text().splitlines() if record.exists() else [], done.stderr

    return submit


def test_the_file_is_clean(tmp_path):
    texts = [sbatch_file(job()), sbatch_file(job(options=(), spares=0, workers=4096, slots=8, run_dir="/a/$(x) b"))]
    files = [tmp_path / f"{number}.sh" for number in range(len(texts))]
    for file, text in zip(files, texts, strict=True):
        file.write_text(text)
    shellcheck = Path(sys.executable).with_name("shellcheck")
    sources = (ROOT / "launch/agent").glob("*.sh")
    done = subprocess.run([shellcheck, *files, *sources], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_slurm_is_asked_for_the_nodes_a_notice_and_a_job_that_outlives_a_node():
    text = sbatch_file(job(workers=4096, slots=8, spares=4, notice=600, made_by=("tc3", "agent", "x", "--slurm")))
    asked = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")]
    assert asked == [
        *("--job-name=a-run", "--nodes=516", "--ntasks-per-node=1", "--exclusive", "--no-kill"),
        *("--signal=TERM@600", "--requeue", "--open-mode=append", "--output=%x-%j.out"),
    ]
    assert text.splitlines()[1] == "# 4,096 workers on 512 nodes and 4 spares. Written by: tc3 agent x --slurm"


def test_an_agent_on_each_node_gets_the_nodes_of_the_job(submit, tmp_path):
    code, called, err = submit(sbatch_file(job()), DECISION="done")
    hosts = tmp_path / "run.slurm-7.hosts"
    assert code == 0, err
    assert called == [
        f"agent recipes/mini/pretrain_dp2.yaml --nodes {hosts} --run-dir {tmp_path}/run "
        "--restarts 5 --set a=b c'd --spares 1 --host n1"
    ]
    assert hosts.read_text() == "n0 1\nn1 1\nn2 1\n"
    assert list((tmp_path / "run").glob("*")) == [tmp_path / "run/attempts"], "a run's folder holds the run alone"
    called = submit(sbatch_file(job(options=("--resume", "old/iteration_3"))), SLURM_RESTART_COUNT="1")[1]
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
    found, called, err = submit(sbatch_file(job()), CODE=str(code), DECISION=decision, SLURM_RESTART_COUNT=restarts)
    assert (found, called[1:]) == (ends, ["requeue 7"] if requeued else []), err
    assert f"agents ended with {code}, their last decision: {decision or 'none'}" in err


def test_what_is_wrong_is_said(submit, tmp_path):
    code, called, err = submit(sbatch_file(job()), SLURM_SUBMIT_DIR=str(tmp_path))
    assert (code, called) == (2, []) and err.startswith(f"error: no launch/train.py in {tmp_path}: submit from the")
    with pytest.raises(ClusterError, match="12 workers are no whole nodes of 8"):
        job(workers=12, slots=8)
    with pytest.raises(ClusterError, match="a notice of 0 s"):
        job(notice=0)
