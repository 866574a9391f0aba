from pathlib import Path
from types import SimpleNamespace

import pytest

from plugins.errors import RecipeError
from tools.check.check import check_recipe
from tools.dryrun.memory import WEIGHT
from tools.dryrun.plan import stages_of
from tools.dryrun.quick import ERROR, compose, quick_plan
from tools.dryrun.quick import small_of as quick_small_of
from tools.dryrun.report import loads_asked, report_of
from tools.estimate.from_recipe import from_recipe
from tools.estimate.loads import uniform
from tools.estimate.memory.loaded import peaks
from tools.estimate.memory.model import stage_memory
from tools.hardware.units import GIB
from tools.model import DENSE, MOE
from tools.recipe.load import load_recipe
from tools.recipe.view import View
from tools.search.ranking.verify import DryRun, judge

RECIPES = Path(__file__).resolve().parents[3] / "recipes"
NAMES = [f"telechat3_{size}/{kind}" for size in ("105b", "438b", "1119b") for kind in ("pretrain_4k", "context_128k")]
LARGE = "telechat3_105b/pretrain_4k.yaml"


@pytest.mark.parametrize("name", NAMES)
def test_the_small_recipe_is_one_that_mindformers_takes(name):
    plan = quick_plan(load_recipe(RECIPES / f"{name}.yaml"))
    small = plan.jobs[0].recipe
    assert check_recipe(small).errors == []
    assert small["model"]["model_config"]["num_hidden_layers"] == 3
    whole = load_recipe(RECIPES / f"{name}.yaml")["parallel_config"]
    for key in ("data_parallel", "model_parallel", "context_parallel", "expert_parallel"):
        assert small["parallel_config"][key] == whole[key]


def test_a_layer_that_is_recomputed_and_one_that_is_not_are_two_kinds():
    loaded = recompute(recompute=[4, 2, 1, 0, 0, 0, 0, 0])
    small = small_of(loaded)["recompute_config"]
    assert small["recompute"] == [2, 0]  # dense and MoE; the MoE layer that is not recomputed stands behind them
    assert groups_of(loaded) == [[(DENSE, (True,)), (MOE, (True,)), (MOE, (False,))], [(MOE, (False,))]]
    assert [[kind.on for kind in chunk] for chunk in quick_small_of(loaded).kinds[1]] == [
        [(True,)] * 2 + [(False,)] * 4
    ]


def test_what_no_one_stage_can_say_takes_another_stage():
    """The dense layer is not recomputed and comes first, so that no MoE layer behind it on its stage can be."""
    loaded = recompute(recompute=[0, 2, 0, 6, 0, 0, 0, 1])
    small = small_of(loaded)
    assert groups_of(loaded)[:2] == [[(DENSE, (False,)), (MOE, (False,))], [(MOE, (True,))] * 2]
    assert small["recompute_config"]["recompute"] == [0, 2, 1]
    assert small["parallel_config"]["pipeline_stage"] == 3
    assert [len(stage.kinds) for stage in stages_of(View(small))] == [2, 2, 1]


def test_select_lists_and_exclusions_set_kinds_apart_but_not_where_the_layer_is_recomputed_whole():
    norms = {r".*\.norm": [0, 0, 3, 0, 0, 0, 0, 0], r"mlp\.mul": True}
    loaded = recompute(recompute=[0, 0, 1, 0, 0, 0, 0, 0], select_recompute=norms)
    on = {kind.on for stage in quick_small_of(loaded).kinds for chunk in stage for kind in chunk}
    assert on == {(False, False), (True, True), (False, True)}
    loaded = recompute(recompute=True, select_recompute=norms, select_comm_recompute=[1] * 8)
    assert {kind.on for stage in quick_small_of(loaded).kinds for chunk in stage for kind in chunk} == {(True, True)}
    assert small_of(loaded)["recompute_config"]["recompute"] is True


def test_one_number_a_stage_is_dealt_to_its_chunks():
    loaded = load_recipe(RECIPES / "telechat3_438b/pretrain_4k.yaml")
    loaded["recompute_config"]["recompute"] = [3, 0, 0, 0, 0, 0, 0, 0]
    first = quick_small_of(loaded).kinds[0]
    assert [sum(kind.on[0] for kind in chunk) for chunk in first] == [2, 1]
    small_of(loaded)


