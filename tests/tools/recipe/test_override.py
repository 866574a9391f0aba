"""`--set`: right values, shared values, and refusals that say what would be right."""

import copy
import re
from dataclasses import fields
from pathlib import Path
from textwrap import dedent

import pytest
import yaml

from plugins import ADAPTERS
from plugins.errors import RecipeError
from plugins.settings import settings_of
from tools.recipe.findings import refusal
from tools.recipe.load import Recipe, load_recipe
from tools.recipe.override import also_changed, apply_overrides

ROOT = Path(__file__).resolve().parents[3]
SWITCHES = [name for name in ADAPTERS if settings_of(name).look(True)[0] is not None]  # which True switches on
RECIPE = """
    seed: 42
    use_parallel: False
    runner_config: {batch_size: &bs 4, epochs: 1}
    plugins: {finite_loss: {stop_after: 1}}
    lr_schedule: {learning_rate: 3.e-3, total_steps: 40}
    train_dataset: &data
      data_loader:
        sizes: [160, 0, 0]
        config: {seed: 1234, data_path: ['1', "./tiny"]}
    train_dataset_task: {dataset_config: *data}
    parallel: {dataset_strategy: [[1, 1], [1, 1]]}
    model: {model_config: {batch_size: *bs, offset: 0, name: mini, nothing: }}
    callbacks:
      - {type: Loss}
      - {type: Bias, number: 4}
      - {type: Save, save_checkpoint_steps: 20}
"""


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(dedent(RECIPE))
    return load_recipe(path)


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("seed=7", ["seed"], 7),
        ("lr_schedule.learning_rate=1e-3", ["lr_schedule", "learning_rate"], 1e-3),
        ("lr_schedule.learning_rate=1", ["lr_schedule", "learning_rate"], 1.0),
        ("use_parallel=true", ["use_parallel"], True),
        ("callbacks.2.save_checkpoint_steps=5", ["callbacks", 2, "save_checkpoint_steps"], 5),
        ("train_dataset.data_loader.sizes.0=8", ["train_dataset", "data_loader", "sizes"], [8, 0, 0]),
        ("parallel.dataset_strategy=[[2, 1]]", ["parallel", "dataset_strategy"], [[2, 1]]),
        ("parallel.dataset_strategy.1.0=3", ["parallel", "dataset_strategy"], [[1, 1], [3, 1]]),
        ("model.model_config.offset=[1, 0]", ["model", "model_config", "offset"], [1, 0]),
        ("model.model_config.name=007", ["model", "model_config", "name"], "007"),
        ("model.model_config.name=a=b", ["model", "model_config", "name"], "a=b"),
        ("model.model_config.nothing=[1e-2]", ["model", "model_config", "nothing"], [0.01]),
        ("plugins.finite_loss=False", ["plugins", "finite_loss"], False),
        ("runner_config={epochs: 3}", ["runner_config"], {"batch_size": 4, "epochs": 3}),
    ],
)
def test_an_override_changes_the_value_and_nothing_else(recipe, override, path, value):
    before = copy.deepcopy(dict(recipe))
    changed = apply_overrides(recipe, [override])
    assert recipe == before, "the given recipe must stay as it is"
    node, parent = changed, None
    for key in path:
        parent, node = node, node[key]
    assert node == value and type(node) is type(value)
    old = before
    for key in path:
        old = old[key]
    parent[path[-1]] = old
    assert changed == before


def test_a_shared_mapping_changes_at_every_alias(recipe):
    changed = apply_overrides(recipe, ["train_dataset.data_loader.config.data_path.1=PREFIX"])
    assert changed["train_dataset"]["data_loader"]["config"]["data_path"] == ["1", "PREFIX"]
    assert changed["train_dataset_task"]["dataset_config"] == changed["train_dataset"]


