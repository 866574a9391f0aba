"""Every number of a tensor goes to its one place, whatever the cuts of either side."""

import errno
import json
import math
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from plugins.errors import CheckpointError, DataError
from plugins.sealed_checkpoint.plan import fault, made, step_of, write_seal
from tests.tools.weights.drawn import LAYOUTS, MINI_3D, ONE, SMALL, draw, laid_out
from tools.checkpoint import tensor_files
from tools.checkpoint.stored import read_whole
from tools.recipe.load import load_recipe
from tools.weights import reshard
from tools.weights.average import average
from tools.weights.convert_plan import KEPT
from tools.weights.reshard import pieces
from tools.weights.reshard_plan import plan_recipes, plan_stored
from tools.weights.reshard_target import target_of
from tools.weights.source import open_source


@st.composite
def cut_twice(draw):
    """(shape, old cuts, new cuts) of up to three axes."""
    axes = draw(st.lists(st.sampled_from([1, 2, 3, 4, 6, 8, 12]), max_size=3))
    cuts = [[draw(st.sampled_from([n for n in range(1, length + 1) if length % n == 0])) for length in axes]
            for _ in range(2)]  # fmt: skip
    return tuple(axes), *map(tuple, cuts)


def slices_of(whole, cuts):
    """Slow and obvious: NumPy splits one axis after the other."""
    parts = [whole]
    for axis, count in enumerate(cuts):
        parts = [piece for part in parts for piece in np.split(part, count, axis=axis)]
    return parts


def box(start, size):
    return tuple(slice(low, low + length) for low, length in zip(start, size, strict=True))


@settings(max_examples=60)
@given(cut_twice())
def test_each_element_is_read_once_and_written_once(case):
    shape, old, new = case
    whole = np.arange(math.prod(shape)).reshape(shape)
    stored, wanted = slices_of(whole, old), slices_of(whole, new)
    read = [np.zeros(part.shape, int) for part in stored]
    for place, expected in enumerate(wanted):
        found, written = np.full(expected.shape, -1), np.zeros(expected.shape, int)
        for piece in pieces(shape, old, new, place):
            found[box(piece.target, piece.size)] = stored[piece.place][box(piece.source, piece.size)]
            written[box(piece.target, piece.size)] += 1
            read[piece.place][box(piece.source, piece.size)] += 1
        assert (found == expected).all() and (written == 1).all()
    assert all((count == 1).all() for count in read)


