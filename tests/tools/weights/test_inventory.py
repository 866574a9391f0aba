"""These tests check which weights a folder holds, group by group, from headers, and what reading the weights finds."""

import json
import math

import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import save_file

from plugins.errors import CheckpointError
from plugins.sealed_checkpoint.plan import write_seal
from tests.tools.checkpoint.saved import Saved, numbered
from tests.tools.experts.test_restore import MODULE, WEIGHT, write
from tests.tools.weights.drawn import LAYOUTS, draw
from tests.tools.weights.test_cli import model_of, on_disk
from tests.tools.weights.test_merge import saved
from tests.training.runs import ROOT
from tools.checkpoint.tensor_files import read_headers
from tools.recipe.load import load_recipe
from tools.weights.cli import weights
from tools.weights.hugging_face_config import config_of
from tools.weights.hugging_face_names import hugging_face_shapes
from tools.weights.inventory import SALVAGED, compare, comparison_lines, inventory
from tools.weights.source import CHECKSUMS, open_source

EXPERTS = "decoder.layers.0.mlp.experts"


@pytest.fixture
def two_ranks(tmp_path):
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


def test_names_that_differ_in_numbers_alone_are_one_group(two_ranks):
    groups = groups_of(two_ranks.write())
    linear = groups["decoder.layers.*.linear.weight"]
    assert (linear.numbers, linear.shape, linear.cuts, linear.elements) == ("0-2", (4, 2), (2, 1), 24)
    assert linear.bytes == 96, "copies are counted once"
    assert groups["decoder.layers.*.norm.weight"].bytes == 48
    assert [group.kind for group in groups.values()] == ["weights", "weights", "optimizer", "other"]
    assert groups["decoder.layers.*.mlp.router.expert_bias"].cuts == ()


def test_values_give_norms_and_what_is_not_finite(two_ranks):
    two_ranks.held[two_ranks.file("model", 1)]["decoder.layers.1.linear.weight"][0, 1] = np.nan
    groups = groups_of(two_ranks.write(), values=True)
    assert groups["decoder.layers.*.norm.weight"].values.norm == pytest.approx(math.sqrt(12))
    linear = groups["decoder.layers.*.linear.weight"].values
    assert (linear.not_finite, linear.where) == (1, "decoder.layers.1.linear.weight")


def test_copies_that_differ_are_named(two_ranks):
    two_ranks.held[two_ranks.file("model", 1)]["decoder.layers.2.norm.weight"] = np.full(4, 2, np.float32)
    two_ranks.held[two_ranks.file("model", 1)]["decoder.layers.0.mlp.router.expert_bias"] = numbered(2) + 1
    groups = groups_of(two_ranks.write(), values=True)
    assert groups["decoder.layers.*.norm.weight"].values.differing == {"decoder.layers.2.norm.weight": (1,)}
    router = groups["decoder.layers.*.mlp.router.expert_bias"].values
    assert router.differing == {"decoder.layers.0.mlp.router.expert_bias": (1,)}


def test_seals_are_told_without_reading_and_checksums_with(two_ranks):
    folder = two_ranks.write()
    assert not open_source(folder).sealed
    for rank in range(2):
        write_seal(folder, rank, 2, 8)
    source = open_source(folder)
    assert (source.step, source.ranks, source.seal_fault(checksums=True)) == (8, 2, None)
    file = folder / two_ranks.file("model", 0)
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


