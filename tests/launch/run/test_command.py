"""`tc3 train` from the command line, with msrun replaced by a function that writes what a run writes."""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from launch import cli
from launch import train as worker
from launch.agent import cli as agent_start
from launch.agent import part
from launch.resume import checkpoints
from launch.run import command, preflight
from launch.run.cores import Cores
from launch.run.failure import Failure
from launch.run.msrun import ROOT
from launch.run.supervise import Outcome
from plugins.errors import ClusterError
from plugins.operator_fusion.plan import VARIABLE
from tests.launch.run.scripts import ascend, generate
from tests.tools.checkpoint.saved import Saved, numbered
from tools.checkpoint.scan import CheckpointInfo
from tools.recipe.load import Recipe, load_recipe


def test_a_dry_run_prints_the_exact_argv_and_writes_nothing(train, runs, workplace):
    before = sorted(workplace.rglob("*"))
    code, out, _ = train("mini/toy.yaml", "--dry-run", "--port", "5001")
    argv = shlex.split(out)
    assert code == 0 and not runs and sorted(workplace.rglob("*")) == before
    assert "--worker_num=2" in argv and "--master_port=5001" in argv
    assert argv[-2:] == ["--run-dir", str(workplace / "output" / "mini-toy")]
    assert json.loads(train("mini/toy.yaml", "--dry-run", "--port", "5001", "--json")[1]) == argv


def test_what_a_dry_run_prints_is_what_a_run_starts(train, runs):
    _, out, _ = train("mini/toy.yaml", "--dry-run", "--json", "--port", "45011")
    assert train("mini/toy.yaml", "--port", "45011")[0] == 0
    assert runs == [json.loads(out)]


def test_workers_get_cores_unless_they_shall_not(train, runs, workplace, monkeypatch):
    planned = Cores(("--bind_numa=cores.json",), {}, ("cores: worker 0: 5",), (workplace / "cores.json", {"a": 1}))
    monkeypatch.setattr(part, "of_launch", lambda recipe, workers, file: planned)
    _, out, err = train("mini/toy.yaml", "--dry-run")
    assert "--bind_numa=cores.json" in shlex.split(out) and "cores: worker 0: 5" in err
    assert not (workplace / "cores.json").exists()
    _, out, _ = train("mini/toy.yaml")
    assert "--bind_numa=cores.json" in runs[0] and "cores: worker 0: 5\n" in out
    assert json.loads((workplace / "cores.json").read_text()) == {"a": 1}
    _, out, _ = train("mini/toy.yaml", "--force", "--no-bind")
    assert "--bind_numa=cores.json" not in runs[1] and "cores:" not in out


def test_a_dry_run_of_an_ascend_recipe_works_without_npus_and_says_what_is_missing(train, workplace):
    code, out, err = train("mini/toy.yaml", "--dry-run", "--set", "context.device_target=Ascend")
    assert code == 0 and "--worker_num=2" in out
    assert os.path.exists("/dev/davinci1") or "would be refused here: context.device_target: Ascend" in err


def test_a_dry_run_looks_at_the_weights_with_which_a_resume_begins_if_nothing_is_saved(train, workplace):
    words = ("mini/toy.yaml", "--resume", "auto", "--set", "checkpoint.load_path=nothere")
    code, _, err = train(*words, "--dry-run")
    assert code == 0 and "would be refused here: checkpoint.load_path: nothere: this is not a folder" in err
    code, _, err = train(*words)
    assert code == 2 and "checkpoint.load_path: nothere: this is not a folder" in err


def test_a_run_ends_with_its_numbers_its_files_and_the_command_to_go_on(train, runs, workplace):
    runs.saves = True
    code, out, err = train("mini/toy.yaml", "--set", "runner_config.batch_size=2")
    assert code == 0
    assert "batch_size=2 also sets model.model_config.batch_size" in err
    assert "training loss: 5.0000 -> 3.0000" in out and "200 tokens/s of all workers (median step)" in out
    assert "tc3 train mini/toy.yaml --resume auto --set runner_config.batch_size=2 --steps 6" in out
    run_dir = workplace / "output" / "mini-toy"
    assert (run_dir / "loss.png").exists()
    flat = load_recipe(run_dir / "recipe.yaml")
    assert flat["output_dir"] == str(run_dir) and flat["checkpoint"]["save_path"] == str(run_dir / "checkpoint")
    assert flat["model"]["model_config"]["batch_size"] == 2