def test_a_shared_scalar_changes_at_every_alias_and_equal_numbers_elsewhere_stay(recipe):
    for name in ("runner_config.batch_size", "model.model_config.batch_size"):
        changed = apply_overrides(recipe, [f"{name}=2"])
        assert changed["runner_config"]["batch_size"] == changed["model"]["model_config"]["batch_size"] == 2
        assert changed["callbacks"][1]["number"] == 4
    assert also_changed(recipe, "runner_config.batch_size=2") == ["model.model_config.batch_size"]
    assert also_changed(recipe, "callbacks.1.number=2") == []


def test_a_value_that_only_one_place_inherits_is_shared_no_more(tmp_path):
    (tmp_path / "base.yaml").write_text("a: {n: &n 1}\nb: {n: *n}\nc: {n: *n}\n")
    (tmp_path / "top.yaml").write_text("base_config: base.yaml\na: {n: 5}\n")
    changed = apply_overrides(load_recipe(tmp_path / "top.yaml"), ["b.n=7"])
    assert changed == {"a": {"n": 5}, "b": {"n": 7}, "c": {"n": 7}}


def test_a_replaced_list_forgets_the_aliases_of_its_old_entries(tmp_path):
    (tmp_path / "x.yaml").write_text("n: &n 1\nlist: [0, *n]\n")
    assert apply_overrides(load_recipe(tmp_path / "x.yaml"), ["list=[5, 6]", "n=2"]) == {"n": 2, "list": [5, 6]}


def test_a_later_override_of_the_same_value_wins_only_if_it_agrees(recipe):
    assert apply_overrides(recipe, ["seed=1", "seed=1"])["seed"] == 1
    with pytest.raises(RecipeError, match="batch_size=2 has already set"):
        apply_overrides(recipe, ["runner_config.batch_size=2", "model.model_config.batch_size=3"])


def test_a_plain_dict_keeps_its_shared_objects(recipe):
    plain = copy.deepcopy(dict(recipe))
    changed = apply_overrides(plain, ["train_dataset.data_loader.config.seed=1"])
    assert changed["train_dataset_task"]["dataset_config"]["data_loader"]["config"]["seed"] == 1
    changed.source = "x.yaml"
    with pytest.raises(RecipeError, match=r"^x.yaml: --set nope:"):
        apply_overrides(changed, ["nope=1"])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("runner_config.bach_size=2", "did you mean 'runner_config.batch_size'?"),
        ("batch_size=2", "did you mean 'runner_config.batch_size'?"),
        ("runner.epochs=2", "did you mean 'runner_config.epochs'?"),
        ("zzzzzz=2", "the recipe has no key 'zzzzzz'"),
        ("seed", "must have the form KEY.PATH=VALUE"),
        ("=3", "must have the form KEY.PATH=VALUE"),
        ("seed.x=1", "seed is a plain value (42)"),
        ("callbacks.3.type=X", "its indices are 0 to 2"),
        ("callbacks.last.type=X", "its indices are 0 to 2, not 'last'"),
        ("callbacks.-1.type=X", "its indices are 0 to 2"),
        ("callbacks.².type=X", "its indices are 0 to 2"),
        ("runner_config=3", "set its keys, for instance runner_config.batch_size=..."),
        ("seed={a: 1}", "seed is an integer (42), not a mapping"),
        ("seed=true", "seed must be an integer (now 42), but True is true or false"),
        ("seed=7.0", "write 7"),
        ("seed=7.5", "seed must be an integer"),
        ("seed=seven", "but 'seven' is text"),
        ("seed=", "but no value is given"),
        ("seed=null", "but null means no value"),
        ("use_parallel=1", "write true"),
        ("use_parallel=maybe", "must be true or false"),
        ("lr_schedule.learning_rate=fast", "must be a number"),
        ("lr_schedule.learning_rate=true", "must be a number"),
        ("train_dataset.data_loader.sizes=8", "write [8], or name one entry by its index"),
        ("seed=[1]", "seed must be an integer"),
        ("seed=[1", "not valid YAML"),
        ("runner_config={epoch: 3}", "did you mean 'runner_config.epochs'?"),
        (
            "plugins.finite_loss=True",
            "set its keys, for instance plugins.finite_loss.stop_after=...; plugins.finite_loss=",
        ),
    ],
)
def test_what_does_not_fit_is_refused(recipe, override, message):
    with pytest.raises(RecipeError) as error:
        apply_overrides(recipe, [override])
    assert message in str(error.value)
    assert "--set" in str(error.value) and "\n" not in str(error.value)


