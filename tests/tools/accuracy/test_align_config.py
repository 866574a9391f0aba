"""Rung 1: which differences of two configurations must not be."""

from pathlib import Path

import pytest

from plugins.errors import DataError
from tools.accuracy import align_config
from tools.accuracy.align_recipe import load
from tools.accuracy.reference.golden import write_corpus

MINI = Path(__file__).parents[3] / "recipes" / "mini" / "pretrain.yaml"


@pytest.fixture
def corpora(tmp_path):
    """Two prefixes of one corpus, and one of another."""
    for name in ("one", "same", "other"):
        write_corpus(tmp_path / name, 100 if name == "other" else 512)
    return {name: str(tmp_path / name) for name in ("one", "same", "other")}


def differences(corpora, *overrides, data="one"):
    ours, theirs = load(MINI, (), corpora["one"], 4), load(MINI, overrides, corpora[data], 4)
    settings = align_config.differences(ours, theirs)
    return {setting.path: setting for setting in align_config.same_content(settings, ours, theirs)}


def test_nothing_differs_from_itself(corpora):
    assert differences(corpora) == {}


@pytest.mark.parametrize(
    ("override", "kind", "group"),
    [
        ("optimizer.weight_decay=0.05", "must match", "hyper-parameters"),
        ("model.model_config.num_attention_heads=8", "must match", "architecture"),
        ("model.model_config.vocab_size=4096", "must match", "vocabulary"),
        ("model.model_config.router_dense_type=bfloat16", "must match", "precision"),
        ("seed=1", "must match", "determinism"),
        ("train_dataset.data_loader.config.seed=5", "must match", "data"),
        ("callbacks.2.checkpoint_format=ckpt", "may differ", "hyper-parameters"),
    ],
)
def test_each_class_of_the_report(corpora, override, kind, group):
    (setting,) = differences(corpora, override).values()
    assert (setting.path, setting.kind, setting.group) == (setting.path, kind, group)
    assert override.rpartition("=")[2] in setting.theirs or setting.theirs == "4096"


def test_a_corpus_goes_by_its_content(corpora):
    (moved,) = differences(corpora, data="same").values()
    assert (moved.kind, moved.meaning) == ("may differ", "another path to the same corpus")
    other = differences(corpora, data="other")
    assert other["train_dataset (content)"].kind == "must match"
    assert any(path.startswith("train_dataset.data_loader.config.data_path") for path in other)


def test_a_missing_corpus_is_named(tmp_path):
    recipe = load(MINI, (), str(tmp_path / "none"), 4)
    with pytest.raises(DataError, match=r"none\.idx not found; make the dataset with `tc3 data prepare"):
        align_config.corpus_checksum(recipe)
