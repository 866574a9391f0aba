"""These tests check what the recipes feed to the model: columns, mesh and masks agree, and MindFormers' loaders make
the inputs that the model reads.
"""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner

from tests.recipes.oracles import FAMILY, RECIPES, all_recipes, load
from tests.tools.check.test_data_files import write
from tools.check.check import check_recipe
from tools.data.imbalance.cli import imbalance_command
from tools.data.index import read_blend
from tools.recipe.load import load_recipe

CONTEXT = [name for name in FAMILY if "context" in name]
EOD = [name for name in FAMILY if "pretrain" not in name]


def mask_settings(recipe):
    """Return the mapping that holds a loader's mask keys: Megatron's loader nests them."""
    loader = recipe["train_dataset"]["data_loader"]
    return loader.get("config", loader)


@pytest.mark.parametrize("name", all_recipes())
def test_columns_and_their_sharding_are_those_of_the_loader(name):
    """As MindFormers' base_trainer names them: four, and a fifth for either mask."""
    recipe = load(name)
    settings, dataset = mask_settings(recipe), recipe["train_dataset"]
    columns, dp = ["input_ids", "labels", "loss_mask", "position_ids"], recipe["parallel_config"]["data_parallel"]
    shards = [[dp, 1]] * 4
    if settings["create_compressed_eod_mask"]:
        columns, shards = [*columns, "actual_seq_len"], [*shards, [dp, 1]]
    elif settings["create_attention_mask"]:
        columns, shards = [*columns, "attention_mask"], [*shards, [dp, 1, 1, 1]]
    assert dataset["input_columns"] == dataset["construct_args_key"] == columns
    assert recipe["parallel"]["dataset_strategy"] == shards


@pytest.mark.parametrize("name", all_recipes())
def test_sequence_lengths_agree(name):
    recipe = load(name)
    length, settings = recipe["model"]["model_config"]["seq_length"], mask_settings(recipe)
    handlers = [handler for handler in settings.get("handler", []) if handler["type"].endswith("Handler")]
    assert {settings.get("seq_length", length), *(handler["seq_length"] for handler in handlers)} == {length}


@pytest.mark.parametrize("name", all_recipes())
def test_the_models_mask_is_the_loaders(name):
    recipe = load(name)
    model, settings = recipe["model"]["model_config"], mask_settings(recipe)
    assert model.get("use_eod_attn_mask_compression", False) == settings["create_compressed_eod_mask"]
    if model.get("use_attn_mask_compression"):
        assert model["seq_length"] >= 2048
        assert not settings["create_attention_mask"], "a full mask would be made and thrown away"


def test_long_contexts_and_packed_conversations_keep_documents_apart():
    for name in EOD:
        assert mask_settings(load(name))["create_compressed_eod_mask"], name


@pytest.mark.parametrize("name", CONTEXT)
def test_context_parallelism_gathers_keys_and_values(name):
    """Ulysses in MLA has no way back from the TND layout that the compressed document mask asks for."""
    mesh = load(name)["parallel_config"]
    assert mesh["context_parallel"] > 1
    assert mesh["context_parallel_algo"] == "colossalai_cp"
    assert mesh.get("ulysses_degree_in_cp", 1) == 1


