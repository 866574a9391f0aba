"""`offset: auto` and layout strings: what launches, checks and errors make of them."""

import copy
import os
from dataclasses import replace

import pytest
import yaml

from launch.run.effective import effective_recipe
from launch.train import build_config
from plugins.errors import RecipeError
from tools.check.check import check_recipe
from tools.estimate.configuration import PATTERNS
from tools.estimate.efficiency import cluster
from tools.estimate.from_recipe import from_recipe
from tools.estimate.memory.model import peak_memory
from tools.estimate.time_model import TimeModel
from tools.hardware.units import GIB
from tools.layout.budget import Budget
from tools.layout.offsets import digest_of, even_layout, inputs_of, path_of, read_layout, write_layout
from tools.layout.place import Placement
from tools.layout.resolve import NothingFits, make_layout, resolve
from tools.recipe.load import load_recipe
from tools.recipe.override import apply_overrides

LARGE = os.path.abspath("recipes/telechat3_438b/pretrain_4k.yaml")
MTP = os.path.abspath("recipes/telechat3_105b/pretrain_4k.yaml")


def recipe_with(folder, offset, base=LARGE, more=""):
    path = folder / "recipe.yaml"
    path.write_text(f"base_config: {base}\nmodel: {{model_config: {{offset: {offset}}}}}\n{more}")
    return load_recipe(path)


@pytest.fixture(scope="module")
def made():
    """The answer for the 438B recipe."""
    return make_layout(load_recipe(LARGE), "atlas_800t_a2", Budget(2))


@pytest.mark.slow
def test_the_answer_fits_and_is_the_recipes_own(made, tmp_path):
    recipe = recipe_with(tmp_path, "auto")
    write_layout(made, path_of(recipe.source), "a test")
    assert read_layout(path_of(recipe.source)) == made
    said = []
    resolved = resolve(recipe, said.append)
    assert len(said) == 1 and "auto ->" in said[0]
    config = from_recipe(resolved)
    assert peak_memory(config) <= 45 * GIB
    assert max(made.predicted["stage_gib"]) == pytest.approx(peak_memory(config) / GIB, abs=0.01)
    assert made.predicted["bound_s"] <= made.predicted["step_s"]
    assert resolve(resolved, said.append) == resolved and len(said) == 1, "resolved is resolved"


def test_a_faster_layout_of_an_earlier_search_is_kept(made, monkeypatch, tmp_path):
    """With less effort, or after Ctrl-C, a slower layout took its place."""
    step, path = 1.01 * made.predicted["step_s"], tmp_path / "recipe.layout.yaml"
    late = Placement(from_recipe(load_recipe(LARGE)), 0.0, 0.0, (GIB,) * 8, cut=True)
    monkeypatch.setattr("tools.layout.place.place", lambda *_: replace(late, step_s=step, bound_s=step))

    def again(before, **more):
        write_layout(before, path, "a test")
        found = make_layout(load_recipe(LARGE), "atlas_800t_a2", budget := Budget(1), path=path, **more)
        assert budget.cut, "the time limit ended this search, whichever layout is the answer"
        return found

    assert again(made) == made
    assert again(made, margin=0.6) != made  # it does not fit into so little memory
    later = replace(made, predicted={**made.predicted, "step_s": 99.0, "bound_s": 98.0})  # by other efficiencies
    found = again(later)
    assert found.offset == made.offset and found.predicted["step_s"] == made.predicted["step_s"]
    assert found.predicted["bound_s"] <= found.predicted["step_s"]
    others = {"cluster": "h100"}, {"digest": "0" * 16}, {"offset": [[0]]}, {"recompute": "all"}, {"predicted": None}
    for other in others:
        assert again(replace(made, **other)).predicted["step_s"] == pytest.approx(step, abs=1e-4)
    write_layout(made, path, "a test")
    own = from_recipe(resolve(recipe_with(tmp_path, "auto")))
    step = TimeModel(cluster("atlas_800t_a2")).step(own, simulated=True).total
    assert again(made) == made, "a whole search knows more of an equally fast layout than one that was ended"
    step *= 0.9
    assert again(made) != made