def test_a_refusal_names_the_line_that_the_value_stands_in(recipe):
    with pytest.raises(RecipeError, match=rf"^{recipe.source}:2: --set seed=x"):
        apply_overrides(recipe, ["seed=x"])


@pytest.mark.parametrize(
    ("overrides", "plugins"),
    [
        (["plugins.spike_guard={}"], {"spike_guard": {}}),
        (["plugins.spike_guard={window: 9}"], {"spike_guard": {"window": 9}}),
        (["plugins.spike_guard.window=9", "plugins.spike_guard.skip=2"], {"spike_guard": {"window": 9, "skip": 2}}),
        (["plugins.finite_loss=False"], {"finite_loss": False}),
    ],
)
def test_a_plugin_that_is_not_written_can_be_switched_on(overrides, plugins):
    recipe = Recipe({"seed": 1, "plugins": None})
    assert apply_overrides(recipe, overrides)["plugins"] == apply_overrides(Recipe(), overrides)["plugins"] == plugins
    assert also_changed(recipe, overrides[0]) == [] and recipe["plugins"] is None


def given_whole(written, name, text):
    """Return what a plugin's section becomes by `--set` if a recipe writes `written` there, or the refusal."""
    recipe = Recipe({"plugins": {} if written is None else {name: written}})
    try:
        return apply_overrides(recipe, [f"plugins.{name}={text}"])["plugins"][name]
    except RecipeError as error:
        return str(error)


@pytest.mark.parametrize("written", [None, False, "on"])
@pytest.mark.parametrize("name", ADAPTERS)
def test_a_whole_section_is_taken_as_the_plugin_reads_it_or_refused_with_what_it_reads(name, written):
    section, switch = settings_of(name), name in SWITCHES
    on = True if switch else {each.name: 1 for each in fields(section)}
    written = on if written == "on" else written
    assert given_whole(written, name, "False") is False
    if switch:
        assert given_whole(written, name, "True") is True
        wrong = "not a mapping" if written else section.RIGHT
        assert wrong in given_whole(written, name, "{}")
        return
    assert given_whole(written, name, "{}") == (written or {})
    refused = given_whole(written, name, "True")
    if written:
        wanted = f"is a mapping; set its keys, for instance plugins.{name}."
    elif written == {}:
        wanted = f"is an empty mapping; plugins.{name}=False leaves the plugin off"
    elif section.look({})[0] is None:
        wanted = section.RIGHT
    else:
        wanted = f"write plugins.{name}={{}}" + " for the defaults" * bool(fields(section))
    assert wanted in refused


def test_a_plugin_that_reads_only_true_is_switched_once():
    assert SWITCHES == ["group_aux_loss"]
    for pair in (["True", "False"], ["False", "True"]):
        with pytest.raises(RecipeError, match=r"this sets plugins.group_aux_loss, which --set .* has already set"):
            apply_overrides(Recipe(), [f"plugins.group_aux_loss={each}" for each in pair])
    with pytest.raises(RecipeError, match=r"{'x': 1} is not allowed; write True, or False to leave the loss to"):
        apply_overrides(Recipe(), ["plugins.group_aux_loss.x=1"])