def test_a_slice_that_stays_is_one_piece():
    (piece,) = pieces((8, 6), (2, 3), (2, 3), 4)
    assert (piece.place, piece.source, piece.target, piece.size) == (4, (0, 0), (0, 0), (4, 2))


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    folder = tmp_path_factory.mktemp("drawn") / "one" / "checkpoint" / "iteration_00000003"
    draw(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("block", [1, reshard.BLOCK])
def test_round_through_all_layouts_every_tensor_is_the_same_bits(one, tmp_path, monkeypatch, block):
    """In blocks of a single row, too: what is put together does not depend on them."""
    monkeypatch.setattr(reshard, "BLOCK", block)
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


@pytest.mark.parametrize("low", [16, None])
def test_fused_projections_are_whole_on_tensor_parallel_ranks(tmp_path, low):
    """As MindFormers' SequenceParallelLinear, which makes the compressed queries, keys and values of them."""
    recipes = {name: tmp_path / f"{name}.yaml" for name in ("one", "tp2", "zero")}
    model = {"model_config": {"mla_qkv_concat": True, "q_lora_rank": low}}
    more = json.dumps({"model": model, "plugins": {"lora": {"rank": 2, "alpha": 6, "targets": ["*"]}}})
    for name, recipe in recipes.items():
        recipe.write_text(f"base_config: {SMALL[name]}\n{more[1:-1]}\n".replace(', "plugins"', '\n"plugins"'))
    folder = tmp_path / "run" / "checkpoint" / "iteration_00000003"
    expected = draw(folder, recipe=recipes["one"])
    for name in ("tp2", "zero", "one"):
        folder = laid_out(folder, recipes[name], tmp_path / name)
        found = read_whole(folder)
        arrays = found.arrays | {tensor: ranks[0] for tensor, ranks in found.unlisted.items()}
        assert {key: array.tobytes() for key, array in arrays.items()} == {
            key: array.tobytes() for key, array in expected.items()
        }
    layer, placed = "decoder.layers.0.self_attention.linear", target_of(load_recipe(recipes["tp2"])).weights
    cuts = {each: placed[f"{layer}_{each}.weight"].lying.cuts for each in ("qkv", "qkv.lora_B", "kvb", "kvb.lora_B")}
    assert cuts == {"qkv": (1, 1), "qkv.lora_B": (1, 1), "kvb": (2, 1), "kvb.lora_B": (2, 1)}


def test_checkpoints_of_two_layouts_are_averaged_after_both_are_in_one_layout(tmp_path):
    """As of a run that went on in another layout: the ranks that wrote what all hold were other ones."""
    folders, wholes = [], []
    for seed, name in ((1, "tp2"), (2, "ep2")):
        wholes.append(draw(tmp_path / str(seed) / "checkpoint" / "iteration_00000003", seed))
        folder = laid_out(tmp_path / str(seed) / "checkpoint" / "iteration_00000003", SMALL[name], tmp_path / name)
        folders.append(folder if name == "ep2" else laid_out(folder, SMALL["zero"], tmp_path / "zero"))
    with pytest.raises(CheckpointError, match=r"in another layout; write all .* first \(tc3 weights reshard"):
        average([open_source(folder) for folder in folders], tmp_path / "mean")
    folders = [laid_out(folder, SMALL["pp2"], tmp_path / f"pp2_{number}") for number, folder in enumerate(folders)]
    average([open_source(folder) for folder in folders], tmp_path / "mean")
    found = read_whole(tmp_path / "mean").arrays
    for name in ("embedding.word_embeddings.weight", "decoder.layers.1.mlp.experts.weight1"):
        right = (wholes[0][name].astype(np.float64) + wholes[1][name]) / 2
        np.testing.assert_array_equal(found[name], right.astype(np.float32))


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


def test_a_recipe_that_was_kept_beside_the_weights_goes_along(one, tmp_path):
    folder = tmp_path / "merged"
    shutil.copytree(one, folder)
    (folder / KEPT).write_text("a: 1\n")
    assert (laid_out(folder, LAYOUTS["tp2"], tmp_path / "to") / KEPT).read_text() == "a: 1\n"


def test_only_a_new_run_begins_with_weights_that_have_no_moments(one, tmp_path):
    """What was printed as the way to go on with them was refused."""
    (tmp_path / "merged").mkdir()
    shutil.copy(next(one.glob("*-model-*")), tmp_path / "merged")
    for folder, words in ((tmp_path / "merged", "--set checkpoint.load_path=to"), (one, "--resume to")):
        planned = plan_stored(open_source(folder), load_recipe(LAYOUTS["tp2"]))
        last = planned.lines(folder, Path("to"), Path("r.yaml"), dry_run=False)[-1]
        assert last.endswith(f"with it: tc3 train r.yaml {words}")


def test_the_samples_that_the_run_had_left_out_are_still_known(one, tmp_path):
    """Else a resume takes those of the run's recipe, which may be that of a later attempt."""
    folder = tmp_path / "run" / "checkpoint" / one.name
    shutil.copytree(one, folder)
    write_seal(folder, 0, 1, 3, made={"attempt": "0002-aa", "skipped": [[4, 8]]})
    laid_out(folder, LAYOUTS["tp2"], tmp_path / "to")
    assert made(tmp_path / "to" / "checkpoint" / one.name) == {"skipped": [[4, 8]]}


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
    with pytest.raises(CheckpointError, match=r"not those of the recipe's model: .* missing: decoder\.layers\.2"):
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
    reshard.reshard(source, tmp_path / "to", plan_stored(source, recipe).plan)
    found = read_whole(tmp_path / "to" / "checkpoint" / "iteration_00000000")
    name = "decoder.layers.1.mlp.experts.placement"
    assert found.arrays[name].tolist() == [15, *range(15)] and found.differing == {}


def test_a_checkpoint_that_a_run_removes_at_the_end_is_written_completely(one, tmp_path):
    """As a run that trains does with its oldest one, here when the last file is written."""
    folder = tmp_path / "run" / "checkpoint" / one.name
    shutil.copytree(one, folder)
    source, written = open_source(folder), []
    plan = plan_stored(source, load_recipe(ONE)).plan

    def remove_at_the_end(_, file):
        written.append(file)
        if len(written) == len(plan.files):
            shutil.rmtree(folder)

    reshard.reshard(source, tmp_path / "to", plan, progress=remove_at_the_end)
    common, known = (each / "common.json" for each in (tmp_path / "to" / "checkpoint" / one.name, one))
    assert not folder.exists() and common.read_bytes() == known.read_bytes()


def test_room_is_looked_for_first(one, tmp_path, monkeypatch):
    monkeypatch.setattr(reshard.shutil, "disk_usage", lambda _: SimpleNamespace(free=5_000_000))
    with pytest.raises(DataError, match=r"GB are to be written, but only 0.005 GB are free"):
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

    monkeypatch.setattr(tensor_files.os, "fsync", fsync)
    with pytest.raises(DataError, match=f"^{tmp_path}/to/checkpoint/.*: .*No space left on device"):
        laid_out(one, LAYOUTS["tp2"], tmp_path / "to")  # said of no hidden folder, which is gone
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_there_is_left_alone(one, tmp_path):
    with pytest.raises(CheckpointError, match="the folder exists"):
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


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Layout -> an iteration of the same numbers in it."""
    root = tmp_path_factory.mktemp("layouts")
    one = root / "drawn" / "checkpoint" / "iteration_00000003"
    draw(one)
    return {name: laid_out(one, recipe, root / name) for name, recipe in {**LAYOUTS, "one": ONE}.items()}


def loaded(folder, wanted, rank):
    """name -> array as MindFormers' ReshardLoader gives it to `rank` of the run that would save `wanted`; and files."""
    from mindformers.checkpoint import reshard
    from mindformers.checkpoint.metadata import load_metadata

    metas, _ = load_metadata(str(wanted / "metadata.json"))
    ranks = {name: each[0].layout.to_dict()["rank_list"] for name, each in metas.items() if name != "global_step"}
    own = {name: metas[name][0] for name in ranks if rank in ranks[name]}
    source, files = load_metadata(str(folder / "metadata.json"))
    opened, load = [], reshard.ms_load_checkpoint

    def counted(path, **options):
        opened.append(path)
        return load(path, **options)

    patched = mock.patch.object(reshard, "get_real_rank", lambda: rank)
    with patched, mock.patch.object(reshard, "ms_load_checkpoint", counted):
        found = reshard.ReshardLoader(str(folder), own, source, files).load()
    return {name: value.asnumpy() for name, value in found.items() if str(value.dtype) != "BFloat16"}, opened


@pytest.mark.parametrize(
    ("old", "new"), [("tp2", "zero"), ("zero", "pp2"), ("pp2", "ep2"), ("ep2", "one"), ("one", "tp2")]
)
def test_online_and_offline_give_each_rank_the_same_bits(folders, old, new):
    moves = plan_stored(open_source(folders[old]), load_recipe({**LAYOUTS, "one": ONE}[new])).plan.moves
    whole = read_whole(folders["one"]).arrays
    for rank in range(1 if new == "one" else 2):
        online, _ = loaded(folders[old], folders[new], rank)
        offline, opened = loaded(folders[new], folders[new], rank)
        held = {move.name: move for move in moves if rank in move.new.ranks and move.dtype == "F32"}
        assert online.keys() == offline.keys() == held.keys() and len(held) > 30
        for name, move in held.items():
            (place,) = [place for place, ranks in enumerate(move.new.holders) if rank in ranks]
            index = np.unravel_index(place, move.new.cuts)
            spans = tuple(slice(i * n, (i + 1) * n) for i, n in zip(index, move.new.part, strict=True))
            expected = np.ascontiguousarray(whole[name][spans])
            assert expected.tobytes() == online[name].tobytes() == offline[name].tobytes(), (name, rank)
        if new == "pp2":
            assert len(opened) == 2 and all(f"-{rank:07d}-0000002" in path for path in opened), "only its own files"
