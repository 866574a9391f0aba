import json

import numpy as np
import pytest
from click.testing import CliRunner

from tools.hardware.units import GIB, MIB
from tools.memory.cli import memory, pass_in_words, unit_of
from tools.recipe.load import load_recipe

RECIPE = "recipes/telechat3_105b/pretrain_4k.yaml"


def run(*words, recipe=RECIPE):
    return CliRunner().invoke(memory, [recipe, *map(str, words)])


def test_json_has_stages_room_and_the_peaks_owners():
    result = run("--json", "--stage", 7)
    found = json.loads(result.stdout)
    assert result.exit_code == 0 and found["fit"] == "fits" and len(found["stages"]) == 8
    assert found["peak"]["stage"] == 7
    assert found["peak"]["bytes"] == pytest.approx(found["stages"][7]["peak"])
    assert sum(owner["bytes"] for owner in found["peak"]["owners"]) == pytest.approx(found["peak"]["bytes"])
    assert found["known_error"][0] < 0 < found["known_error"][1]


def test_a_limit_that_is_too_small_is_exit_code_1():
    result = run("--limit", 10)
    assert result.exit_code == 1 and "does not fit" in result.stdout and "by --limit" in result.stdout


def test_explained_with_keys():
    result = run("--limit", 16, "--explain-oom")
    assert "gradient_accumulation_shard: True" in result.stdout
    assert "optimizer_level: level3" in result.stdout


@pytest.mark.parametrize("name", ["a.svg", "a.json"])
def test_the_line_is_written(tmp_path, name):
    result = run("--time-line", tmp_path / name)
    text = (tmp_path / name).read_text("utf-8")
    assert result.exit_code == 0 and f"written: {tmp_path / name}" in result.stderr
    if name.endswith("json"):
        line = json.loads(text)
        assert max(map(sum, line["live"])) == pytest.approx(line["peak"]["bytes"], abs=50)
    else:
        assert "accumulated gradients" in text


def test_a_mini_is_shown_in_mib_and_told_to_fit_before_what_would_free_some():
    shown = run("--explain-oom", recipe="recipes/mini/pretrain.yaml").stdout
    peak = json.loads(run("--json", recipe="recipes/mini/pretrain.yaml").stdout)["peak"]["bytes"]
    assert f"{peak / MIB:.1f} MiB" in shown and "MiB on one device" in shown
    assert "It fits unchanged" in shown and "  MiB  frees" in shown
    assert "It fits" not in run("--limit", 16, "--explain-oom").stdout


def test_the_peak_of_a_stage_is_named_in_words():
    shown = run("--stage", 7).stdout
    assert "stage 7 holds most in the backward of micro-batch" in shown
    assert pass_in_words("F 3.1") == "the forward of micro-batch 3, chunk 1"
    assert pass_in_words("W 0.0") == "the gradients of weights of micro-batch 0, chunk 0"
    assert pass_in_words("") == "no pass"
    assert (unit_of(GIB), unit_of(GIB - 1)) == ((GIB, "GiB"), (MIB, "MiB"))


LARGE = "recipes/telechat3_438b/pretrain_4k.yaml"


def test_uneven_loads_are_judged_below_the_table(tmp_path):
    shown = run(recipe=LARGE)
    assert shown.exit_code == 0 and "fits at even loads, and up to a max/mean of 8.33 in every layer" in shown.stdout
    rows = np.ones((2, 53, 256), int)
    rows[1, :, :16] = 60  # the first of 16 devices in the second step: 12.8 times the mean
    lines = [json.dumps({"step": step, "tokens": one.tolist()}) for step, one in enumerate(rows, 5)]
    (tmp_path / "log.jsonl").write_text("\n".join(lines) + "\n")
    uneven = run("--loads", tmp_path / "log.jsonl", recipe=LARGE)
    assert uneven.exit_code == 1 and "1 of 2 steps needs more than the limit" in uneven.stdout
    assert "the fullest is step 6 on stage 1" in uneven.stdout
    found = json.loads(run("--json", "--loads", tmp_path / "log.jsonl", recipe=LARGE).stdout)
    assert found["fit"] == "does not fit" and {stage["fit"] for stage in found["stages"]} == {"fits"}
    assert found["loads"]["steps"] == {"all": 2, "need_more": 1, "open": 0} and len(found["loads"]["stages"]) == 8
    even = json.loads(run("--json", "--loads", "even", recipe=LARGE).stdout)
    assert even["loads"]["stages"][3]["bytes"] == even["stages"][3]["peak"]
    dense = json.loads(run("--json", recipe="recipes/telechat3_36b/pretrain_8k.yaml").stdout)
    assert dense["loads"] is None


def test_moving_experts_is_judged_between_two_steps():
    """512 ranks of a stage hold 32 copies of each expert, and the optimizer is sharded over all of them."""
    report = "recipes/telechat3_438b/pretrain_4k_report.yaml"
    model = load_recipe(report)["model"]["model_config"]
    rows = model["n_routed_experts"] * model["hidden_size"] * 2 * model["moe_intermediate_size"] / 512
    found = json.loads(run("--json", recipe=report).stdout)["exchange"]
    assert found["bytes"] == 2 * 4 * rows and found["fit"] == "fits", "sent and arrived, four bytes each"
    assert "to move experts of stage" in run(recipe=report).stdout
    tight = run("--json", "--limit", 1, recipe=report)
    assert json.loads(tight.stdout)["exchange"]["fit"] == "does not fit" and tight.exit_code == 1
    never = run("--json", "--set", "plugins.expert_balance.every=0", recipe=report)
    assert json.loads(never.stdout)["exchange"] is None
    assert json.loads(run("--json").stdout)["exchange"] is None, "a recipe without the plugin"
