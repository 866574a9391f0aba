"""The command: what it prints where, exit codes, and the whole list on this CPU.

A recipe that leaves out a key or a section is refused in one line, or trained: no command ends in a traceback.

Trainings are replaced by a function that notes the recipe. `TC3_LEFT_OUT=all` leaves out each key, not only sections
and the keys that the commands read by name.
"""

import copy
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from click.testing import CliRunner

from launch.cli import tc3
from plugins.errors import DataError, RecipeError, TC3Error
from tests.tools.accuracy.dumps.dump_writer import run, write_dump
from tests.tools.check.mutations import at, plain
from tools.accuracy import collectives
from tools.accuracy.align import sides
from tools.accuracy.cli import _pairs, accuracy
from tools.accuracy.dumps import render
from tools.accuracy.dumps.compare import compare_dumps
from tools.accuracy.dumps.read import open_dump
from tools.accuracy.dumps.render import write_files
from tools.accuracy.equivalence import strategies
from tools.accuracy.equivalence.runs import make_corpus
from tools.accuracy.operators.report import SPECS
from tools.accuracy.pages import check_page, keeping

# Found on CPU with MindSpore 2.9.0, seed 0: (operator, data type) -> phases
KNOWN = {
    ("sigmoid", "float16"): {"backward"},  # y (1 - y) of a rounded y near 1
    ("tanh", "float32"): {"backward"},  # a rational approximation, above 1 near |x| = 5
    ("mean", "float16"): {"backward"},  # the divisor 200704 is infinite in float16: the gradient is 0
    ("embedding", "float16"): {"backward"},  # accumulates in float16
    ("cross_entropy.ops", "float16"): {"forward", "backward"},  # sums 32000 exponentials in float16
    **{
        (name, dtype): {"special"}
        for name in ("relu", "max", "min", "maximum", "minimum", "clip")
        for dtype in ("float32", "float16")
    },
    **{("div", dtype): {"special"} for dtype in ("float32", "float16", "bfloat16")},  # NaN / 0 is infinite
    **{("log_softmax", dtype): {"special"} for dtype in ("float32", "float16")},
    ("softmax", "float32"): {"special"},
}


def ops(*arguments):
    return CliRunner().invoke(accuracy, ["ops", *arguments])


@pytest.mark.slow
def test_a_clean_run():
    result = ops("rope", "rms_norm", "--dtype", "fp32", "--dtype", "bf16")
    assert result.exit_code == 0, result.output
    for line in ("not runnable: rope.fused fp32, bf16: The kernel RotaryPositionEmbedding unregistered.",):
        assert line in result.stdout
    assert "4 operators on MindSpore 2.9.0 on CPU; by data type: 4 pass, 0 fail, 4 not runnable here" in result.stdout


def test_a_data_type_that_is_given_twice_is_tested_once():
    result = ops("neg", "--dtype", "fp32", "--dtype", "float32", "--json")
    rows = [tuple(map(str, row.values())) for row in json.loads(result.stdout)["rows"]]
    assert result.exit_code == 0 and len(rows) == len(set(rows))


def test_failures_exit_with_1():
    result = ops("tanh", "--dtype", "fp32", "--reruns", "1")
    assert result.exit_code == 1 and "fail: tanh fp32 backward 0 [64x96]: error" in result.stdout
    assert "tolerance 0.0001 at count 1" in result.stdout


def test_json_and_html(tmp_path):
    page = tmp_path / "deep" / "ops.html"
    result = ops("relu", "adamw", "strided_slice", "--json", "--html", str(page), "--seed", "3")
    content = json.loads(result.stdout)
    assert (content["seed"], content["reruns"], content["passed"]) == (3, 3, False)
    assert content["counts"] == {"pass": 6, "fail": 2, "not runnable": 4}
    assert {row["error"] for row in content["rows"] if row["status"] == "fail"} == {"inf"}
    assert str(page) in result.stderr
    text = page.read_text("utf-8")
    assert "FAIL special" in text and "forward only" in text and "The kernel AdamW unregistered." in text
    assert "http" not in text and "<script" not in text


def test_every_listed_name_can_be_given_back():
    """Uncut, the first word of a line, whatever the terminal's width."""
    result = CliRunner(env={"COLUMNS": "40"}).invoke(accuracy, ["ops", "--list"])
    listed = [line.split()[0] for line in result.stdout.splitlines()]
    assert result.exit_code == 0 and listed == list(SPECS)
    for name in listed:
        assert name in [spec.name for spec, _ in _pairs((name,), SPECS[name].dtypes)]


def test_a_page_may_replace_a_page_and_makes_no_folder_before_it_is_written(tmp_path):
    (tmp_path / "old.html").write_text("<!DOCTYPE html>old")
    check_page(tmp_path / "old.html")
    check_page(tmp_path / "new" / "page.html")
    assert not (tmp_path / "new").exists()


