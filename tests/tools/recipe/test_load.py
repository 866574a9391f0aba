"""Reading recipes: MindFormers' own semantics, and errors that name file and line.

Files that are not recipes (bombs, giants, pipes, knots) end in one line within seconds.
"""

import os
import re
from pathlib import Path
from textwrap import dedent

import pytest

from plugins.errors import RecipeError
from tools.check.check import check_recipe
from tools.files.small_yaml import MAX_VALUES
from tools.recipe.load import load_recipe, read_recipe
from tools.recipe.mini import load_mini
from tools.recipe.override import apply_overrides

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def write(tmp_path):
    """Write a YAML file below tmp_path and return its path as a string."""

    def write(name, text):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(text))
        return str(path)

    return write


def test_bases_merge_shallowly_among_themselves_and_the_file_deeply_on_top(write):
    write("a.yaml", "model: {x: 1, deep: {p: 1, q: 2}}\nonly_a: 1\nlist: [1, 2]\n")
    write("sub/b.yaml", "base_config: ../a.yaml\nmodel: {y: 2}\ncallbacks: {k: 1}\n")
    write("sub/c.yaml", "callbacks: {z: 3}\nempty:\n")
    top = write(
        "top.yaml",
        """
        base_config: [sub/b.yaml, sub/c.yaml]
        model: {deep: {q: 3, r: 4}}
        list: [9]
        empty: {now: filled}
        """,
    )
    assert read_recipe(top) == {
        "model": {"x": 1, "y": 2, "deep": {"p": 1, "q": 3, "r": 4}},  # b over a: deeply
        "only_a": 1,
        "list": [9],  # lists are replaced
        "callbacks": {"z": 3},  # c over b: the whole top-level key
        "empty": {"now": "filled"},
    }


def test_an_alias_stays_one_object_and_a_copied_mapping_keeps_its_untouched_parts_shared(write):
    write("base.yaml", "data: &d {loader: {n: 1}, other: {m: 2}}\ntask: {config: *d}\n")
    plain = load_recipe(write("plain.yaml", "base_config: base.yaml\nseed: 1\n"))
    assert plain["data"] is plain["task"]["config"]
    child = load_recipe(write("child.yaml", "base_config: base.yaml\ndata: {loader: {n: 5}}\n"))
    # as in MindFormers, the child changes only the place that it names
    assert (child["data"]["loader"], child["task"]["config"]["loader"]) == ({"n": 5}, {"n": 1})
    assert child["data"]["other"] is child["task"]["config"]["other"]


def test_marks_name_the_file_and_line_that_a_value_comes_from(write):
    base = write("base.yaml", "model:\n  a: 1\n  b: 2\n")
    top = write("top.yaml", "base_config: base.yaml\nmodel:\n  b: 3\n")
    marks = load_recipe(top).marks
    assert (str(marks["model", "a"]), str(marks["model", "b"])) == (f"{base}:2", f"{top}:3")


