"""The comparison from its first stage to its last, and its command."""

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

from plugins.errors import ClusterError, RecipeError
from tests.tools.accuracy.align import cases
from tests.tools.accuracy.align.test_stages import ROPE, ScaledSoftmax
from tools.accuracy.align import comparison as align_comparison
from tools.accuracy.align import sides as align_sides
from tools.accuracy.align.cli import align as command
from tools.accuracy.align.comparison import (
    Comparison,
    Wanted,
    compare_records,
    compare_stages,
    failed_text,
    print_comparison,
    split_model,
)
from tools.accuracy.align.sides import SideFailedError, shortened
from tools.accuracy.align.stages import NONE, Row, Stage
from tools.check.check import check_recipe
from tools.data.index import write_learnable
from tools.process import children
from tools.recipe.dump import dump_recipe
from tools.recipe.load import load_recipe
from tools.recipe.override import apply_overrides
from tools.recipe.view import View

ROOT = Path(__file__).parents[4]
RECIPES = ROOT / "recipes"
ASCEND = RECIPES / "telechat3_105b" / "pretrain_4k.yaml"
MINI, DP2, TP2 = (RECIPES / "mini" / f"{name}.yaml" for name in ("pretrain", "pretrain_dp2", "pretrain_tp2"))
LOSSES = [5.0, 4.5, 4.2, 4.0]


@pytest.fixture
def corpus(tmp_path):
    write_learnable(tmp_path / "corpus", 512)
    return str(tmp_path / "corpus")


@pytest.fixture
def runs(monkeypatch):
    """Return the list of what was run; each run gives the same record and the same losses."""
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
    dump_recipe(apply_overrides(load_recipe(path), overrides), folder / "other.yaml")
    return folder / "other.yaml"


def compared(ours, theirs, folder, data=None):
    return compare_stages(Wanted(ours, str(theirs), 4, (), data, folder / "runs", sys.executable), lambda text: None)


def statuses(comparison):
    return [stage.status for stage in comparison.stages]


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
    comparison = compared(ASCEND, recipe_like(ASCEND, tmp_path, override), tmp_path)
    assert statuses(comparison) == ["failed", *["not run"] * 5] and not runs
    assert override.partition("=")[0] in {
        setting.path for setting in comparison.settings if setting.kind == "must match"
    }
    assert comparison.verdict == "not aligned" and not comparison.passed


def test_another_layout_that_its_mini_does_not_show_is_not_compared(tmp_path, runs):
    """Tensor parallelism over 8 or 4 devices is over 2 in both minis."""
    comparison = compared(ASCEND, recipe_like(ASCEND, tmp_path, "parallel_config.model_parallel=4"), tmp_path)
    assert statuses(comparison) == ["passed", *["same"] * 5] and not runs
    assert [(setting.path, setting.kind) for setting in comparison.settings] == [
        ("parallel_config.model_parallel", "another layout")
    ]
    assert (comparison.verdict, comparison.passed) == ("not compared", False)
    console = Console(record=True, width=160)
    print_comparison(comparison, console)
    last = console.export_text().strip().splitlines()[-1]
    assert last.startswith("not compared: ") and "aligned" not in console.export_text()


def test_a_layout_for_ascend_is_executed_as_minis_that_keep_it(tmp_path, runs):
    comparison = compared(ASCEND, recipe_like(ASCEND, tmp_path, "parallel_config.model_parallel=1"), tmp_path)
    assert statuses(comparison) == ["passed", *["same"] * 4, "passed"] and comparison.verdict == "aligned"
    assert runs == ["layout_ours", "layout_theirs"]
    assert (
        "4 processes (tp2 pp2" in comparison.stages[-1].reason
        and "and 4 processes (pp2 dp2" in comparison.stages[-1].reason
    )


def test_recomputation_that_one_worker_does_not_have_is_compared_with_four(tmp_path, corpus, runs):
    recipe = RECIPES / "telechat3_1119b" / "pretrain_4k_ep_overlap.yaml"
    comparison = compared(recipe, recipe_like(recipe, tmp_path, "recompute_config.recompute=false"), tmp_path, corpus)
    assert statuses(comparison) == ["passed", *["same"] * 4, "passed"] and comparison.verdict == "aligned"
    assert runs == ["layout_ours", "layout_theirs"]