def test_a_command_without_a_page_may_stand_anywhere(monkeypatch):
    monkeypatch.chdir("/proc")
    check_page(None)


def test_pure_modules_import_no_mindspore():
    modules = "tools.accuracy.operators.run, tools.accuracy.operators.report, tools.accuracy.cli"
    code = f"import sys, {modules}; assert 'mindspore' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the known failures are those of x86-64 kernels")
def test_everything_on_this_cpu(tmp_path):
    """stdout holds the JSON only, though MindFormers logs to stdout; and nothing but the known failures."""
    code = "from tools.accuracy.cli import accuracy; accuracy()"
    command = [sys.executable, "-c", code, "ops", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    content = json.loads(done.stdout)
    found = {}
    for row in content["rows"]:
        if row["status"] == "fail":
            found.setdefault((row["op"], row["dtype"]), set()).add(row["phase"])
    found.pop(("log", "float32"), None)  # of a denormal, wrong or not depending on its place in the vector
    assert done.returncode == 1 and found == KNOWN
    assert {row["op"] for row in content["rows"]} == set(SPECS)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("task", ["tensor", "statistics"])
def test_the_same_nan_on_both_sides_is_not_called_a_difference(tmp_path, task):
    golden, rounded, other = sides = run(1), run(1), run(1)
    for steps in sides:
        steps[0]["Cell.layers.0.linear.Dense.forward.0"]["output"][0][0] = np.float32("nan")
    rounded[0]["Cell.layers.0.linear.Dense.forward.0"]["output"][0][1:] *= np.float32(1 + 2**-22)
    other[0]["Cell.layers.1.linear.Dense.forward.0"]["output"][0][0] += 1
    folders = [
        write_dump(tmp_path / name, each, task=task) for name, each in zip("abcd", (golden, *sides), strict=True)
    ]
    done = [CliRunner().invoke(accuracy, ["compare", str(folders[0]), str(each)]) for each in folders[1:]]
    assert [each.exit_code for each in done] == [1, 1, 1]
    for each in done[:2]:
        assert "Both dumps have NaN, first Cell.layers.0.linear.Dense.forward.0.output.0: look" in each.output
    assert "The initial loss is affected: layers.1.linear (Dense) is the first whose result differs" in done[2].output


def test_dumps_of_different_layouts_are_said_to_be_so(tmp_path):
    folders = [write_dump(tmp_path / name, run(1), ranks=2) for name in ("tp2", "dp2", "bare")]
    for folder, degrees in zip(
        folders, ({"model_parallel": 2, "data_parallel": 1}, {"data_parallel": 2}), strict=False
    ):
        recipe = {"use_parallel": True, "parallel": {"parallel_mode": 1}, "parallel_config": degrees}
        (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    said = [CliRunner().invoke(accuracy, ["compare", str(folders[0]), str(each)]).output for each in folders[1:]]
    assert "different parallel layouts (GOLDEN tp2, BENCH dp2)" in said[0] and "layouts" not in said[1]
    assert compare_dumps(*map(open_dump, folders[:2])).meaning() == "No tensor diverges.", "nothing to explain"


def test_what_is_compared_with_itself_is_no_comparison(tmp_path):
    write_dump(tmp_path / "a", run(1))
    (tmp_path / "b").symlink_to(tmp_path / "a")
    for command, words in (("compare", "are the same dump"), ("diagnose", "are the same run")):
        done = CliRunner().invoke(accuracy, [command, str(tmp_path / "a"), str(tmp_path / "b")])
        assert isinstance(done.exception, DataError) and words in str(done.exception)


@pytest.mark.parametrize("at", ["compare.json", "compare.html", "rows.csv", "page"])
def test_an_interrupted_comparison_leaves_no_files_of_two(tmp_path, monkeypatch, at):
    def replace(part, target):
        if target.name == at:
            raise KeyboardInterrupt
        moved(part, target)

    def page(report):
        raise KeyboardInterrupt

    def files():
        return {path.name: path.read_text() for path in out.iterdir()}

    sides = [write_dump(tmp_path / name, run(steps)) for name, steps in (("a", 1), ("b", 1), ("c", 2), ("d", 2))]
    out, moved = tmp_path / "out", Path.replace
    reports = [compare_dumps(*map(open_dump, pair)) for pair in (sides[:2], sides[2:])]
    write_files(reports[0], out, True)
    old = files()
    if at == "page":
        monkeypatch.setattr(render, "as_page", page)
    monkeypatch.setattr(Path, "replace", replace)
    with pytest.raises(KeyboardInterrupt):
        write_files(reports[1], out, True)
    assert files() == old if at == "page" else "compare.json" not in files()
    monkeypatch.undo()
    write_files(reports[1], out, True)
    assert old.keys() == files().keys() and all(old[name] != text for name, text in files().items())


@pytest.mark.parametrize("command", ["align", "collectives", "diagnose"])
def test_two_commands_do_not_keep_their_runs_in_one_folder(tmp_path, command):
    recipe, keep = "recipes/mini/pretrain_pp2.yaml", tmp_path / "keep"
    with keeping(keep, "the first"):
        done = CliRunner().invoke(accuracy, [command, recipe, "--keep", str(keep)])
    assert isinstance(done.exception, DataError) and "is at work in this folder" in str(done.exception)
    (keep / "other").touch()
    done = CliRunner().invoke(accuracy, [command, recipe, "--keep", str(keep)])
    assert isinstance(done.exception, RecipeError) and "the folder is not empty" in str(done.exception)


def test_strategies_of_a_repeated_option_are_all_taken():
    words = ["--only", "executed_tp2", "--only", "executed_pp2,executed_cp2"]
    result = CliRunner().invoke(accuracy, ["equivalence", "recipes/mini/pretrain.yaml", "--dry-run", *words])
    chosen = {line.split(":")[0] for line in result.output.splitlines()}
    assert chosen == {"executed_tp2", "executed_pp2", "executed_cp2"}


RECIPES = Path(__file__).parents[3] / "recipes" / "mini"
READ = {"model_type", "seq_length", "vocab_size", "eod", "batch_size", "sizes"}
TWICE = ("train_dataset_task", "dataset_config", "data_loader")  # the same as train_dataset


def left_out(recipe, path=()):
    """Key paths of a recipe that may be left out, each in its turn."""
    for key, value in (at(recipe, path)).items():
        here = (*path, key)
        if here == TWICE:
            continue
        if isinstance(value, dict) or key in READ or os.environ.get("TC3_LEFT_OUT") == "all":
            yield here
        if isinstance(value, dict):
            yield from left_out(recipe, here)


def without(recipe, path):
    changed = copy.deepcopy(recipe)
    del at(changed, path[:-1])[path[-1]]
    return changed


def align(file, folder):
    recipe = sides.load(file, (), None, 2)
    sides.on_one_worker(recipe, 2)
    sides.shortened(recipe, 2)


def equivalence(file, folder):
    base = strategies.one_worker(str(file))
    corpus = make_corpus(folder / "corpus", base, 2)
    for case in strategies.cases_of(base):
        if case.variant:
            strategies.derive(base, case.variant, 2, corpus)


def executed(file, folder):
    recipe = collectives.sharded_recipe(file, ())
    collectives.train(recipe, folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "command"), [("pretrain", align), ("pretrain", equivalence), ("pretrain_tp2", executed)]
)
def test_a_recipe_without_a_key_is_refused_or_trained(name, command, tmp_path, monkeypatch):
    trained = []
    monkeypatch.setattr(collectives, "launch", lambda recipe, run_dir: trained.append(recipe))
    recipe, ended = plain(RECIPES / f"{name}.yaml"), []
    command(RECIPES / f"{name}.yaml", tmp_path)
    for path in left_out(recipe):
        file = tmp_path / "recipe.yaml"
        file.write_text(yaml.safe_dump(without(recipe, path), sort_keys=False))
        try:
            command(file, tmp_path)
        except TC3Error as error:
            assert "\n" not in str(error), path
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            ended.append((".".join(path), repr(error)))
    assert not ended


def test_the_type_of_the_model_may_stand_in_a_folder(tmp_path):
    """MindFormers reads a config.json there."""
    file = tmp_path / "recipe.yaml"
    recipe = without(plain(RECIPES / "pretrain.yaml"), ("model", "model_config", "model_type"))
    file.write_text(yaml.safe_dump(recipe | {"pretrained_model_dir": str(tmp_path)}))
    equivalence(file, tmp_path)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        (("train_dataset_task",), "train_dataset_task: the section train_dataset_task is missing; every"),
        (("train_dataset", "data_loader"), "train_dataset.data_loader: the section data_loader is missing; every"),
        (("model", "model_config", "model_type"), "model_type: model_type is missing, by which"),
        (("model", "model_config", "architectures"), "TeleChat3ForCausalLM, TeleChat3MoeForCausalLM, in a list"),
    ],
)
def test_check_names_what_mindformers_cannot_do_without(path, words, tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text(json.dumps(without(plain(RECIPES / "pretrain.yaml"), path)))
    checked = CliRunner().invoke(tc3, ["check", str(file)])
    assert checked.exit_code == 1 and words in checked.stdout and "recipe.yaml" in checked.stdout