def test_merge_keys_and_yaml_11_scalars_read_as_pyyaml_reads_them(write):
    chained = "  - &d {<<: *a, q: 4}\n  - {<<: [*d, *a], p: 5}\n"  # what merges is merged before it is read itself
    path = write(
        "x.yaml",
        f"a: &a {{p: 1, q: 2}}\ne:\n{chained}b: {{<<: *a, q: 3}}\nc: [1e-3, 1.e-3, yes, 0x10, ~, 2020-01-01]\n",
    )
    import yaml

    assert load_recipe(path) == yaml.safe_load(Path(path).read_text())


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("a: 1\nb:\n  c: [1, 2\nd: 3\n", 4, "not valid YAML"),
        ("a: 1\n\tb: 2\n", 2, "not valid YAML"),
        ("a: 1\nb: {c: 1,\n  d: 2,\n  c: 3}\n", 4, "key 'c' is already set in line 2"),
        ("a: 1\nb: 2\na: 1\n", 3, "key 'a' is already set in line 1"),
        ("a: &a {k: 1, k: 2}\nb: {<<: *a}\n", 1, "key 'k' is already set in line 1"),
        ("- a\n- b\n", 1, "must be a mapping"),
        ("", 1, "must be a mapping, but the file is empty"),
        ("a: !!python/object/apply:os.system [ls]\n", 1, "is not plain YAML"),
        ("a: 1\nb: !thing 3\n", 2, "not valid YAML"),
        ("a: &x\n  b: *x\n", 1, "contains itself"),
        ("a: *nowhere\n", 1, "undefined alias"),
        ("? [1, 2]\n: 3\n", 1, "a key must be a plain text"),
        ("base_config: gone.yaml\n", 1, "the base 'gone.yaml' was not found"),
        ("a: 1\nbase_config: [3]\n", 2, "must be a file name or a list of them, not 3"),
        ("base_config: base.yaml\nscalar: {a: 1}\n", 2, "this mapping cannot replace a plain value"),
    ],
)
def test_a_broken_recipe_is_refused_with_file_and_line(write, text, line, message):
    write("base.yaml", "scalar: 1\n")
    path = write("broken.yaml", text)
    with pytest.raises(RecipeError) as error:
        load_recipe(path)
    assert str(error.value).startswith(f"{path}:{line}: ")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_plugin_that_the_base_leaves_off_can_be_set(write):
    write("base.yaml", "plugins:\n  held_out_loss: False\n  spike_guard: {limit: 3}\n")
    recipe = load_recipe(write("top.yaml", "base_config: base.yaml\nplugins:\n  held_out_loss: {every: 5}\n"))
    assert recipe["plugins"] == {"held_out_loss": {"every": 5}, "spike_guard": {"limit": 3}}


def test_an_error_in_a_base_names_the_base(write):
    base = write("base.yaml", "a: 1\na: 2\n")
    with pytest.raises(RecipeError, match=f"{base}:2: "):
        load_recipe(write("top.yaml", "base_config: base.yaml\n"))


def test_a_circle_of_bases_is_named(write):
    write("one.yaml", "base_config: sub/two.yaml\n")
    write("sub/two.yaml", "base_config: ../one.yaml\n")
    with pytest.raises(
        RecipeError, match=r"names itself as its base through `base_config`: .*one.yaml -> .*two.yaml -> .*one.yaml"
    ):
        load_recipe(write("top.yaml", "base_config: one.yaml\n"))


@pytest.mark.parametrize("typo", ["pretrian.yaml", "pretrain", "pretrain.yml"])
def test_a_missing_recipe_suggests_a_neighbour(write, tmp_path, typo):
    there = write("pretrain.yaml", "a: 1\n")
    with pytest.raises(RecipeError, match=f"did you mean {there!r}"):
        load_recipe(tmp_path / typo)