def test_every_way_to_a_recipe_sees_the_same(made, tmp_path):
    recipe = recipe_with(tmp_path, "auto")
    write_layout(made, path_of(recipe.source), "a test")
    flat = effective_recipe(tmp_path / "recipe.yaml", (), None, tmp_path / "run")
    worker = build_config(tmp_path / "recipe.yaml", (), tmp_path / "run", None)
    checked = check_recipe(tmp_path / "recipe.yaml")
    assert checked.clean
    for seen in (flat, worker, checked.recipe):
        assert seen["model"]["model_config"]["offset"] == made.offset
        assert seen["recompute_config"]["recompute"] == made.recompute
    layers = [sum(column) for column in zip(*from_recipe(flat).layers, strict=True)]
    assert checked.table["stage_layers"] == layers


def test_without_a_file_launches_say_what_to_run(tmp_path):
    recipe_with(tmp_path, "auto")
    with pytest.raises(
        RecipeError, match=r"recipe.layout.yaml, but this file does not exist; run tc3 search layout .*recipe.yaml"
    ):
        build_config(tmp_path / "recipe.yaml", (), None, None)
    errors = check_recipe(tmp_path / "recipe.yaml").errors
    assert [error.key for error in errors] == ["model.model_config.offset"]
    assert errors[0].line == 2 and errors[0].wrong.startswith("auto: the layout is read from ")


def test_the_one_who_starts_a_run_makes_the_file(made, tmp_path, monkeypatch, capsys):
    recipe_with(tmp_path, "auto")
    monkeypatch.setattr("tools.layout.resolve.make_layout", lambda recipe, *_: made)
    with pytest.raises(RecipeError, match=r"the layout is read from .* but this file does not exist"):
        effective_recipe(tmp_path / "recipe.yaml", (), None, tmp_path / "run", make_layout=False)
    flat = effective_recipe(tmp_path / "recipe.yaml", (), None, tmp_path / "run")
    assert flat["model"]["model_config"]["offset"] == made.offset
    assert read_layout(tmp_path / "recipe.layout.yaml") == made
    assert "searching about 60 s" in capsys.readouterr().err
    assert build_config(tmp_path / "recipe.yaml", (), None, None)["model"]["model_config"]["offset"] == made.offset


def test_a_file_of_another_run_is_refused(made, tmp_path):
    recipe = recipe_with(tmp_path, "auto")
    write_layout(made, path_of(recipe.source), "a test")
    changed = apply_overrides(recipe, ["parallel_config.micro_batch_num=32", "context.max_device_memory=50GB"])
    with pytest.raises(
        RecipeError, match=r"micro_batches 32, was 64; max_device_memory \d+, was \d+.*tc3 search layout"
    ):
        resolve(changed)
    # what plays no part may change
    resolve(apply_overrides(recipe, ["recompute_config.recompute=False", "lr_schedule.learning_rate=1.e-5"]))
    write_layout(replace(made, digest="0"), path_of(recipe.source), "a test")
    with pytest.raises(RecipeError, match="its digest is not that of its inputs"):
        resolve(recipe_with(tmp_path, "auto"))


def test_a_broken_file_is_refused(made, tmp_path):
    recipe = recipe_with(tmp_path, "auto")
    path_of(recipe.source).write_text("digest: 1\n")
    with pytest.raises(RecipeError, match=r"must be a mapping with the keys digest, inputs, .*, but it lacks "):
        resolve(recipe)
    write_layout(made, path_of(recipe.source), "a test")
    with path_of(recipe.source).open("a") as file:
        file.write("ofset: 1\n")
    with pytest.raises(RecipeError, match=r"ofset: no such key \(did you mean 'offset'"):
        resolve(recipe)
    write_layout(replace(made, offset=[[9] * 8, [0] * 8]), path_of(recipe.source), "a test")
    with pytest.raises(RecipeError, match="places 120 layers, but the model has 54"):
        resolve(recipe)


