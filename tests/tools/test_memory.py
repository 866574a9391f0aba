"""`tc3 memory`. Each of its proposals is predicted from its own keys, and what is said to fit does."""

import copy
import json
import os

import numpy as np
import pytest
from click.testing import CliRunner
from rich.console import Console

from plugins.errors import RecipeError
from tools.check.check import check_recipe
from tools.dryrun.cli import advice
from tools.estimate.efficiency import cluster
from tools.estimate.from_recipe import from_recipe
from tools.estimate.loads import loads_of
from tools.estimate.memory.changes import fewest_recomputed, pairs_of_changes, single_changes
from tools.estimate.memory.loaded import judge
from tools.estimate.memory.model import all_stages, peak_memory, stage_memory
from tools.estimate.memory.room import DOES_NOT_FIT, FITS, UNKNOWN, Room, room_of
from tools.estimate.time_model import TimeModel
from tools.hardware import DEFAULT_HARDWARE
from tools.hardware.units import GIB, MIB
from tools.layout.budget import Budget
from tools.layout.offsets import path_of, write_layout
from tools.layout.resolve import make_layout, resolve
from tools.measured import MemoryTerms, applied
from tools.memory import _report, _worst, explain, memory, pass_in_words, print_proposals, unit_of, verdict
from tools.recipe.load import load_recipe
from tools.recipe.override import apply_overrides

GRADIENTS = "parallel.parallel_optimizer_config.gradient_accumulation_shard"
EP = "parallel_config.expert_parallel"


@pytest.fixture(scope="module")
def times():
    return TimeModel(cluster(DEFAULT_HARDWARE))


def public_48():
    """MindFormers' row of 48 devices, with an offset that its own check accepts and a micro-batch for each stage."""
    changes = {
        **{"data_parallel": 1, "model_parallel": 8, "pipeline_stage": 6, "expert_parallel": 1, "micro_batch_num": 8},
    }
    sets = [f"parallel_config.{key}={value}" for key, value in changes.items()]
    sets += ["model.model_config.offset=[1,1,1,0,0,0]", "context.max_device_memory=58GB"]
    return apply_overrides(load_recipe("recipes/telechat3_105b/pretrain_4k.yaml"), sets)


def test_experts_are_shared_by_ranks_that_mindformers_lets_share_them():
    """Ranks of context parallelism share none: `tc3 check` wants dp x tp to be a multiple of ep."""
    degrees = {"data_parallel": 4, "model_parallel": 4, "context_parallel": 2, "expert_parallel": 16}
    sets = [f"parallel_config.{key}={value}" for key, value in degrees.items()]
    recipe = apply_overrides(load_recipe("recipes/telechat3_105b/pretrain_4k.yaml"), sets)
    assert not check_recipe(recipe).errors
    config = from_recipe(recipe)
    changes = [*single_changes(config, 20 * GIB), *pairs_of_changes(config, 20 * GIB)]
    assert "model_parallel doubled, data_parallel halved" in [change.name for change in changes]
    assert all(change.config.dp * change.config.tp % change.config.ep == 0 for change in changes)
    said, command = advice(recipe, 60 * GIB, sets).split("; tc3 memory ")
    assert command.startswith(f"{recipe.source} --set {sets[0]} --set ")  # without --set, it is another run
    assert "model_parallel doubled" in said and "context_parallel" not in said and "expert_parallel" not in said


def test_advice_cuts_no_key_value_heads_that_check_refuses_to_cut():
    """Sixteen ranks divide the 48 heads of the model, but not its 8 key-value heads."""
    sets = [f"parallel_config.{key}" for key in ("data_parallel=2", "model_parallel=8")]
    recipe = apply_overrides(load_recipe("recipes/telechat3_36b/pretrain_8k.yaml"), sets)
    refused = apply_overrides(recipe, ["parallel_config.data_parallel=1", "parallel_config.model_parallel=16"])
    assert any("8 key-value heads cannot be divided over 16" in str(one) for one in check_recipe(refused).errors)
    said = advice(recipe, 10 * GIB)
    assert "context_parallel doubled" in said and "model_parallel" not in said


def test_advice_for_experts_without_tensor_parallelism_also_sets_sequence_parallelism(times):
    """MindFormers trains no experts with tensor parallelism and without sequence parallelism."""
    recipe = load_recipe("docs/examples/moe_20b.yaml")
    found = {row.name: row for row in explain(recipe, times, room_of(recipe, times.hardware, 20), pairs=False)}
    doubled = found["model_parallel doubled, data_parallel halved"]
    assert doubled.keys["parallel_config.use_seq_parallel"] is True and not doubled.refused


