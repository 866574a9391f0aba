"""These tests read back what an overlay writes: the configuration from which it was made, in a recipe that `tc3 check`
accepts.
"""

import os
from dataclasses import replace

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from plugins.errors import RecipeError
from plugins.hierarchical_ep.plan import MODES
from tools.check.check import check_recipe
from tools.dryrun.plan import stages_of
from tools.estimate.configuration import PATTERNS, Recompute, even_layers
from tools.estimate.from_recipe import from_recipe
from tools.estimate.memory.activations import saved
from tools.hardware.units import GIB
from tools.layout.resolve import resolve
from tools.model import layer_size, model_of
from tools.recipe.dump import dump_recipe
from tools.recipe.load import load_recipe
from tools.recipe.override import apply_overrides
from tools.recipe.view import View, limit_of
from tools.schema.converter import convert
from tools.schema.schema import load_schema
from tools.search.overlay import Site, changed, dispatch_values, left_off, overlay, write_overlay

LARGE = "recipes/telechat3_438b/pretrain_4k.yaml"
PLUGGED = "recipes/telechat3_438b/pretrain_4k_ep_overlap.yaml"
DENSE = "recipes/telechat3_36b/pretrain_8k.yaml"
MTP = "recipes/telechat3_105b/pretrain_4k.yaml"


def read_back(recipe, config, folder, notes=(), site=None):
    path = folder / "child.yaml"
    write_overlay(recipe, config, path, notes, site)
    return path, load_recipe(path)


@pytest.mark.parametrize("file", [LARGE, DENSE, MTP])
def test_a_recipe_as_it_is_needs_no_key(file):
    recipe = load_recipe(file)
    assert overlay(recipe, from_recipe(recipe)) == {}


@pytest.mark.parametrize("ep", [8, 16, 32, 64])
def test_auto_is_written_as_a_launch_resolves_it(ep):
    recipe = apply_overrides(load_recipe(PLUGGED), [f"parallel_config.expert_parallel={ep}"])
    resolved = resolve(recipe)
    mode = resolved["plugins"]["hierarchical_ep"]["mode"]
    config = from_recipe(resolved)
    assert config.ep_mode == mode and recipe["plugins"]["hierarchical_ep"]["mode"] == "auto"
    assert overlay(recipe, config) == {"plugins": {"hierarchical_ep": {"mode": mode}}}
    assert overlay(resolved, config) == {}


PER_STAGE = "[5, 4, 5, 5, 5, 6, 6, 0]"
SELECTIONS = [None, "False", "True", PER_STAGE, r"['.*\.norm']", r"['mlp\.mul']", r"{'.*\.norm': True}"]
SELECTIONS += [r"{'mlp\.mul': True, '.*\.norm': " + PER_STAGE + "}", r"{'mlp\.mul': True}"]


def with_selection(recipe_file, value, folder):
    """A child of a recipe with another `select_recompute`; its path."""
    path = folder / "recipe.yaml"
    if value is not None:
        value = value.replace(PER_STAGE, str([5, 4, 5, 5, 5, 6, 6, 0][: View(load_recipe(recipe_file)).pp]))
    section = "" if value is None else f"recompute_config: {{select_recompute: {value}}}\n"
    path.write_text(f"base_config: {os.path.abspath(recipe_file)}\n{section}", "utf-8")
    return path


@st.composite
def configured(draw, folder):
    """A recipe and another configuration of its devices' model that it can express, and a machine."""
    file = draw(st.sampled_from([LARGE, PLUGGED, DENSE, MTP]))
    recipe = load_recipe(with_selection(file, draw(st.sampled_from(SELECTIONS)), folder))
    node = draw(st.sampled_from([8, 16]))
    site = Site(node, "atlas_900_a3" if node == 16 else "atlas_800t_a2", draw(st.sampled_from([None, 50.5 * GIB])))
    return recipe, draw(strategies(from_recipe(resolve(recipe)), node)), site


