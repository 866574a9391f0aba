"""The same question has one answer: ep-report, `auto`, search, memory, explain, the first hour and imbalance say the
same seconds and the same mode.

The collectives of a recipe's groups are those that the time model asks of its own functions.
"""

import ast
import copy
import json
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner

from launch.firsthour.npu import hour_of
from launch.firsthour.plan import as_text, plan_of
from plugins.errors import RecipeError
from plugins.hierarchical_ep.plan import MODES
from tools import memory
from tools.data.imbalance.measure import seconds_of
from tools.estimate.configuration import Cut
from tools.estimate.efficiency import cluster, efficiency_of
from tools.estimate.from_recipe import from_recipe
from tools.estimate.groups import Noted, collectives_of
from tools.estimate.memory.room import room_of
from tools.estimate.time_model import TimeModel
from tools.experts.cost import ep_report
from tools.hardware import DEFAULT_HARDWARE, load_hardware
from tools.layout.advise import advise
from tools.layout.budget import Budget
from tools.layout.offsets import path_of, write_layout
from tools.layout.resolve import make_layout, resolve
from tools.profile.attribute import modelled
from tools.profile.study import run_of
from tools.recipe.load import load_recipe
from tools.recipe.override import apply_overrides
from tools.recipe.view import View
from tools.runs.measured import beside
from tools.runs.study import Study
from tools.search.candidates import Block
from tools.search.ranking.predict import TimeTable
from tools.search.ranking.rank import rank
from tools.search.ranking.run import entry_of
from tools.search.request import POLICIES, SHARDS, read_limit, request_of

ROOT = Path(__file__).resolve().parents[3]
CARDS = {"card.yaml"}
# no tool says the seconds of a step with adapters, which are not modelled
RECIPES = [
    str(path.relative_to(ROOT))
    for path in sorted((ROOT / "recipes").glob("*/*.yaml"))
    if path.parent.name not in ("base", "mini") and path.name not in CARDS and "lora" not in path.name
]
A2 = load_hardware(DEFAULT_HARDWARE)
OVERLAP = {"hierarchical_ep": {"mode": "auto"}, "ep_overlap": {"chunks": "auto"}}


def with_overlap(recipe):
    """The recipe dispatched by the plugins, cut into chunks, as good as they can."""
    recipe["plugins"] = copy.deepcopy(OVERLAP)
    recipe["plugins"]["hierarchical_ep"]["hardware"] = cluster_of(recipe)
    return recipe


def cluster_of(recipe):
    """The cluster with the recipe's node: sixteen devices are those of an Atlas 900 A3."""
    return "atlas_900_a3" if View(recipe).node == 16 else DEFAULT_HARDWARE


def searched(recipe):
    """Seconds that search prints for the recipe as it is written."""
    asked = request_of(recipe, cluster_of(recipe))
    return entry_of(asked.base, TimeModel(asked.hardware)).seconds


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("file", RECIPES)
def test_every_tool_says_the_same_seconds_of_a_recipe(file, overlap):
    recipe = load_recipe(ROOT / file)
    sends = View(recipe).ep > 1
    if overlap and not sends:
        pytest.skip("nobody to send tokens to")
    recipe = with_overlap(recipe) if overlap else recipe
    seconds, cluster = searched(recipe), load_hardware(cluster_of(recipe))
    resolved = resolve(recipe)
    config = from_recipe(resolved)
    assert seconds_of(resolved, cluster).whole == seconds
    assert TimeModel(cluster).step(config, simulated=True).total == seconds
    if sends:
        assert advise(recipe, cluster).written.step.total == seconds
    assert memory._seconds(config, TimeModel(cluster)) == seconds
    terms = modelled(config, cluster, efficiency_of(cluster), None)
    assert sum(terms.values()) == pytest.approx(seconds, rel=1e-9)


@pytest.mark.parametrize("model", ["438b", "1119b"])
def test_the_plan_of_a_first_hour_and_a_run_beside_it_say_what_a_search_says(tmp_path, model):
    """The 1119B's dense first layers make its stages uneven: without its schedule replayed, a step is 18 % shorter."""
    file = ROOT / f"recipes/telechat3_{model}/pretrain_4k.yaml"
    seconds = searched(load_recipe(file))
    assert plan_of(hour_of(file, tmp_path, None, planned=True), 3600)["predicted_step_s"] == seconds
    run = SimpleNamespace(recipe=load_recipe(file), usual=lambda: seconds, parts=[])
    study = Study(run, "", "", [], None, None, [], None)  # only the run is read
    assert beside(study, A2).beside.predicted == seconds