def test_json_is_all_there_is_on_stdout(train, runs, workplace):
    code, out, err = train("mini/toy.yaml", "--json", "--run-dir", "here")
    summary = json.loads(out)
    assert code == 0 and "step 3/3" in err
    wanted = {"exit_code": 0, "steps": 3, "first_loss": 5.0, "final_loss": 3.0, "tokens_per_second": 200.0}
    assert wanted.items() <= summary.items()
    assert summary["picture"] == str(workplace / "here" / "loss.png") and summary["checkpoint"] is None
    assert summary["next_command"] is None, "nothing was saved to go on from"
    assert "go on with" not in train("mini/toy.yaml", "--force")[1]
    runs.saves = True
    summary = json.loads(train("mini/toy.yaml", "--json", "--run-dir", "here", "--force")[1])
    assert summary["next_command"] == f"tc3 train mini/toy.yaml --resume auto --run-dir {workplace / 'here'} --steps 6"


@pytest.mark.parametrize(
    ("extra", "samples"),
    [
        ([], 7 * 4 * 2),
        (["--set", "use_parallel=false"], 7 * 4),
        (["--set", "runner_config.batch_size=1", "--set", "parallel_config.data_parallel=3"], 7 * 1 * 3),
    ],
)
def test_steps_sets_the_samples_and_the_schedule(train, runs, workplace, extra, samples):
    assert train("mini/toy.yaml", "--steps", "7", *extra)[0] == 0
    flat = load_recipe(workplace / "output" / "mini-toy" / "recipe.yaml")
    assert flat["train_dataset"]["data_loader"]["sizes"] == [samples, 8, 0]
    assert flat["lr_schedule"]["total_steps"] == 7


def test_a_failing_worker_gives_code_1_its_traceback_and_the_log(train, runs):
    lines = ('  File "x.py", line 3, in x', "Boom: x")
    runs.outcome = Outcome(
        1,
        Failure(
            "worker 1 failed with exit code 1", Path("/l/worker_1.log"), lines, rank=1, error="Boom: x", mend="no booms"
        ),
    )
    code, out, err = train("mini/toy.yaml")
    assert code == 1 and err.endswith(
        "tc3: worker 1 failed with exit code 1 after step 3: Boom: x\nWhat to do: no booms\nLog: /l/worker_1.log\n"
        '      File "x.py", line 3, in x\n    Boom: x\n'
    )
    assert "go on with" not in out
    runs.outcome = Outcome(2, Failure("plugins.x: no such plugin", Path("/l"), user_error=True))
    code, out, err = train("mini/toy.yaml", "--force", "--json")
    assert code == 2 and err.endswith("tc3: plugins.x: no such plugin\n")
    assert json.loads(out)["error"] == "plugins.x: no such plugin"


def test_a_failure_is_said_before_a_checkpoint_is_read(train, runs, monkeypatch, capsys):
    """Who lost patience while terabytes were read never saw which worker had failed, and where."""
    runs.outcome = Outcome(1, Failure("worker 1 failed with exit code 1", Path("/l/worker_1.log"), rank=1))
    said = []
    monkeypatch.setattr("launch.run.summary._newest", lambda *_: said.append(capsys.readouterr().err) or (None, None))
    assert train("mini/toy.yaml")[0] == 1
    assert "tc3: worker 1 failed with exit code 1 after step 3\nLog: /l/worker_1.log\n" in said[0]


def test_a_run_that_ended_itself_says_why_and_what_to_change(train, runs, save, workplace):
    runs.outcome = Outcome(1, Failure("step 3: lm loss is NaN; start over", Path("/l/worker_1.log"), stopped=True))
    flags = ("--set", "lr_schedule.learning_rate=0.5", "--steps", "9")
    code, out, err = train("mini/toy.yaml", *flags)
    assert code == 1 and not out.startswith("steps:")
    assert "tc3: stopped: step 3: lm loss is NaN; start over\nLog: /l/worker_1.log\n" in err
    again = "tc3 train mini/toy.yaml --resume auto --set lr_schedule.learning_rate=0.25 --steps 9\n"
    assert err.endswith(f"Start over with: {again}")
    save(workplace / "output" / "mini-toy" / "checkpoint", 2)
    code, _, err = train("mini/toy.yaml", "--resume", "auto", *flags)
    assert code == 1 and f"Checkpoint of step 2: {workplace}" in err and err.endswith(f"Go on with: {again}")