@st.composite
def strategies(draw, now, node):
    """Another configuration of the same model that a recipe can express."""
    tp, dp = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([4, 16, 64]))
    pp, chunks = draw(st.sampled_from([(1, 1), (2, 1), (4, 1), (4, 2), (8, 2), (2, 3)]))
    if not now.model.experts:
        ep = 1
    else:
        ep = draw(st.sampled_from([width for width in (1, 2, 4, 8, 16, 32) if width <= dp * tp]))
    modes = ["global"] if ep == 1 else ["global", "deduplicated"] + (["hierarchical"] if ep >= node else [])
    layers = even_layers(now.model.layers, pp, chunks)
    layers = draw(shifted(layers))
    v_shaped = (pp, chunks) in ((4, 2), (8, 2)) and draw(st.booleans())
    return replace(
        now,
        tp=tp,
        dp=dp,
        pp=pp,
        ep=ep,
        layers=layers,
        schedule="zero_bubble_v" if v_shaped else "interleaved_1f1b" if chunks > 1 else "1f1b",
        batch=draw(st.sampled_from([1, 2])),
        micro_batches=draw(st.sampled_from([16, 17, 32] if v_shaped else [8, 9, 32])),
        sequence_parallel=tp > 1,
        ep_mode=draw(st.sampled_from(modes)) if now.model.experts else now.ep_mode,
        ep_cut=now.ep_cut if ep > 1 else None,
        recompute=Recompute(
            full=draw(tables(layers)),
            select=draw(tables(layers)),
            communication=draw(tables(layers)),
            replay_tp=now.recompute.replay_tp,
            operators=draw(groups(layers)),
        ),
        shard_optimizer=draw(st.booleans()),
        shard_gradients=draw(st.booleans()),
    )


@st.composite
def shifted(draw, layers):
    rows = [list(row) for row in layers]
    for _ in range(draw(st.integers(0, 3))):
        chunk, stage, other = (draw(st.integers(0, len(rows[0]) * len(rows) - 1)) for _ in range(3))
        (a, b), (c, d) = divmod(stage, len(rows[0])), divmod(other, len(rows[0]))
        if rows[a][b] > 1 and chunk % 2:
            rows[a][b] -= 1
            rows[c][d] += 1
    return tuple(map(tuple, rows))


@st.composite
def tables(draw, layers):
    if draw(st.booleans()):
        return draw(st.sampled_from([None, layers]))
    return tuple(tuple(draw(st.integers(0, count)) for count in row) for row in layers)


@st.composite
def groups(draw, layers):
    """Layers of some groups of operators; those without any are none."""
    names = draw(st.sampled_from([(), (), ("attention",), ("mlp", "experts"), tuple(PATTERNS)]))
    return tuple((name, table) for name in names if (table := draw(tables(layers))) and any(map(any, table)))


def without_zeros(config):
    """A table of no layers is none."""
    tables = {name: getattr(config.recompute, name) for name in ("full", "select", "communication")}
    kept = {name: table if table and any(map(any, table)) else None for name, table in tables.items()}
    return replace(config, recompute=replace(config.recompute, **kept))


def dispatch_of(recipe):
    """Return the settings of a recipe that say how tokens are sent to experts."""
    return recipe.get("plugins", {}).get("hierarchical_ep"), recipe["model"]["model_config"].get(
        "moe_token_dispatcher_type"
    )


