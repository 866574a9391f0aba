"""The whole ladder, its runs replaced: what is compared at which size, what is said when none ran or one broke."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import click.testing
import psutil
import pytest
from rich.console import Console

from plugins.errors import RecipeError
from tests.tools.accuracy.align import cases
from tools.accuracy.align import devices as align_devices
from tools.accuracy.align import ladder as align
from tools.accuracy.align import sides as align_sides
from tools.accuracy.align.cli import align as command
from tools.accuracy.align.compare import Row, Rung
from tools.accuracy.align.ladder import Ladder, Wanted, climb
from tools.accuracy.align.render import print_ladder
from tools.accuracy.align.sides import SideFailedError
from tools.accuracy.reference.golden import write_corpus
from tools.process import child
from tools.recipe.dump import dump_recipe
from tools.recipe.load import load_recipe
from tools.recipe.override import apply_overrides
from tools.recipe.view import View

ROOT = Path(__file__).parents[4]
RECIPES = ROOT / "recipes"
ASCEND = RECIPES / "telechat3_105b" / "pretrain_4k.yaml"
MINI, DP2 = (RECIPES / "mini" / f"{name}.yaml" for name in ("pretrain", "pretrain_dp2"))
LOSSES = [5.0, 4.5, 4.2, 4.0]


@pytest.fixture
def corpus(tmp_path):
    write_corpus(tmp_path / "corpus", 512)
    return str(tmp_path / "corpus")


@pytest.fixture
def runs(monkeypatch):
    """What was run; each run gives the same record, and the same losses."""
    started = []

    def run_mindformers(recipe, folder, hyper, weights):
        started.append((folder.name, recipe["runner_config"]["batch_size"], recipe["parallel_config"]["data_parallel"]))
        return cases.record(cases.sizes(mtp=0))

    def start(command, log, run):
        started.append(log.parent.name)
        (log.parent / "run" / "metrics").mkdir(parents=True)
        lines = [json.dumps({"step": step, "loss": loss}) for step, loss in enumerate(LOSSES, 1)]
        for rank in range(4):
            (log.parent / "run" / "metrics" / f"rank_{rank}.jsonl").write_text("\n".join(lines))

    monkeypatch.setattr(align_sides, "run_mindformers", run_mindformers)
    monkeypatch.setattr(align_sides, "start", start)
    return started


def recipe_like(path, folder, *overrides):
    """A copy of a recipe with something else in it."""
    dump_recipe(apply_overrides(load_recipe(path), overrides), folder / "other.yaml")
    return folder / "other.yaml"


def climbed(ours, theirs, folder, data=None):
    return climb(Wanted(ours, str(theirs), 4, (), data, folder / "runs", sys.executable), lambda text: None)


def statuses(ladder):
    return [rung.status for rung in ladder.rungs]


@pytest.mark.parametrize(
    "override",
    [
        "model.model_config.vocab_size=1000",
        "model.model_config.num_hidden_layers=7",
        "model.model_config.n_routed_experts=32",
        "model.model_config.num_experts_per_tok=2",
        "model.model_config.compute_dtype=float32",
        "train_dataset.data_loader.config.eod=7",
        "lr_schedule.warmup_steps=3",
        "runner_config.batch_size=3",
    ],
)
def test_recipes_for_ascend_are_compared_and_not_their_minis(override, tmp_path, runs):
    ladder = climbed(ASCEND, recipe_like(ASCEND, tmp_path, override), tmp_path)
    assert statuses(ladder) == ["failed", *["not run"] * 5] and not runs
    assert override.partition("=")[0] in {setting.path for setting in ladder.settings if setting.kind == "must match"}
    assert ladder.verdict == "not aligned" and not ladder.passed


def test_another_layout_that_its_mini_does_not_show_is_not_compared(tmp_path, runs):
    """Tensor parallelism over 8 or 4 devices is over 2 in both minis."""
    ladder = climbed(ASCEND, recipe_like(ASCEND, tmp_path, "parallel_config.model_parallel=4"), tmp_path)
    assert statuses(ladder) == ["passed", *["same"] * 5] and not runs
    assert [(setting.path, setting.kind) for setting in ladder.settings] == [
        ("parallel_config.model_parallel", "another layout")
    ]
    assert (ladder.verdict, ladder.passed) == ("not compared", False)
    console = Console(record=True, width=160)
    print_ladder(ladder, console)
    last = console.export_text().strip().splitlines()[-1]
    assert last.startswith("not compared: ") and "aligned" not in console.export_text()


def test_a_layout_for_ascend_is_executed_as_minis_that_keep_it(tmp_path, runs):
    ladder = climbed(ASCEND, recipe_like(ASCEND, tmp_path, "parallel_config.model_parallel=1"), tmp_path)
    assert statuses(ladder) == ["passed", *["same"] * 4, "passed"] and ladder.verdict == "aligned"
    assert runs == ["layout_ours", "layout_theirs"]
    assert "4 processes (tp2 pp2" in ladder.rungs[-1].reason and "and 4 processes (pp2 dp2" in ladder.rungs[-1].reason


def test_recomputation_that_one_worker_does_not_have_is_compared_with_four(tmp_path, corpus, runs):
    recipe = RECIPES / "telechat3_1119b" / "pretrain_4k_ep_overlap.yaml"
    ladder = climbed(recipe, recipe_like(recipe, tmp_path, "recompute_config.recompute=false"), tmp_path, corpus)
    assert statuses(ladder) == ["passed", *["same"] * 4, "passed"] and ladder.verdict == "aligned"
    assert runs == ["layout_ours", "layout_theirs"]


@pytest.mark.parametrize(("name", "left_out"), [("tp2", ""), ("pp2", "auxiliary loss"), ("cp2", "auxiliary loss")])
def test_a_layout_of_cpu_processes_is_compared_with_one_of_them(name, left_out, tmp_path, corpus, runs):
    ladder = climbed(RECIPES / "mini" / f"pretrain_{name}.yaml", MINI, tmp_path, corpus)
    assert statuses(ladder) == ["passed", *["same"] * 4, "passed"], [rung.reason for rung in ladder.rungs]
    assert runs == ["layout_ours", "layout_theirs"]
    ours, theirs = (load_recipe(tmp_path / "runs" / side / "recipe_in.yaml") for side in runs)
    assert View(ours).sharded_on_cpu and View(theirs).sharded_on_cpu and View(theirs).devices == 1
    assert View(ours).global_batch == View(theirs).global_batch
    coefficients = {side["model"]["model_config"]["moe_aux_loss_coeff"] for side in (ours, theirs)}
    assert len(coefficients) == 1 and (coefficients == {0.0}) is bool(left_out)
    assert left_out in ladder.rungs[-1].reason


def test_plugin_settings_that_one_worker_does_not_run_are_not_compared(tmp_path, corpus, runs):
    alone = ("use_parallel=False", "parallel_config.data_parallel=1", "parallel_config.expert_parallel=1")
    one = recipe_like(RECIPES / "mini" / "pretrain_ep4.yaml", tmp_path, *alone)
    (tmp_path / "b").mkdir()
    two = recipe_like(one, tmp_path / "b", "plugins.hierarchical_ep.mode=global")
    ladder = climbed(one, two, tmp_path, corpus)
    assert not runs and ladder.verdict == "not compared"


def test_recipes_that_differ_in_no_number_are_said_to(tmp_path, corpus, runs):
    ladder = climbed(MINI, recipe_like(MINI, tmp_path, "output_dir=elsewhere"), tmp_path, corpus)
    assert not runs and (ladder.verdict, ladder.passed) == ("same settings", True)


def test_another_layout_is_compared_alone_and_then_with_its_workers(tmp_path, corpus, runs):
    ladder = climbed(MINI, DP2, tmp_path, corpus)
    assert statuses(ladder) == ["passed", *["same"] * 4, "passed"]
    assert runs == ["layout_ours", "layout_theirs"]
    assert len(ladder.rungs[-1].rows) == 4 and ladder.verdict == "aligned"


def test_recipes_that_are_not_one_on_one_worker_run_there_first(tmp_path, corpus, runs):
    other = recipe_like(MINI, tmp_path, "model.model_config.moe_grouped_gemm=false")
    ladder = climbed(MINI, other, tmp_path, corpus)
    assert statuses(ladder) == ["passed"] * 5 + ["not run"] and ladder.verdict == "aligned"
    assert runs == [("ours", 8, 1), ("theirs", 8, 1)]


def test_workers_whose_losses_part_fail_the_last_rung(tmp_path, corpus, runs, monkeypatch):
    real = align_devices.read_metrics
    monkeypatch.setattr(align_devices, "read_metrics", lambda run, rank: [
        {"loss": step["loss"] + 1e-3 * (step["step"] > 2 and run.parent.name == "layout_theirs")}
        for step in real(run, rank)
    ])  # fmt: skip
    ladder = climbed(MINI, DP2, tmp_path, corpus)
    assert statuses(ladder)[-1] == "failed"
    assert ladder.rungs[-1].reason.startswith("loss of step 3 is the first to differ, by 1.0e-03")


@pytest.mark.parametrize(
    "error", [SideFailedError("train ended with exit code 1: worker 1 failed"), RecipeError("port")]
)
def test_a_run_that_breaks_down_is_a_failed_rung_and_leaves_the_others(error, tmp_path, corpus, runs, monkeypatch):
    def start(command, log, run):
        raise error

    monkeypatch.setattr(align_sides, "start", start)
    ladder = climbed(MINI, DP2, tmp_path, corpus)
    assert statuses(ladder) == ["passed", *["same"] * 4, "failed"] and ladder.broken and not ladder.passed
    assert str(error) in ladder.rungs[-1].reason


def test_a_side_that_breaks_down_early_fails_the_next_rung(tmp_path, corpus, monkeypatch):
    def broken(*arguments):
        raise SideFailedError("mindformers ended with exit code 1")

    monkeypatch.setattr(align_sides, "run_mindformers", broken)
    ladder = climbed(MINI, recipe_like(MINI, tmp_path, "model.model_config.moe_grouped_gemm=false"), tmp_path, corpus)
    assert statuses(ladder) == ["passed", "failed", *["not run"] * 4]


@pytest.mark.parametrize("broken", [True, False])
def test_logs_are_kept_when_a_run_broke_down(broken, tmp_path, monkeypatch):
    made = []

    def climb(wanted, say):
        made.append(wanted.folder)
        (wanted.folder / "ours").mkdir()
        (wanted.folder / "ours" / "mindformers.log").write_text("why")
        (wanted.folder / "ours" / "record.npz").write_text("large")
        rung = Rung("forward", state="failed") if broken else Rung("forward", [Row("logits", 1, 0.5, "")])
        return Ladder("a", "b", [rung])

    monkeypatch.setattr(align, "climb", climb)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    result = click.testing.CliRunner().invoke(command, [str(MINI), "--json"])
    assert result.exit_code == 1 and json.loads(result.stdout)["passed"] is False
    assert [path.name for path in made[0].rglob("*.*")] == ["mindformers.log"] * broken
    assert made[0].exists() is broken


def test_undecided_numbers_are_told_by_their_cause():
    ladder = Ladder("a", "b", [Rung("forward", [Row("logits", 3e-5, 1e-5, "", floor=2e-5)])])
    ladder.rungs.append(Rung("steps", [Row("step 3 by itself: loss", 2e-4, 1e-5, "", excuse=3e-4)]))
    console = Console(record=True, width=200)
    print_ladder(ladder, console)
    lines = console.export_text().splitlines()
    rounding, tie = (line for line in lines if line.startswith("undecided: 1 numbers"))
    assert "weights change in the last place (largest: logits)" in rounding
    assert "an expert that moved at a tie may do (largest: step 3" in tie
    assert lines[-1] == "aligned, but for what is undecided"


def test_a_child_says_what_it_said_and_how_it_ended():
    done = child.run([sys.executable, "-c", "print('a'); raise SystemExit(3)"], stdout=subprocess.PIPE)
    assert (done.returncode, done.stdout) == (3, "a\n")


@pytest.mark.parametrize("deaf", [False, True])
def test_a_child_ends_with_us(deaf, tmp_path):
    """On SIGTERM to us, at once; one that does not listen to it, after the time it is given."""
    ignore = "signal.signal(signal.SIGTERM, signal.SIG_IGN); " * deaf
    sleeper = f"import os, signal, sys, time; {ignore}print(os.getpid(), flush=True); time.sleep(60)"
    script = f"from tools.process import child; child.GRACE = 0.2; child.run([{sys.executable!r}, '-c', {sleeper!r}])"
    with subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as ours:
        pid = int(ours.stdout.readline())
        os.kill(ours.pid, signal.SIGTERM)
        assert ours.wait(30) != 0
    until = time.monotonic() + 30
    while psutil.pid_exists(pid) and time.monotonic() < until:
        time.sleep(0.02)
    assert not psutil.pid_exists(pid)
