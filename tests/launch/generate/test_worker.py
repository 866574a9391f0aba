"""These tests check that a worker reads the same tensors wherever they lie, for which recipe they are read, and how the
process with the model is asked, refuses, fails and is gone at the end. A script stands in for the worker.
"""

from pathlib import Path

import click
import ml_dtypes
import numpy as np
import psutil
import pytest
from safetensors.numpy import save_file

from launch.generate import session
from launch.generate.command import forward_recipe
from launch.generate.session import continuation
from launch.generate.text import likeliest
from launch.generate.worker import reader
from plugins.errors import CheckpointError
from tests.tools.checkpoint.saved import Saved
from tools.accuracy.reference.start import initial_weights
from tools.recipe.dump import dump_recipe
from tools.recipe.load import load_recipe
from tools.recipe.mini import load_mini
from tools.weights.convert_plan import model_of
from tools.weights.hugging_face_names import to_mindformers

ROOT = Path(__file__).resolve().parents[3]
TINY = ROOT / "tests" / "training" / "tiny.yaml"


@pytest.fixture(scope="module")
def recipe():
    return load_recipe(TINY)


@pytest.fixture(scope="module")
def theirs(recipe):
    """Under Hugging Face's names."""
    return initial_weights(model_of(recipe), 0)


@pytest.fixture(scope="module")
def ours(recipe, theirs):
    return to_mindformers(theirs, model_of(recipe))


def test_a_hugging_face_folder_is_read_under_our_names(recipe, theirs, ours, tmp_path):
    save_file(theirs, tmp_path / "model.safetensors")
    read = reader(tmp_path, recipe)
    for name, array in ours.items():
        np.testing.assert_array_equal(read(name), array)


def test_an_mtp_layer_in_the_folder_is_left_out(recipe, theirs, ours, tmp_path):
    """The model that generates has none; such a folder was refused as one of another model."""
    dump_recipe(forward_recipe(recipe), tmp_path / "forward.yaml")
    save_file(theirs, tmp_path / "model.safetensors")
    read = reader(tmp_path, load_recipe(tmp_path / "forward.yaml"))
    for name in (name for name in ours if not name.startswith("mtp.")):
        np.testing.assert_array_equal(read(name), ours[name])


def test_weights_whose_parts_have_several_types_are_read(recipe, theirs, tmp_path):
    half = [name for name in theirs if ".up_proj." in name or ".experts.1." in name]
    mixed = {name: array.astype(ml_dtypes.bfloat16) if name in half else array for name, array in theirs.items()}
    save_file(mixed, tmp_path / "model.safetensors")
    read = reader(tmp_path, recipe)
    wide = {name: array.astype(np.float32) for name, array in mixed.items()}
    for name, array in to_mindformers(wide, model_of(recipe)).items():
        np.testing.assert_array_equal(read(name), array)


def test_bfloat16_becomes_float32(recipe, ours, tmp_path):
    half = {name: array.astype(ml_dtypes.bfloat16) for name, array in ours.items()}
    save_file(half, tmp_path / "weights-model-0000000-0000001.safetensors")
    read = reader(tmp_path, recipe)
    for name, array in half.items():
        assert read(name).dtype == np.float32
        np.testing.assert_array_equal(read(name), array.astype(np.float32))


def test_slices_of_ranks_are_put_together(recipe, ours, tmp_path):
    name = "decoder.layers.0.self_attention.linear_proj.weight"
    saved = Saved(tmp_path / "iteration_00000002", 2)
    saved.put(name, ours[name], (1, 2), [[0], [1]])
    np.testing.assert_array_equal(reader(saved.write(), recipe)(name), ours[name])


def test_what_is_missing_is_named(recipe, ours, tmp_path):
    save_file({"output_layer.weight": ours["output_layer.weight"]}, tmp_path / "model-0000000-0000001.safetensors")
    with pytest.raises(CheckpointError, match=r"the weight decoder\.final_layernorm\.weight of the recipe"):
        reader(tmp_path, recipe)("decoder.final_layernorm.weight")