def test_memory_orders_its_proposals_by_what_a_search_says_of_them():
    file = ROOT / "recipes/telechat3_1119b/pretrain_4k.yaml"
    recipe, times = load_recipe(file), TimeModel(A2)
    found = memory.explain(recipe, times, room_of(recipe, A2, 30))
    deeper = next(one for one in found if one.keys == {"parallel_config.expert_parallel": 64})
    child = apply_overrides(load_recipe(file), ["parallel_config.expert_parallel=64"])
    assert deeper.step_s == searched(child)
    assert deeper.slower == deeper.step_s / searched(recipe) - 1


def test_a_search_reads_the_layout_that_a_launch_reads(tmp_path):
    """The line of the recipe is of the layout beside it, and of an even one only if there is none for this run."""
    path = tmp_path / "open.yaml"
    path.write_text(
        f"base_config: {ROOT}/recipes/telechat3_105b/pretrain_4k.yaml\nmodel: {{model_config: {{offset: auto}}}}\n"
    )
    recipe = load_recipe(path)
    even = from_recipe(resolve(recipe, layout="even"))
    assert request_of(recipe, DEFAULT_HARDWARE).base == even
    found = make_layout(recipe, DEFAULT_HARDWARE, Budget(0.1, 60.0))
    write_layout(found, path_of(str(path)), "a test")
    launched = from_recipe(resolve(recipe))
    assert launched != even and request_of(recipe, DEFAULT_HARDWARE).base == launched
    other = apply_overrides(recipe, ["parallel_config.micro_batch_num=128"])
    assert request_of(other, DEFAULT_HARDWARE).base == from_recipe(resolve(other, layout="even"))


LORA = ROOT / "recipes/telechat3_36b/finetune_8k_lora.yaml"


def test_no_tool_says_the_seconds_of_a_step_with_adapters(tmp_path):
    recipe, times = load_recipe(LORA), TimeModel(A2)
    config, why = from_recipe(resolve(recipe)), "adapters cannot be predicted"
    assert why in seconds_of(resolve(recipe), A2)
    plan = plan_of(hour_of(LORA, tmp_path, None, planned=True), 3600)
    assert plan["predicted_step_s"] is None and why in as_text(plan)
    found = memory.explain(recipe, times, room_of(recipe, A2))
    assert found and all(one.step_s is None and one.slower is None for one in found)
    for ask in (
        lambda: request_of(recipe, DEFAULT_HARDWARE),
        lambda: make_layout(recipe, DEFAULT_HARDWARE, Budget(1.0, 60.0)),
        lambda: modelled(config, A2, efficiency_of(A2), None),
    ):
        with pytest.raises(RecipeError, match=why):
            ask()


def test_auto_is_resolved_for_adapters_and_its_report_refused():
    """The best dispatch does not depend on which weights are trained; the seconds of a step do."""
    file = ROOT / "recipes/telechat3_438b/finetune_4k.yaml"
    recipe = with_overlap(load_recipe(file))
    plain = resolve(recipe)["plugins"]["hierarchical_ep"]["mode"]
    recipe["plugins"]["lora"] = {}
    assert resolve(recipe)["plugins"]["hierarchical_ep"]["mode"] == plain
    shown = CliRunner().invoke(ep_report, [str(file), "--set", "plugins.lora={}"])
    assert shown.exit_code and "adapters cannot be predicted" in str(shown.exception)


def test_ep_report_prints_it():
    file = ROOT / "recipes/telechat3_438b/pretrain_4k_ep_overlap.yaml"
    found = json.loads(CliRunner().invoke(ep_report, [str(file), "--json"]).stdout)
    seconds = searched(load_recipe(file))
    assert found["reports"][0]["recipe"]["step_seconds"] == seconds
    assert found["reports"][0]["modes"][found["reports"][0]["recipe"]["mode"]]["step_seconds"][1] == seconds
    assert found["skew"] == 1.0 and found["known_step_errors"]["rows"] == 25


