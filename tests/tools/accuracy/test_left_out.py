"""A recipe that leaves out a key or a section is refused in one line, or trained: no command ends in a traceback.

Trainings are replaced by a function that notes the recipe. `TC3_LEFT_OUT=all` leaves out each key, not only sections
and the keys that the commands read by name.
"""

import copy
import json
import os
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from launch.cli import tc3
from plugins.errors import TC3Error
from tests.tools.check.mutations import at, plain
from tools.accuracy import collectives
from tools.accuracy.align import sides
from tools.accuracy.equivalence import strategies
from tools.accuracy.equivalence.runs import make_corpus

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


@pytest.mark.parametrize(
    ("path", "words"),
    [
        (("train_dataset_task",), "train_dataset_task: this section is missing; every training recipe needs"),
        (("train_dataset", "data_loader"), "train_dataset.data_loader: this section is missing; every training recipe"),
        (
            ("model", "model_config", "model_type"),
            "model_type: the key is missing, by which",
        ),
        (("model", "model_config", "architectures"), "TeleChat3MoeForCausalLM, TrainingQwen3MoeForCausalLM, in a list"),
    ],
)
def test_check_names_what_mindformers_cannot_do_without(path, words, tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text(json.dumps(without(plain(RECIPES / "pretrain.yaml"), path)))
    checked = CliRunner().invoke(tc3, ["check", str(file)])
    assert checked.exit_code == 1 and words in checked.stdout and "recipe.yaml" in checked.stdout