@pytest.mark.slow
@settings(max_examples=24)
@given(st.data())
def test_a_written_overlay_is_the_configuration(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("overlay")
    recipe, config, site = data.draw(configured(folder))
    path, child = read_back(recipe, config, folder, site=site)
    again = from_recipe(resolve(child))
    # chunks that the recipe leaves to auto are those of the strategy, not the recipe's own
    assert bool(again.ep_cut) == bool(config.ep_cut)
    assert without_zeros(replace(again, ep_cut=None)) == without_zeros(replace(config, ep_cut=None))
    assert dispatch_of(resolve(child)) == dispatch_of(child)
    if config.model.experts:
        assert View(child).node == site.node
    if site.memory:
        assert limit_of(child) == site.memory
    errors = [finding for finding in check_recipe(path).findings if finding.severity == "error"]
    # what the space does not have: sharded gradients of micro-batches, weights without a copy under accumulation
    outside = {load_schema().line(rule) for rule in ("endless_compile", "lost_gradients")}
    # batches that no layout of these degrees can help
    assert not [one for one in errors if "plugins" not in one.key and one.source not in outside], errors


SWAPPED = """\
model: {model_config: {swap: True, layer_swap: [{backward_prefetch: 1, layers: [0]}]}}
recompute_config: {recompute: False, select_recompute: False, select_comm_recompute: False}
"""


@pytest.mark.slow
@settings(max_examples=24)
@given(st.data())
def test_a_search_from_the_recipe_of_a_search_keeps_nothing_of_it(tmp_path_factory, data):
    """The written recipe has the tables of the second configuration only, and none of the first one's."""
    folder = tmp_path_factory.mktemp("chain")
    path = folder / "recipe0.yaml"
    swapped = data.draw(st.booleans())
    file = os.path.abspath(data.draw(st.sampled_from([LARGE, DENSE])))
    path.write_text(f"base_config: {file}\n{SWAPPED if swapped else ''}")
    for number in (1, 2, 3):
        recipe = load_recipe(path)
        config = data.draw(strategies(from_recipe(recipe), 8))
        if swapped and config.schedule == "zero_bubble_v":
            config = replace(config, schedule="interleaved_1f1b")
        path = folder / f"recipe{number}.yaml"
        write_overlay(recipe, config, path, [])
        child = load_recipe(path)
        assert without_zeros(from_recipe(child)) == without_zeros(config)
        assert overlay(child, config) == {}
        errors = [finding for finding in check_recipe(path).findings if finding.severity == "error"]
        assert not [one for one in errors if one.key.startswith(("recompute_config", "model."))], errors


def test_only_what_differs_is_written(tmp_path):
    recipe = load_recipe(LARGE)
    config = from_recipe(recipe)
    layers = ((4, 4, 4, 4, 3, 3, 3, 3), (3, 3, 3, 3, 4, 4, 3, 3))
    full = ((1,) * 8, (0,) * 8)
    config = replace(config, layers=layers, recompute=replace(config.recompute, full=full))
    path, _ = read_back(recipe, config, tmp_path, ["a first line", "and two\nmore"])
    lines = path.read_text().splitlines()
    assert lines[:3] == ["# a first line", "# and two", "# more"]
    written = yaml.safe_load(path.read_text())
    base = written.pop("base_config")
    assert os.path.samefile(tmp_path / base, LARGE)
    assert written == {
        "model": {"model_config": {"offset": [[1, 1, 1, 1, 0, 0, 0, 0], [0, 0, 0, 0, 1, 1, 0, 0]]}},
        "recompute_config": {"recompute": [[1] * 8, [0] * 8]},
    }
    assert [file.name for file in tmp_path.iterdir()] == ["child.yaml"]


def test_shared_values_change_together(tmp_path):
    recipe = load_recipe(LARGE)
    config = from_recipe(recipe)
    child = overlay(recipe, replace(config, dp=128, tp=4))
    assert child == {
        "parallel_config": {"data_parallel": 128, "model_parallel": 4},
        "parallel": {"dataset_strategy": [[128, 1]] * 4},
    }


def test_shared_values_of_other_sections_change_too(tmp_path):
    (tmp_path / "recipe.yaml").write_text(
        f"base_config: {os.path.abspath(LARGE)}\n"
        "runner_config: {batch_size: &batch 1}\n"
        "train_dataset: {batch_size: *batch}\n"
        "parallel_config: {micro_batch_num: &micro 64}\n"
        "callbacks: [{type: TopkBiasBalanceCallback, micro_batch_num: *micro}]\n"
    )
    recipe = load_recipe(tmp_path / "recipe.yaml")
    child = overlay(recipe, replace(from_recipe(recipe), batch=2, micro_batches=32))
    assert child == {
        "runner_config": {"batch_size": 2},
        "train_dataset": {"batch_size": 2},
        "parallel_config": {"micro_batch_num": 32},
        "callbacks": [{"type": "TopkBiasBalanceCallback", "micro_batch_num": 32}],
    }


def test_the_callback_of_routers_biases_counts_the_steps_of_accumulation():
    recipe = load_recipe(LARGE)
    piped = from_recipe(recipe)
    layers = ((sum(map(sum, piped.layers)),),)
    alone = replace(piped, pp=1, dp=piped.dp * piped.pp, micro_batches=8, layers=layers, recompute=Recompute())
    child = overlay(recipe, replace(alone, schedule="1f1b"))
    assert child["runner_config"]["gradient_accumulation_steps"] == 8
    (callback,) = [each for each in child["callbacks"] if each["type"] == "TopkBiasBalanceCallback"]
    assert callback["gradient_accumulation_steps"] == 8


def test_the_callback_of_routers_biases_follows_numbers_that_it_repeats(tmp_path):
    """A recipe without a pipeline gets one: what the callback wrote for accumulation is no longer right."""
    (tmp_path / "recipe.yaml").write_text(
        f"base_config: {os.path.abspath(LARGE)}\n"
        "callbacks: [{type: TopkBiasBalanceCallback, gradient_accumulation_steps: 4, micro_batch_num: 7}]\n"
    )
    recipe = load_recipe(tmp_path / "recipe.yaml")
    now = from_recipe(recipe)
    for config, steps, micro_batches in (
        (now, 1, now.micro_batches),
        (replace(now, pp=1, dp=now.dp * now.pp, layers=((now.model.layers,),), micro_batches=8, schedule="1f1b"), 8, 1),
    ):
        (callback,) = changed(recipe, replace(config, recompute=Recompute()))["callbacks"]
        assert (callback["gradient_accumulation_steps"], callback["micro_batch_num"]) == (steps, micro_batches)


def test_what_has_nothing_to_do_in_a_layout_is_switched_off(tmp_path):
    """`tc3 check` refuses experts that move where one device holds all, and the grouped gradient without a pipeline."""
    (tmp_path / "recipe.yaml").write_text(
        f"base_config: {os.path.abspath(LARGE)}\nplugins: {{expert_balance: {{every: 200}}, grouped_gradient: {{}}}}\n"
    )
    recipe = load_recipe(tmp_path / "recipe.yaml")
    now = from_recipe(recipe)
    whole = replace(now, pp=1, tp=1, ep=1, dp=now.devices, layers=((now.model.layers,),), schedule="1f1b")
    child = changed(recipe, replace(whole, sequence_parallel=False, micro_batches=1, recompute=Recompute()))
    assert child["plugins"] == {**recipe["plugins"], "expert_balance": {"every": 0}, "grouped_gradient": False}
    assert not [finding for finding in check_recipe(child).errors if finding.key.startswith("plugins")]
    assert changed(recipe, now)["plugins"] == recipe["plugins"]


def test_a_search_that_goes_back_to_expert_parallelism_says_that_experts_stay(tmp_path):
    """A child with one device for all experts had `every: 0` written; a child of this child inherits it."""
    (tmp_path / "recipe.yaml").write_text(
        f"base_config: {os.path.abspath(LARGE)}\nplugins: {{expert_balance: {{every: 200}}}}\n"
    )
    recipe = load_recipe(tmp_path / "recipe.yaml")
    now = from_recipe(recipe)
    whole = replace(now, pp=1, tp=1, ep=1, dp=now.devices, layers=((now.model.layers,),), schedule="1f1b")
    whole = replace(whole, sequence_parallel=False, micro_batches=1, recompute=Recompute())
    write_overlay(recipe, whole, tmp_path / "child.yaml", [])
    child = load_recipe(tmp_path / "child.yaml")
    write_overlay(child, now, tmp_path / "grandchild.yaml", ["The best."])
    text = (tmp_path / "grandchild.yaml").read_text()
    assert text.startswith("# The best.\n# plugins.expert_balance.every stays 0") and "such as 20" in text
    assert load_recipe(tmp_path / "grandchild.yaml")["plugins"]["expert_balance"] == {"every": 0}
    assert not left_off(recipe, now) and not left_off(recipe, whole) and not left_off(child, whole)


def test_a_pipeline_that_runs_back_up(tmp_path):
    layers = ((4,) * 8, (4, 4, 3, 3, 3, 3, 1, 1))
    recipe = load_recipe(LARGE)
    config = replace(from_recipe(recipe), layers=layers, schedule="zero_bubble_v")
    _, child = read_back(recipe, config, tmp_path)
    assert child["model"]["model_config"]["offset"] == [[1] * 8, [1, 1, 0, 0, 0, 0, -2, -2]]
    stages = stages_of(View(child))
    columns = list(zip(*layers, strict=True))
    assert [tuple(len(kinds) for _, kinds in stage.chunks) for stage in stages] == columns
    assert from_recipe(child).layers == layers
    table = check_recipe(tmp_path / "child.yaml").table
    assert table["stage_layers"] == [8, 8, 7, 7, 7, 7, 5, 5]
    assert table["stage_chunk_layers"] == [list(row) for row in layers]
    model = model_of(convert(View(child), load_schema()).fields)
    kinds = [(*stage.kinds, *stage.ends) for stage in stages]
    assert table["stage_parameters"] == [sum(layer_size(model, kind) for kind in stage) for stage in kinds]


@pytest.mark.parametrize("linked", ["out", "in", "file"])
def test_a_child_finds_its_base_through_links(tmp_path, linked):
    """Of linked folders on either side, and of a recipe that is a link beside its base."""
    deep, work = tmp_path / "somewhere" / "else", tmp_path / "work"
    for folder in (deep, work):
        folder.mkdir(parents=True)
    home = {"out": work, "in": deep, "file": work}[linked]
    (home / "base.yaml").write_text(f"base_config: {os.path.abspath(LARGE)}\n")
    (home / "recipe.yaml").write_text("base_config: base.yaml\n")
    recipe, target = work / "recipe.yaml", work / "child.yaml"
    if linked == "out":
        (work / "output").symlink_to(deep)
        target = work / "output" / "child.yaml"
    elif linked == "in":
        (work / "recipes").symlink_to(deep)
        recipe = work / "recipes" / "recipe.yaml"
    else:
        (home / "recipe.yaml").rename(deep / "recipe.yaml")
        recipe.symlink_to(deep / "recipe.yaml")
        target = deep / "child.yaml"
    loaded = load_recipe(recipe)
    config = replace(from_recipe(loaded), dp=128, tp=4)
    write_overlay(loaded, config, target, [])
    assert from_recipe(load_recipe(target)) == config


def test_a_recipe_is_not_written_over(tmp_path):
    path = with_selection(LARGE, None, tmp_path)
    recipe = load_recipe(path)
    with pytest.raises(RecipeError, match="is the recipe itself"):
        write_overlay(recipe, from_recipe(recipe), path, [])


def test_what_was_set_on_the_command_line_is_written_too(tmp_path):
    recipe = load_recipe(LARGE)
    recipe["seed"] = 7
    _, child = read_back(recipe, from_recipe(recipe), tmp_path)
    assert child["seed"] == 7


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"schedule": "interleaved_1f1b_less_memory"}, "no key of a recipe does"),
        ({"schedule": "zb_h1"}, "no recipe can ask for the schedule"),
        ({"ep_mode": "deepep"}, "must be one of global"),
    ],
)
def test_what_mindformers_cannot_say(changes, words):
    recipe = load_recipe(LARGE)
    with pytest.raises(RecipeError, match=words):
        overlay(recipe, replace(from_recipe(recipe), **changes))