def test_a_run_that_was_told_to_go_on_with_nan_says_so_and_its_json_is_json(train, runs, monkeypatch):
    monkeypatch.setattr(runs, "loss", lambda step: 6.0 if step < 3 else float("nan"), raising=False)
    code, out, _ = train("mini/toy.yaml")
    assert code == 0 and "training loss: 6.0000 -> not finite\n" in out
    summary = json.loads(train("mini/toy.yaml", "--force", "--json")[1], parse_constant=pytest.fail)
    assert (summary["first_loss"], summary["final_loss"]) == (6.0, None)


def test_an_interrupted_run_says_where_its_logs_and_checkpoint_are(train, runs, workplace, monkeypatch):
    saved = workplace / "output" / "mini-toy" / "checkpoint" / "iteration_00000002"
    monkeypatch.setattr("launch.run.summary.scan_checkpoints", lambda *_, **__: (CheckpointInfo(saved, 2), []))
    runs.outcome = Outcome(128 + signal.SIGINT)
    code, _, err = train("mini/toy.yaml", "--steps", "9")
    assert code == 130
    assert "interrupted (SIGINT); all workers have ended. Logs: " in err
    assert (
        f"Checkpoint of step 2: {saved}" in err
        and "Go on with: tc3 train mini/toy.yaml --resume auto --steps 9\n" in err
    )


def test_a_run_that_fails_before_its_first_step_has_no_picture(train, runs):
    runs.steps, runs.outcome = 0, Outcome(1, Failure("worker 0 failed with exit code 1", Path("/l")))
    code, out, _ = train("mini/toy.yaml", "--json")
    summary = json.loads(out)
    assert (code, summary["picture"], summary["final_loss"], summary["steps"]) == (1, None, None, 0)


def test_resume_auto_takes_the_newest_complete_checkpoint_and_names_the_skipped(
    train, runs, workplace, save, monkeypatch
):
    root = workplace / "output" / "mini-toy" / "checkpoint"
    found = (CheckpointInfo(root / "iteration_00000002", 2), [(root / "iteration_3", "truncated")])
    monkeypatch.setattr(checkpoints, "scan_checkpoints", lambda given, *_: found if given == root else (None, []))
    train("mini/toy.yaml")
    folder = save(root, 2)
    code, _, err = train("mini/toy.yaml", "--resume", "auto")
    assert code == 0 and runs[-1][-2:] == ["--resume", str(folder)]
    assert f"skipping checkpoint {root / 'iteration_3'}: truncated" in err and "going on from step 2" in err


def test_resume_auto_without_a_checkpoint_starts_from_the_beginning_and_says_so(train, runs):
    code, _, err = train("mini/toy.yaml", "--resume", "auto")
    assert code == 0 and "--resume" not in runs[0] and "starting from the beginning" in err


def test_force_starts_over_in_a_clean_folder(train, runs, workplace):
    train("mini/toy.yaml")
    runs.steps = 2
    code, out, _ = train("mini/toy.yaml", "--force", "--json")
    assert code == 0 and json.loads(out)["steps"] == 2
    assert len((workplace / "output/mini-toy/metrics/rank_0.jsonl").read_text().splitlines()) == 3


@pytest.mark.parametrize("place", ["run/checkpoint", "run/checkpoint/iteration_00000040", "shared/iteration_00000040"])
def test_force_does_not_remove_the_weights_with_which_the_run_begins(train, runs, save, workplace, monkeypatch, place):
    monkeypatch.setattr(command, "check_load_path", lambda recipe: None)
    weights, other = save(workplace / place.split("/iteration")[0], 40), save(workplace / "other", 40)
    (workplace / "run").mkdir(exist_ok=True)
    (workplace / "run" / "recipe.yaml").write_text("{}")
    start = ("mini/toy.yaml", "--force", "--run-dir", "run")
    start += ("--set", "checkpoint.save_path=shared") if place.startswith("shared") else ()
    code, _, err = train(*start, "--set", f"checkpoint.load_path={place}")
    assert code == 2 and not runs and weights.exists() and "--force would remove these weights" in err
    assert train(*start, "--set", f"checkpoint.load_path={other}")[0] == 0 and other.exists()


