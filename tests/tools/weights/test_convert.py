"""Conversions from beginning to end, cut short, damaged, and back again."""

import fcntl
import json
import os
import signal
from types import SimpleNamespace
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from plugins.errors import CheckpointError, DataError
from plugins.sealed_checkpoint.plan import fault
from tests.tools.accuracy.align.cases import sizes
from tools.accuracy.reference.start import initial_weights
from tools.weights import convert as run
from tools.weights.convert import convert
from tools.weights.convert_plan import plan_conversion
from tools.weights.hugging_face_config import config_of
from tools.weights.hugging_face_names import to_mindformers
from tools.weights.source import INDEX, open_source

MODEL = sizes()
WEIGHTS = initial_weights(MODEL, 3)
LIMIT = 20_000  # bytes of a file: several files of the small model


def hugging_face(folder, weights=WEIGHTS, files=3):
    """A Hugging Face folder as transformers would write it, its tensors dealt to files."""
    folder.mkdir()
    where = {name: f"model-{i % files + 1:05d}-of-{files:05d}.safetensors" for i, name in enumerate(weights)}
    for file in set(where.values()):
        save_file({name: weights[name] for name in weights if where[name] == file}, folder / file, {"format": "pt"})
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    (folder / "config.json").write_text(json.dumps(config_of(MODEL, "float32")))
    return folder


def converted(source, target, dtype=None, limit=LIMIT, **options):
    opened = open_source(source)
    to = "MindFormers" if opened.form == "Hugging Face" else "Hugging Face"
    plan = plan_conversion(opened.headers, MODEL, to, dtype, limit)
    convert(opened, target, plan, MODEL, **options)
    return plan


def loaded(folder):
    return {name: array for file in sorted(folder.glob("*.safetensors")) for name, array in load_file(file).items()}


def same(first, second):
    return first.keys() == second.keys() and all(
        first[name].dtype == second[name].dtype and first[name].tobytes() == second[name].tobytes() for name in first
    )


@pytest.fixture
def theirs(tmp_path):
    return hugging_face(tmp_path / "hf")


