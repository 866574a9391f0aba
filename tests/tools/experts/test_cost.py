"""`tc3 ep-report`: the command and its picture, and what it says would change a step under uneven loads: each row
against the time model, and what is unknown.
"""

import json
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from xml.etree import ElementTree

import numpy as np
import pytest
import yaml
from click.testing import CliRunner

from plugins.errors import TC3Error
from plugins.expert_balance.plan import imbalance
from plugins.expert_balance.settings import Settings
from tests.plugins.expert_balance.drifting import live
from tests.tools.check.test_mutations import ROOT
from tests.tools.check.test_other_models import qwen3_moe
from tests.tools.estimate.test_loads import DEVICES, TIMES
from tests.tools.estimate.test_loads import run as loaded_run
from tools.check.check import check_recipe
from tools.estimate.loads import EVEN, loads_of, of_ratios
from tools.experts.cost import ep_report
from tools.experts.what_if import CAPACITIES, lines, move_seconds, what_if
from tools.hardware.load import load_hardware
from tools.layout.advise import step_under
from tools.recipe.load import load_recipe
from tools.search.request import request_of

LARGE = str(ROOT / "recipes" / "telechat3_438b" / "pretrain_4k.yaml")


def run(*arguments):
    return CliRunner().invoke(ep_report, list(arguments))


def test_text():
    result = run(LARGE, "--ep", "16,64")
    assert result.exit_code == 0, result.output
    for word in (
        "EP 16 on 2 x 8",
        "EP 64 on 8 x 8",
        "modelled, not measured",
        "hierarchical_ep",
        "chunks",
        "break-even",
    ):
        assert word in result.stdout
    assert "inter_node.latency_s" in result.stdout and "peak_flops.fp32" not in result.stdout
    # how far the estimator is off is said wherever its seconds are
    assert "on 25 published runs" in result.stdout and "the recipe as written: hierarchical" in result.stdout


def test_a_degree_that_is_written_twice_is_reported_once():
    reports = json.loads(run(LARGE, "--ep", "32,16,32", "--json").stdout)["reports"]
    assert [report["expert_parallel"] for report in reports] == [32, 16]


def test_what_it_says_to_use_with_another_degree_holds_that_degree(tmp_path):
    """The line gave the settings for a degree that the child recipe did not have."""
    own = json.loads(run(LARGE, "--json").stdout)["reports"][0]["expert_parallel"]
    for report in json.loads(run(LARGE, "--ep", f"{own},{own // 2}", "--json").stdout)["reports"]:
        child = tmp_path / "child.yaml"
        child.write_text(yaml.safe_dump({"base_config": str(LARGE), **report["overlay"]}))
        (after,) = json.loads(run(str(child), "--json").stdout)["reports"]
        assert after["expert_parallel"] == report["expert_parallel"]
        assert ("parallel_config" in report["overlay"]) == (report["expert_parallel"] != own)


def test_long_steps_are_not_cut_where_nobody_looks_at_a_terminal():
    result = run(LARGE, "--set", "parallel_config.micro_batch_num=1024")
    assert result.exit_code == 0 and "\u2026" not in result.stdout, result.output
    seconds = next(
        line.split("\u2502")[1].split()[0] for line in result.stdout.splitlines() if line.startswith("step ")
    )
    assert float(seconds) > 100


@pytest.mark.parametrize("name", ["telechat3_438b", "telechat3_105b"])
def test_what_it_says_to_use_is_sound_and_takes_the_predicted_time(name, tmp_path):
    """`tc3 check` refused it beside MindFormers' own dispatcher without redundancy, which these recipes name."""
    file = ROOT / "recipes" / name / "pretrain_4k.yaml"
    said = run(str(file), "--json")
    (report,) = json.loads(said.stdout)["reports"]
    (used,) = [line for line in run(str(file)).stdout.splitlines() if line.startswith("use: ")]
    keys = yaml.safe_load(used.removeprefix("use: "))
    assert keys == report["overlay"] and keys["plugins"] == report["plugins"]
    child = tmp_path / "child.yaml"
    child.write_text(yaml.safe_dump({"base_config": str(file), **keys}))
    assert [str(error) for error in check_recipe(child).errors] == []
    (after,) = json.loads(run(str(child), "--json").stdout)["reports"]
    assert (
        after["recipe"]["step_seconds"]
        == report["modes"][report["plugins"]["hierarchical_ep"]["mode"]]["step_seconds"][1]
    )