def samples(settings, count):
    """`count` samples of MindFormers' own GPTDataset under a recipe's mask settings; documents of 48 tokens."""
    from mindformers.dataset.blended_datasets.gpt_dataset import GPTDataset

    reset = [settings[key] for key in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")]
    text = np.tile(np.r_[np.full(47, 7), settings["eod"]], 6)[:257]
    dataset = GPTDataset.__new__(GPTDataset)  # its constructor wants files
    dataset.config = SimpleNamespace(**settings, add_extra_token_to_sequence=True)
    dataset.masks_and_position_ids_are_cacheable = not any(reset)
    dataset.masks_and_position_ids_are_cached = False
    dataset._eod_token_id, dataset._pad_token_id = settings["eod"], settings["pad"]
    dataset._query_document_sample_shuffle_indices = lambda index: (text.copy(), None)
    return [dataset[index] for index in range(count)]


@pytest.mark.parametrize("name", CONTEXT)
def test_every_sample_has_a_document_mask(name):
    settings = mask_settings(load(name))
    for sample in samples(settings, 2):
        ends = sample[-1]
        assert ends.shape == (settings["eod_pad_length"],)
        assert ends[:6].tolist() == [48, 96, 144, 192, 240, 256]
        assert set(ends[6:].tolist()) == {256}


def test_without_a_reset_key_mindformers_loses_the_mask_of_the_second_sample():
    """This test shows why the context recipes reset positions; if it fails, MindFormers has mended the fault, and the
    key is no longer needed.
    """
    settings = {**mask_settings(load(CONTEXT[0])), "reset_position_ids": False}
    assert samples(settings, 1)
    with pytest.raises(AttributeError):
        samples(settings, 2)


@pytest.fixture
def instructions(tmp_path, monkeypatch):
    """The fine-tuning data section, on 400 conversations of some 60 words and a tokenizer of words."""
    from mindformers.dataset.handler import base_handler
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<unk>": 0, "the": 1, "answer": 2}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>").save_pretrained(str(tmp_path / "tokenizer"))
    row = {"instruction": "the question", "input": "", "output": "the answer"}
    (tmp_path / "instructions.jsonl").write_text((json.dumps(row) + "\n") * 400)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(base_handler, "is_legacy_model", lambda: False)
    loader = load_recipe(RECIPES / "telechat3_105b/finetune_4k.yaml")["train_dataset"]["data_loader"]
    loader["data_files"] = str(tmp_path / "instructions.jsonl")
    loader["cache_dir"] = str(tmp_path / "cache")
    loader["handler"][0]["tokenizer"]["pretrained_model_dir"] = str(tmp_path / "tokenizer")
    return loader


@pytest.mark.slow
def test_packed_conversations_arrive_with_their_ends(instructions):
    from mindformers.dataset.dataloader.hf_dataloader import HFDataLoader

    dataset = HFDataLoader(**instructions)
    wanted = load("telechat3_105b/finetune_4k.yaml")["train_dataset"]["input_columns"]
    assert dataset.get_col_names() == wanted
    sample = next(dataset.create_dict_iterator(num_epochs=1, output_numpy=True))
    assert {key: value.shape for key, value in sample.items()} == {
        **dict.fromkeys(wanted[:-1], (4096,)),
        "actual_seq_len": (128,),
    }
    ends = sample["actual_seq_len"]
    assert 30 < (ends < 4096).sum() < 128
    assert (np.diff(ends) >= 0).all()
    first = slice(0, ends[0])
    assert sample["position_ids"][first].tolist() == list(range(ends[0]))
    assert sample["position_ids"][ends[0]] == 0
    assert 0 < sample["loss_mask"][first].sum() < ends[0], "only answers are learnt"


BLENDED = RECIPES / "mini" / "pretrain_blended.yaml"


@pytest.fixture
def corpora(tmp_path, monkeypatch):
    """Both corpora where the recipe looks for them: documents of code, and fewer, shorter ones of prose."""
    monkeypatch.chdir(tmp_path)
    prefixes, _ = read_blend(load("mini/pretrain_blended.yaml")["train_dataset"]["data_loader"]["config"]["data_path"])
    (tmp_path / prefixes[0]).parent.mkdir(parents=True)
    random = np.random.default_rng(1)
    for prefix, documents, longest in zip(prefixes, (400, 16), (600, 3000), strict=True):
        write(tmp_path / prefix, random.integers(2, longest, documents))
    return prefixes


def test_check_takes_the_blend(corpora):
    report = check_recipe(BLENDED)
    assert report.clean and not report.warnings, report.findings


def test_another_tokenizer_for_one_of_them_is_refused(corpora, tmp_path):
    write(tmp_path / corpora[1], [400] * 40, eod=3)
    (found,) = check_recipe(BLENDED).errors
    assert f"{corpora[1]} ends its documents with id 3" in found.wrong


def test_imbalance_says_what_each_corpus_gives(corpora):
    for prefix in corpora:
        result = CliRunner().invoke(imbalance_command, [prefix, "--recipe", str(BLENDED), "--steps", "2"])
        assert result.exit_code == 0, result.output
        for share, corpus in zip((80, 20), corpora, strict=True):
            assert f"{share} % of the samples from {corpus}" in result.stdout