def test_operator_patterns_stay(made, tmp_path):
    more = "recompute_config: {select_comm_recompute: {'.*\\.norm': True}}\n"
    recipe = recipe_with(tmp_path, "auto", more=more)
    write_layout(made, path_of(recipe.source), "a test")
    recipe = resolve(recipe)
    assert recipe["recompute_config"]["select_comm_recompute"] == {r".*\.norm": made.select_comm_recompute}


def test_a_recipe_that_swaps_is_given_numbers_of_layers(made, tmp_path):
    swap = "auto, swap: True, layer_swap: [{backward_prefetch: 1, layers: [0]}]"
    recipe = recipe_with(tmp_path, swap)
    first = [[1] * 8, [0] * 8]
    write_layout(replace(made, recompute=first, select_recompute=False), path_of(recipe.source), "a test")
    counted = recipe_with(tmp_path, "auto")
    recipe, counted = resolve(recipe), resolve(counted)
    layers = from_recipe(counted).layers
    numbers = [sum(layers[0][:stage]) for stage in range(8) if layers[0][stage]]
    assert recipe["recompute_config"]["recompute"] == numbers
    assert from_recipe(recipe).recompute.full == from_recipe(counted).recompute.full
    assert check_recipe(tmp_path / "recipe.yaml").clean


def test_inputs_are_numbers_and_words_that_files_keep():
    inputs = inputs_of(load_recipe(LARGE))
    assert inputs["pp"] == 8 and inputs["model.layers"] == 54 and inputs["max_device_memory"] == 45 * GIB
    assert digest_of(inputs) != digest_of({**inputs, "pp": 4})


@pytest.mark.parametrize(
    "change",
    ["recompute_config.mp_comm_recompute=False", "model.model_config.npu_nums_per_device=16"],
)
def test_inputs_name_what_the_model_reads(change):
    before = inputs_of(load_recipe(LARGE))
    now = inputs_of(apply_overrides(load_recipe(LARGE), [change]))
    assert (now != before) == ("npu" not in change)
    overlapped = resolve(load_recipe(os.path.abspath("recipes/telechat3_438b/pretrain_4k_ep_overlap.yaml")))
    alone = copy.deepcopy(overlapped)
    del alone["plugins"]["ep_overlap"]
    assert inputs_of(overlapped) != inputs_of(alone)


def test_a_file_of_an_older_model_is_refused(made, tmp_path, monkeypatch):
    recipe = recipe_with(tmp_path, "auto")
    write_layout(made, path_of(recipe.source), "a test")
    monkeypatch.setattr("tools.layout.offsets.MODEL_VERSION", 1000)
    with pytest.raises(RecipeError, match="model_version 1000, was"):
        resolve(recipe)


@pytest.mark.parametrize("value", ["False", "True", "[5, 5, 5, 5, 5, 6, 6, 0]"])
def test_selected_operators_are_named(made, tmp_path, value):
    recipe = recipe_with(tmp_path, "auto", more=f"recompute_config: {{select_recompute: {value}}}\n")
    write_layout(replace(made, select_recompute=[[1] * 8, [0] * 8]), path_of(recipe.source), "a test")
    recipe = resolve(recipe)
    assert recipe["recompute_config"]["select_recompute"][r".*\.norm"] == [[1] * 8, [0] * 8]