def test_advice_leaves_out_what_plugins_of_the_recipe_refuse():
    """`plugins.group_aux_loss` wants whole sequences in an EP group; 8 of 16 tensor-parallel ranks hold half."""
    recipe = resolve(load_recipe("recipes/telechat3_105b/pretrain_4k_report.yaml"), layout="even")
    assert "model_parallel doubled" in [change.name.split(",")[0] for change in single_changes(from_recipe(recipe), 0)]
    said = advice(recipe, 20 * GIB)
    assert "expert_parallel times 2" in said and "context_parallel doubled" in said and "model_parallel" not in said


def test_the_public_row_of_48_devices_needs_expert_parallelism(times):
    """Compiled by `tc3 dryrun --quick`, 120.6 to 139.3 GiB at ep 1 and 35.7 to 43.4 at ep 8; the limit is 58."""
    recipe = public_48()
    assert min(stage_memory(from_recipe(recipe), s).peak for s in range(6)) > 120 * GIB
    room = room_of(recipe, times.hardware)
    found = explain(recipe, times, room)
    best, by_keys = found[0], {tuple(row.keys): row for row in found}
    assert best.keys == {EP: 8} and best.fit == FITS and not best.refused
    assert best.peak / GIB == pytest.approx(46.5, abs=0.2)
    alone = by_keys[(GRADIENTS,)]
    assert alone.fit == DOES_NOT_FIT and alone.peak > 67 * GIB
    assert "does not finish compiling" in alone.refused
    said = advice(recipe, int(58 * GIB))
    enough, short = said.split("not enough by itself")
    assert "expert_parallel times 8 (46.5 GiB)" in enough and "expert_parallel times 2" in short
    assert "shard accumulated gradients" not in said  # in a pipeline their compile does not end


def test_the_fewest_layers_that_fit_do_so_with_the_margin():
    recipe = load_recipe("recipes/telechat3_105b/pretrain_4k.yaml")
    recipe = apply_overrides(recipe, ["recompute_config.recompute=False"])
    assert peak_memory(from_recipe(recipe)) > 21 * GIB
    enough, _ = advice(recipe, 21 * GIB).split("not enough by itself")
    assert "recompute the fewest layers that fit (19.4 GiB)" in enough  # 7.3 % of 21 stay free


def test_each_proposal_is_what_its_keys_give(times):
    recipe = load_recipe("recipes/telechat3_438b/pretrain_4k.yaml")
    room = room_of(recipe, times.hardware, 30)
    found = explain(recipe, times, room)
    own = peak_memory(from_recipe(recipe))
    assert [row for row in found if row.refused] == [row for row in found if GRADIENTS in row.keys] == found[-1:]
    taken = [row for row in found if not row.refused]
    assert [row.fit for row in taken] == sorted((row.fit for row in taken), key=[FITS, "unknown", DOES_NOT_FIT].index)
    fitting = [row.step_s for row in taken if row.fit == FITS]
    assert len(fitting) > 2 and fitting == sorted(fitting)
    for row in found:
        sets = [f"{key}={value}" for key, value in row.keys.items()]
        again = from_recipe(apply_overrides(recipe, sets))
        assert again.devices == 4096 and again.global_batch == from_recipe(recipe).global_batch
        assert peak_memory(again) == row.peak == pytest.approx(own - row.freed)
        assert row.freed > 0 and row.fit == verdict(row.peak, room)


@pytest.mark.slow
def test_proposals_for_a_recipe_that_leaves_its_layout_open_hold_the_layout(times, tmp_path):
    """The layout file was made for the run without the change. A launch takes the tables of recomputation from it."""
    path = tmp_path / "recipe.yaml"
    base = os.path.abspath("recipes/telechat3_438b/pretrain_4k_ep_overlap.yaml")
    flags = "recompute_config: {select_recompute: False, select_comm_recompute: False}"
    path.write_text(f"base_config: {base}\nmodel: {{model_config: {{offset: auto}}}}\n{flags}\n")
    recipe = load_recipe(path)
    write_layout(make_layout(recipe, "atlas_800t_a2", Budget(0.1, 60.0)), path_of(str(path)), "a test")
    found = explain(recipe, times, room_of(recipe, times.hardware, 30), pairs=False)
    assert {"recompute every layer", "expert_parallel doubled", "expert_parallel times 2"} & {row.name for row in found}
    for row in found:
        sets = [f"{key}={json.dumps(value)}" for key, value in row.keys.items()]
        again = from_recipe(resolve(apply_overrides(recipe, sets)))
        assert peak_memory(again) == row.peak
        assert times.step(again, simulated=True).total == row.step_s