def test_a_recipe_below_a_missing_folder_suggests_one_of_the_repository(monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(RecipeError, match=r"did you mean 'recipes/mini/pretrain.yaml'"):
        load_recipe("recipe/mini/pretrain.yaml")


def test_a_recipe_copied_out_of_the_repository_is_told_where_its_bases_are(write, tmp_path):
    there = os.path.relpath(ROOT / "recipes" / "base" / "run.yaml", tmp_path)
    with pytest.raises(RecipeError, match=re.escape(f"'../base/run.yaml' was not found (did you mean {there!r}?)")):
        load_recipe(write("copy.yaml", "base_config: ../base/run.yaml\n"))


def test_a_missing_base_suggests_a_neighbour_as_the_recipe_names_it(write, tmp_path):
    write("parts/common.yaml", "a: 1\n")
    with pytest.raises(RecipeError, match=r"did you mean 'parts/common.yaml'\?"):
        load_recipe(write("common2.yaml", "base_config: parts/comon.yaml\n"))


def test_bytes_that_are_no_text_are_refused(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_bytes(b"a: \xff\xfe\n")
    with pytest.raises(RecipeError, match="cannot be read"):
        load_recipe(path)


@pytest.mark.slow
def test_mindformers_reads_the_same(write, tmp_path):
    """Every recipe of the repository, and a handmade chain, as MindFormers itself merges them."""
    from mindformers import MindFormerConfig

    from tools.recipe.dump import dump_recipe

    write("a.yaml", "model: {model_config: {x: 1, y: [1, {z: 2}]}}\ntrainer: {type: T}\nrun_mode: eval\n")
    write("b.yaml", "runner_config: {batch_size: &b 2}\nmodel: {model_config: {x: 3, w: *b}}\n")
    write("mid.yaml", "base_config: [a.yaml, b.yaml]\nmodel: {model_config: {y: [5]}}\n")
    top = write("top.yaml", "base_config: mid.yaml\ntrainer: {type: U, extra: 1e-3}\nmodel: {model_config: {v: }}\n")
    recipes = [top, *map(str, (ROOT / "recipes").glob("*/*.yaml"))]
    checked = 0
    for path in recipes:
        if Path(path).name == "card.yaml":
            continue
        recipe = load_recipe(path)
        assert _plain(MindFormerConfig._file2dict(path)) == recipe, path
        if "run_mode" in recipe and "context" in recipe:  # complete: also with MindFormers' defaults filled in
            flat = tmp_path / "flat.yaml"
            dump_recipe(recipe, flat)
            assert _plain(MindFormerConfig(str(flat))) == _plain(MindFormerConfig(path)), path
            checked += 1
    assert checked >= 2


def _plain(node):
    if isinstance(node, dict):
        return {key: _plain(value) for key, value in node.items()}
    return [_plain(item) for item in node] if isinstance(node, list) else node


LAUGHS = "a0: &a0 [lol, lol]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 30))
MERGES = "a0: &a0 {k: 1}\n" + "".join(f"a{i}: &a{i} {{<<: [*a{i - 1}, *a{i - 1}]}}\n" for i in range(1, 40))
MERGES_AT_THE_TOP = MERGES + "<<: *a39\n"
CHAIN = "a0: &a0 [1]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}]\n" for i in range(1, 3000))
MERGED_CHAIN = "a0: &a0 {k: 1}\n" + "".join(f"a{i}: &a{i} {{<<: *a{i - 1}}}\n" for i in range(1, 3000))


pytestmark = pytest.mark.timeout(300)  # a second is usual; what grows without bounds takes years


def refusal(path):
    with pytest.raises(RecipeError) as refused:
        load_recipe(path)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 500
    return str(refused.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (LAUGHS, "aliases written out"),
        (MERGES, "aliases written out"),
        (MERGES_AT_THE_TOP, "aliases written out"),
        (CHAIN, "levels deep"),
        (MERGED_CHAIN, "levels deep"),
        ("x: " + "[" * 10_000 + "]" * 10_000, "levels deep"),
        ("x: " + "[" * 10_000, "levels deep"),
        ("x: " + "{a: " * 10_000, "levels deep"),
        ("\n".join("  " * i + "a:" for i in range(500)), "levels deep"),
        ("x: [" + "1, " * MAX_VALUES + "1]", "more than"),
        ("a: &a [*a]\n", "contains itself"),
        ("a: &a {b: {<<: *a}}\n", "contains itself"),
        ("a: " + "9" * 5_000 + "\n", "cannot read the value 999"),
        ("a: 2024-13-45\n", "cannot read the value"),
        ("a: !!int x\n", "cannot read the value"),
        ("a: \x00\n", "not allowed"),
        ("\ta: 1\n", "not valid YAML"),
        ("a: !!python/object/apply:os.system [ls]\n", "not plain YAML"),
        ("? [a, b]\n: 1\n", "must be a plain text"),
        ("a: 1\n---\nb: 2\n", "not valid YAML"),
        ("", "the file is empty"),
        ("# only a remark\n", "the file is empty"),
    ],
)
def test_text_that_no_recipe_is(text, words, tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text(text, "utf-8")
    assert words in refusal(path)


def test_a_file_of_100_mb_is_not_read(tmp_path):
    path = tmp_path / "x.yaml"
    with open(path, "wb") as file:
        file.truncate(100 * 2**20)
    assert "100.0 MiB" in refusal(path)


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "x.yaml")
    assert "not an ordinary file" in refusal(tmp_path / "x.yaml")


