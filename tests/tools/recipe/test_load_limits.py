"""Files that are no recipes: bombs, giants, pipes, knots. Each is one line within seconds."""

import os
import time

import pytest

from plugins.errors import RecipeError
from tools.check.check import check_recipe
from tools.files.small_yaml import MAX_VALUES
from tools.recipe.load import load_recipe
from tools.recipe.mini import load_mini
from tools.recipe.override import apply_overrides

LAUGHS = "a0: &a0 [lol, lol]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 30))
MERGES = "a0: &a0 {k: 1}\n" + "".join(f"a{i}: &a{i} {{<<: [*a{i - 1}, *a{i - 1}]}}\n" for i in range(1, 40))
MERGES_AT_THE_TOP = MERGES + "<<: *a39\n"
CHAIN = "a0: &a0 [1]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}]\n" for i in range(1, 3000))
MERGED_CHAIN = "a0: &a0 {k: 1}\n" + "".join(f"a{i}: &a{i} {{<<: *a{i - 1}}}\n" for i in range(1, 3000))


@pytest.fixture(autouse=True)
def within_seconds():
    start = time.monotonic()
    yield
    assert time.monotonic() - start < 60  # under load; a second otherwise


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
        ("? [a, b]\n: 1\n", "must be a plain word"),
        ("a: 1\n---\nb: 2\n", "not valid YAML"),
        ("", "found nothing"),
        ("# only a remark\n", "found nothing"),
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
    assert "no ordinary file" in refusal(tmp_path / "x.yaml")


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
    assert refusal(tmp_path / "x.yaml").endswith("x.yaml: cannot be read: Permission denied")


def test_bases_by_the_thousand(tmp_path):
    for index in range(200):
        (tmp_path / f"{index}.yaml").write_text(f"base_config: {index + 1}.yaml\na: 1\n")
    assert "more than 50 files" in refusal(tmp_path / "0.yaml")


def test_bases_that_double_at_each_level_are_read_once(tmp_path):
    for index in range(40):
        (tmp_path / f"{index}.yaml").write_text(f"base_config: [{index + 1}.yaml, {index + 1}.yaml]\nk{index}: 1\n")
    (tmp_path / "40.yaml").write_text("last: 1\n")
    assert len(load_recipe(tmp_path / "0.yaml")) == 41


def test_a_circle_of_bases_is_named(tmp_path):
    (tmp_path / "a.yaml").write_text("base_config: b.yaml\n")
    (tmp_path / "b.yaml").write_text("base_config: [c.yaml]\n")
    (tmp_path / "c.yaml").write_text("base_config: a.yaml\n")
    assert "goes in a circle" in refusal(tmp_path / "a.yaml")


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
    assert "must be a plain word" in refusal(tmp_path / "x.yaml")


def test_the_mini_of_what_is_no_recipe(tmp_path):
    (tmp_path / "x.yaml").write_text("model: {model_config: {model_type: telechat3_moe}}\n")
    with pytest.raises(RecipeError, match="cannot shrink it: tc3 check"):
        load_mini(tmp_path / "x.yaml")