def test_proposals_have_the_measured_factors(times):
    """With twice the modelled activations a change fits only if they fit; the freed bytes are those of the same."""
    recipe, terms = load_recipe("recipes/mini/pretrain_tp2.yaml"), MemoryTerms(2.0, 1.0, 0.0, 0.0)
    own = max(applied(stage, terms).peak for stage in all_stages(from_recipe(recipe)))
    room = Room(peak_memory(from_recipe(recipe)), "a test", 0.0)
    found = explain(recipe, times, room, pairs=False, terms=terms)
    assert {row.fit for row in found} == {FITS, DOES_NOT_FIT}
    for row in found:
        changed = recipe
        for key, value in row.keys.items():
            changed = with_value(changed, key.split("."), value)
        again = from_recipe(changed)
        assert row.peak == max(applied(stage, terms).peak for stage in all_stages(again))
        assert row.freed == own - row.peak and row.fit == verdict(row.peak, room)


@pytest.mark.parametrize(("factor", "fit"), [(1.0, UNKNOWN), (0.5, FITS), (2.0, DOES_NOT_FIT)])
def test_the_verdict_of_a_model_with_experts_is_that_of_the_measured_memory(times, factor, fit):
    """The limit is the modelled peak: with half of the modelled activations a run fits, at even loads as well."""
    config = from_recipe(load_recipe("recipes/telechat3_438b/pretrain_4k.yaml"))
    terms = MemoryTerms(factor, factor, 0.0, 0.0)
    every = [applied(stage, terms) for stage in all_stages(config)]
    room = Room(1.01 * peak_memory(config), "a test", 0.05)
    report, _ = _report(config, times, room, None, None, every, terms)
    assert report["fit"] == fit == _worst([stage["fit"] for stage in report["stages"]])


def test_the_keys_of_a_proposal_are_all_that_a_recipe_needs(times, tmp_path):
    """The router's callback repeats the steps of accumulation; patterns of operators have dots of their own."""
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"base_config: {os.path.abspath('docs/examples/moe_20b.yaml')}\n"
        "runner_config: {gradient_accumulation_steps: 16}\n"
        "parallel_config: {data_parallel: 64, pipeline_stage: 1, micro_batch_num: 1}\n"
        "parallel: {dataset_strategy: [[64, 1], [64, 1], [64, 1], [64, 1]]}\n"
        "recompute_config: {recompute: False, select_recompute: {mlp\\.mul: False}}\n"
        "model: {model_config: {offset: 0}}\n"
        "callbacks: [{type: MFLossMonitor}, {type: TopkBiasBalanceCallback, gradient_accumulation_steps: 16}]\n"
    )
    recipe = load_recipe(path)
    assert not check_recipe(recipe).errors
    found = {row.name: row for row in explain(recipe, times, room_of(recipe, times.hardware, 30), pairs=False)}
    assert found["model_parallel doubled, data_parallel halved"].keys["callbacks.1.gradient_accumulation_steps"] == 32
    assert isinstance(found["recompute norms"].keys["recompute_config.select_recompute"], dict)
    for row in found.values():
        changed = recipe
        for key, value in row.keys.items():
            changed = with_value(changed, key.split("."), value)
        assert peak_memory(from_recipe(changed)) == row.peak
        assert bool(check_recipe(changed).errors) == bool(row.refused)


def with_value(section, path, value):
    """A copy of a recipe with another value at a path, of sections and entries of lists."""
    section = copy.deepcopy(section)
    inner = section
    for name in path[:-1]:
        inner = inner[int(name)] if isinstance(inner, list) else inner.setdefault(name, {})
    inner[path[-1]] = value
    return section


def test_two_together_where_one_is_not_enough(times):
    recipe = load_recipe("recipes/telechat3_438b/pretrain_4k.yaml")
    found = explain(recipe, times, room_of(recipe, times.hardware, 13))
    assert any("; " in row.name for row in found)
    config, limit = from_recipe(recipe), 12.0 * GIB
    single = min(change.peak for change in single_changes(config, limit))
    assert min(change.peak for change in pairs_of_changes(config, limit)) < single