def test_one_device_has_no_layout():
    recipe = load_recipe("recipes/mini/pretrain.yaml")
    with pytest.raises(RecipeError, match="use_parallel"):
        overlay(recipe, replace(from_recipe(recipe), dp=2))


@pytest.mark.parametrize(("now", "wanted"), [("level1", "level2"), ("level2", "level1")])
def test_where_a_level_says_what_is_sharded_the_flag_is_not_written(now, wanted):
    """MindSpore refuses gradient_accumulation_shard beside level1, and takes level2 for True whatever it says."""
    recipe = load_recipe(LARGE)
    section = recipe["parallel"]["parallel_optimizer_config"]
    del section["gradient_accumulation_shard"]
    section["optimizer_level"] = now
    config = from_recipe(recipe)
    assert config.shard_gradients == (now == "level2") and overlay(recipe, config) == {}
    other = replace(config, shard_gradients=not config.shard_gradients)
    assert overlay(recipe, other) == {"parallel": {"parallel_optimizer_config": {"optimizer_level": wanted}}}
    wrong = [error.source for error in check_recipe(changed(recipe, other)).errors]
    assert wrong == [load_schema().line("endless_compile")] * (wanted == "level2")  # the recipe is a pipeline
    section["gradient_accumulation_shard"] = False
    assert from_recipe(recipe).shard_gradients == (now == "level2")


