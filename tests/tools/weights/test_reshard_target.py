"""Layouts from recipes against those that MindFormers wrote for runs of them (frozen/layouts.json, see freeze.py)."""

import json
from dataclasses import replace

import numpy as np
import pytest

from tests.training.runs import ROOT
from tools.estimate import configuration
from tools.estimate.from_recipe import from_recipe
from tools.estimate.memory.model import static_memory
from tools.layout.resolve import resolve
from tools.model import parameters
from tools.recipe.load import load_recipe
from tools.weights import reshard_target
from tools.weights.convert_plan import model_of
from tools.weights.hugging_face_names import table
from tools.weights.reshard_target import target_of

FROZEN = json.loads((ROOT / "tests/tools/weights/frozen/layouts.json").read_text())
FULL = ["105b/pretrain_4k", "438b/pretrain_4k", "438b/pretrain_4k_searched", "1119b/pretrain_4k", "36b/pretrain_8k"]


@pytest.mark.parametrize("recipe", FROZEN)
def test_layouts_are_those_that_a_run_wrote(recipe):
    found = target_of(load_recipe(ROOT / recipe))
    for name, (shape, cuts, ranks) in FROZEN[recipe].items():
        lying = found.place(name, tuple(shape)).lying
        assert (list(lying.cuts), list(map(list, lying.holders))) == (cuts, ranks), name
    assert found.weights.keys() <= FROZEN[recipe].keys(), "no weight that the run has not"
    assert all(list(placed.shape) == FROZEN[recipe][name][0] for name, placed in found.weights.items())


@pytest.mark.parametrize("recipe", FULL)
def test_a_full_size_recipe_holds_what_the_estimator_counts(recipe):
    loaded = load_recipe(ROOT / "recipes" / f"telechat3_{recipe}.yaml")
    found, config = target_of(loaded), from_recipe(resolve(loaded))
    assert sum(int(np.prod(placed.shape)) for placed in found.weights.values()) == parameters(config.model)
    held = [0] * config.pp
    for placed in found.weights.values():
        parts = np.prod(placed.shape) // np.prod(placed.layout.cuts)
        held[placed.layout.first // found.stage] += int(parts)  # a slice on each rank of the stage
    lent = bool(config.model.mtp)  # the embedding, to the last stage
    for number in range(config.pp - lent):
        assert 4 * held[number] == static_memory(config, number)[0], f"stage {number}"


@pytest.mark.parametrize("recipe", ["105b/pretrain_4k", "1119b/pretrain_4k"])
def test_names_and_shapes_are_those_of_the_conversion(recipe):
    loaded = load_recipe(ROOT / "recipes" / f"telechat3_{recipe}.yaml")
    wanted = {entry.mindformers: entry.shape for entry in table(model_of(loaded)) if entry.trained}
    assert {name: placed.shape for name, placed in target_of(loaded).weights.items()} == wanted


def test_gates_of_hyper_connections_lie_as_a_run_wrote_them():
    """As metadata.json of a run on two data-parallel ranks had them; only the matrix is shared by the optimizer."""
    recipe = load_recipe(ROOT / "tests" / "training" / "sharded_zero.yaml")
    recipe["plugins"]["hyper_connections"] = {"streams": 4}
    found = target_of(recipe).weights
    cuts = {name: found[f"decoder.layers.0.attn_hc.hc_{name}"].lying.cuts for name in ("fn", "base", "scale")}
    assert cuts == {"fn": (2, 1), "base": (1,), "scale": (1,)}


def test_shards_over_some_copies_lie_on_neighbours(monkeypatch):
    """optimizer_weight_shard_size 4 of dp 4 x cp 2: the inner half of dp, and cp."""
    config = from_recipe(load_recipe(ROOT / "tests" / "training" / "sharded_zero.yaml"))
    config = replace(config, dp=4, cp=2, tp=1, ep=1, shard_size=4)
    monkeypatch.setattr(configuration, "weight_shards", lambda weight, config: 4)
    name, weight = next(reshard_target._held(config, 0))
    devices, axes = reshard_target._cut(weight, config)
    lying = reshard_target.Layout(devices, axes, 0).lying(reshard_target._shape(weight))
    assert name == "embedding.word_embeddings.weight" and lying.cuts == (4, 1)
    assert lying.holders == ((0, 4), (1, 5), (2, 6), (3, 7))


def test_shards_that_are_no_part_of_the_matrix_are_left_whole(monkeypatch):
    config = from_recipe(load_recipe(ROOT / "tests" / "training" / "sharded_zero.yaml"))
    monkeypatch.setattr(configuration, "weight_shards", lambda weight, config: 3)
    _, weight = next(reshard_target._held(config, 0))
    assert reshard_target._cut(weight, config)[1] == ((2,), ())


@pytest.mark.parametrize(
    ("schedule", "numbers"),
    [("interleaved_1f1b", [[0, 3, 4, 5], [1, 2, 6]]), ("zero_bubble_v", [[0, 4, 5, 6], [1, 2, 3]])],
)
def test_layers_are_numbered_as_they_run(schedule, numbers):
    """Chunks of 1 and 2 layers, then of 3 and 1; in a V the second chunk runs back."""
    config = from_recipe(load_recipe(ROOT / "tests" / "training" / "sharded_pp2.yaml"))
    model = replace(config.model, pattern=("dense", *["moe"] * 6))
    config = replace(config, model=model, layers=((1, 2), (3, 1)), schedule=schedule)
    assert [config.layer_numbers(stage) for stage in range(2)] == numbers
