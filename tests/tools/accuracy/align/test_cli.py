"""The command's wrong inputs and what it prints; runs of it are in test_align_mindformers."""

import json
import sys
from pathlib import Path

import pytest
from rich.console import Console

from plugins.errors import ClusterError, RecipeError
from tests.tools.accuracy.align import cases
from tests.tools.accuracy.align.test_faults import ROPE, ScaledSoftmax
from tools.accuracy.align import sides as align_sides
from tools.accuracy.align.compare import NONE, Row
from tools.accuracy.align.ladder import Ladder, Wanted, climb, compare_records
from tools.accuracy.align.render import failed_text, print_ladder
from tools.accuracy.align.sides import SideFailedError
from tools.accuracy.reference.golden import write_corpus

RECIPES = Path(__file__).parents[4] / "recipes" / "mini"


def wanted(path, against, folder, **changes):
    return Wanted(**{"path": path, "against": str(against), "steps": 4, "overrides": (), "data": None,
                     "folder": folder, "python": sys.executable, **changes})  # fmt: skip


@pytest.mark.parametrize("python", ["/nowhere/python", "/bin/false"])
def test_without_torch_there_is_one_message_and_nothing_runs(python, tmp_path):
    with pytest.raises(ClusterError, match=r"reference-python") as caught:
        climb(wanted(RECIPES / "pretrain.yaml", "hf", tmp_path, python=python), print)
    assert "\n" not in str(caught.value) and list(tmp_path.iterdir()) == []


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


def test_settings_that_must_match_stop_the_ladder(tmp_path):
    write_corpus(tmp_path / "corpus", 512)
    data = str(tmp_path / "corpus")
    ladder = climb(
        wanted(RECIPES / "pretrain.yaml", RECIPES / "pretrain_ep4.yaml", tmp_path / "runs", data=data), print
    )
    assert [rung.status for rung in ladder.rungs] == ["failed", *["not run"] * 5]
    assert {row.name for row in ladder.rungs[0].rows if row.status == "failed"} == {"lr_schedule.learning_rate"}
    assert not ladder.passed and not (tmp_path / "runs").exists()


def test_what_is_printed():
    model, ladder = cases.sizes(mtp=0), Ladder("recipe.yaml", "Hugging Face DeepseekV3")
    compare_records(ladder, cases.record(model, ScaledSoftmax), cases.record(model), None, cases.HYPER, ROPE)
    console = Console(record=True, width=160)
    print_ladder(ladder, console)
    text = console.export_text()
    assert "recipe.yaml  against  Hugging Face DeepseekV3" in text
    assert "forward: first difference: layer 0, self_attention.core_attention" in text
    assert "logits: " in text and text.rstrip().endswith("not aligned")
    data = json.loads(json.dumps(ladder.as_json()))
    assert data["passed"] is False and data["rungs"][0]["rows"][-1]["status"] in ("passed", "failed")


def test_a_row_says_what_differs_and_not_one_half():
    setting = Row("optimizer.weight_decay", 1, NONE, "must match", detail="0.1 | 0.05: changes the numbers")
    assert failed_text(setting) == "optimizer.weight_decay: 0.1 | 0.05: changes the numbers (must match)"
    tokens = Row("batch labels", 17, NONE, "elements that differ")
    assert failed_text(tokens) == "batch labels: 17 elements that differ, should be none"
    assert failed_text(Row("logits", 0.1, 1e-5, "relative")) == "logits: 0.1 (relative; at most 1e-05)"