@pytest.mark.parametrize("written", [True, [5, 5, 5, 5]])
def test_groups_of_operators_are_off_in_a_layout(made, tmp_path, written):
    """The layout was found without them: a launch that recomputed them, too, would take longer than predicted."""
    named = dict.fromkeys([*PATTERNS["mlp"], r"input_layernorm\.norm"], written)
    more = yaml.safe_dump({"recompute_config": {"select_recompute": named}})
    recipe = recipe_with(tmp_path, "auto", more=more)
    table = [[1] * 8, [0] * 8]
    write_layout(replace(made, recompute=False, select_recompute=table), path_of(recipe.source), "a test")
    recipe = resolve(recipe)
    found = from_recipe(recipe).recompute
    assert found.select == tuple(map(tuple, table)) and found.operators == ()
    assert check_recipe(tmp_path / "recipe.yaml").clean


def test_fewer_layers_than_chunks_have_no_layout(tmp_path):
    recipe = apply_overrides(load_recipe(LARGE), ["model.model_config.num_hidden_layers=15"])
    with pytest.raises(RecipeError, match="auto: 15 layers on 8 stages x 2 chunks are fewer layers than chunks; use"):
        make_layout(recipe, "atlas_800t_a2", Budget(2))


@pytest.mark.slow
def test_what_cannot_fit_says_so():
    recipe = apply_overrides(load_recipe(LARGE), ["context.max_device_memory=20GB"])
    words = r"no plan keeps memory_cap 18\.\d+: .*18.5 GiB \(20.0 less .*context.max_device_memory of the recipe"
    with pytest.raises(NothingFits, match=words):
        make_layout(recipe, "atlas_800t_a2", Budget(2))


def test_a_layout_string_becomes_an_offset(tmp_path):
    layout = '"Et*4|(t*4|)*5,(t*3|)*9,t*3,L"'
    recipe = recipe_with(tmp_path, layout)
    before = recipe["recompute_config"]
    said = []
    recipe = resolve(recipe, said.append)
    assert recipe["model"]["model_config"]["offset"] == [[1] * 6 + [0] * 2, [0] * 8]
    assert "Et*4|" in said[0] and recipe["recompute_config"] == before
    assert check_recipe(tmp_path / "recipe.yaml").clean
    assert build_config(tmp_path / "recipe.yaml", (), None, None)["model"]["model_config"]["offset"][0][0] == 1


@pytest.mark.parametrize(
    ("layout", "base", "words"),
    [
        ("Et*54|L", LARGE, "2 chunks do not fill 8 pipeline stages"),
        ("Et*40|(t|)*6,t*8L", LARGE, "the layout has 1 chunks on each of 8 stages, but the recipe has 2 on each stage"),
        ("E(t*3|)*15,t*3L", LARGE, "48 decoder layers, but the model has 54"),
        ("Et*5|(t*6|)*6,t*4L", MTP, "0 MTP layers, but the model has 1"),
        ("atuo", LARGE, "the symbol 'a' is unknown; the symbols are E .embedding"),
    ],
)
def test_layouts_that_do_not_fit_are_named(layout, base, words, tmp_path):
    recipe_with(tmp_path, f'"{layout}"', base)
    with pytest.raises(RecipeError, match=f"model.model_config.offset: layout .*{words}"):
        build_config(tmp_path / "recipe.yaml", (), None, None)
    errors = check_recipe(tmp_path / "recipe.yaml").errors
    assert [error.key for error in errors] == ["model.model_config.offset"]


def test_a_v_shaped_pipeline_has_no_layout_string():
    recipe = apply_overrides(load_recipe(LARGE), ["parallel.pipeline_config.pipeline_scheduler=zero_bubble_v"])
    recipe["model"]["model_config"]["offset"] = "Et|tL"
    with pytest.raises(RecipeError, match="cannot describe zero_bubble_v"):
        resolve(recipe)


def test_an_open_layout_can_be_read():
    recipe = load_recipe(LARGE)
    recipe["model"]["model_config"]["offset"] = "auto"
    config = from_recipe(even_layout(recipe))
    assert sum(map(sum, config.layers)) == 54 and config.recompute.full is None
    assert recipe["model"]["model_config"]["offset"] == "auto"
