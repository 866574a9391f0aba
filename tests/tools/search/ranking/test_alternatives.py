"""`tc3 search --schedule`: which schedules a recipe can ask for is said, and only for those one is written."""

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner

from plugins.errors import RecipeError
from tools.check.check import check_recipe
from tools.estimate.efficiency import cluster
from tools.estimate.from_recipe import from_recipe
from tools.estimate.memory.activations import saved
from tools.estimate.time_model import TimeModel
from tools.pipeline.schedules import PAPER_SCHEDULES, SCHEDULES, why_not
from tools.recipe.load import load_recipe
from tools.search.cli import search
from tools.search.ranking.alternatives import ALL, ALWAYS, OTHERS, asked_schedules, swap_words

RECIPE = "recipes/telechat3_105b/pretrain_4k.yaml"
NARROW = [word for limit in ("tp=4", "pp=4", "vpp<=2", "cp=1", "ep=8", "mbs=1") for word in ("--limit", limit)]

pytestmark = pytest.mark.usefixtures("stand_in_placement")


def run(*words):
    words = [RECIPE, *NARROW, "--effort", 1, "--top", 1, *words]
    return CliRunner().invoke(search, list(map(str, words)), catch_exceptions=False)


@pytest.mark.parametrize("schedule", ["zero_bubble_v", "seqpipe"])
def test_a_schedule_that_runs_is_written(tmp_path, schedule):
    overlay = tmp_path / "best.yaml"
    result = run("--json", "--schedule", schedule, "--write", overlay)
    assert result.exit_code == 0
    answer = json.loads(result.stdout)
    (found,) = answer["schedules"]
    assert (found["schedule"], found["runnable"]) == (schedule, True)
    assert {one["schedule"] for one in answer["strategies"]} <= set(ALWAYS)
    written = load_recipe(overlay)
    assert check_recipe(written).errors == []
    assert written["parallel"]["pipeline_config"] == {"pipeline_interleave": True, "pipeline_scheduler": schedule}
    config = from_recipe(written)
    assert config.schedule == schedule
    step = TimeModel(cluster("atlas_800t_a2")).step(config, simulated=True).total
    assert step == pytest.approx(found["strategy"]["step_s"])
    assert f"Schedule {schedule}" in overlay.read_text("utf-8")


def test_one_that_is_simulated_only_is_shown_and_not_written(tmp_path):
    result = run("--schedule", "zb_v")
    assert result.exit_code == 0
    assert "simulated only: the only V-shaped pipeline that MindSpore has is zero_bubble_v" in " ".join(
        result.stdout.split()
    )
    overlay = tmp_path / "best.yaml"
    with pytest.raises(RecipeError, match="no recipe can ask for --schedule zb_v: the only V-shaped"):
        run("--schedule", "zb_v", "--write", overlay)
    assert not overlay.exists()


def test_swapping_has_the_price_of_the_link_to_the_host():
    config, times = from_recipe(load_recipe(RECIPE)), TimeModel(cluster("atlas_800t_a2"))
    slow = replace(times.hardware, host_link=replace(times.hardware.host_link, bytes_per_s=1e9))
    moved = saved(config, "moe") - saved(config, "moe", "full")
    cost = moved / 1e9 - times.layer(config, "moe").backward.total
    assert cost > 0 and f"would add {1e3 * cost:.1f} ms" in swap_words(config, TimeModel(slow))[-1]
    fast = replace(slow, host_link=replace(slow.host_link, bytes_per_s=1e15))
    assert "would add 0.0 ms" in swap_words(config, TimeModel(fast))[-1]
    assert "not known" in swap_words(config, TimeModel(replace(slow, host_link=None)))[0]


def test_all_are_those_that_the_simulator_knows():
    assert {*asked_schedules([ALL]), *ALWAYS, "dual_pipe"} == {*SCHEDULES, *PAPER_SCHEDULES}
    assert asked_schedules(["1f1b", "zb_v", ALL])[0] == "zb_v"
    assert {name for name in OTHERS if not why_not(name)} == {"gpipe", "seqpipe", "seqsmartvpp", "zero_bubble_v"}


def test_without_the_option_nothing_is_said_of_schedules():
    assert "schedules" not in json.loads(run("--json").stdout)