def ranked_seconds(asked, own):
    """[modes] seconds by which search ranks the dispatch modes of one layout."""
    same = {name: np.full(len(MODES), getattr(own, name)) for name in ("dp", "tp", "cp", "ep")}
    same |= {"mbs": np.full(len(MODES), own.batch), "m": np.full(len(MODES), own.micro_batches)}
    shard = np.full(len(MODES), SHARDS.index("optimizer"))
    block = Block(own.pp, own.chunks, {**same, "mode": np.arange(len(MODES)), "shard": shard}, ("full",))
    table = TimeTable(asked)
    stages = table.stages(block)
    return table.totals(block, stages.work[:, POLICIES.index("full")], stages.sending)


def test_the_best_of_a_search_is_dispatched_as_auto_would_be():
    recipe = with_overlap(load_recipe(ROOT / "recipes/telechat3_105b/pretrain_4k.yaml"))
    limits = ["tp=8", "pp=8", "vpp=1", "cp=1", "ep=32", "mbs=1", "shard=optimizer", "recompute=none"]
    asked = request_of(recipe, DEFAULT_HARDWARE, memory_gib=500, limits=tuple(map(read_limit, limits)))
    best = next(rank(asked).fastest())
    recipe = apply_overrides(recipe, ["parallel_config.expert_parallel=32", "parallel_config.data_parallel=4"])
    assert best.candidate.mode == resolve(recipe)["plugins"]["hierarchical_ep"]["mode"] == "deduplicated"


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("degree", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("model", ["438b", "1119b"])
def test_auto_is_the_mode_that_search_ranks_first(model, degree, overlap):
    """Among the strategies of the recipe's own mesh, batch and recomputation."""
    recipe = load_recipe(ROOT / f"recipes/telechat3_{model}/pretrain_4k.yaml")
    recipe = apply_overrides(recipe, [f"parallel_config.expert_parallel={degree}"])
    recipe = with_overlap(recipe)
    if not overlap:
        del recipe["plugins"]["ep_overlap"]
    resolved = resolve(recipe)
    chosen, own = resolved["plugins"], from_recipe(resolved)
    asked = request_of(recipe, DEFAULT_HARDWARE)
    seconds = ranked_seconds(asked, own)
    best = MODES[int(np.argmin(seconds))]
    assert chosen["hierarchical_ep"]["mode"] == best
    advice = advise(recipe, cuts=() if overlap else [(1, 1)])
    assert advice.mode == best and list(advice.modes) == list(MODES)
    if overlap:
        assert chosen["ep_overlap"] == {"chunks": list(advice.chunks), "stride": advice.stride}


def test_search_gives_each_strategy_its_own_chunks_where_the_recipe_does():
    recipe = with_overlap(load_recipe(ROOT / "recipes/telechat3_438b/pretrain_4k.yaml"))
    asked = request_of(recipe, DEFAULT_HARDWARE)
    assert asked.base.ep_cut == Cut()
    recipe["plugins"]["ep_overlap"] = {"chunks": [1, 4]}
    assert request_of(recipe, DEFAULT_HARDWARE).base.ep_cut == Cut((1, 4), 1)


def test_more_skew_is_slower_everywhere():
    recipe = load_recipe(ROOT / "recipes/telechat3_438b/pretrain_4k.yaml")
    even, busy = advise(recipe), advise(recipe, loads="1.5")
    assert even.written.step.total < busy.written.step.total
    config = replace(from_recipe(recipe), skew=1.5)
    assert TimeModel(A2).step(config, simulated=True).total == busy.written.step.total


# what of a device and its links makes seconds out of bytes and FLOPs
RATES = {"bytes_per_s", "hbm_bytes_per_s", "latency_s", "launch_s", "peak_flops", "inter_node", "intra_node"}
AT_HOME = ("tools/estimate/", "tools/hardware/")


@pytest.mark.slow
def test_nobody_else_makes_seconds_of_bytes_and_flops():
    """Rates of devices and links are read only by the estimator."""
    found = []
    for folder in ("tools", "launch", "plugins"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = str(path.relative_to(ROOT))
            if name.startswith(AT_HOME):
                continue
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, ast.Attribute) and node.attr in RATES:
                    found.append(f"{name}:{node.lineno} {node.attr}")
    assert found == []


HARDWARE = cluster(DEFAULT_HARDWARE)


@cache
def config(name):
    return run_of(ROOT / "recipes" / f"{name}.yaml", ())


def test_noting_changes_no_prediction():
    run = config("telechat3_438b/pretrain_4k")
    assert Noted(HARDWARE).step(run).total == TimeModel(HARDWARE).step(run).total


def test_groups_are_those_of_the_mesh_and_their_largest_tensors():
    run = config("telechat3_438b/pretrain_4k")
    found = {(one.group, one.ranks, one.stride): one for one in collectives_of(run, HARDWARE)}
    assert set(found) == {
        ("tp", 2, 1),
        ("ep", 2, 8),
        ("ep", 8, 1),
        ("dp", 32, 16),
        ("dp", 256, 2),
        ("dp", 512, 1),
        ("pp", 2, 512),
    }
    tokens, hidden, bf16 = 4096, 5120, 2
    assert found["tp", 2, 1].bytes == tokens * hidden * bf16  # a sample, gathered
    assert found["pp", 2, 512].bytes == tokens * hidden * bf16 // 2  # each rank of tp sends its half
    rows = tokens // 2 * (hidden * bf16 + 8 * (4 + 4))  # with ids and probabilities of a token's eight experts
    assert (found["ep", 2, 8].operator, found["ep", 2, 8].bytes) == ("AllGather", 2 * rows)
    assert found["ep", 8, 1].operator == "AlltoAll"
    assert found["tp", 2, 1].seconds == TimeModel(HARDWARE)._collective(tokens * hidden * bf16, 2, 1)


@pytest.mark.parametrize(
    ("mode", "calls"),
    [
        ("global", {("AlltoAll", 16, 1)}),
        ("hierarchical", {("AllGather", 2, 8), ("AlltoAll", 8, 1)}),
        ("deduplicated", {("AlltoAll", 2, 8), ("AlltoAll", 8, 1)}),
    ],
)
def test_a_dispatch_in_two_steps_has_a_group_for_each(mode, calls):
    run = replace(config("telechat3_438b/pretrain_4k"), ep_mode=mode)
    found = [one for one in collectives_of(run, HARDWARE) if one.group == "ep"]
    assert {(one.operator, one.ranks, one.stride) for one in found} == calls
    (inside,) = collectives_of(replace(run, ep=8), HARDWARE)[1:2]
    assert (inside.group, inside.operator, inside.ranks, inside.stride) == ("ep", "AlltoAll", 8, 1)


def test_context_parallel_groups_lie_between_tensor_and_data():
    found = {one.group: one for one in collectives_of(config("telechat3_1119b/context_128k"), HARDWARE)}
    assert (found["cp"].ranks, found["cp"].stride) == (8, 8)


def test_a_recipe_of_one_device_has_no_groups():
    assert collectives_of(config("mini/pretrain"), HARDWARE) == []


@pytest.mark.parametrize("devices", [0, 15, 64, 512])
def test_the_groups_of_a_kind_are_apart_and_inside_the_devices(devices):
    for one in collectives_of(config("telechat3_438b/pretrain_4k"), HARDWARE):
        groups = one.groups(devices)
        ranks = [rank for group in groups for rank in group]
        assert len(ranks) == len(set(ranks)) == len(groups) * one.ranks
        assert all(0 <= rank < devices for rank in ranks)
        assert all(b - a == one.stride for group in groups for a, b in pairwise(group))
        assert len(ranks) == devices // (one.ranks * one.stride) * one.ranks * one.stride


def test_a_run_in_fp32_sends_twice_the_bytes_of_one_in_bf16():
    """Activations of all groups and, of dp, the weights that are gathered; gradients are summed in fp32 anyway."""
    low = replace(config("telechat3_1119b/context_128k"), dtype="bf16")
    one, two = ({(c.group, c.operator, c.ranks, c.stride): c.bytes for c in collectives_of(run, HARDWARE)}
                for run in (low, replace(low, dtype="fp32")))  # fmt: skip
    assert set(one) == set(two) and {"tp", "cp", "ep", "pp", "dp"} == {group for group, *_ in one}
    for key, size in one.items():  # with the rows of experts go their weights, which are in fp32 in both runs
        assert two[key] > size if key[0] == "dp" else two[key] == pytest.approx(2 * size, rel=0.01), key