@pytest.mark.parametrize("first", ["plugins.spike_guard.window=9", "plugins.spike_guard={window: 9}"])
def test_a_new_setting_is_not_given_twice(first):
    assert apply_overrides(Recipe(), [first, "plugins.spike_guard.window=9"])["plugins"]["spike_guard"]["window"] == 9
    with pytest.raises(RecipeError, match=r"sets plugins.spike_guard.window, which --set .* has already set"):
        apply_overrides(Recipe(), [first, "plugins.spike_guard.window=8"])


@pytest.mark.parametrize("written", [Recipe(), Recipe({"plugins": {"spike_guard": {"skip": 1}}})])
@pytest.mark.parametrize(
    "part", ["plugins.spike_guard.window=9", "plugins.spike_guard={window: 9}", "plugins.spike_guard={}"]
)
def test_a_plugin_is_not_switched_off_and_given_a_setting(written, part):
    off = "plugins.spike_guard=False"
    for pair in ([off, part], [part, off]):
        with pytest.raises(
            RecipeError, match=r"contradicts --set .* whole of plugins.spike_guard, .* keep one of the two"
        ):
            apply_overrides(written, pair)
    both = apply_overrides(written, ["plugins.spike_guard={}", "plugins.spike_guard.window=9"])
    assert both["plugins"]["spike_guard"]["window"] == 9


def test_a_mapping_adds_settings_to_a_plugin_that_is_written_or_off():
    for written in ({"skip": 1}, False):
        changed = apply_overrides(Recipe({"plugins": {"spike_guard": written}}), ["plugins.spike_guard={window: 9}"])
        assert changed["plugins"]["spike_guard"] == {**(written or {}), "window": 9}


@pytest.mark.parametrize(
    ("name", "values"),
    [("held_out_loss.data_path", ("a", ["a", "b"])), ("ep_overlap.chunks", ("auto", [2, 2]))],
)
def test_a_setting_may_be_text_as_well_as_a_list(name, values):
    plugin, setting = name.split(".")
    for old, new in (values, values[::-1]):
        written = {"plugins": {plugin: {setting: old}}}
        changed = apply_overrides(Recipe(written), [f"plugins.{name}={yaml.safe_dump(new, default_flow_style=True)}"])
        assert changed["plugins"][plugin][setting] == new
    with pytest.raises(RecipeError, match="must be text"):
        apply_overrides(
            Recipe({"plugins": {"hierarchical_ep": {"mode": "auto"}}}), ["plugins.hierarchical_ep.mode=[1]"]
        )


def test_a_whole_list_and_an_entry_of_it_are_not_both_given(recipe):
    whole, entry = (
        "train_dataset.data_loader.config.data_path=['1', a]",
        "train_dataset.data_loader.config.data_path.1=b",
    )
    for pair in ([whole, entry], [entry, whole]):
        with pytest.raises(RecipeError, match=r"contradicts --set .* whole of train_dataset\S*data_path, "):
            apply_overrides(recipe, pair)


@pytest.mark.parametrize("name", ["telechat3_105b", "telechat3_438b"])
def test_a_list_whose_entry_another_override_reaches_through_an_anchor_is_what_the_user_names(name):
    recipe = load_recipe(ROOT / f"recipes/{name}/pretrain_4k.yaml")
    pair = ["parallel_config.data_parallel=2", "parallel.dataset_strategy=[[1, 1], [4, 1]]"]
    for overrides in (pair, pair[::-1]):
        changed = apply_overrides(recipe, overrides)
        assert changed["parallel_config"]["data_parallel"] == 2
        assert changed["parallel"]["dataset_strategy"] == [[1, 1], [4, 1]]
        assert also_changed(recipe, pair[0]) and also_changed(recipe, pair[0], changed) == []


