import pytest

from plugins.errors import DataError, RecipeError
from plugins.held_out_loss.plan import check, held_out_loader


@pytest.fixture
def settings(tmp_path):
    for suffix in (".bin", ".idx"):
        (tmp_path / f"corpus{suffix}").touch()
    return {"data_path": str(tmp_path / "corpus"), "samples": 16, "every": 10}


def test_good_settings_pass(settings):
    check(settings, global_batch=16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sample": 3}, r"held_out_loss\.sample: no such setting \(did you mean 'samples'\?\)"),
        ({"samples": 8}, r"held_out_loss\.samples: 8; write a number of at least 16"),
        ({"every": 0}, r"held_out_loss\.every: 0; write a number of at least 1"),
        ({"every": "often"}, r"held_out_loss\.every: 'often'; "),
        ({"every": True}, r"held_out_loss\.every: True; "),
    ],
)
def test_wrong_settings_are_named(settings, change, message):
    with pytest.raises(RecipeError, match=message):
        check({**settings, **change}, global_batch=16)


def test_a_missing_setting_is_named(settings):
    del settings["every"]
    with pytest.raises(RecipeError, match=r"held_out_loss\.every: missing"):
        check(settings, global_batch=1)


def test_a_missing_corpus_says_how_to_make_one(settings, tmp_path):
    (tmp_path / "corpus.idx").unlink()
    with pytest.raises(DataError, match=r"no .*corpus\.idx; `tc3 data prepare --held-out"):
        check(settings, global_batch=1)


def test_a_file_of_instructions_is_looked_for_as_such(settings, tmp_path):
    settings["data_path"] = str(tmp_path / "talk.jsonl")
    with pytest.raises(DataError, match=r"no .*talk\.jsonl; `tc3 data instructions --held-out"):
        check(settings, global_batch=1, instructions=True)
    (tmp_path / "talk.jsonl").touch()
    check(settings, global_batch=1, instructions=True)


def test_held_out_data_is_read_as_training_data_is(settings):
    megatron = {
        "type": "BlendedMegatronDatasetDataLoader",
        "sizes": [800, 0, 0],
        "config": {"data_path": ["a"], "eod": 0},
    }
    assert held_out_loader(megatron, settings) == {
        **megatron, "sizes": [16, 0, 0], "config": {"data_path": ["1", settings["data_path"]], "eod": 0},
    }  # fmt: skip
    packing = [{"type": "AlpacaInstructDataHandler"}, {"type": "PackingHandler", "seq_length": 8}]
    talk = {"type": "HFDataLoader", "data_files": "a.jsonl", "path": "json"}
    talk["handler"] = [{"type": "shuffle", "seed": 1}, *packing, {"type": "take", "n": 800}]
    own = held_out_loader(talk, settings)
    assert own == {**talk, "data_files": settings["data_path"], "handler": [*packing, {"type": "take", "n": 16}]}
    assert talk["handler"][-1]["n"] == 800