@pytest.mark.parametrize(("kind", "one"), [("F8_E4M3", 0x38), ("F8_E5M2", 0x3C), ("F8_E8M0", 0x7F)])
def test_values_of_eight_bits_are_read_or_refused(tmp_path, kind, one):
    """DeepSeek-V3's published weights have them; the safetensors package cannot read them into NumPy."""
    header = json.dumps({"x.weight": {"dtype": kind, "shape": [2, 2], "data_offsets": [0, 4]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes([one] * 4))
    if kind == "F8_E8M0":
        with pytest.raises(CheckpointError, match=r"x\.weight: values of the type F8_E8M0 cannot be read here"):
            groups_of(tmp_path, values=True)
        return
    group = groups_of(tmp_path, values=True)["x.weight"]
    assert (group.shape, group.values.norm, group.values.not_finite) == ((2, 2), 2.0, 0)
    assert called("inspect", tmp_path, "--diff", tmp_path).exit_code == 0


def lose(folder):
    file = next(iter(NAMES.values()))
    save_file({"other.weight": numbered(2)}, folder / file)


def cut(folder):
    file = folder / next(iter(NAMES.values()))
    file.write_bytes(file.read_bytes()[:-3])


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lose, "lacks model.layers.0.mlp.gate.weight, which"),
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


def test_a_folder_of_iterations_names_one(two_ranks):
    two_ranks.write()
    with pytest.raises(CheckpointError, match="name one of them, such as "):
        open_source(two_ranks.folder.parent)


def saved_in(folder, ranks, cuts, more=0.0, **others):
    checkpoint = Saved(folder / "iteration_00000001", ranks)
    checkpoint.put("linear.weight", numbered(4, 4) + np.float32(more), cuts, [[rank] for rank in range(ranks)])
    for name, array in others.items():
        checkpoint.put(name, array, (1,) * array.ndim, [list(range(ranks))])
    return open_source(checkpoint.write())


def test_layouts_make_no_difference(tmp_path):
    found = compare(saved_in(tmp_path / "a", 2, (2, 1)), saved_in(tmp_path / "b", 4, (2, 2)))
    assert found.equal and found.same == ("linear.weight",)


def test_experts_that_have_moved_are_compared_with_themselves(tmp_path):
    there, _ = write(tmp_path / "a", np.array([2, 0, 1, 3]), 2)
    here, _ = write(tmp_path / "b", np.arange(4), 4)
    assert compare(open_source(there), open_source(here)).equal
    stored = open_source(there)
    assert stored.placements.keys() == {MODULE}
    assert not np.array_equal(stored.stored.read(WEIGHT)[0], stored.read(WEIGHT)[0]), "rows do stand elsewhere"


def test_what_differs_is_told_by_how_much(tmp_path):
    a = saved_in(tmp_path / "a", 2, (2, 1), only_a=numbered(2), typed=numbered(2), zero=np.zeros(2, np.float32))
    b = saved_in(tmp_path / "b", 2, (2, 1), 0.5, only_b=numbered(2), typed=numbered(3), zero=np.ones(2, np.float32))
    found = compare(a, b)
    assert found.only == (("only_a",), ("only_b",)) and found.other == (("typed", "F32 [2]", "F32 [3]"),)
    zero, linear = found.changes
    assert (zero.name, zero.relative, zero.largest) == ("zero", math.inf, 1)
    assert linear.relative == np.linalg.norm(np.full(16, 0.5)) / np.linalg.norm(np.arange(16.0))
    assert linear.largest == 0.5 and not found.equal


def test_one_bit_is_a_difference_and_a_nan_is_equal_to_itself(tmp_path):
    nan = np.array([np.nan, 1], np.float32)
    found = compare(
        saved_in(tmp_path / "a", 1, (1, 1), odd=np.float32([0.0]), same=nan),
        saved_in(tmp_path / "b", 1, (1, 1), odd=np.float32([-0.0]), same=nan),
    )
    assert found.same == ("linear.weight", "same") and [change.name for change in found.changes] == ["odd"]


def test_names_of_two_libraries_are_called_so(tmp_path):
    ours = saved_in(tmp_path / "a", 1, (1, 1))
    (tmp_path / "hf").mkdir()
    save_file({"model.norm.weight": numbered(4)}, tmp_path / "hf" / "model.safetensors")
    found = compare(ours, open_source(tmp_path / "hf"))
    assert found.hint.startswith("A has tensors with the names of MindFormers, B with those of Hugging Face")
    assert found.hint in comparison_lines(found, tmp_path / "a", tmp_path / "hf")
    assert not compare(ours, saved_in(tmp_path / "b", 1, (1, 1), 1.0)).hint


def test_a_copy_that_differs_on_one_rank_is_no_equal_checkpoint(two_ranks, tmp_path):
    """Only the copy of the first rank was compared, and the two were equal."""
    whole = two_ranks.write()
    two_ranks.folder = tmp_path / "other"
    two_ranks.folder.mkdir()
    two_ranks.held[two_ranks.file("model", 1)]["decoder.layers.2.norm.weight"] = np.full(4, 2, np.float32)
    found = compare(open_source(whole), open_source(two_ranks.write()))
    assert found.differing == (("B", "decoder.layers.2.norm.weight", (1,)),) and not found.equal and not found.changes
    done = called("inspect", whole, "--diff", two_ranks.folder)
    assert done.exit_code == 1 and "copies differ in B: decoder.layers.2.norm.weight on ranks 1" in done.output


MINI = ROOT / "recipes" / "mini" / "pretrain.yaml"


def called(*words):
    return CliRunner().invoke(weights, [*map(str, words)])


def changed(folder, name, value=None):
    """Another number in the first file that holds a tensor, or the lowest bit of one of it."""
    file = next(file for file in sorted(folder.glob("*.safetensors")) if name in read_headers(file))
    header, content = read_headers(file)[name], bytearray(file.read_bytes())
    if value is None:
        content[header.start] ^= 1
    else:
        content[header.start : header.start + 4] = np.float32(value).tobytes()
    file.write_bytes(content)
    return file


@pytest.fixture
def commands(tmp_path):
    """name -> (checkpoint, a tensor of it, the command's words; the last one is what it writes)."""
    both = [saved(tmp_path / name, [1, 2, 3, 4]).path for name in "ab"]
    one = tmp_path / "run" / "checkpoint" / "iteration_00000003"
    draw(one)
    write_seal(one, 0, 1, 3)
    target = tmp_path / "to"
    return {
        "average": (both[0], "linear.weight", ["average", *both, "--to", target]),
        "reshard": (one, "embedding.word_embeddings.weight", ["reshard", one, "--recipe", LAYOUTS["zero"], target]),
    }


@pytest.mark.parametrize("name", ["average", "reshard"])
def test_what_fails_its_seal_is_not_sealed_anew(commands, name):
    folder, tensor, words = commands[name]
    changed(folder, tensor)
    done = called(*words)
    assert isinstance(done.exception, CheckpointError) and "\n" not in str(done.exception)
    assert "checksum" in str(done.exception) and "--salvage" in str(done.exception)
    assert not words[-1].exists()


@pytest.mark.parametrize("name", ["average", "reshard"])
def test_what_is_salvaged_says_so(commands, name):
    folder, tensor, words = commands[name]
    changed(folder, tensor)
    done = called(*words, "--salvage")
    assert done.exit_code == 0 and "SALVAGED from damaged weights: " in done.output
    (file,) = words[-1].rglob(SALVAGED)
    assert str(folder) in json.loads(file.read_text())["damaged"][0]
    assert f"see {SALVAGED}" in called("inspect", file.parent).output
    again = called(*[file.parent if word == folder else word for word in words[:-1]], words[-1].with_name("again"))
    assert isinstance(again.exception, CheckpointError) and "written from damaged weights" in str(again.exception)


def sealed_with(folder, tensor, value):
    """As a run that saved such a number: its seals hold."""
    changed(folder, tensor, value)
    ranks = len(list(folder.glob("seal_*")))
    step = open_source(folder).step
    for seal in folder.glob("seal_*"):
        seal.unlink()
    for rank in range(ranks):
        write_seal(folder, rank, ranks, step)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_numbers_that_are_not_finite_are_no_checkpoint_to_go_on_with(commands, value):
    folder, tensor, words = commands["reshard"]
    sealed_with(folder, tensor, value)
    done = called(*words)
    assert f"{tensor} in " in str(done.exception) and "not finite" in str(done.exception)
    assert not words[-1].exists()
    assert called(*words, "--salvage", "--json").exit_code == 0
    assert words[-1].exists()


def test_conversions_either_way(tmp_path):
    model = model_of(load_recipe(MINI))
    theirs = on_disk(tmp_path / "hf", hugging_face_shapes(model), config_of(model, "bfloat16"))
    words = ["--recipe", MINI, "--dtype", "fp32", "--salvage", "--json"]
    assert json.loads(called("convert", theirs, tmp_path / "ms", *words).output)["salvaged"] == []
    sealed_with(tmp_path / "ms", "output_layer.weight", math.nan)
    refused = called("convert", tmp_path / "ms", tmp_path / "back", *words[:4])
    assert "not finite" in str(refused.exception) and not (tmp_path / "back").exists()
    (line,) = json.loads(called("convert", tmp_path / "ms", tmp_path / "back", *words).output)["salvaged"]
    assert "output_layer.weight" in line and (tmp_path / "back" / SALVAGED).exists()
    assert (tmp_path / "back" / CHECKSUMS).exists()
    (tmp_path / "back" / SALVAGED).unlink()
    assert called("inspect", tmp_path / "back", "--values").exit_code == 1, "the NaN is still there"
    changed(tmp_path / "back", "lm_head.weight", 1.0)  # finite once more, and not what was written
    shown = called("inspect", tmp_path / "back", "--values")
    assert shown.exit_code == 1 and "model.safetensors does not match its checksum: corrupted" in shown.output
    assert called("inspect", tmp_path / "back").exit_code == 0, "nothing was read"
    refused = called("convert", tmp_path / "back", tmp_path / "there", *words[:4])
    assert "does not match its checksum" in str(refused.exception) and not (tmp_path / "there").exists()
    sums = tmp_path / "back" / CHECKSUMS
    sums.write_text(sums.read_text()[:-20])  # of a copy that was cut short: all was taken for whole
    shown = called("inspect", tmp_path / "back", "--values")
    assert shown.exit_code == 1 and f"{CHECKSUMS} is not JSON: " in shown.output
    refused = called("convert", tmp_path / "back", tmp_path / "there", *words[:4])
    assert "nothing shows whether the files are whole" in str(refused.exception)
    sums.write_text('{"files": ["model.safetensors"]}')  # another program's
    assert called("inspect", tmp_path / "back", "--values").exit_code == 0