@pytest.mark.parametrize(
    ("name", "own", "wanted"),
    [
        ("telechat3_105b", {"chunks": [1, 8], "stride": 3}, False),
        ("telechat3_438b", {"chunks": [1, 4], "stride": 3}, {"chunks": [1, 2], "stride": 1}),
    ],
)
def test_what_it_says_to_use_replaces_the_chunks_of_the_recipe(name, own, wanted, tmp_path):
    """A child with what it said kept the recipe's chunks or their order: 44.8 s a step in place of 20.1 s."""
    keys = {"plugins": {"hierarchical_ep": {"mode": "global"}, "ep_overlap": own}}
    keys |= {"base_config": str(ROOT / "recipes" / name / "pretrain_4k.yaml")}
    keys |= {"model": {"model_config": {"moe_token_dispatcher_type": "alltoall"}}}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(keys))
    (report,) = json.loads(run(str(tmp_path / "recipe.yaml"), "--json").stdout)["reports"]
    assert report["overlay"]["plugins"]["ep_overlap"] == wanted
    child = tmp_path / "child.yaml"
    child.write_text(yaml.safe_dump({"base_config": "recipe.yaml", **report["overlay"]}))
    assert check_recipe(child).errors == []
    (after,) = json.loads(run(str(child), "--json").stdout)["reports"]
    best = report["modes"][report["plugins"]["hierarchical_ep"]["mode"]]
    assert after["recipe"]["step_seconds"] == best["step_seconds"][1] < report["recipe"]["step_seconds"]


def test_a_model_that_the_plugins_cannot_change_is_offered_mindformers_own_dispatchers(tmp_path):
    """It was told to use plugins.hierarchical_ep, which `tc3 check` refuses for the class."""
    recipe = qwen3_moe(num_experts=64, num_experts_per_tok=8, offset=0)
    recipe["parallel_config"].update(data_parallel=16, expert_parallel=16, model_parallel=1, use_seq_parallel=False)
    recipe["parallel"]["dataset_strategy"] = [[16, 1]] * 4
    del recipe["model"]["model_config"]["num_nextn_predict_layers"]
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    (report,) = json.loads(run(str(tmp_path / "recipe.yaml"), "--json").stdout)["reports"]
    assert list(report["modes"]) == ["global", "hierarchical"] and report["plugins"] == {}
    assert all(mode["chunks"] == [1, 1] for mode in report["modes"].values())
    child = {"base_config": "recipe.yaml", **report["overlay"]}
    assert child["model"] == {"model_config": {"moe_token_dispatcher_type": "alltoall_deredundency"}}
    (tmp_path / "child.yaml").write_text(yaml.safe_dump(child))
    assert [str(error) for error in check_recipe(tmp_path / "child.yaml").errors] == []
    (after,) = json.loads(run(str(tmp_path / "child.yaml"), "--json").stdout)["reports"]
    predicted = report["modes"]["hierarchical"]["step_seconds"][1]
    assert after["overlay"] == {} and after["recipe"]["step_seconds"] == pytest.approx(predicted, rel=1e-12)
    assert "use: the recipe as written" in run(str(tmp_path / "child.yaml")).stdout
    (inside,) = json.loads(run(str(tmp_path / "recipe.yaml"), "--ep", "4", "--json").stdout)["reports"]
    assert list(inside["modes"]) == ["global"]
    assert inside["overlay"] == {"parallel_config": {"expert_parallel": 4}}
    request = request_of(load_recipe(tmp_path / "recipe.yaml"), "atlas_800t_a2")
    assert not request.pluggable and request_of(load_recipe(LARGE), "atlas_800t_a2").pluggable