REFUSALS = {
    "unknown recipe": (["mini/tyo.yaml"], "no such recipe (did you mean 'mini/toy.yaml'?)"),
    "typo in --set": (
        ["mini/toy.yaml", "--set", "runner_config.bach_size=1"],
        "did you mean 'runner_config.batch_size'",
    ),
    "no dataset": (
        ["mini/toy.yaml", "--set", "train_dataset.data_loader.config.data_path.1=./corpse"],
        "./corpse.bin and ./corpse.idx cannot be found (did you mean 'corpus'?); make the dataset with: tc3 data",
    ),
    "checkpoint gone": (["mini/toy.yaml", "--resume", "iteration_9"], "--resume iteration_9: there is no such folder"),
    "strange folder": (["mini/toy.yaml", "--run-dir", "mini"], "not a run's folder (it holds toy.yaml)"),
    "port of root": (["mini/toy.yaml", "--port", "80"], "--port 80: msrun needs a port from 1024"),
    "a file for a folder": (
        ["mini/toy.yaml", "--run-dir", "mini/toy.yaml"],
        "not a folder that can be read (Not a dir",
    ),
    "below a file": (["mini/toy.yaml", "--run-dir", "mini/toy.yaml/x"], "toy.yaml; choose another folder"),
    "no checkpoint": (
        ["mini/toy.yaml", "--resume", "/etc"],
        "--resume /etc: this is not a checkpoint, because",
    ),
    "empty folder": (
        ["mini/toy.yaml", "--resume", "empty"],
        "--resume empty: this is not a checkpoint, because",
    ),
    "file to resume": (["mini/toy.yaml", "--resume", "corpus.idx"], "a file; name the folder that it is in"),
    "long name": (["mini/toy.yaml", "--run-dir", "a" * 300], "not a folder that can be read (File name too long)"),
    "no weights": (
        ["mini/toy.yaml", "--set", "checkpoint.load_path=mini"],
        "checkpoint.load_path: mini: the folder holds no weights (*.safetensors); --set checkpoint.load_path=FOLDER "
        "names a run's",
    ),
    "weights gone": (
        ["mini/toy.yaml", "--set", "checkpoint.load_path=gone"],
        "not a folder that can be read (No such file or directory); --set checkpoint.load_path=FOLDER names a run's",
    ),
    "bad parallel size": (
        ["mini/toy.yaml", "--set", "parallel_config.data_parallel=0"],
        "it must be a whole number from 1 to 1,000,000",
    ),
    "steps without sizes": (["mini/bare.yaml", "--steps", "3"], "--steps cannot work, because the recipe lacks a key"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_can_be_seen_to_be_wrong_is_one_line_and_code_2(train, runs, workplace, name):
    (workplace / "mini" / "bare.yaml").write_text("context: {device_target: CPU}\n")
    (workplace / "empty").mkdir()
    arguments, message = REFUSALS[name]
    before = sorted(workplace.rglob("*"))
    code, out, err = train(*arguments)
    assert code == 2 and not runs and not out
    assert err.startswith("tc3: ") and err.count("\n") == 1 and message in err
    assert sorted(workplace.rglob("*")) == before, "a start that fails leaves nothing"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--port", "99999999"], "99999999 is out of range; it must be a whole number from 1 to 65,535"),
        (["--port", "nan"], "nan is not finite"),
        (["--steps", "99999999999999"], "out of range; it must be a whole number from 1 to 1,000,000,000"),
        (["--steps", "1.5"], "1.5 is not a whole number"),
        (["--steps", "0"], "0 is out of range"),
        (["--resume", ""], "--resume: the value is empty; write auto, or the folder of a checkpoint"),
    ],
)
def test_options_that_make_no_sense_are_refused(train, runs, workplace, arguments, message):
    before = sorted(workplace.rglob("*"))
    code, out, err = train("mini/toy.yaml", *arguments)
    assert code == 2 and message in err and not runs and not out and sorted(workplace.rglob("*")) == before