@pytest.mark.parametrize(("name", "left_out"), [("tp2", ""), ("pp2", "auxiliary loss"), ("cp2", "auxiliary loss")])
def test_a_layout_of_cpu_processes_is_compared_with_one_of_them(name, left_out, tmp_path, corpus, runs):
    comparison = compared(RECIPES / "mini" / f"pretrain_{name}.yaml", MINI, tmp_path, corpus)
    assert statuses(comparison) == ["passed", *["same"] * 4, "passed"], [stage.reason for stage in comparison.stages]
    assert runs == ["layout_ours", "layout_theirs"]
    ours, theirs = (load_recipe(tmp_path / "runs" / side / "recipe_in.yaml") for side in runs)
    assert View(ours).sharded_on_cpu and View(theirs).sharded_on_cpu and View(theirs).devices == 1
    assert View(ours).global_batch == View(theirs).global_batch
    coefficients = {side["model"]["model_config"]["moe_aux_loss_coeff"] for side in (ours, theirs)}
    assert len(coefficients) == 1 and (coefficients == {0.0}) is bool(left_out)
    assert left_out in comparison.stages[-1].reason


def test_plugin_settings_that_one_worker_does_not_run_are_not_compared(tmp_path, corpus, runs):
    one_worker = ("use_parallel=False", "parallel_config.data_parallel=1", "parallel_config.expert_parallel=1")
    one = recipe_like(RECIPES / "mini" / "pretrain_ep4.yaml", tmp_path, *one_worker)
    (tmp_path / "b").mkdir()
    two = recipe_like(one, tmp_path / "b", "plugins.hierarchical_ep.mode=global")
    comparison = compared(one, two, tmp_path, corpus)
    assert not runs and comparison.verdict == "not compared"


def test_recipes_that_differ_in_no_number_are_said_to(tmp_path, corpus, runs):
    comparison = compared(MINI, recipe_like(MINI, tmp_path, "output_dir=elsewhere"), tmp_path, corpus)
    assert not runs and (comparison.verdict, comparison.passed) == ("same settings", True)


def test_another_layout_is_compared_alone_and_then_with_its_workers(tmp_path, corpus, runs):
    comparison = compared(MINI, DP2, tmp_path, corpus)
    assert statuses(comparison) == ["passed", *["same"] * 4, "passed"]
    assert runs == ["layout_ours", "layout_theirs"]
    assert len(comparison.stages[-1].rows) == 4 and comparison.verdict == "aligned"


def test_recipes_that_are_not_one_on_one_worker_run_there_first(tmp_path, corpus, runs):
    other = recipe_like(MINI, tmp_path, "model.model_config.moe_grouped_gemm=false")
    comparison = compared(MINI, other, tmp_path, corpus)
    assert statuses(comparison) == ["passed"] * 5 + ["not run"] and comparison.verdict == "aligned"
    assert runs == [("ours", 8, 1), ("theirs", 8, 1)]


def test_workers_whose_losses_part_fail_the_last_stage(tmp_path, corpus, runs, monkeypatch):
    real = align_comparison.read_steps
    monkeypatch.setattr(align_comparison, "read_steps", lambda run, rank: [
        {"loss": step["loss"] + 1e-3 * (step["step"] > 2 and run.parent.name == "layout_theirs")}
        for step in real(run, rank)
    ])  # fmt: skip
    comparison = compared(MINI, DP2, tmp_path, corpus)
    assert statuses(comparison)[-1] == "failed"
    assert comparison.stages[-1].reason.startswith("loss of step 3 is the first to differ, by 1.0e-03")


@pytest.mark.parametrize(
    "error", [SideFailedError("train ended with exit code 1: worker 1 failed"), RecipeError("port")]
)
def test_a_run_that_breaks_down_is_a_failed_stage_and_leaves_the_others(error, tmp_path, corpus, runs, monkeypatch):
    def start(command, log, run):
        raise error

    monkeypatch.setattr(align_sides, "start", start)
    comparison = compared(MINI, DP2, tmp_path, corpus)
    assert statuses(comparison) == ["passed", *["same"] * 4, "failed"] and comparison.broken and not comparison.passed
    assert str(error) in comparison.stages[-1].reason


def test_a_side_that_breaks_down_early_fails_the_next_stage(tmp_path, corpus, monkeypatch):
    def broken(*arguments):
        raise SideFailedError("mindformers ended with exit code 1")

    monkeypatch.setattr(align_sides, "run_mindformers", broken)
    comparison = compared(
        MINI, recipe_like(MINI, tmp_path, "model.model_config.moe_grouped_gemm=false"), tmp_path, corpus
    )
    assert statuses(comparison) == ["passed", "failed", *["not run"] * 4]