def test_a_degree_for_a_recipe_that_writes_none(tmp_path):
    recipe = load_recipe(LARGE)
    del recipe["parallel_config"]["expert_parallel"]
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(json.loads(json.dumps(recipe))))
    none = run(str(tmp_path / "recipe.yaml"))
    assert type(none.exception).__name__ == "RecipeError" and "try --ep" in str(none.exception)
    ours, theirs = (
        json.loads(run(file, "--ep", "16", "--json").stdout) for file in (str(tmp_path / "recipe.yaml"), LARGE)
    )
    assert ours["reports"][0]["overlay"].pop("parallel_config") == {"expert_parallel": 16}
    assert ours["reports"] == theirs["reports"]


def test_json_is_one_object_on_stdout(tmp_path):
    picture = tmp_path / "deep" / "streams.svg"
    result = run(LARGE, "--json", "--skew", "1", "--picture", str(picture))
    content = json.loads(result.stdout)
    assert content["modelled"] is True and content["skew"] == 1 and content["hardware"]["name"] == "atlas_800t_a2"
    (report,) = content["reports"]
    assert (report["expert_parallel"], report["nodes"], report["rank_tokens"]) == (16, 2, 2048)
    assert list(report["modes"]) == ["global", "hierarchical", "deduplicated"]
    for mode in report["modes"].values():
        assert mode["step_seconds"][1] <= mode["step_seconds"][0]
        assert mode["exposed_fraction"][0] == pytest.approx(1)
    assert report["plugins"]["hierarchical_ep"]["mode"] in report["modes"]
    assert str(picture) in result.stderr
    assert ElementTree.parse(picture).getroot().tag.endswith("svg")
    assert "between nodes" in picture.read_text("utf-8")


def test_the_picture_of_the_same_numbers_is_the_same_file(tmp_path):
    files = [tmp_path / name for name in ("a.svg", "b.svg")]
    for file in files:
        assert run(LARGE, "--picture", str(file)).exit_code == 0
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--ep", "64", "--set", "parallel_config.data_parallel=4"], "--ep 64: .*expert_parallel"),
        (["--cluster", "h10"], "did you mean 'h100'"),
        (["--hardware", "h10"], "did you mean 'h100'"),  # the option's old name
        (["--cluster", "atlas_900_a3"], "npu_nums_per_device"),
        (["--picture", "streams.pdf"], ".svg or .png"),
        (["--set", "parallel_config.expert_paralel=8"], "did you mean"),
    ],
)
def test_user_errors(arguments, word):
    """`launch.cli.main` turns them into one line and exit code 2."""
    result = run(LARGE, *arguments)
    assert isinstance(result.exception, TC3Error)
    with pytest.raises(TC3Error, match=word):
        raise result.exception


@pytest.mark.parametrize("arguments", [["--ep", "16,x"], ["--skew", "0.5"], ["--ep", "16,32", "--picture", "a.svg"]])
def test_usage_errors(arguments):
    assert run(LARGE, *arguments).exit_code == 2


def test_nothing_heavy_is_imported():
    code = "import sys, tools.experts.cost; print([m for m in ('mindspore', 'matplotlib') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def advised(config, loads, **section):
    """Return the parts of an advice that `what_if` reads."""
    step = step_under(TIMES, config, loads)
    return SimpleNamespace(
        hardware=load_hardware("atlas_800t_a2"),
        written=SimpleNamespace(config=config, step=step),
        loads=loads,
        recipe={"plugins": {"expert_balance": section or False}},
        topology=SimpleNamespace(nodes=1),
    )


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    """A routing log of experts whose load drifts."""
    path = tmp_path_factory.mktemp("log") / "log.jsonl"
    records = live(Settings(every=0), steps=12, layers=7)
    path.write_text("".join(json.dumps({"step": r.step, "tokens": r.tokens.tolist()}) + "\n" for r in records))
    return str(path)