def plain(recipe):
    return forward_recipe(recipe)["model"]["model_config"]


@pytest.mark.parametrize("name", ["telechat3_438b/context_128k", "telechat3_105b/pretrain_4k", "xing4_29b/pretrain_4k"])
def test_a_mini_of_many_workers_is_cut_down_to_one_process_in_float32(name):
    mini = load_mini(ROOT / "recipes" / f"{name}.yaml", workers=4)
    cut = forward_recipe(mini)
    assert cut["use_parallel"] is False and cut["context"]["device_target"] == "CPU"
    assert list(cut["plugins"]) == (["hyper_connections"] if name.startswith("xing4") else []), "the model itself"
    assert plain(mini)["compute_dtype"] == "float32" and plain(mini)["num_nextn_predict_layers"] == 0
    assert mini["parallel"]["parallel_mode"] == 1, "the recipe itself stays"


def test_sizes_and_scales_of_the_model_stay(recipe):
    whole, cut = recipe["model"]["model_config"], plain(recipe)
    changed = {key for key in whole if whole[key] != cut[key]}
    assert changed == {"batch_size", "num_nextn_predict_layers"}


def counting(seen):
    def logits(ids):
        seen.append(list(ids))
        return np.eye(100)[ids[-1] + 1]

    return logits


def test_it_goes_on_from_what_it_said():
    seen = []
    assert list(continuation(counting(seen), likeliest, [3, 7], 10, 3, None)) == [8, 9, 10]
    assert seen == [[3, 7], [3, 7, 8], [3, 7, 8, 9]]


def test_the_end_of_a_document_is_the_last_token():
    assert list(continuation(counting([]), likeliest, [7], 10, 50, 9)) == [8, 9]


def test_it_sees_no_more_than_its_window():
    seen = []
    assert list(continuation(counting(seen), likeliest, [1, 2, 3, 4], 3, 2, None)) == [5, 6]
    assert seen == [[2, 3, 4], [3, 4, 5]]


def test_each_token_is_there_before_the_next_is_computed():
    seen = []
    words = continuation(counting(seen), likeliest, [1], 10, 5, None)
    assert (next(words), len(seen)) == (2, 1)


HEAD = """
import os, sys
from multiprocessing.connection import Connection
import numpy as np
from launch.generate.session import Ready, Refused
pipe = Connection(int(sys.argv[3]))
"""
ANSWERS = "pipe.send(Ready())\nwhile True:\n    pipe.send(np.array([sum(pipe.recv()), os.getpid()]))\n"


@pytest.fixture
def started(tmp_path, monkeypatch):
    """A function that starts a session with a script in the worker's place."""

    def start(script):
        (tmp_path / "worker.py").write_text(HEAD + script)
        monkeypatch.setattr(session, "WORKER", tmp_path / "worker.py")
        return session.answering_model({"a": 1}, tmp_path / "weights")

    return start


def test_it_answers_and_is_gone_afterwards(started):
    with started(ANSWERS) as logits:
        answers = [logits([1, 2]), logits((3,))]
    assert [answer[0] for answer in answers] == [3, 3]
    assert not psutil.pid_exists(int(answers[0][1]))


def test_it_is_gone_after_an_interrupt(started):
    pids = []
    with pytest.raises(KeyboardInterrupt), started(ANSWERS) as logits:
        pids.append(int(logits([])[1]))
        raise KeyboardInterrupt
    assert not psutil.pid_exists(pids[0])


def test_weights_that_it_refuses_are_the_users_to_mend(started):
    with pytest.raises(CheckpointError, match="of another model"), started("pipe.send(Refused('of another model'))"):
        pass


@pytest.mark.parametrize(
    "script", ["sys.exit('no memory left')", "pipe.send(Ready()); pipe.recv(); sys.exit('no memory left')"]
)
def test_an_end_before_its_time_shows_the_last_lines(started, script):
    with pytest.raises(click.ClickException, match=r"exit code 1:\n(.*\n)*no memory left"), started(script) as logits:
        logits([1])
