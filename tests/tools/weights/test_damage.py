"""Damaged weights are not written anew under a good seal: refused, or salvaged and marked."""

import json
import math

import numpy as np
import pytest
from click.testing import CliRunner

from plugins.errors import CheckpointError
from plugins.sealed_checkpoint.plan import write_seal
from tests.tools.weights.convert.test_cli import model_of, on_disk
from tests.tools.weights.reshard.drawn import LAYOUTS, draw
from tests.tools.weights.test_average import saved
from tests.training.runs import ROOT
from tools.checkpoint.headers import read_headers
from tools.recipe.load import load_recipe
from tools.weights.cli import weights
from tools.weights.hugging_face.names import hugging_face_shapes
from tools.weights.hugging_face.sizes import config_of
from tools.weights.inventory import SALVAGED
from tools.weights.source import CHECKSUMS, open_source

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
    changed(tmp_path / "back", "lm_head.weight", 1.0)  # finite once more, and not what was written
    refused = called("convert", tmp_path / "back", tmp_path / "there", *words[:4])
    assert "does not match its checksum" in str(refused.exception) and not (tmp_path / "there").exists()