def test_swapped_layers_are_kinds_of_their_own():
    loaded = recompute(recompute=[7, 13])  # with swapping, numbers of layers
    model = loaded["model"]["model_config"]
    model |= {"swap": True, "layer_swap": [{"backward_prefetch": 1, "layers": [8, 14]}]}
    model["op_swap"] = [{"op_name": r"mlp\.mul", "backward_prefetch": 1, "layers": [8]}]
    small = quick_small_of(loaded).recipe  # tc3 check counts layers here, as if nothing were swapped
    small_model = small["model"]["model_config"]
    swap = small_model["layer_swap"][0]["layers"]
    again = small["recompute_config"]["recompute"]
    assert len(swap) == 2 and len(again) == 1 and not set(swap) & set(again)
    assert len(small_model["op_swap"][0]["layers"]) == 1
    kinds = quick_small_of(loaded).kinds
    assert [kind.on for kind in kinds[1][0]][:3] == [(False,) * 3, (True, False, False), (False, True, True)]
    assert kinds[2][0][2].on == (False, True, False)


def test_what_stands_in_swap_config_reaches_no_model_of_mindformers():
    """Lists of layers go on counting, from the first stage on, whatever `swap` says."""
    loaded = recompute(recompute=[7, 3])
    loaded["swap_config"] = {"swap": True, "layer_swap": [{"backward_prefetch": 1, "layers": [8]}]}
    kinds = quick_small_of(loaded).kinds
    assert [sum(kind.whole for kind in stage[0]) for stage in kinds] == [6, 3, 0, 0, 0, 0, 0, 0]


def test_the_small_models_last_layer_is_like_the_last_whose_settings_mtp_layers_share():
    loaded = recompute(recompute=[0, 0, 0, 0, 0, 0, 0, 1])
    assert groups_of(loaded)[-1] == [(MOE, (True,))]


def recompute(**section):
    loaded = load_recipe(RECIPES / LARGE)
    loaded["recompute_config"] = section
    return loaded


def groups_of(loaded):
    return [[(kind.block, kind.on) for kind in group] for group in quick_small_of(loaded).groups]


def small_of(loaded):
    small = quick_plan(loaded).jobs[0].recipe
    assert check_recipe(small).errors == []
    return small


def kinds_of(loaded):
    return [kind for stage in stages_of(View(small_of(loaded))) for kind in stage.kinds]


def test_layers_that_the_recipe_leaves_to_the_default():
    """MindFormers' class says three dense layers, so that the small model would have no other."""
    loaded = load_recipe(RECIPES / LARGE)
    del loaded["model"]["model_config"]["first_k_dense_replace"]
    assert kinds_of(loaded) == [DENSE, MOE, MOE]


def test_layers_that_the_recipe_lists():
    loaded = load_recipe(RECIPES / LARGE)
    loaded["model"]["model_config"] |= {"first_k_dense_replace": 0, "moe_layer_freq": [0, *[1] * 44]}
    assert kinds_of(loaded) == [DENSE, MOE, MOE]
    loaded["model"]["model_config"]["moe_layer_freq"] = [1] * 45
    assert kinds_of(loaded) == [MOE] * 3  # two in front: what both read belongs to neither


def test_a_recipe_that_says_nothing_of_recomputation():
    loaded = load_recipe(RECIPES / LARGE)
    del loaded["recompute_config"]
    assert not small_of(loaded).get("recompute_config")


@pytest.mark.parametrize(
    ("name", "layers"), [("pangu_ultra_moe_718b/pretrain_4k", 3), ("telechat3_36b/pretrain_8k", 3)]
)
def test_recipes_of_other_models(name, layers):
    assert small_of(load_recipe(RECIPES / f"{name}.yaml"))["model"]["model_config"]["num_hidden_layers"] == layers


def test_a_model_of_experts_with_dense_layers_only_stays_dense():
    loaded = load_recipe(RECIPES / LARGE)
    loaded["model"]["model_config"]["first_k_dense_replace"] = 45
    assert kinds_of(loaded) == [DENSE] * 3


def test_what_a_stage_excludes_is_excluded_there_alone():
    loaded = load_recipe(RECIPES / LARGE)
    loaded["recompute_config"]["select_recompute_exclude"] = {r"mlp\.mul": [0, 0, 0, 6, 0, 0, 0, 0]}
    assert small_of(loaded)["recompute_config"]["select_recompute_exclude"] == {r"mlp\.mul": [0, 2, 0]}
    kinds = quick_small_of(loaded).kinds
    assert [kinds[stage][0][0].on for stage in (2, 3)] == [(False,), (True,)]


