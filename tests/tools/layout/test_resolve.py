"""`resolve`: the one place where `auto` becomes values, for every command."""

import ast
import copy
import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.cli import tc3
from launch.run.effective import effective_recipe
from launch.train import build_config
from plugins.attention_balance.plan import recomputed_share
from plugins.attention_balance.samples import Cost
from plugins.errors import RecipeError
from plugins.hierarchical_ep.plan import MODES
from tools.accuracy.align.sides import changed
from tools.check.check import check_recipe
from tools.data.imbalance.recipe import setting_of
from tools.dryrun.plan import plan_jobs
from tools.estimate.efficiency import cluster
from tools.estimate.from_recipe import from_recipe
from tools.estimate.time_model import TimeModel
from tools.layout.budget import Budget
from tools.layout.offsets import LayoutFile, digest_of, path_of, write_layout
from tools.layout.resolve import (
    keep_sample_cost,
    make_layout,
    resolve,
    resolve_for_check,
    sample_cost,
    write_sample_cost,
)
from tools.model import flops_per_token, model_of
from tools.recipe.cli import effective
from tools.recipe.load import Recipe, load_recipe
from tools.recipe.mini import load_mini
from tools.recipe.view import CHUNKS, MODE, OFFSET, OVERLAP, View, look, unresolved
from tools.schema.converter import convert
from tools.schema.schema import load_schema
from tools.schema.stages import RECOMPUTE

ROOT = Path(__file__).resolve().parents[3]
PLUGGED = ROOT / "recipes" / "telechat3_438b" / "pretrain_4k_ep_overlap.yaml"
TABLES = {("recompute_config", name) for name in RECOMPUTE}
OPEN = "model: {model_config: {offset: auto}}"


def leaves(value, path=()):
    """Key path -> value of everything below a recipe that is no mapping."""
    if isinstance(value, dict) and value:
        return {key: leaf for name, inner in value.items() for key, leaf in leaves(inner, (*path, name)).items()}
    return {path: value}


def turned(value):
    """The same mappings with their keys in the opposite order."""
    return {key: turned(value[key]) for key in reversed(value)} if isinstance(value, dict) else value


def child(folder, text=OPEN, name="recipe"):
    path = folder / f"{name}.yaml"
    path.write_text(f"base_config: {PLUGGED}\n{text}\n")
    return path


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """A recipe with everything open, and its layout file."""
    path = child(tmp_path_factory.mktemp("opened"))
    found = make_layout(load_recipe(path), "atlas_800t_a2", Budget(2))
    write_layout(found, path_of(path), "a test")
    return path


@st.composite
def combination(draw):
    """`plugins` and `offset` of a recipe, each open or not."""
    plugins = {"hierarchical_ep": {"mode": draw(st.sampled_from(["auto", *MODES]))}}
    chunks = draw(st.sampled_from([None, "auto", [1, 2], [1, 4]]))
    if chunks:
        plugins["ep_overlap"] = {"chunks": chunks, **draw(st.sampled_from([{}, {"stride": 2}]))}
    if draw(st.booleans()):
        plugins["held_out_loss"] = False
    offset = draw(st.sampled_from(["auto", "Et*4|(t*4|)*5,(t*3|)*9,t*3,L", [[1] * 6 + [0] * 2, [0] * 8]]))
    return plugins, offset