def test_each_row_is_the_step_with_one_thing_changed(log):
    config = loaded_run()
    loads = loads_of(log, config)
    found = {one.name: one for one in what_if(advised(config, loads, every=4), log)}
    assert found["as written"].step_s == TIMES.under(config, loads, True).total
    assert found["even loads"].step_s == TIMES.step(config, True).total == TIMES.under(config, EVEN, True).total
    for capacity in CAPACITIES:
        one = found[f"a device takes at most {capacity:g} x the mean"]
        capped = replace(loads, shares=np.minimum(loads.shares, capacity))
        assert one.step_s == TIMES.under(config, capped, True).total
        dropped = np.maximum(loads.shares - capacity, 0).mean()
        assert f"drops {dropped:.1%}" in one.note if dropped else one.note == "drops nothing"
    half = found["expert_parallel: 2"]
    other = replace(config, ep=2)
    assert (
        half.step_s == TIMES.under(replace(other, skew=loads_of(log, other).typical), loads_of(log, other), True).total
    )
    assert half.max_over_mean < loads.typical and "expert_parallel: 8" not in found, "dp 4 has no 8 ranks"


@pytest.mark.parametrize("node, wanted", [(4, {12}), (8, set()), (12, {3, 12})])
def test_a_degree_whose_groups_the_command_refuses_is_no_row(node, wanted):
    """Of 6 devices half is 3, and twice is 12: neither divides a node of 8, nor covers whole ones."""
    own = loaded_run()
    config = replace(own, model=replace(own.model, experts=24), dp=12, ep=6)
    advice = advised(config, loads_of("spread:0.5", config))
    advice.hardware = replace(advice.hardware, devices_per_node=node)
    rows = {one.name for one in what_if(advice, "spread:0.5")}
    assert {name for name in rows if "expert_parallel" in name} == {f"expert_parallel: {one}" for one in wanted}


def test_a_degree_that_a_plugin_of_the_recipe_refuses_is_neither_predicted_nor_recommended():
    """`plugins.group_aux_loss` wants whole sequences in an EP group, and eight tensor-parallel ranks share one."""
    report = "recipes/telechat3_105b/pretrain_4k_report.yaml"
    told = json.loads(run(report, "--loads", "spread:0.3", "--json").stdout)
    rows = {row["name"]: row for row in told["reports"][0]["what_if"]}
    assert rows["expert_parallel: 4"]["step_s"] is None and rows["expert_parallel: 16"]["step_s"] > 0
    assert "refused by tc3 check" in rows["expert_parallel: 4"]["note"]
    refused = str(run(report, "--ep", "4").exception)
    assert refused.startswith("--ep 4: tc3 check refuses this degree") and "plugins.group_aux_loss" in refused
    assert run(report, "--ep", "4", "--set", "plugins.group_aux_loss=False").exit_code == 0


def test_moves_are_replayed_and_their_cost_is_counted(log):
    config = loaded_run()
    loads = loads_of(log, config)
    found = {one.name: one for one in what_if(advised(config, loads, every=4, method="swaps"), log)}
    moved = found["experts move every 4 steps (swaps)"]
    records = live(Settings(every=4), steps=12, layers=7)  # the same tokens, by the plugin itself
    ratios = np.stack([imbalance(record.tokens, record.slots, DEVICES) for record in records])[4:]
    assert moved.max_over_mean == pytest.approx(ratios.mean())
    slots = np.stack([record.moved.slots if record.moved else record.slots for record in records])
    cost = move_seconds(TIMES, config, records[0].slots, slots, 3)
    expected = TIMES.under(config, of_ratios(ratios, range(8), ""), True).total + cost / 4
    assert moved.step_s == pytest.approx(expected) and cost > 0
    assert f"{cost:.2f} s over the links" in moved.note
    assert moved.step_s < found["as written"].step_s