def weight(name, size):
    return {"name": name, "kind": WEIGHT, "dtype": "Float32", "shape": (size,), "slice": (size,), "shards": 1}


def part(saved, forward=0, backward=0):
    return {"saved": saved, "forward": forward, "backward": backward}


def results_of(plan, saved):
    """Compiles as they might have been: `saved` by layer of the small model; 1 GiB in its front, 2 in its back."""
    found, number = [], 0
    for job, stage in zip(plan.jobs, stages_of(View(plan.jobs[0].recipe)), strict=True):
        held, parts = [], {"common": part(0)}
        for _ in stage.kinds:
            held.append(weight(f"decoder.layers.{number}.w", 1 << 20))
            parts[str(number)] = part(saved[number], saved[number] + GIB // 10, GIB // 2)
            number += 1
        if "embedding" in stage.ends:
            held.append(weight("embedding.w", 1000))
            parts["front"] = part(GIB, GIB, 0)
        if "head" in stage.ends:
            held += [weight("output_layer.w", 500), weight("embedding.w", 1000)]
            parts["back"] = part(2 * GIB, 2 * GIB, GIB)
        graph = {"kept": {}, "activations": [{**part(0), "parts": parts}]}
        found.append({"rank": job.rank, "stage": job.stage, "held": held, "groups": [], "graph": graph, "seconds": {}})
    return found


def reported(loaded, saved, loads=None):
    plan = quick_plan(loaded)
    results = [
        result | {"graph": result["graph"] | {"collectives": [], "groups": []}} for result in results_of(plan, saved)
    ]
    return report_of(loaded, plan, results, View(loaded).node, loads=loads)


def test_stages_are_put_together_from_layers():
    plan = quick_plan(load_recipe(RECIPES / "telechat3_105b/pretrain_4k.yaml"))
    front = [weight("embedding.w", 1000), weight("decoder.layers.0.w", 10), weight("decoder.layers.1.w", 7)]
    back = [weight("embedding.w", 1000), weight("decoder.layers.2.w", 7), weight("output_layer.w", 500)]
    back.append(weight("mtp.layers.0.w", 50))
    in_front = {"common": part(1), "front": part(5, 9, 1), "0": part(8, 20, 30), "1": part(4, 6, 40)}
    behind = {"common": part(2), "front": part(0), "2": part(4, 6, 40), "back": part(100, 130, 60)}
    results = [
        {"held": front, "graph": {"activations": [{**part(8), "parts": in_front}],
                                  "kept": {"embedding.w": 100, "decoder.layers.1.w": 3}}},
        {"held": back, "graph": {"activations": [{**part(10), "parts": behind}], "kept": {"mtp.layers.0.w": 9}}},
    ]  # fmt: skip
    parts = compose(load_recipe(RECIPES / LARGE), plan.stages, results)
    sums = [sum(item.elements for item in held) for held, _ in parts]
    assert sums == [1000 + 10 + 5 * 7, *[6 * 7] * 4, *[7 * 7] * 2, 7 + 1000 + 500 + 50]
    assert [sum(graph["kept"].values()) for _, graph in parts] == [100 + 5 * 3, *[18] * 4, *[21] * 2, 3 + 9]
    passes = [graph["activations"][0] for _, graph in parts]
    assert [item["saved"] for item in passes] == [1 + 5 + 8 + 5 * 4, *[1 + 6 * 4] * 4, *[1 + 7 * 4] * 2, 2 + 4 + 100]
    assert [item["forward"] for item in passes] == [34 - 4 + 6, *[25 - 4 + 6] * 4, *[29 - 4 + 6] * 2, 2 + 4 + 130]
    assert [item["backward"] for item in passes] == [40, *[40] * 6, 60]


@pytest.mark.parametrize(
    ("kept_gib", "verdict", "words"),
    [(0.1, "fits", ""), (1.5, "does not fit", "the limit is 55.5"), (1.3, "unknown", "unknown whether it fits")],
)
def test_the_stage_without_recomputation_decides(kept_gib, verdict, words):
    """Seven stages recompute all their layers; the sixth, with 7 layers and 3 micro-batches in flight, none."""
    loaded = recompute(recompute=[6, 6, 6, 6, 6, 0, 7, 1])
    blocks = [kind.on[0] for group in quick_small_of(loaded).groups for kind in group]
    report = reported(loaded, [GIB // 100 if again else int(kept_gib * GIB) * 2 for again in blocks])
    assert report["fit"] == verdict and report["quick_error"] == ERROR
    assert [stage["fit"] for stage in report["stages"]] == ["fits"] * 5 + [verdict] + ["fits"] * 2
    problems = report["problems"]
    assert len(problems) == (verdict != "fits") and all(words in line and "stage 5" in line for line in problems)
    saved = report["stages"][5]["memory"]["saved"]
    assert saved == 3 * 7 * int(kept_gib * GIB) * 2  # 1F1B: stage 5 of 8 has three micro-batches in flight


@pytest.mark.slow
def test_uneven_loads_are_judged_on_what_was_compiled():
    loaded = recompute(recompute=True)
    small = quick_small_of(loaded).groups
    saved = [GIB // 100] * sum(map(len, small))
    even = reported(loaded, saved)
    assert even["loads"]["fits_up_to"] > 1 and even["fit"] == "fits" and even["exchange"] is None
    mild, hard = (reported(loaded, saved, loads=loads_asked(text, loaded)) for text in ("1.01", "7"))
    assert mild["fit"] == "fits" and mild["loads"]["steps"] == {"all": 1, "need_more": 0, "open": 0}
    assert mild["loads"]["fits_up_to"] == even["loads"]["fits_up_to"] and not mild["problems"]
    stage = max(even["stages"], key=lambda stage: stage["memory"]["total"])
    more = hard["loads"]["stages"][stage["stage"]]["bytes"] - stage["memory"]["total"]
    config = from_recipe(loaded)
    modelled = peaks(config, stage["stage"], uniform(7).shares)[0] - stage_memory(config, stage["stage"]).peak
    assert more == pytest.approx(modelled)
    tight = recompute(recompute=True)
    tight["context"]["max_device_memory"] = f"{(stage['memory']['total'] + more / 9) / GIB}GB"
    over = reported(tight, saved, loads=loads_asked("7", tight))
    assert over["fit"] == "does not fit" and over["stages"][stage["stage"]]["fit"] == "unknown", "within 3 %"
    assert "under the loads: does not fit" in over["problems"][-1]


def test_loads_need_a_limit_and_a_device():
    loaded = recompute(recompute=True)
    del loaded["context"]["max_device_memory"]
    with pytest.raises(RecipeError, match=r"sets no context\.max_device_memory"):
        loads_asked("even", loaded)
    with pytest.raises(RecipeError, match="memory of CPU workers"):
        loads_asked("even", load_recipe(RECIPES / "mini/pretrain_ep4.yaml"))


def test_search_does_not_take_a_winner_of_which_one_stage_recomputes_nothing_and_does_not_fit():
    loaded = recompute(recompute=[6, 6, 6, 6, 6, 0, 7, 1])
    blocks = [kind.on[0] for group in quick_small_of(loaded).groups for kind in group]
    report = reported(loaded, [GIB // 100 if again else 3 * GIB for again in blocks])
    memory = [stage["memory"] for stage in report["stages"]]
    found = DryRun([], [one["exact"] for one in memory], [one["total"] for one in memory])
    loaded["recompute_config"]["recompute"] = True  # the search's own prediction sees no danger
    config = from_recipe(loaded)
    asked = SimpleNamespace(cap=55.5 * GIB, room=55.5 * GIB, room_words="55.5 GiB")
    (problem,) = judge(SimpleNamespace(config=config), found, asked, full=False).problems
    assert problem.startswith("stage 5: ")


def test_search_takes_no_quick_dry_run_for_proof_that_is_nearer_to_the_limit_than_it_may_be_off():
    config = from_recipe(recompute(recompute=True))
    asked = SimpleNamespace(cap=55.5 * GIB, room=55.5 * GIB, room_words="55.5 GiB")
    near = DryRun([], [10 * GIB] * 8, [int(55 * GIB)] * 8)
    quick = judge(SimpleNamespace(config=config), near, asked, full=False)
    assert not quick.proven and not quick.problems and len(quick.doubts) == 8
    assert judge(SimpleNamespace(config=config), near, asked, full=True).proven


def test_layers_that_are_recomputed_whole_keep_nothing_of_what_all_layers_read():
    loaded = recompute(recompute=[6, 6, 6, 6, 6, 0, 7, 0])
    plan = quick_plan(loaded)
    results = results_of(plan, [10] * 9)
    for result in results:
        result["graph"]["activations"][0]["parts"]["common"] = part(1000)
    passes = [graph["activations"][0] for _, graph in compose(loaded, plan.stages, results)]
    assert [item["saved"] for item in passes[1:7]] == [60, 60, 60, 60, 1000 + 70, 70]