def test_folders_that_cannot_be_read_are_named(train, runs, workplace, monkeypatch):
    def refused(folder):
        raise PermissionError(13, "Permission denied", str(folder))

    (workplace / "there").mkdir()
    monkeypatch.setattr(Path, "iterdir", refused)
    for option in ("--run-dir", "--resume"):
        code, _, err = train("mini/toy.yaml", option, "there")
        assert code == 2 and "there: " in err and "read (Permission denied)" in err and err.count("\n") == 1


def test_a_checkpoint_of_another_model_is_refused(train, runs, workplace, save, monkeypatch):
    checkpoint = Saved(workplace / "stock" / "iteration_00000002", 1)
    for name, size in {"decoder.norm.weight": 8, "adam_m.decoder.norm.weight": 8, "router.expert_bias": 4}.items():
        checkpoint.put(name, numbered(size), (1,), [[0]])
    folder = checkpoint.write()
    (folder / "common.json").write_text("{}")
    for wanted, code in ((8, 0), (9, 2)):
        monkeypatch.setattr("launch.resume.model.weights_of", lambda recipe, wanted=wanted: wanted)
        found, _, err = train("mini/toy.yaml", "--resume", str(folder), "--steps", "9")
        assert found == code, err
    assert (
        f"{folder}: the checkpoint holds 8 weights, but the recipe's model has 9: this is a checkpoint of another model"
        in err
    )


def test_a_port_in_use_and_a_folder_with_a_run_are_refused(train, runs):
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        code, _, err = train("mini/toy.yaml", "--port", str(busy.getsockname()[1]))
        assert code == 2 and "in use" in err and not runs
    train("mini/toy.yaml")
    code, _, err = train("mini/toy.yaml")
    assert code == 2 and "already holds a run, which has no complete checkpoint; start over" in err
    runs.saves = True
    assert train("mini/toy.yaml", "--force")[0] == 0
    code, _, err = train("mini/toy.yaml")
    assert code == 2 and "already holds a run; go on with --resume auto, start over with --force" in err
    assert len(runs) == 2


@pytest.mark.parametrize("option", [[], ["--force"], ["--resume", "auto"]])
def test_a_second_start_in_the_folder_of_a_run_says_that_it_goes_on(train, runs, workplace, option):
    """Not that the folder holds a run, which one would go on with, or start over."""
    run_dir = workplace / "output" / "mini-toy"
    with preflight.only_run_in(run_dir):
        (run_dir / "recipe.yaml").write_text("a: 1\n")
        code, _, err = train("mini/toy.yaml", *option)
    assert code == 2 and not runs and "--force" not in err
    assert f"{run_dir}: a run is in progress in this folder (pid {os.getpid()}); follow it with tc3 runs watch" in err


def test_resume_and_force_exclude_each_other(train, runs):
    code, _, err = train("mini/toy.yaml", "--resume", "auto", "--force")
    assert code == 2 and "give only one of the two" in err and not runs


def test_planning_a_run_imports_neither_mindspore_nor_matplotlib(workplace):
    source = (
        "import sys; from launch.cli import main\n"
        "sys.argv = ['tc3', 'train', 'mini/toy.yaml', '--dry-run']\n"
        "try: main()\n"
        "finally: print([name for name in ('mindspore', 'mindformers', 'matplotlib') if name in sys.modules])"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(cli.__file__).parents[1])}
    run = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, env=environment)
    assert run.stdout.splitlines()[-1] == "[]", run.stderr


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("model.model_config.num_experts_per_tok=100", "model.model_config.num_experts_per_tok"),
        ("runner_config.batch_size=eight", "runner_config.batch_size"),
    ],
)
def test_a_script_of_an_unsound_recipe_is_not_written(train, monkeypatch, change, message):
    monkeypatch.undo()
    code, out, err = train(str(ROOT / "recipes/mini/pretrain_dp2.yaml"), "--script", "--set", change)
    assert code == 2 and not out and message in err and "Traceback" not in err


def test_a_script_of_ranks_that_would_wait_for_ever_is_not_written(train, monkeypatch):
    def check_dispatch(recipe):
        raise ClusterError("they would wait")

    monkeypatch.undo()
    monkeypatch.setattr(preflight, "check_dispatch", check_dispatch)
    code, out, err = train(str(ROOT / "recipes/mini/pretrain_dp2.yaml"), "--script")
    assert code == 2 and not out and err == "tc3: they would wait\n"


