"""Checkpoints laid out anew, from beginning to end, damaged, and without room."""

import errno
import json
import os
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from plugins.errors import CheckpointError, DataError
from plugins.sealed_checkpoint.plan import fault, step_of
from tests.tools.weights.reshard.drawn import LAYOUTS, MINI_3D, ONE, SMALL, draw, laid_out
from tools.checkpoint import stream
from tools.checkpoint.whole import read_whole
from tools.recipe.load import load_recipe
from tools.weights.reshard import run
from tools.weights.reshard.plan import plan_recipes, plan_stored
from tools.weights.source import open_source


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    folder = tmp_path_factory.mktemp("drawn") / "one" / "checkpoint" / "iteration_00000003"
    draw(folder)
    return folder


@pytest.mark.parametrize("block", [1, run.BLOCK])
def test_round_through_all_layouts_every_tensor_is_the_same_bits(one, tmp_path, monkeypatch, block):
    """In blocks of a single row, too: what is put together does not depend on them."""
    monkeypatch.setattr(run, "BLOCK", block)
    expected, folder = read_whole(one).arrays, one
    for name in ("tp2", "zero", "pp2", "ep2", "tp2", "one"):
        folder = laid_out(folder, SMALL[name], tmp_path / f"{len(list(tmp_path.iterdir()))}_{name}")
        assert fault(folder) is None and step_of(folder) == 3
        found = read_whole(folder)
        arrays = found.arrays | {tensor: ranks[0] for tensor, ranks in found.unlisted.items()}
        assert arrays.keys() == expected.keys() and found.differing == {}
        for tensor, array in expected.items():
            assert arrays[tensor].dtype == array.dtype and arrays[tensor].tobytes() == array.tobytes(), (name, tensor)
    assert json.loads((folder / "common.json").read_text())["global_step"] == 3


def test_each_number_is_in_one_file(one, tmp_path):
    folder = laid_out(one, LAYOUTS["ep2"], tmp_path / "ep2")
    names = [name for file in folder.glob("*.safetensors") for name in load_file(file)]
    twice = {name for name in names if names.count(name) > 1}
    listed = json.loads((folder / "metadata.json").read_text())["state_dict_metadata"]
    assert twice == {name for name in listed if ".experts.weight" in name}, "only what is cut"
    assert all(len(load_file(file)) > 5 for file in folder.glob("*-model-*")), "copies are dealt to all ranks"


def test_several_processes_write_the_same_bytes(one, tmp_path):
    alone = laid_out(one, LAYOUTS["zero"], tmp_path / "a")
    told = []
    together = laid_out(one, LAYOUTS["zero"], tmp_path / "b", workers=2, progress=lambda *each: told.append(each))
    assert [file for _, file in told] == [path.name for path in sorted(together.glob("*.safetensors"), key=_by_rank)]
    for path in alone.iterdir():
        assert path.read_bytes() == (together / path.name).read_bytes()


def _by_rank(path):
    kind, rank = path.name.split("-")[1:3]
    return rank, kind


def test_the_runs_recipe_and_data_go_along(one, tmp_path):
    home = one.parents[1]
    (home / "recipe.yaml").write_text("a: 1\n")
    laid_out(one, LAYOUTS["tp2"], tmp_path / "to")
    assert (tmp_path / "to" / "recipe.yaml").read_text() == "a: 1\n" and not (tmp_path / "to" / "data.json").exists()
    (home / "recipe.yaml").unlink()


def test_old_checkpoints_that_do_not_list_the_routers_state_have_it_listed(one, tmp_path):
    folder = laid_out(one, LAYOUTS["pp2"], tmp_path / "pp2")
    file = folder / "metadata.json"
    content = json.loads(file.read_text())
    for part in content.values():
        for name in [name for name in part if "expert_bias" in name]:
            del part[name]
    file.write_text(json.dumps(content))
    for seal in folder.glob("seal_*"):
        seal.unlink()
    bias = "decoder.layers.1.mlp.router.expert_bias"
    assert bias in open_source(folder).stored.unlisted
    again = laid_out(folder, LAYOUTS["tp2"], tmp_path / "tp2")
    assert read_whole(again).arrays[bias].tobytes() == read_whole(one).arrays[bias].tobytes()