def test_a_folder(tmp_path):
    (tmp_path / "x.yaml").mkdir()
    assert "is a folder" in refusal(tmp_path / "x.yaml")


def test_a_device():
    assert refusal("/dev/zero")


def test_a_file_that_may_not_be_read(tmp_path, monkeypatch):
    def refuse(path, *others, **more):
        raise PermissionError(13, "Permission denied", str(path))

    (tmp_path / "x.yaml").write_text("a: 1\n")
    monkeypatch.setattr("tools.files.small_yaml.os.stat", refuse)
    assert refusal(tmp_path / "x.yaml").endswith("x.yaml: the file cannot be read: Permission denied")


def test_bases_by_the_thousand(tmp_path):
    for index in range(200):
        (tmp_path / f"{index}.yaml").write_text(f"base_config: {index + 1}.yaml\na: 1\n")
    assert "more than 50 files" in refusal(tmp_path / "0.yaml")


def test_bases_that_double_at_each_level_are_read_once(tmp_path):
    for index in range(40):
        (tmp_path / f"{index}.yaml").write_text(f"base_config: [{index + 1}.yaml, {index + 1}.yaml]\nk{index}: 1\n")
    (tmp_path / "40.yaml").write_text("last: 1\n")
    assert len(load_recipe(tmp_path / "0.yaml")) == 41


def test_a_circle_of_lists_of_bases_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the message names four files, and must not depend on where a test run writes
    (tmp_path / "a.yaml").write_text("base_config: b.yaml\n")
    (tmp_path / "b.yaml").write_text("base_config: [c.yaml]\n")
    (tmp_path / "c.yaml").write_text("base_config: a.yaml\n")
    refused = refusal(tmp_path / "a.yaml")
    assert "the recipe names itself as its base" in refused
    assert refused.endswith("a.yaml -> b.yaml -> c.yaml -> a.yaml")


@pytest.mark.parametrize("ending", ["\r\n", "\n"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_windows_line_ends_and_byte_order_marks_are_no_matter(ending, mark, tmp_path):
    (tmp_path / "x.yaml").write_text(f"{mark}seed: 1{ending}übung: [1,{ending}  2]{ending}", "utf-8", newline="")
    assert load_recipe(tmp_path / "x.yaml") == {"seed": 1, "übung": [1, 2]}


@pytest.mark.parametrize(
    "value", ["[" * 10_000, "&a [*a]", "{a: &a [1, 1], b: &b [*a, *a], c: *b}", "9" * 5_000, "2024-13-45", "\x00"]
)
def test_overrides_that_are_bombs(value):
    with pytest.raises(RecipeError) as refused:
        apply_overrides({"x": [1]}, [f"x={value}"])
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 500


@pytest.mark.parametrize(
    "text",
    ["plugins: [1]", "context: CPU", "model: 3", "model: {model_config: [1]}", "train_dataset: {data_loader: x}",
     "callbacks: x", "callbacks: [{type: MFLossMonitor}, x]", "train_dataset: {data_loader: {config: 1}}"],
)  # fmt: skip
def test_a_section_that_is_none(text, tmp_path):
    (tmp_path / "x.yaml").write_text(text + "\n")
    assert "x.yaml:1: " in refusal(tmp_path / "x.yaml") and "must be a " in refusal(tmp_path / "x.yaml")
    assert check_recipe(tmp_path / "x.yaml").errors


def test_a_section_that_is_empty_is_no_matter_here(tmp_path):
    (tmp_path / "x.yaml").write_text("plugins:\ncontext:\ncallbacks:\n")
    assert load_recipe(tmp_path / "x.yaml")["plugins"] is None


def test_a_key_that_is_a_date(tmp_path):
    (tmp_path / "x.yaml").write_text("2024-01-01: 1\n")
    assert "must be a plain text" in refusal(tmp_path / "x.yaml")


def test_the_mini_of_what_is_no_recipe(tmp_path):
    (tmp_path / "x.yaml").write_text("model: {model_config: {model_type: telechat3_moe}}\n")
    with pytest.raises(RecipeError, match="cannot shrink this recipe; run tc3 check"):
        load_mini(tmp_path / "x.yaml")