@pytest.mark.slow
@settings(max_examples=24)
@given(combination(), st.sampled_from(["file", "even"]))
def test_nothing_stays_auto_and_nothing_else_changes(opened, drawn, layout):
    plugins, offset = drawn
    recipe = load_recipe(opened)
    recipe["plugins"], recipe["model"]["model_config"]["offset"] = plugins, offset
    before, said = json.dumps(recipe), []
    if layout == "file":  # the file of this very dispatch, as a search would have made it
        _layout_of(recipe, opened)
    resolved = resolve(recipe, said.append, layout)
    assert json.dumps(recipe) == before, "the caller's recipe stays as it was"
    assert unresolved(resolved) == [] and "auto" not in leaves(resolved).values()
    may = {path for path in (MODE, CHUNKS) if look(recipe, path) == "auto"}
    may |= {(*OVERLAP, "stride")} if CHUNKS in may and not look(recipe, (*OVERLAP, "stride")) else set()
    may |= {OFFSET} if isinstance(offset, str) else set()
    may |= TABLES if offset == "auto" else set()
    old, new = leaves(recipe), leaves(resolved)
    changed = {path for path in old | new if old.get(path, "absent") != new.get(path, "absent")}
    assert {path[:2] if path[:2] in TABLES else path for path in changed} <= may  # a table may be for patterns
    assert list(resolved) == list(recipe) and resolved.source == recipe.source and resolved.marks == recipe.marks
    assert resolve(resolved, said.append, layout) == resolved and len(said) == len(unresolved(recipe)), "idempotent"
    other = Recipe(turned(recipe))
    other.source = recipe.source
    assert resolve(other, layout=layout) == resolved, "the order of keys plays no part"
    assert resolve_for_check(recipe)[0] == resolved or layout == "even"


def _layout_of(recipe, opened):
    """Make the layout file one of this recipe; the tables in it stay."""
    from tools.layout.offsets import inputs_of

    inputs = inputs_of(resolve(recipe, layout="even"))
    file = LayoutFile(**yaml.safe_load(path_of(opened).read_text()))
    write_layout(replace(file, inputs=inputs, digest=digest_of(inputs)), path_of(opened), "a test")


def test_the_dispatch_is_that_of_the_even_layout(opened):
    """The layout file is for one dispatch, which so cannot follow from what the file says."""
    _layout_of(load_recipe(opened), opened)
    file, even = (resolve(load_recipe(opened), layout=layout) for layout in ("file", "even"))
    assert file["plugins"] == even["plugins"]
    assert file["model"]["model_config"]["offset"] != even["model"]["model_config"]["offset"]
    assert file["recompute_config"] != even["recompute_config"]


def test_every_command_sees_the_same_recipe(opened, tmp_path):
    """Each by the way on which it gets its recipe."""
    _layout_of(load_recipe(opened), opened)
    wanted = resolve(load_recipe(opened))
    ways = {
        "train": effective_recipe(opened, (), None, tmp_path),
        "worker": build_config(opened, (), None, None),
        "check": check_recipe(opened).recipe,
        "show": effective(opened),
        "align": changed(load_recipe(opened), (), None),
    }
    for name, seen in ways.items():
        different = {key for key in wanted if wanted[key] != seen.get(key)} - {"output_dir", "checkpoint"}
        assert not different, name


def test_what_is_shown_has_no_auto(opened):
    _layout_of(load_recipe(opened), opened)
    run = CliRunner()
    shown = run.invoke(tc3, ["recipe", "show", str(opened)])
    assert shown.exit_code == 0 and yaml.safe_load(shown.stdout) == resolve(load_recipe(opened))
    assert "auto" not in leaves(yaml.safe_load(shown.stdout)).values()
    assert shown.stderr.count("auto ->") == 3, "and says what became of it"
    written_ = run.invoke(tc3, ["recipe", "show", str(opened), "--as-written", "--json"])
    assert json.loads(written_.stdout) == load_recipe(opened) and written_.stderr == ""
    path = opened.with_name("shown.yaml")
    path.write_text(shown.stdout)
    assert run.invoke(tc3, ["recipe", "diff", str(opened), str(path)]).exit_code == 0
    assert run.invoke(tc3, ["recipe", "diff", str(opened), str(path), "--as-written"]).exit_code == 1