@pytest.mark.parametrize("broken", [True, False])
def test_logs_are_kept_when_a_run_broke_down(broken, tmp_path, monkeypatch):
    made = []

    def compare_stages(wanted, say):
        made.append(wanted.folder)
        (wanted.folder / "ours").mkdir()
        (wanted.folder / "ours" / "mindformers.log").write_text("why")
        (wanted.folder / "ours" / "record.npz").write_text("large")
        stage = Stage("forward", state="failed") if broken else Stage("forward", [Row("logits", 1, 0.5, "")])
        return Comparison("a", "b", [stage])

    monkeypatch.setattr(align_comparison, "compare_stages", compare_stages)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    result = click.testing.CliRunner().invoke(command, [str(MINI), "--json"])
    assert result.exit_code == 1 and json.loads(result.stdout)["passed"] is False
    assert [path.name for path in made[0].rglob("*.*")] == ["mindformers.log"] * broken
    assert made[0].exists() is broken


def test_undecided_numbers_are_told_by_their_cause():
    comparison = Comparison("a", "b", [Stage("forward", [Row("logits", 3e-5, 1e-5, "", floor=2e-5)])])
    comparison.stages.append(Stage("steps", [Row("step 3 by itself: loss", 2e-4, 1e-5, "", excuse=3e-4)]))
    console = Console(record=True, width=200)
    print_comparison(comparison, console)
    lines = console.export_text().splitlines()
    rounding, tie = (line for line in lines if line.startswith("undecided: 1 numbers"))
    assert "weights change in the last place (largest: logits)" in rounding
    assert "an expert that moved at a tie may do (largest: step 3" in tie
    assert lines[-1] == "aligned, but for what is undecided"


def test_a_child_says_what_it_said_and_how_it_ended():
    done = children.run_child([sys.executable, "-c", "print('a'); raise SystemExit(3)"], stdout=subprocess.PIPE)
    assert (done.returncode, done.stdout) == (3, "a\n")


@pytest.mark.parametrize("deaf", [False, True])
def test_a_child_ends_with_us(deaf, tmp_path):
    """On SIGTERM to us, at once; one that does not listen to it, after the time it is given."""
    ignore = "signal.signal(signal.SIGTERM, signal.SIG_IGN); " * deaf
    sleeper = f"import os, signal, sys, time; {ignore}print(os.getpid(), flush=True); time.sleep(3600)"
    script = (
        "from tools.process import children; children.GRACE = 0.2; "
        f"children.run_child([{sys.executable!r}, '-c', {sleeper!r}])"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as ours:
        pid = int(ours.stdout.readline())
        os.kill(ours.pid, signal.SIGTERM)
        assert ours.wait(300) != 0
    until = time.monotonic() + 300
    while psutil.pid_exists(pid) and time.monotonic() < until:
        time.sleep(0.02)
    assert not psutil.pid_exists(pid)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("telechat3_105b/pretrain_4k", "4 processes (tp2 pp2 ep2)"),
        ("telechat3_438b/pretrain_4k", "4 processes (tp2 pp2 ep2)"),
        ("telechat3_1119b/pretrain_4k_ep_overlap", "4 processes (tp2 pp2 ep2)"),
        ("mini/pretrain_3d", "8 processes (tp2 pp2 dp2 ep2)"),
        ("mini/pretrain_cp2", "2 processes (cp2)"),
        ("mini/pretrain_pp2_interleaved", "2 processes (pp2)"),
    ],
)
def test_a_layout_and_one_process_are_sound_recipes_of_the_same_step(name, layout, tmp_path):
    sides, about = split_model([RECIPES / f"{name}.yaml"], (), None, 3)
    assert about.startswith(f"the sharded graph on {layout} and 1 process; without the auxiliary loss")
    views = []
    for place, recipe in enumerate(sides):
        dump_recipe(shortened(recipe, 3), tmp_path / f"{place}.yaml")
        short = load_recipe(tmp_path / f"{place}.yaml")
        wrong = [finding for finding in check_recipe(short).errors if "data_path" not in str(finding)]
        assert wrong == []  # a corpus may not be there
        views.append(View(short))
    ours, theirs = views
    assert ours.sharded_on_cpu and theirs.sharded_on_cpu and theirs.devices == 1
    assert ours.global_batch == theirs.global_batch
    for key in ("num_hidden_layers", "n_routed_experts", "seq_length", "compute_dtype"):
        assert ours.get(("model", "model_config", key)) == theirs.get(("model", "model_config", key))


def test_a_degree_that_is_set_on_the_command_line_counts():
    for recipe, overrides in ((MINI, ()), (DP2, ()), (TP2, ("parallel_config.model_parallel=1",))):
        assert split_model([recipe], overrides, None, 3) is None