def test_the_machine_is_written():
    recipe = load_recipe(LARGE)
    config, a3 = from_recipe(recipe), Site(16, "atlas_900_a3", 54 * GIB)
    assert overlay(recipe, config, Site(8, "atlas_800t_a2")) == {}
    memory = {"max_device_memory": "54GB", "mempool_block_size": "54GB"}
    wide = replace(config, ep=32, ep_mode="hierarchical")
    assert overlay(recipe, wide, a3) == {
        "context": memory,
        "parallel_config": {"expert_parallel": 32},
        "model": {"model_config": {"npu_nums_per_device": 16}},
    }
    assert overlay(recipe, replace(config, ep=1, ep_mode="global"), a3)["context"] == memory
    dense = load_recipe("recipes/telechat3_36b/pretrain_8k.yaml")  # whose node only tensor parallelism asks for
    for run, of_run in (
        (recipe, replace(config, ep_mode="global")),
        (recipe, replace(config, ep=1, ep_mode="global")),
        (dense, replace(from_recipe(dense), tp=16)),
    ):
        child = changed(run, of_run, a3)
        assert View(child).node == 16
        assert not [one for one in check_recipe(child).findings if "a node of" in one.wrong], "of another cluster"
    recipe["context"]["mempool_block_size"] = "1GB"
    del memory["mempool_block_size"]
    assert overlay(recipe, wide, a3)["context"] == memory