def test_as_few_layers_are_recomputed_as_fit():
    recipe = apply_overrides(
        load_recipe("recipes/telechat3_105b/pretrain_4k.yaml"), ["recompute_config.recompute=false"]
    )
    config = from_recipe(recipe)
    limit = 0.6 * peak_memory(config)
    changed = fewest_recomputed(config, limit)
    counts = changed.recompute.full[0]
    for stage, count in enumerate(counts):
        assert stage_memory(changed, stage).peak <= limit or count == config.layers[0][stage]
    assert 0 < sum(counts) < config.model.layers
    assert fewest_recomputed(config, 2 * peak_memory(config)) is None


@pytest.mark.parametrize(
    ("rows", "fits", "led"),
    [
        ([], False, True),
        ([], True, False),
        ([(FITS, "")], False, False),
        ([(FITS, "refused"), (UNKNOWN, "")], False, True),
    ],
)
def test_where_no_change_surely_fits_the_search_is_named(capsys, rows, fits, led):
    row = {"name": "a change", "keys": {}, "peak": 2.0 * GIB, "freed": GIB, "slower": 0.1}
    print_proposals([{**row, "fit": fit, "refused": refused} for fit, refused in rows], Console(width=200), fits)
    assert ("tc3 search tries every layout" in capsys.readouterr().out) == led


def test_nothing_is_proposed_where_nothing_is_known(times):
    recipe = load_recipe("recipes/telechat3_105b/pretrain_4k.yaml")
    config = from_recipe(recipe)
    assert all(change.peak < peak_memory(config) for change in single_changes(config, 50 * GIB))


def test_of_level3_nothing_is_said(times):
    recipe = load_recipe("recipes/telechat3_105b/pretrain_4k.yaml")
    recipe["parallel"]["parallel_optimizer_config"] = {"optimizer_level": "level3"}
    with pytest.raises(RecipeError, match="with level3 fits is unknown"):
        room_of(recipe, times.hardware)
    assert advice(recipe, 10 * GIB).startswith("what would make it fit is unknown: ")


@pytest.mark.parametrize(
    ("value", "unknown"),
    [
        ([r"mlp\.mul"], True),
        ({r"mlp\.mul": [0, 0, 0, 0, 0, 0, 0, 1]}, True),
        ({r"mlp\.mul": [[0] * 8, True]}, True),
        ({r"mlp\.mul": [0] * 8, r".*\.norm": False}, False),
        (True, False),
        ([], False),
    ],
)
@pytest.mark.parametrize("key", ["select_recompute_exclude", "select_comm_recompute_exclude"])
def test_of_operators_excluded_from_recomputation_nothing_is_said(times, key, value, unknown):
    recipe = load_recipe("recipes/telechat3_105b/pretrain_4k.yaml")
    recipe["recompute_config"][key] = value
    if not unknown:
        assert room_of(recipe, times.hardware)
        return
    with pytest.raises(RecipeError, match=f"{key}: whether a recipe that excludes operators"):
        room_of(recipe, times.hardware)


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
    assert "step times: off by " in result.stdout and "step times" not in run("--limit", 16).stdout
    told = run("--limit", 16, "--explain-oom", "--json", "--cluster", "a100_80g").stdout
    assert json.loads(told)["known_step_errors"]["groups"] > 1


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
    assert pass_in_words("update") == "the update (clipping and the optimizer)"
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


def test_a_change_under_loads_fits_only_if_all_their_steps_do(times):
    """Changes were said to make the recipe fit that fit only at even loads."""
    recipe, loads = load_recipe(LARGE), "10"
    room = room_of(recipe, times.hardware, 32)
    even, found = (explain(recipe, times, room, pairs=False, loads=text) for text in (None, loads))
    for row in found:
        changed = recipe
        for key, value in row.keys.items():
            changed = with_value(changed, key.split("."), value)
        config = from_recipe(changed)
        judged = judge(config, room, loads_of(loads, config, of_many=True))
        assert row.fit == _worst([verdict(row.peak, room), judged.verdict]), row.name
    fits = [{row.name for row in rows if row.fit == FITS} for rows in (even, found)]
    assert fits[1] and fits[0] - fits[1]


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