@pytest.mark.parametrize("recorded", [0, 2])
def test_losses_that_were_not_recorded_are_not_compared(recorded, tmp_path, monkeypatch):
    recipe = load_recipe(TP2)
    recipe["callbacks"] = [{"type": "MFLossMonitor", "per_print_times": 10}]
    assert shortened(recipe, 3)["callbacks"] == [{"type": "MFLossMonitor", "per_print_times": 1}]
    monkeypatch.setattr(align_sides, "start", lambda *_: None)
    monkeypatch.setattr(align_comparison, "read_steps", lambda *_: [{"loss": 6.0}] * recorded)
    with pytest.raises(SideFailedError, match=f"recorded {recorded} of 3 losses"):
        align_comparison._train(recipe, tmp_path, 3)


def test_a_failed_side_is_told_by_its_own_words(tmp_path):
    def start(script, name="x"):
        align_sides.start([sys.executable, "-c", script, name], tmp_path / "log", tmp_path)

    start("pass")
    with pytest.raises(RecipeError, match=r"^a\.b: must be c$"):
        start("print('noise'); print('tc3: a.b: must be c'); raise SystemExit(2)")
    with pytest.raises(SideFailedError, match=r"exit code 1: ValueError: broken .*log"):
        start("raise ValueError('broken')")
    with pytest.raises(SideFailedError, match=r"exit code 1: worker 1 failed"):
        start("print('tc3: worker 1 failed'); print('its log'); raise SystemExit(1)")
    with pytest.raises(SideFailedError, match=r"exit code 2: "):  # argparse, click: not our words
        start("raise SystemExit(2)")
    with pytest.raises(ClusterError, match="needs torch"):
        start("raise SystemExit(3)")


def test_accumulated_gradients_are_those_of_one_batch_in_one_process(tmp_path):
    recipe = load_recipe(TP2)
    recipe["runner_config"]["gradient_accumulation_steps"] = 2
    dump_recipe(recipe, tmp_path / "recipe.yaml")
    ours, alone = split_model([tmp_path / "recipe.yaml"], (), None, 3)[0]
    assert View(ours).accumulation == 2 and View(alone).accumulation == 1
    assert View(ours).global_batch == View(alone).global_batch


def test_settings_that_must_match_stop_the_comparison(tmp_path, corpus):
    comparison = compared(MINI, RECIPES / "mini" / "pretrain_ep4.yaml", tmp_path, corpus)
    assert statuses(comparison) == ["failed", *["not run"] * 5]
    assert {row.name for row in comparison.stages[0].rows if row.status == "failed"} == {"lr_schedule.learning_rate"}
    assert not comparison.passed and not (tmp_path / "runs").exists()


def test_what_is_printed():
    model, comparison = cases.sizes(mtp=0), Comparison("recipe.yaml", "Hugging Face DeepseekV3")
    compare_records(comparison, cases.record(model, ScaledSoftmax), cases.record(model), None, cases.HYPER, ROPE)
    console = Console(record=True, width=160)
    print_comparison(comparison, console)
    text = console.export_text()
    assert "recipe.yaml  against  Hugging Face DeepseekV3" in text
    assert "forward: first difference: layer 0, self_attention.core_attention" in text
    assert "logits: " in text and text.rstrip().endswith("not aligned")
    data = json.loads(json.dumps(comparison.as_json()))
    assert data["passed"] is False and data["stages"][0]["rows"][-1]["status"] in ("passed", "failed")


def test_an_error_that_is_not_finite_is_a_text_in_json():
    rows = [Row("a", float("inf"), 1e-4, "relative"), Row("b", float("nan"), 1e-4, "relative")]
    comparison = Comparison("recipe.yaml", "other.yaml", [Stage("backward", rows)])
    told = json.loads(json.dumps(comparison.as_json(), allow_nan=False))["stages"][0]["rows"]
    assert [(row["error"], row["tolerance"], row["status"]) for row in told] == [
        ("inf", 1e-4, "failed"),
        ("nan", 1e-4, "failed"),
    ]


def test_a_row_says_what_differs_and_not_one_half():
    setting = Row("optimizer.weight_decay", 1, NONE, "must match", detail="0.1 | 0.05: changes the numbers")
    assert failed_text(setting) == "optimizer.weight_decay: 0.1 | 0.05: changes the numbers (must match)"
    tokens = Row("batch labels", 17, NONE, "elements that differ")
    assert failed_text(tokens) == "batch labels: 17 elements that differ, but there must be none"
    assert failed_text(Row("logits", 0.1, 1e-5, "relative")) == "logits: 0.1 (relative; at most 1e-05)"
