"""What weights hold, group by group, from headers; and what reading them finds."""

import json
import math

import numpy as np
import pytest
from safetensors.numpy import save_file

from plugins.errors import CheckpointError
from plugins.sealed_checkpoint.plan import write_seal
from tests.tools.checkpoint.saved import Saved, numbered
from tools.weights.inventory import inventory, spans
from tools.weights.source import open_source

EXPERTS = "decoder.layers.0.mlp.experts"


@pytest.fixture
def saved(tmp_path):
    """Two ranks: a norm on both, a linear layer cut in two, three layers, a moment, a counter that nobody lists."""
    checkpoint = Saved(tmp_path / "iteration_00000008", 2)
    for layer in range(3):
        checkpoint.put(f"decoder.layers.{layer}.linear.weight", numbered(4, 2) + layer, (2, 1), [[0], [1]])
        checkpoint.put(f"decoder.layers.{layer}.norm.weight", np.ones(4, np.float32), (1,), [[0, 1]])
    checkpoint.put("adam_m.decoder.layers.0.norm.weight", np.ones(4, np.float32), (2,), [[0], [1]], "opt")
    for rank in range(2):
        checkpoint.held[checkpoint.file("model", rank)]["decoder.layers.0.mlp.router.expert_bias"] = numbered(2)
    return checkpoint


def groups_of(folder, **more):
    return {group.pattern: group for group in inventory(open_source(folder), **more)}


def test_names_that_differ_in_numbers_alone_are_one_group(saved):
    groups = groups_of(saved.write())
    linear = groups["decoder.layers.*.linear.weight"]
    assert (linear.numbers, linear.shape, linear.cuts, linear.elements) == ("0-2", (4, 2), (2, 1), 24)
    assert linear.bytes == 96, "copies are counted once"
    assert groups["decoder.layers.*.norm.weight"].bytes == 48
    assert [group.kind for group in groups.values()] == ["weights", "weights", "optimizer", "other"]
    assert groups["decoder.layers.*.mlp.router.expert_bias"].cuts == ()


def test_values_give_norms_and_what_is_not_finite(saved):
    saved.held[saved.file("model", 1)]["decoder.layers.1.linear.weight"][0, 1] = np.nan
    groups = groups_of(saved.write(), values=True)
    assert groups["decoder.layers.*.norm.weight"].values.norm == pytest.approx(math.sqrt(12))
    linear = groups["decoder.layers.*.linear.weight"].values
    assert (linear.not_finite, linear.where) == (1, "decoder.layers.1.linear.weight")


def test_copies_that_differ_are_named(saved):
    saved.held[saved.file("model", 1)]["decoder.layers.2.norm.weight"] = np.full(4, 2, np.float32)
    saved.held[saved.file("model", 1)]["decoder.layers.0.mlp.router.expert_bias"] = numbered(2) + 1
    groups = groups_of(saved.write(), values=True)
    assert groups["decoder.layers.*.norm.weight"].values.differing == {"decoder.layers.2.norm.weight": (1,)}
    router = groups["decoder.layers.*.mlp.router.expert_bias"].values
    assert router.differing == {"decoder.layers.0.mlp.router.expert_bias": (1,)}


def test_seals_are_told_without_reading_and_checksums_with(saved):
    folder = saved.write()
    assert not open_source(folder).sealed
    for rank in range(2):
        write_seal(folder, rank, 2, 8)
    source = open_source(folder)
    assert (source.step, source.ranks, source.seal_fault(checksums=True)) == (8, 2, None)
    file = folder / saved.file("model", 0)
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(bytes(content))
    assert source.seal_fault(checksums=False) is None
    assert "checksum" in source.seal_fault(checksums=True)


def hugging_face(folder, where):
    folder.mkdir(exist_ok=True)
    for file in set(where.values()):
        save_file({name: numbered(2, 2) for name in where if where[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return folder


NAMES = {"model.layers.0.mlp.gate.weight": "model-00001-of-00002.safetensors",
         "model.layers.1.mlp.gate.weight": "model-00002-of-00002.safetensors"}  # fmt: skip


def test_a_hugging_face_folder_is_read_by_its_index(tmp_path):
    source = open_source(hugging_face(tmp_path / "hf", NAMES))
    (group,) = inventory(source)
    assert (source.form, group.pattern, group.numbers) == ("Hugging Face", "model.layers.*.mlp.gate.weight", "0-1")


def test_one_file_is_read_alone(tmp_path):
    save_file({"a.weight": numbered(2)}, tmp_path / "a.safetensors")
    source = open_source(tmp_path / "a.safetensors")
    assert source.form == "one file" and list(source.headers) == ["a.weight"]


def lose(folder):
    file = next(iter(NAMES.values()))
    save_file({"other.weight": numbered(2)}, folder / file)


def cut(folder):
    file = folder / next(iter(NAMES.values()))
    file.write_bytes(file.read_bytes()[:-3])


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lose, "holds no model.layers.0.mlp.gate.weight, though"),
        (cut, "not a complete safetensors file"),
        (lambda folder: (folder / next(iter(NAMES.values()))).unlink(), "cannot be read"),
        (lambda folder: (folder / "model.safetensors.index.json").write_text("[]"), "not an index of safetensors"),
        (lambda folder: save_file({**{next(iter(NAMES)): numbered(2, 2)}, "more": numbered(1)},
                                  folder / next(iter(NAMES.values()))), "holds more, which"),
    ],
)  # fmt: skip
def test_a_folder_that_is_not_as_its_index_says_is_refused(tmp_path, spoil, words):
    folder = hugging_face(tmp_path / "hf", NAMES)
    spoil(folder)
    with pytest.raises(CheckpointError, match=words):
        open_source(folder)


def test_a_folder_of_iterations_names_one(saved):
    saved.write()
    with pytest.raises(CheckpointError, match="name one of them, such as "):
        open_source(saved.folder.parent)


def test_runs_of_numbers():
    assert spans([3, 0, 1, 2, 7, 9, 8]) == "0-3, 7-9"
    assert spans([5]) == "5"
