"""Stage 1: which differences of two configurations must not be."""

import json
from pathlib import Path

import pytest

from tools.accuracy.align import config as align_config
from tools.accuracy.align.sides import changed, load
from tools.data.index import write_learnable
from tools.recipe.dump import dump_recipe
from tools.recipe.load import load_recipe
from tools.recipe.override import apply_overrides

RECIPES = Path(__file__).parents[4] / "recipes"
MINI = RECIPES / "mini" / "pretrain.yaml"


@pytest.fixture
def corpora(tmp_path):
    for name in ("one", "same", "other"):
        write_learnable(tmp_path / name, 100 if name == "other" else 512)
    return {name: str(tmp_path / name) for name in ("one", "same", "other")}


@pytest.mark.parametrize("entry", ["data_path.1=x", "data_path=['1', x]", "data_path=['1', x, '1', y]"])
def test_data_is_the_corpus_whatever_the_overrides_name(entry):
    override = f"train_dataset.data_loader.config.{entry}"
    for recipe in (changed(load_recipe(MINI), (override,), "mine"), load(MINI, (override,), "mine", 4)):
        assert recipe["train_dataset"]["data_loader"]["config"]["data_path"] == ["1", "mine"]


def differences(corpora, *overrides, data="one"):
    ours, theirs = load(MINI, (), corpora["one"], 4), load(MINI, overrides, corpora[data], 4)
    return {setting.path: setting for setting in align_config.differences(ours, theirs)}


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


def test_a_corpus_is_compared_to_its_last_token(corpora, monkeypatch):
    read = []
    crc = align_config._crc
    monkeypatch.setattr(align_config, "PIECE", 1000)
    monkeypatch.setattr(align_config, "_crc", lambda file, start: (read.append(file.suffix), crc(file, start))[1])
    assert differences(corpora) == {} and ".bin" not in read
    tokens = Path(corpora["same"] + ".bin")
    content = tokens.read_bytes()
    assert len(content) > 2000
    tokens.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    found = differences(corpora, data="same")["train_dataset (content)"]
    assert (found.kind, found.meaning) == ("must match", "tokens differ") and read.count(".bin") == 2


def blended(corpora, shares):
    words = [word for pair in zip(shares, ("one", "other"), strict=True) for word in (pair[0], corpora[pair[1]])]
    return apply_overrides(load(MINI, (), None, 4), [f"train_dataset.data_loader.config.data_path={json.dumps(words)}"])


def test_the_shares_of_a_blend_are_part_of_its_content(corpora):
    ours = blended(corpora, ("0.7", "0.3"))
    found = align_config.differences(ours, blended(corpora, ("0.1", "0.9")))
    assert {(setting.kind, setting.meaning) for setting in found} == {
        ("must match", "other data"), ("must match", "shares of the blend differ"),
    }  # fmt: skip
    found = align_config.differences(ours, blended(corpora, ("7", "3")))
    assert {setting.meaning for setting in found} == {"another path to the same corpus"}


def test_data_takes_the_place_of_a_whole_blend(corpora, tmp_path):
    dump_recipe(blended(corpora, ("0.7", "0.3")), tmp_path / "blended.yaml")
    recipe = load(tmp_path / "blended.yaml", (), corpora["same"], 4)
    assert recipe["train_dataset"]["data_loader"]["config"]["data_path"] == ["1", corpora["same"]]


def test_the_corpus_of_a_recipe_for_ascend_may_be_elsewhere():
    ours, theirs = (
        changed(
            load_recipe(RECIPES / "telechat3_105b" / "pretrain_4k.yaml"),
            (f"train_dataset.data_loader.config.data_path.1={path}",),
            None,
        )
        for path in ("/elsewhere/one", "/elsewhere/other")
    )
    assert [(setting.kind, setting.meaning) for setting in align_config.differences(ours, theirs)] == [
        ("must match", "other data")
    ]


def test_the_mean_of_gradients_goes_with_the_parallel_mode(corpora):
    """Data parallel takes it, a sharded graph sums: the same step. Anything else is not."""
    sharded = ("parallel.parallel_mode=1", "parallel.gradients_mean=False")
    assert differences(corpora, *sharded)["parallel.gradients_mean"].kind == "another layout"
    assert differences(corpora, sharded[1])["parallel.gradients_mean"].kind == "must match"