def test_the_seconds_of_moves_are_those_of_the_device_that_sends_most():
    config = loaded_run()
    first = np.tile(np.arange(32), (7, 1))
    slots = np.tile(first, (2, 1, 1))
    assert move_seconds(TIMES, config, first, slots, 1) == 0
    slots[1, 0, [0, 8]] = slots[1, 0, [8, 0]]  # layer 1 on stage 0: one expert leaves devices 0 and 1
    model = config.model
    size = 3 * model.hidden * model.expert_ffn * (config.weight_item + config.state_item)
    one = TIMES.sending(size, DEVICES)
    assert move_seconds(TIMES, config, first, slots, 1) == pytest.approx(one)
    slots[1, 0, [1, 16]] = slots[1, 0, [16, 1]]  # a second one leaves device 0
    slots[1, 6, [0, 8]] = slots[1, 6, [8, 0]]  # on the other stage at the same time
    two = TIMES.sending(2 * size, DEVICES)
    assert move_seconds(TIMES, config, first, slots, 1) == pytest.approx(two)
    assert move_seconds(TIMES, config, first, slots, 2) == pytest.approx(two / 2)


def test_what_the_loads_do_not_tell_is_unknown(log):
    config = loaded_run()
    spread = {one.name: one for one in what_if(advised(config, loads_of("spread:0.5", config)), "spread:0.5")}
    moved = spread["experts move every 20 steps (swaps)"]
    assert moved.step_s is None and "a record or a routing log" in moved.note
    short = what_if(advised(config, loads_of(log, config)), log)[2]
    assert short.step_s is None and "the log has 12 steps, a plan needs more than 20" in short.note
    number = {one.name: one for one in what_if(advised(config, loads_of("1.6", config)), "1.6")}
    assert number["expert_parallel: 2"].step_s is None
    assert number["a device takes at most 1.25 x the mean"].note == "what it drops is unknown"
    text = lines(list(number.values()))
    assert len(text) == 1 + len(number) and " unknown " in text[3] and "max/mean" in text[0]


def test_the_command_shows_the_rows_under_uneven_loads_only():
    shown = CliRunner().invoke(ep_report, [LARGE, "--loads", "1.3"]).stdout
    assert "what would change a step under these loads" in shown
    assert "a token visits at most 1 of 2 nodes: mode deduplicated" in shown
    found = json.loads(CliRunner().invoke(ep_report, [LARGE, "--loads", "1.3", "--json"]).stdout)["reports"][0]
    rows = {row["name"]: row for row in found["what_if"]}
    assert rows["as written"]["step_s"] == found["recipe"]["step_seconds"] > rows["even loads"]["step_s"]
    even = json.loads(CliRunner().invoke(ep_report, [LARGE, "--json"]).stdout)["reports"][0]
    assert even["what_if"] is None and even["recipe"]["step_seconds"] == rows["even loads"]["step_s"]


def test_a_recipe_whose_router_visits_few_nodes_is_not_told_to_limit_it():
    limited = run(
        *(LARGE, "--ep", "64", "--skew", "1.3", "--json"),
        *("--set", "model.model_config.n_group=8", "--set", "model.model_config.topk_group=2"),
    )
    free = run(LARGE, "--ep", "64", "--skew", "1.3", "--json")
    (few,), (any_,) = (json.loads(result.stdout)["reports"] for result in (limited, free))
    assert any("visits at most 4 of 8 nodes" in one["name"] for one in any_["what_if"])
    assert not any("visits at most" in one["name"] for one in few["what_if"])
    sent = [report["modes"]["deduplicated"]["inter_bytes"] for report in (few, any_)]
    saved = [report["break_even"]["deduplicated_over_hierarchical"] for report in (few, any_)]
    assert sent[0] < 0.6 * sent[1] and saved[0] < 0.6 * saved[1]
    assert few["modes"]["global"] == any_["modes"]["global"]