@pytest.mark.parametrize(
    "command",
    [
        "recipe show",
        "recipe diff {0}",
        "train --dry-run",
        "accuracy align --against {0}",
        "data imbalance {1} --recipe",
    ],
)
def test_without_a_layout_file_commands_say_what_to_do(command, tmp_path):
    path = child(tmp_path)
    words = command.format(PLUGGED, tmp_path / "corpus").split()
    ended = CliRunner().invoke(tc3, [*words, str(path)])
    assert isinstance(ended.exception, RecipeError)
    layout = tmp_path / "recipe.layout.yaml"
    said = f"model.model_config.offset: auto: the layout is read from {layout}, but this file does not exist"
    assert said in str(ended.exception)
    assert f"run tc3 search layout {path}" in str(ended.exception)


def test_check_goes_on_with_an_even_layout_and_says_so(tmp_path):
    report = check_recipe(child(tmp_path))
    assert [finding.key for finding in report.errors] == ["model.model_config.offset"]
    assert "everything else is checked with an even layout" in report.errors[0].wrong
    assert report.table and unresolved(report.recipe) == []


def test_check_refuses_a_dispatch_that_a_launch_refuses(tmp_path):
    """It was clean: nobody asked for what `auto` stands for."""
    path = child(tmp_path, "plugins: {hierarchical_ep: {hardware: atlas_800t_a3}}")
    findings = [finding for finding in check_recipe(path).errors if finding.key == "plugins.hierarchical_ep.mode"]
    assert len(findings) == 1 and "atlas_800t_a3" in findings[0].wrong
    with pytest.raises(RecipeError, match="atlas_800t_a3"):
        resolve(load_recipe(path))


def test_a_report_on_dispatch_needs_no_layout(tmp_path):
    ended = CliRunner().invoke(tc3, ["ep-report", str(child(tmp_path)), "--ep", "16,32", "--json"])
    assert ended.exit_code == 0, ended.output
    assert "offset: auto -> an even layout here" in ended.stderr
    even = resolve(load_recipe(tmp_path / "recipe.yaml"), layout="even")
    advised = CliRunner().invoke(tc3, ["ep-report", str(tmp_path / "recipe.yaml"), "--json"])
    assert look(even, MODE) in advised.stdout


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["hierarchical", "auto"])
def test_a_report_on_dispatch_has_the_step_of_the_layout_file(tmp_path, mode):
    """Its step was that of an even layout with nothing recomputed, beside a file that every launch reads."""
    path = child(tmp_path, f"{OPEN}\nplugins: {{hierarchical_ep: {{mode: {mode}}}, ep_overlap: False}}")
    recipe = load_recipe(path)
    write_layout(make_layout(recipe, "atlas_800t_a2", Budget(0.1)), path_of(path), "a test")
    told = CliRunner().invoke(tc3, ["ep-report", str(path), "--json"])
    assert told.exit_code == 0, told.output
    (report,) = json.loads(told.stdout)["reports"]
    expected = TimeModel(cluster("atlas_800t_a2")).step(from_recipe(resolve(recipe)), simulated=True).total
    assert report["recipe"]["step_seconds"] == expected
    assert "offset: auto -> an even layout" not in told.stderr
    other = CliRunner().invoke(tc3, ["ep-report", str(path), "--json", "--set", "context.max_device_memory=50GB"])
    assert other.exit_code == 0, other.output
    assert "an even layout here, nothing recomputed: " in other.stderr and "was made for another recipe" in other.stderr


@pytest.mark.parametrize("key", ["model.model_config.offset", "plugins.hierarchical_ep.mode"])
def test_who_needs_numbers_refuses_what_is_open(key, tmp_path):
    recipe = load_recipe(PLUGGED)
    if key.endswith("offset"):
        recipe = resolve(load_recipe(child(tmp_path)), layout="even")
        recipe["model"]["model_config"]["offset"] = "auto"
    asked = [from_recipe, lambda open_: setting_of(open_, "corpus", None)]
    for ask in [*asked, plan_jobs] if key.endswith("offset") else asked:
        with pytest.raises(RecipeError, match=rf"yaml: {key}: auto must first be replaced.*tc3 recipe show"):
            ask(recipe)


