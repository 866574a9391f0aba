"""What `RUN/data.json` covers of a corpus that is too large to be read whole."""

import pytest

from launch.resume import data_digest
from tools.files import atomic
from tools.recipe.load import Recipe


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    """A .bin of 256 blocks and their gaps; blocks made small."""
    monkeypatch.setattr(atomic, "BLOCK", 4)
    (tmp_path / "x.idx").write_bytes(b"index")
    (tmp_path / "x.bin").write_bytes(bytes(256 * 8))
    return tmp_path / "x"


def recipe(*path):
    return Recipe({"train_dataset": {"data_loader": {"type": "BlendedMegatronDatasetDataLoader",
                                                     "config": {"data_path": [*map(str, path)]}}}})  # fmt: skip


@pytest.mark.parametrize(
    ("place", "seen"),
    [(0, True), (3, True), (4, False), (256 * 8 - 1, True), (256 * 8 - 4, True), (256 * 8 - 5, False)],
)
def test_blocks_are_spread_over_the_file_the_first_and_last_among_them(corpus, place, seen):
    before = data_digest.digests(recipe(corpus))
    tokens = bytearray(256 * 8)
    tokens[place] = 1
    corpus.with_suffix(".bin").write_bytes(tokens)
    assert (data_digest.digests(recipe(corpus)) != before) == seen


def test_size_index_and_each_of_several_corpora_count(corpus, tmp_path):
    for end in ("idx", "bin"):
        (tmp_path / f"y.{end}").write_bytes(corpus.with_suffix(f".{end}").read_bytes())
    blend = recipe("3", corpus, "1", tmp_path / "y")
    data_digest.keep(blend, tmp_path)
    assert data_digest.replaced(tmp_path, blend) == []
    with (tmp_path / "y.bin").open("ab") as more:
        more.write(b"\0")
    assert data_digest.replaced(tmp_path, blend) == [
        f"{tmp_path / 'y'}.bin is not what it was (2,048 bytes then, 2,049 now): the corpus was prepared anew or "
        "replaced"
    ]
    (tmp_path / "y.idx").write_bytes(b"other")
    assert "y.idx is not what it was: the" in data_digest.replaced(tmp_path, blend)[0]


def test_other_loaders_have_no_corpora():
    assert data_digest.digests(Recipe({"train_dataset": {"data_loader": {"type": "HFDataLoader"}}})) == []


def test_a_missing_file_is_said_and_stops_nothing(tmp_path, capsys):
    data_digest.keep(recipe("nowhere"), tmp_path)
    assert "nowhere.idx: cannot be read (No such file" in capsys.readouterr().err
    assert not (tmp_path / "data.json").exists()


def test_files_of_instructions_and_their_tokenizer_count(tmp_path):
    data, folder = tmp_path / "a.jsonl", tmp_path / "tokenizer"
    folder.mkdir()
    data.write_text("one")
    for name in ("tokenizer.json", "tokenizer_config.json", "model.safetensors"):
        (folder / name).write_text(name)
    handler = {"type": "AlpacaInstructDataHandler", "tokenizer": {"pretrained_model_dir": str(folder)}}
    told = Recipe({"train_dataset": {"data_loader": {"type": "HFDataLoader", "data_files": str(data),
                                                     "handler": [handler]}}})  # fmt: skip
    data_digest.keep(told, tmp_path)
    (folder / "model.safetensors").write_text("other")
    assert data_digest.replaced(tmp_path, told) == []
    data.write_text("three")
    assert data_digest.replaced(tmp_path, told) == [
        f"{data} is not what it was (3 bytes then, 5 now): the data was prepared anew or replaced"
    ]
    data.write_text("one")
    (folder / "tokenizer.json").write_text("tokenizer_json")
    (changed,) = data_digest.replaced(tmp_path, told)
    assert changed.startswith(f"{folder / 'tokenizer.json'} is not what it was: the")