def test_a_group_that_straddles_nodes_is_not_for_the_plugin(tmp_path):
    recipe = load_recipe(PLUGGED)
    recipe["model"]["model_config"]["n_routed_experts"] = 240
    config = replace(from_recipe(resolve(recipe)), dp=48, ep=12, ep_mode="global", ep_cut=None)
    path, child = read_back(recipe, config, tmp_path, site=Site(16, "atlas_900_a3"))
    own = {"held_out_loss": recipe["plugins"]["held_out_loss"]}
    assert child["plugins"] == own | {"hierarchical_ep": False, "ep_overlap": False}
    assert not [finding for finding in check_recipe(path).errors if "plugins" in finding.key]


def test_chunks_that_a_launch_resolves_are_for_the_same_machine(tmp_path):
    recipe = load_recipe(PLUGGED)
    config = replace(from_recipe(resolve(recipe)), ep=32, ep_mode="deduplicated")
    _, child = read_back(recipe, config, tmp_path, site=Site(16, "atlas_900_a3"))
    assert child["plugins"]["hierarchical_ep"] == {"mode": "deduplicated", "hardware": "atlas_900_a3"}
    said = []
    resolve(child, said.append)
    assert said[0].startswith("plugins.ep_overlap: auto -> ")


@pytest.mark.parametrize("mode", MODES)
def test_each_mode_comes_back_from_the_recipe(mode):
    recipe = load_recipe(LARGE)
    config = replace(from_recipe(recipe), ep_mode=mode)
    for (*section, last), value in dispatch_values(View(recipe), config).items():
        place = recipe
        for key in section:
            place = place.setdefault(key, {})
        place[last] = value
    assert from_recipe(recipe).ep_mode == mode


@pytest.mark.parametrize("mode", MODES)
def test_each_mode_keeps_activations(mode):
    config = replace(from_recipe(load_recipe(LARGE)), ep_mode=mode)
    assert saved(config, "moe") > saved(config, "dense") / config.tp > 0


def test_samples_that_the_model_repeats_change_too(tmp_path):
    recipe = load_recipe(DENSE)
    recipe["model"]["model_config"]["batch_size"] = from_recipe(recipe).batch
    source = tmp_path / "recipe.yaml"
    dump_recipe(recipe, source)
    recipe = load_recipe(source)
    path, child = read_back(recipe, replace(from_recipe(recipe), batch=2 * from_recipe(recipe).batch), tmp_path)
    assert child["model"]["model_config"]["batch_size"] == child["runner_config"]["batch_size"]
    assert check_recipe(path).errors == []