def test_broken_sizes_are_an_error_of_the_recipe():
    recipe = load_recipe(PLUGGED)
    recipe["model"]["model_config"]["num_experts_per_tok"] = None
    recipe["model"]["model_config"]["hidden_size"] = "many"
    with pytest.raises(RecipeError, match="tc3 check"):
        resolve(recipe)
    assert check_recipe(recipe).errors


def _imports(path):
    """Modules that a file imports, wherever it does."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_nobody_resolves_by_parts():
    """Only the room of `resolve` turns `auto` into values; `tc3 search layout` makes the file and nothing else."""
    parts = {f"tools.layout.offsets.{name}" for name in ("string_values", "even_values", "even_layout", "file_values")}
    inside = {*parts, "tools.layout.advise.dispatch_values"}
    files = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in files.split():
        if not name.startswith(("tests/", "tools/layout/")) and "auto" in (ROOT / name).read_text(encoding="utf-8"):
            assert not inside & set(_imports(ROOT / name)), name


RECIPES = Path(__file__).resolve().parents[3] / "recipes"
BALANCED = RECIPES / "mini/pretrain_eod_balanced.yaml"
# FLOPs a token and a pair of tokens, as every run of these recipes has weighed its samples so far
SHIPPED = {
    "telechat3_105b/context_32k.yaml": (38_220_857_344, 3_768_320),
    "telechat3_105b/context_128k.yaml": (38_220_857_344, 3_768_320),
    "telechat3_438b/context_32k.yaml": (192_318_275_584, 17_694_720),
    "telechat3_438b/context_128k.yaml": (192_318_275_584, 17_694_720),
    "telechat3_1119b/context_32k.yaml": (295_260_127_232, 20_316_160),
    "telechat3_1119b/context_128k.yaml": (295_260_127_232, 20_316_160),
    "mini/pretrain_eod_balanced.yaml": (7_704_576, 7_680),
}
MINIS = {"telechat3_105b/context_128k.yaml": (6_832_128, 5_760)}


def section(recipe):
    return recipe["plugins"]["attention_balance"]


@pytest.mark.parametrize("name", SHIPPED)
def test_the_order_of_samples_stays_what_it_was(name):
    recipe = load_recipe(RECIPES / name)
    assert (section(recipe)["window"], len(section(recipe))) == (1, 1), "sizes stand once, in the model"
    write_sample_cost(recipe)
    assert section(recipe) == {"window": 1, "per_token": SHIPPED[name][0], "per_pair": SHIPPED[name][1], "unit": "FLOP"}
    assert all(type(section(recipe)[key]) is int for key in ("per_pair", "per_token"))


@pytest.mark.parametrize("name", MINIS)
def test_that_of_minis_too(name):
    cost = sample_cost(load_mini(RECIPES / name))
    assert (cost.per_token, cost.per_pair) == MINIS[name]


def test_by_hand():
    """The cost of a sample is that computed by hand for one dense and one MoE layer with latent attention and an MTP
    layer; the heads and their widths are those of the mini recipe.
    """
    recipe = load_recipe(BALANCED)
    recipe["recompute_config"] = {"recompute": False}
    recipe["model"]["model_config"].update({
        "num_hidden_layers": 2, "first_k_dense_replace": 1, "num_nextn_predict_layers": 1, "vocab_size": 512,
        "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 8,
        "qk_nope_head_dim": 16, "qk_head_dim": 16, "qk_rope_head_dim": 8, "qk_pos_emb_head_dim": 8, "v_head_dim": 12,
        "intermediate_size": 96, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "n_shared_experts": 1, "moe_shared_expert_intermediate_size": 32,
    })  # fmt: skip
    attention = 64 * 24 + 24 * 4 * (16 + 8) + 64 * (8 + 8) + 8 * 4 * (16 + 12) + 4 * 12 * 64
    moe = 3 * 64 * (2 * 32 + 32) + 64 * 8
    weights = 3 * attention + 3 * 64 * 96 + moe + (moe + 2 * 64 * 64) + 2 * 512 * 64
    # a pair in one head: 2 * 24 FLOPs for a score, 2 * 12 for its value; forward, and twice that backward
    assert sample_cost(recipe) == Cost(3 * (2 * 24 + 2 * 12) * 4 * 3, 6 * weights, "FLOP")
    recipe["recompute_config"] = {"recompute": [1, 1]}
    assert sample_cost(recipe) == Cost(4 * (2 * 24 + 2 * 12) * 4 * 3, 8 * weights, "FLOP")


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*/*k.yaml")), ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_sample_without_documents_costs_what_tc3_check_says(path):
    recipe = load_recipe(path)
    model = model_of(convert(View(recipe), load_schema()).fields)
    cost, passes = sample_cost(recipe), 3 + recomputed_share(recipe)
    assert 3 * cost.per_token == passes * flops_per_token(model, 0)
    # a token of a sequence of n attends to n / 2 tokens on average
    assert 3 * cost.per_pair == passes * (flops_per_token(model, 2) - flops_per_token(model, 0))


def test_what_is_written_stays_and_what_is_off_stays_off():
    recipe = load_recipe(BALANCED)
    shared = section(recipe)
    write_sample_cost(recipe)
    assert shared == {"window": 1}, "an anchor may share it"
    before = copy.deepcopy(recipe)
    write_sample_cost(recipe)
    assert recipe == before
    for other in ({"window": 2, "per_pair": 1e-9, "per_token": 1e-6}, {"per_pair": 1e-9}, False, None, True, 3):
        recipe["plugins"]["attention_balance"] = other
        write_sample_cost(recipe)
        assert recipe["plugins"]["attention_balance"] == other
    for plugins in (None, {}):
        recipe["plugins"] = plugins
        write_sample_cost(recipe)
        assert recipe["plugins"] == plugins


def test_a_model_that_lacks_a_size():
    recipe = load_recipe(BALANCED)
    recipe["model"]["model_config"]["hidden_size"] = None
    with pytest.raises(
        RecipeError, match=r"model_config: .* these sizes do not describe a model .* measured per_pair and per_token"
    ):
        write_sample_cost(recipe)


def costing(**cost):
    recipe = load_recipe(BALANCED)
    recipe["plugins"]["attention_balance"] = {"window": 3, **cost}
    return recipe


FLOPS, SECONDS = {"per_pair": 8, "per_token": 9, "unit": "FLOP"}, {"per_pair": 1e-9, "per_token": 1e-6}


@pytest.mark.parametrize("first", [{"per_pair": 7, "per_token": 9, "unit": "FLOP"}, SECONDS])
def test_a_run_that_goes_on_weighs_samples_as_it_began(first):
    recipe = costing(**FLOPS)
    (line,) = keep_sample_cost(recipe, costing(**first))
    assert section(recipe) == {"window": 3, **first}
    assert "keep the order in which this run began" in line and str(first["per_pair"]) in line


@pytest.mark.parametrize(("now", "first"), [(FLOPS, FLOPS), (FLOPS, {}), (SECONDS, FLOPS)])
def test_nothing_is_said_where_nothing_changes(now, first):
    recipe = costing(**now)
    assert keep_sample_cost(recipe, costing(**first)) == [] and section(recipe) == {"window": 3, **now}


def test_a_run_without_the_plugin_has_nothing_to_keep():
    recipe, off = costing(**FLOPS), costing()
    off["plugins"]["attention_balance"] = False
    assert keep_sample_cost(recipe, off) == [] == keep_sample_cost(off, costing(**FLOPS))
    assert section(recipe) == {"window": 3, **FLOPS}
