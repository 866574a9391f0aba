"""`plugins.operator_fusion` on its way to the workers: of a launch, and of a script."""

import json
import shlex
import subprocess

import pytest

from launch import train as worker
from launch.agent import start as agent_start
from plugins.errors import ClusterError
from plugins.operator_fusion.plan import VARIABLE
from tests.launch.on_cluster.scripts import ascend, generate
from tools.recipe.load import Recipe

FLAGS = "--opt_level=2 --fusion_ops_level=0 --disable_cluster_ops=Exp"
ON_ASCEND = {"device_target": "Ascend", "jit_config": {"jit_level": "O1"}}
SECTION = {"operator_fusion": {"level": "vector", "disable": ["Exp"]}}


@pytest.fixture
def fused(workplace, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    text = "base_config: toy.yaml\ncontext: {device_target: Ascend, jit_config: {jit_level: O1}}\n"
    section = f"plugins: {json.dumps({'attention_balance': False, **SECTION})}\n"
    (workplace / "mini" / "fused.yaml").write_text(text + section)
    return "mini/fused.yaml"


def test_a_dry_run_prints_the_flags_as_part_of_the_command(train, fused):
    code, out, _ = train(fused, "--dry-run", "--port", "5001")
    argv = shlex.split(out)
    assert code == 0 and argv[:2] == ["env", f"{VARIABLE}={FLAGS}"] and argv[2].endswith("/msrun")
    assert json.loads(train(fused, "--dry-run", "--port", "5001", "--json")[1]) == argv


@pytest.mark.parametrize("options", [["--dry-run"], []])
def test_other_flags_in_the_environment_are_refused(train, fused, monkeypatch, workplace, options):
    monkeypatch.setenv(VARIABLE, "--opt_level=0")
    monkeypatch.setattr("launch.run.preflight.check_machine", lambda recipe: None)
    code, out, err = train(fused, *options)
    assert code == 2 and not out and f"{VARIABLE}='--opt_level=0'" in err
    assert not (workplace / "output").exists()


def test_a_launch_hands_the_flags_to_its_workers(train, fused, monkeypatch):
    from launch.agent.node import start

    seen = []
    whole = start.worker_environment
    monkeypatch.setattr(start, "worker_environment", lambda *a, **k: seen.append(whole(*a, **k)) or seen[-1])
    train(fused, "--dry-run")
    assert seen[0][VARIABLE] == FLAGS


def run(text, **environ):
    """The part of a script above its shared body, and what msrun would see."""
    upper = text.partition("# ---- from here on")[0] + f'\necho "${VARIABLE}"\n'
    return subprocess.run(["bash", "-c", upper], capture_output=True, text=True, env=environ)


def test_a_script_exports_the_flags_or_refuses_others():
    text = generate({**ascend(data_parallel=2), "context": ON_ASCEND, "plugins": SECTION})
    for environ in ({}, {VARIABLE: FLAGS}):
        done = run(text, **environ)
        assert (done.returncode, done.stdout) == (0, f"{FLAGS}\n"), done.stderr
    done = run(text, **{VARIABLE: "--opt_level=0"})
    assert done.returncode == 2 and VARIABLE in done.stderr and not done.stdout
    assert VARIABLE not in generate({**ascend(data_parallel=2), "context": ON_ASCEND})


def test_who_starts_msrun_by_hand_gets_them_from_the_worker(monkeypatch):
    """It reaches the check of versions, and goes no further with flags that contradict the recipe."""
    monkeypatch.setenv(VARIABLE, "--opt_level=0")
    monkeypatch.setattr(worker, "require_verified", lambda: None)
    with pytest.raises(ClusterError, match="asks for"):
        worker.train({"context": ON_ASCEND, "plugins": SECTION})


def test_an_agent_refuses_other_flags_before_it_meets_anybody(monkeypatch, tmp_path):
    monkeypatch.setenv(VARIABLE, "--opt_level=0")
    monkeypatch.setattr(agent_start, "require_verified", lambda: None)
    monkeypatch.setattr("launch.run.preflight.check_machine", lambda recipe, slots: None)
    with pytest.raises(ClusterError, match="asks for"):
        agent_start.Start(Recipe({"context": ON_ASCEND, "plugins": SECTION}), tmp_path, None).check(8, None)