def test_the_last_stages_loss_is_the_runs(train, runs, workplace):
    text = (workplace / "mini" / "toy.yaml").read_text().replace("{data_parallel: 2", "{pipeline_stage: 2")
    (workplace / "mini" / "toy.yaml").write_text(text)
    runs.rank = 1
    summary = json.loads(train("mini/toy.yaml", "--json")[1])
    assert (summary["first_loss"], summary["steps"]) == (5.0, 3) and summary["picture"]


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
    monkeypatch.setattr("launch.run.preflight.check_machine", lambda recipe, slots: None)
    code, out, err = train(fused, *options)
    assert code == 2 and not out and f"{VARIABLE}='--opt_level=0'" in err
    assert not (workplace / "output").exists()


def test_a_launch_hands_the_flags_to_its_workers(train, fused, monkeypatch):
    from launch.agent import part as start

    seen = []
    whole = start.worker_environment
    monkeypatch.setattr(start, "worker_environment", lambda *a, **k: seen.append(whole(*a, **k)) or seen[-1])
    train(fused, "--dry-run")
    assert seen[0][VARIABLE] == FLAGS


def test_an_optimizer_that_swaps_has_its_variable_in_every_launch(train, fused, workplace, monkeypatch):
    """A launch script has it, too; another value that the user exports is kept."""
    name, made, whole = "MS_DEV_RUNTIME_CONF", [], command.command_of
    monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(command, "command_of", lambda *a: made.append(whole(*a)) or made[-1])
    recipe = workplace / "mini" / "fused.yaml"
    recipe.write_text(recipe.read_text() + "optimizer: {type: AdamW, swap: True}\n")
    assert f"{name}=switch_inline:False" in shlex.split(train(fused, "--dry-run", "--port", "5001")[1])
    monkeypatch.setenv(name, "inline_thread:True")
    assert name not in train(fused, "--dry-run")[1]
    assert [each.environment[name] for each in made] == ["switch_inline:False", "inline_thread:True"]


def run(text, **environ):
    """Run the part of a launch script that sets the fusion flags, and print the value that msrun would see."""
    flags = [line for line in text.splitlines() if line.startswith("FUSION_FLAGS=")]
    fail, block = (
        re.search(each, text, re.M | re.S)[0] for each in (r"^fail\(\) .*?^}$", r"^if \S+ -n .{,4}FUSION.*?^fi$")
    )
    script = "\n".join(["set -euo pipefail", *flags, fail, block, f'echo "${{{VARIABLE}:-}}"'])
    return subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=environ)


def test_a_script_exports_the_flags_or_refuses_others():
    text = generate({**ascend(data_parallel=2), "context": ON_ASCEND, "plugins": SECTION})
    for environ in ({}, {VARIABLE: FLAGS}):
        done = run(text, **environ)
        assert (done.returncode, done.stdout) == (0, f"{FLAGS}\n"), done.stderr
    done = run(text, **{VARIABLE: "--opt_level=0"})
    assert done.returncode == 2 and VARIABLE in done.stderr and not done.stdout
    plain = generate({**ascend(data_parallel=2), "context": ON_ASCEND})
    assert "FUSION_FLAGS=" not in plain and run(plain).stdout == "\n", "nothing is exported"


def test_who_starts_msrun_by_hand_gets_them_from_the_worker(monkeypatch):
    """It reaches the check of versions, and goes no further with flags that contradict the recipe."""
    monkeypatch.setenv(VARIABLE, "--opt_level=0")
    monkeypatch.setattr(worker, "require_verified", lambda: None)
    with pytest.raises(ClusterError, match="asks for"):
        worker.train({"context": ON_ASCEND, "plugins": SECTION})


def test_an_agent_refuses_other_flags_before_it_meets_anybody(monkeypatch, tmp_path):
    monkeypatch.setenv(VARIABLE, "--opt_level=0")
    monkeypatch.setattr("launch.run.command.require_verified", lambda: None)
    monkeypatch.setattr("launch.run.preflight.check_machine", lambda recipe, slots: None)
    with pytest.raises(ClusterError, match="asks for"):
        agent_start.Start(
            Recipe({"context": ON_ASCEND, "plugins": SECTION, "checkpoint": {"save_path": ""}}), tmp_path, None
        ).check(8, None)