@pytest.mark.parametrize(
    ("pair", "agreed"),
    [
        (["parts=[[7, 1], 5]", "parts.0.0=7"], {"n": 7, "parts": [[7, 1], 5], "same": [[7, 1], 5]}),  # n is its anchor
        (["parts=[[7, 1], 5]", "parts.0.0=8"], None),
        (["parts=[[7, 1], 5]", "same.0.0=8"], None),  # one list under two names
        (["parts=[[7, 1], 5]", "n=8"], {"n": 8, "parts": [[7, 1], 5], "same": [[7, 1], 5]}),
    ],
)
def test_an_anchor_means_the_same_in_both_orders(tmp_path, pair, agreed):
    (tmp_path / "x.yaml").write_text("n: &n 1\nparts: &p [[*n, 1], *n]\nsame: *p\n")
    for overrides in (pair, pair[::-1]):
        if agreed:
            assert apply_overrides(load_recipe(tmp_path / "x.yaml"), overrides) == agreed
            continue
        with pytest.raises(RecipeError, match=r"contradicts --set .* the whole of (parts|same), .* keep one"):
            apply_overrides(load_recipe(tmp_path / "x.yaml"), overrides)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("plugins.spike_gard={}", "there is no plugin 'spike_gard' (did you mean 'spike_guard'?)"),
        ("plugins.spike_guard=True", "write plugins.spike_guard={} for the defaults"),
        ("plugins.spike_guard.window=.nan", "plugins.spike_guard.window: nan is not a finite number"),
        ("plugins.finite_loss.stop_aftr=3", "plugins.finite_loss has no key 'stop_aftr' (did you mean"),
    ],
)
def test_a_plugin_that_there_is_not_says_what_to_write(recipe, override, words):
    with pytest.raises(RecipeError) as caught:
        apply_overrides(recipe, [override])
    assert words in str(caught.value) and "recipe.yaml" in str(caught.value)


def test_file_and_line_as_far_as_known():
    path = ("parallel_config", "data_parallel")
    recipe = load_recipe(ROOT / "recipes/mini/pretrain.yaml")
    error = refusal(recipe, path, "8; write 4")
    assert isinstance(error, RecipeError)
    assert re.search(r"pretrain\.yaml:\d+: parallel_config\.data_parallel: 8; write 4$", str(error))
    assert re.search(r"pretrain\.yaml: not\.there: gone$", str(refusal(recipe, ("not", "there"), "gone")))
    assert str(refusal(Recipe(), path, "8; write 4")) == "parallel_config.data_parallel: 8; write 4"


def test_no_tool_has_one_of_its_own():
    asks = re.compile(r"""mark = (recipe\.marks|getattr\(recipe, "marks", {}\))\.get\(path\)""")
    own = [path for path in (ROOT / "tools").rglob("*.py") if asks.search(path.read_text())]
    assert own == [ROOT / "tools/recipe/load.py"]


def test_operator_patterns_are_set_as_a_recipe_writes_them():
    """They are keys of the user's own, with dots in them, below keys that also take a flag or a list."""
    key = "recompute_config.select_recompute"
    recipe = apply_overrides(
        {"recompute_config": {"recompute": True, "select_recompute": False}}, [key + r'={"mlp\\.mul": true}']
    )
    assert recipe["recompute_config"]["select_recompute"] == {r"mlp\.mul": True}
    recipe = apply_overrides(recipe, [key + r'={"mlp\\.mul": [1, 1, 1, 1, 1, 1, 1, 1], ".*\\.norm": true}'])
    assert recipe["recompute_config"]["select_recompute"] == {r"mlp\.mul": [1] * 8, r".*\.norm": True}
    recipe = apply_overrides(recipe, [key + r".mlp\.mul=False"])
    assert recipe["recompute_config"]["select_recompute"] == {r"mlp\.mul": False, r".*\.norm": True}
    with pytest.raises(
        RecipeError, match=r"has no key 'mlp\\\\' \(did you mean 'recompute_config.select_recompute.mlp"
    ):
        apply_overrides(recipe, [key + r".mlp\.mull=True"])
    with pytest.raises(RecipeError, match="recompute is true or false"):
        apply_overrides(recipe, [r'recompute_config.recompute={"mlp\\.mul": true}'])