def test_there_and_back_to_the_bit_in_files_of_another_size(theirs, tmp_path):
    plan = converted(theirs, tmp_path / "ms")
    assert len(plan.shards) > 2 and len(list((tmp_path / "ms").glob("*.safetensors"))) == len(plan.shards)
    assert same(loaded(tmp_path / "ms"), to_mindformers(WEIGHTS, MODEL))
    assert fault(tmp_path / "ms") is None, "every file is sealed"
    converted(tmp_path / "ms", tmp_path / "back", limit=50_000, ends=7)
    assert same(loaded(tmp_path / "back"), WEIGHTS)
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config == {**config_of(MODEL, "float32"), "eos_token_id": 7}, "where transformers stops, else at 1"
    index = json.loads((tmp_path / "back" / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in WEIGHTS.values())
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_two_processes_write_the_same_files(theirs, tmp_path):
    converted(theirs, tmp_path / "one")
    converted(theirs, tmp_path / "two", workers=2)
    names = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "two").iterdir())
    assert all((tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes() for name in names)


def test_trained_weights_change_their_type_and_the_biases_of_routers_keep_it(theirs, tmp_path):
    converted(theirs, tmp_path / "ms", "BF16")
    found = loaded(tmp_path / "ms")
    assert {str(array.dtype) for name, array in found.items() if not name.endswith("expert_bias")} == {"bfloat16"}
    name = "decoder.layers.1.mlp.router.expert_bias"
    assert found[name].dtype == np.float32
    wanted = to_mindformers({name: array.astype(ml_dtypes.bfloat16) for name, array in WEIGHTS.items()}, MODEL)
    assert found["output_layer.weight"].tobytes() == wanted["output_layer.weight"].tobytes()
    converted(tmp_path / "ms", tmp_path / "back")
    assert json.loads((tmp_path / "back" / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_of_two_types_that_half_of_the_weights_have_the_first_one_is_named(tmp_path):
    """Two conversions of the same weights named one or the other."""
    for types in (["float32", "bfloat16"], ["bfloat16", "float32"]):
        tensors = {name: [kind, [2, 2]] for name, kind in zip("ab", types, strict=True)}
        files = {"model.safetensors": {"tensors": tensors, "sha256": "", "crc32": {}}}
        run._finish_hugging_face(tmp_path, files, MODEL, SimpleNamespace(bytes=32), None)
        assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == types[0]


def test_cut_short_it_goes_on_where_it_was(theirs, tmp_path, monkeypatch):
    written, real = [], run.save_file

    def cut(arrays, path, metadata):
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(path.name)
        return real(arrays, path, metadata)

    monkeypatch.setattr(run, "save_file", cut)
    with pytest.raises(KeyboardInterrupt):
        converted(theirs, tmp_path / "ms")
    assert not (tmp_path / "ms").exists() and len(written) == 2
    monkeypatch.setattr(run, "save_file", lambda *given: (written.append(given[1].name), real(*given))[1])
    plan = converted(theirs, tmp_path / "ms")
    assert len(written) == len(set(written)) == len(plan.shards), "no file was written twice"
    assert same(loaded(tmp_path / "ms"), to_mindformers(WEIGHTS, MODEL))


def test_killed_while_it_seals_it_leaves_nothing_of_that_behind(theirs, tmp_path, monkeypatch):
    converted(theirs, tmp_path / "whole")
    real = os.replace

    def kill(part, target):
        if os.path.basename(target) == "seal_rank_1.json":
            os.kill(os.getpid(), signal.SIGKILL)
        real(part, target)

    if (child := os.fork()) == 0:
        monkeypatch.setattr(os, "replace", kill)
        converted(theirs, tmp_path / "ms")
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert any(path.name.endswith(".seal_rank_1.json") for path in (tmp_path / ".ms.part").iterdir())
    converted(theirs, tmp_path / "ms")
    names = [sorted(path.name for path in (tmp_path / folder).iterdir()) for folder in ("ms", "whole")]
    assert names[0] == names[1]


def test_what_was_written_of_another_source_is_not_kept(theirs, tmp_path, monkeypatch):
    real = run.save_file
    monkeypatch.setattr(run, "save_file", lambda *given: (real(*given), (_ for _ in ()).throw(KeyboardInterrupt)))
    with pytest.raises(KeyboardInterrupt):
        converted(theirs, tmp_path / "ms")
    monkeypatch.setattr(run, "save_file", real)
    other = {name: array + 1 for name, array in WEIGHTS.items()}
    for path in theirs.iterdir():
        path.unlink()
    theirs.rmdir()
    hugging_face(theirs, other)
    converted(theirs, tmp_path / "ms")
    assert same(loaded(tmp_path / "ms"), to_mindformers(other, MODEL))


def test_what_was_written_of_another_output_layer_is_not_kept(theirs, tmp_path, monkeypatch):
    """config.json says whether the embedding is the output layer, and may be corrected between two starts."""

    def started(tied):
        opened = open_source(theirs)
        plan = plan_conversion(opened.headers, MODEL, "MindFormers", None, LIMIT, tied)
        convert(opened, tmp_path / "ms", plan, MODEL)

    with monkeypatch.context() as cut:
        cut.setattr(run, "finish_mindformers", mock.Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            started(tied=False)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
        started(tied=True)


def test_the_tokenizer_of_an_earlier_start_does_not_stay(theirs, tmp_path, monkeypatch):
    converted(theirs, tmp_path / "ms")
    for folder, names in (("a", ("merges.txt", "tokenizer.json")), ("b", ("tokenizer.json",))):
        (tmp_path / folder).mkdir()
        for name in names:
            (tmp_path / folder / name).write_text(folder)
    with monkeypatch.context() as cut:
        copied = mock.Mock(side_effect=[None, OSError(5, "Input/output error")])
        real = run.shutil.copyfile
        cut.setattr(run.shutil, "copyfile", lambda *given: copied(*given) or real(*given))
        with pytest.raises(DataError, match="Input/output error"):
            converted(tmp_path / "ms", tmp_path / "back", tokenizer=tmp_path / "a")
    converted(tmp_path / "ms", tmp_path / "back", tokenizer=tmp_path / "b")
    assert (tmp_path / "back" / "tokenizer.json").read_text() == "b"
    assert not (tmp_path / "back" / "merges.txt").exists()


def test_a_full_disk_is_seen_before_anything_is_written(theirs, tmp_path, monkeypatch):
    monkeypatch.setattr(run.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(DataError, match=r"GB are to be written, but only 0\.000 GB are free on its disk"):
        converted(theirs, tmp_path / "ms")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_a_disk_that_fills_up_leaves_nothing_that_reads_as_whole(theirs, tmp_path, monkeypatch):
    def full(arrays, path, metadata):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run, "save_file", full)
    with pytest.raises(DataError, match="No space left on device"):
        converted(theirs, tmp_path / "ms")
    assert not (tmp_path / "ms").exists() and not list(tmp_path.rglob("weights-model-*.safetensors"))


def test_a_disk_that_is_full_from_the_beginning_is_named(theirs, tmp_path, monkeypatch):
    """As one without a free inode; the error was none of a file."""

    def full(path, *content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run.Path, "write_text", full)
    with pytest.raises(DataError, match=r"\.ms\.part/plan\.json: .* be written \(No space left on device"):
        converted(theirs, tmp_path / "ms")


def test_a_folder_that_is_there_or_that_another_writes_is_left_alone(theirs, tmp_path):
    (tmp_path / "ms").mkdir()
    with pytest.raises(CheckpointError, match="the folder exists"):
        converted(theirs, tmp_path / "ms")
    (tmp_path / ".new.part").mkdir()
    held = os.open(tmp_path / ".new.part", os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    with pytest.raises(CheckpointError, match="another process is writing into this folder"):
        converted(theirs, tmp_path / "new")
    os.close(held)


@pytest.mark.parametrize("renamed", [True, False])
def test_a_conversion_that_ended_while_another_began_is_not_written_again(theirs, tmp_path, monkeypatch, renamed):
    """The first is done between the second one's look at the target and its lock."""
    lock, part = fcntl.flock, tmp_path / ".ms.part"

    def late(number, how):
        if renamed:
            part.rename(tmp_path / "ms")
        else:
            (tmp_path / "ms").mkdir()
        lock(number, how)

    monkeypatch.setattr(run.fcntl, "flock", late)
    with pytest.raises(CheckpointError, match="the folder exists"):
        converted(theirs, tmp_path / "ms")
    assert sorted(item.name for item in tmp_path.iterdir()) == ["hf", "ms"] and not list((tmp_path / "ms").iterdir())


def test_a_tensor_that_is_not_what_its_checksum_says(theirs, tmp_path):
    converted(theirs, tmp_path / "ms")
    converted(tmp_path / "ms", tmp_path / "back")
    file = sorted((tmp_path / "back").glob("*.safetensors"))[1]
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match="does not match its checksum, so the file is damaged"):
        converted(tmp_path / "back", tmp_path / "again")


@pytest.mark.parametrize(("step", "fits"), [(0, True), (1, False)])
def test_the_mtp_layers_own_embedding_must_be_the_embedding(tmp_path, step, fits):
    copy = "model.layers.2.embed_tokens.weight"
    source = hugging_face(tmp_path / "hf", {**WEIGHTS, copy: WEIGHTS["model.embed_tokens.weight"] + step})
    if fits:
        converted(source, tmp_path / "ms")
        assert same(loaded(tmp_path / "ms"), to_mindformers(WEIGHTS, MODEL))
    else:
        with pytest.raises(CheckpointError, match=f"{copy} differs from model.embed_tokens.weight"):
            converted(source, tmp_path / "ms")


def test_a_tokenizer_goes_along(theirs, tmp_path):
    (tmp_path / "tokens").mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "pytorch_model.bin"):
        (tmp_path / "tokens" / name).write_text(name)
    converted(theirs, tmp_path / "ms")
    converted(tmp_path / "ms", tmp_path / "back", tokenizer=tmp_path / "tokens")
    assert (tmp_path / "back" / "tokenizer.json").read_text() == "tokenizer.json"
    assert not (tmp_path / "back" / "pytorch_model.bin").exists()