def test_a_checkpoint_of_another_model_is_refused_by_name(one):
    with pytest.raises(CheckpointError, match=r"not the model of the recipe; .* missing: decoder\.layers\.2"):
        plan_stored(open_source(one), _with_layers(3))
    with pytest.raises(CheckpointError, match=r"of another shape: embedding.word_embeddings.weight \[512, 128\]"):
        plan_stored(open_source(one), load_recipe(MINI_3D))
    with pytest.raises(CheckpointError, match=r"not of this model: decoder.layers.1"):
        plan_stored(open_source(one), _with_layers(1))


def _with_layers(count):
    recipe = load_recipe(ONE)
    recipe["model"]["model_config"]["num_hidden_layers"] = count
    return recipe


def test_what_is_not_whole_is_refused(one, tmp_path):
    folder = laid_out(one, LAYOUTS["tp2"], tmp_path / "tp2")
    victim = next(folder.glob("*-opt-0000001-*"))
    victim.unlink()
    with pytest.raises(CheckpointError, match=r"opt-0000001-0000002.safetensors is missing"):
        plan_stored(open_source(folder), load_recipe(ONE))


def test_moved_experts_need_a_recipe_that_knows_of_them(one, tmp_path):
    folder = tmp_path / "moved" / "checkpoint" / "iteration_00000003"
    folder.mkdir(parents=True)
    for path in one.glob("*.safetensors"):
        arrays = load_file(path)
        if "-model-" in path.name:
            arrays["decoder.layers.1.mlp.experts.placement"] = np.roll(np.arange(16, dtype=np.int32), 1)
        save_file(arrays, folder / path.name, {"format": "ms"})
    with pytest.raises(CheckpointError, match="have moved"):
        plan_stored(open_source(folder), load_recipe(LAYOUTS["ep2"]))
    recipe = load_recipe(LAYOUTS["ep2"])
    recipe["plugins"]["expert_balance"] = {"every": 2}
    source = open_source(folder)
    run.reshard(source, tmp_path / "to", plan_stored(source, recipe).plan)
    found = read_whole(tmp_path / "to" / "checkpoint" / "iteration_00000000")
    name = "decoder.layers.1.mlp.experts.placement"
    assert found.arrays[name].tolist() == [15, *range(15)] and found.differing == {}


def test_room_is_looked_for_first(one, tmp_path, monkeypatch):
    monkeypatch.setattr(run.shutil, "disk_usage", lambda _: SimpleNamespace(free=5_000_000))
    with pytest.raises(DataError, match=r"GB are to be written, 0.005 GB are free"):
        laid_out(one, LAYOUTS["tp2"], tmp_path / "to")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("after", [0, 3])
def test_a_disk_that_fills_up_leaves_nothing(one, tmp_path, monkeypatch, after):
    left, flush = [after], os.fsync

    def fsync(number):
        if not left[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        left[0] -= 1
        flush(number)

    monkeypatch.setattr(stream.os, "fsync", fsync)
    with pytest.raises(DataError, match="No space left on device"):
        laid_out(one, LAYOUTS["tp2"], tmp_path / "to")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_there_is_left_alone(one, tmp_path):
    with pytest.raises(CheckpointError, match="is there already"):
        laid_out(one, LAYOUTS["tp2"], tmp_path)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_plan_by_recipes_is_that_of_the_stored_checkpoint(one, tmp_path, layout):
    folder = laid_out(one, SMALL[layout], tmp_path / layout)
    stored = plan_stored(open_source(folder), load_recipe(LAYOUTS["zero"]))
    planned = plan_recipes(load_recipe(SMALL[layout]), load_recipe(LAYOUTS["zero"]))
    bits16 = {move.name for move in stored.plan.moves if move.dtype == "BF16"}
    by_name = {move.name: move for move in planned.plan.moves}
    assert bits16 == {"output_layer.weight"}
    for move in stored.plan.moves:
        if move.name.endswith(("expert_load", "global_step")):
            continue  # counters are not planned
        other = by_name.pop(move.name)
        assert (move.old.cuts, move.new, move.layout) == (other.old.cuts, other.new, other.layout), move.name
    assert by_name == {}
