"""Reading recipes: MindFormers' own semantics, and errors that name file and line."""

from pathlib import Path
from textwrap import dedent

import pytest

from plugins.errors import RecipeError
from tools.recipe.load import load_recipe, read_recipe

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
        ("", 1, "must be a mapping, found nothing"),
        ("a: !!python/object/apply:os.system [ls]\n", 1, "is not plain YAML"),
        ("a: 1\nb: !thing 3\n", 2, "not valid YAML"),
        ("a: &x\n  b: *x\n", 1, "contains itself"),
        ("a: *nowhere\n", 1, "undefined alias"),
        ("? [1, 2]\n: 3\n", 1, "a key must be a plain word"),
        ("base_config: gone.yaml\n", 1, "base 'gone.yaml' not found"),
        ("a: 1\nbase_config: [3]\n", 2, "wants file names, got 3"),
        ("base_config: base.yaml\nscalar: {a: 1}\n", 2, "cannot be merged over the plain value"),
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


def test_an_error_in_a_base_names_the_base(write):
    base = write("base.yaml", "a: 1\na: 2\n")
    with pytest.raises(RecipeError, match=f"{base}:2: "):
        load_recipe(write("top.yaml", "base_config: base.yaml\n"))


def test_a_circle_of_bases_is_named(write):
    write("one.yaml", "base_config: sub/two.yaml\n")
    write("sub/two.yaml", "base_config: ../one.yaml\n")
    with pytest.raises(RecipeError, match=r"circle: .*one.yaml -> .*two.yaml -> .*one.yaml"):
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
