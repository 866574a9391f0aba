"""Files that a recipe names, and the dataset's index against the model."""

import json
import re
import shutil
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import yaml
from mindformers.dataset.blended_datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from mindformers.dataset.blended_datasets.gpt_dataset import GPTDataset
from mindformers.dataset.dataloader.blended_megatron_dataloader import MegatronDatasetBuilder

from plugins.attention_balance.samples import build_gpt_index, segments_of
from plugins.errors import RecipeError
from plugins.spike_guard import plan as spike_guard
from plugins.spike_guard.adapter import spare_of
from tests.tools.check.mutations import LOADER, MODEL, put
from tests.tools.check.test_mutations import ROOT, plain
from tools.accuracy.collectives import sharded_recipe
from tools.accuracy.equivalence.strategies import one_worker
from tools.check.check import check_recipe, require_sound
from tools.data.index import IndexWriter
from tools.recipe.load import dotted, load_recipe
from tools.recipe.view import View

MINI_FILE, MINI_TP2 = (ROOT / "recipes" / "mini" / name for name in ("pretrain.yaml", "pretrain_tp2.yaml"))
MINI = plain(MINI_FILE)
MINI["plugins"] = {}
MINI["lr_schedule"]["warmup_steps"] = 2  # of a run of ten steps


@pytest.fixture
def prefix(tmp_path):
    return write(tmp_path / "data", [400] * 40)


def write(prefix, lengths, vocabulary=2048, eod=0):
    writer = IndexWriter(prefix.with_suffix(".bin"), "uint16")
    writer.add(np.array(lengths, np.int32), np.ones(sum(lengths), np.uint16))
    writer.finish(prefix.with_suffix(".idx"))
    notes = {"format": "tc3-data-1", "vocab_size": vocabulary, "eod_id": eod}
    prefix.with_suffix(".json").write_text(json.dumps(notes), "utf-8")
    return str(prefix)


def on(prefix, recipe=MINI):
    recipe = put(recipe, (*LOADER, "config", "data_path"), ["1", prefix])
    return put(recipe, (*LOADER, "sizes"), [80, 0, 0])


def wrong(recipe, **options):
    return {finding.key: finding for finding in check_recipe(recipe, **options).findings}


def test_a_dataset_that_fits(prefix):
    assert wrong(on(prefix)) == {}


def test_missing_data_is_an_error_only_where_the_run_starts(tmp_path):
    recipe, key = on(str(tmp_path / "nothing")), "train_dataset.data_loader.config.data_path"
    assert wrong(recipe)[key].severity == "warning"
    assert wrong(recipe, here=True)[key].severity == "error"
    assert "tc3 data prepare" in wrong(recipe)[key].right


@pytest.mark.parametrize("sharded", [False, True])
def test_a_command_with_data_of_its_own_does_not_look_at_the_recipes(tmp_path, sharded):
    """`tc3 accuracy` trains on made-up data; whether it starts does not depend on what lies in `output/`."""
    recipe = on(write(tmp_path / "data", [400] * 40, vocabulary=5000), plain(MINI_TP2 if sharded else MINI_FILE))
    held_out = write(tmp_path / "held", [400] * 40, vocabulary=5000)
    recipe = put(recipe, ("plugins", "held_out_loss"), {"data_path": held_out, "every": 10})
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe, sort_keys=False))
    with pytest.raises(RecipeError, match="5,000"):
        require_sound(load_recipe(file))
    made = sharded_recipe(file, ()) if sharded else one_worker(str(file))
    assert made["train_dataset"]["data_loader"]["config"]["data_path"] == ["1", str(tmp_path / "data")]


@pytest.mark.parametrize(
    ("split", "trains"),
    [
        ("1, 0, 0", True),
        ("0.5, 0.5", True),
        ("0, 0, 0", False),
        ("0, 1, 0", False),
        ("0.0", False),
        ("0 0 0", False),
        ("0/1/0", False),
        (".0, 1, 0", False),
        ("1.2.3", False),
        ("1, 0, 0, 0", False),
        ("", False),
    ],
)
def test_a_split_that_leaves_nothing_to_train(prefix, split, trains):
    """MindFormers trains on the first part, and makes no dataset of a part of zero."""
    found = wrong(put(on(prefix), (*LOADER, "config", "split"), split))
    assert ("train_dataset.data_loader.config.split" not in found) == trains


@pytest.mark.parametrize(
    ("split", "documents", "part"),
    [
        ("1, 1, 1", 1, "training"),
        ("0.001, 0.999, 0", 40, "training"),
        ("999, 1, 0", 40, "validation"),
        ("969, 30, 1", 40, "test"),
        ("969, 30, 1", 1000, None),
        ("0.5, 0.5", 2, None),
    ],
)
def test_a_part_of_the_split_without_a_document(tmp_path, split, documents, part):
    """MindFormers adds up passes over the tokens of such a part, which are none, until there is one."""
    key = "train_dataset.data_loader.config.split"
    found = wrong(put(on(write(tmp_path / "data", [400] * documents)), (*LOADER, "config", "split"), split))
    assert (f"the {part} part gets none of the {documents} documents" in found[key].wrong) if part else key not in found


@pytest.mark.parametrize("weights", [("1",), ("1", "2"), ("", "")])
@pytest.mark.parametrize("whole", [True, False])
def test_a_part_of_the_split_without_a_sample(tmp_path, weights, whole):
    """MindFormers refuses a blend without weights if one of its corpora has no sample in any part."""
    prefixes = [write(tmp_path / name, [100] * 100) for name in "ab"][: len(weights)]
    path = [entry for pair in zip(weights, prefixes, strict=True) for entry in pair if entry]
    recipe, key = put(on(prefixes[0]), (*LOADER, "config", "data_path"), path), (*LOADER, "config", "split")
    recipe = put(recipe, (*LOADER, "config", "drop_last_partial_validation_sequence"), whole)
    for split in ("99, 1, 0", "98, 2, 0", "99, 0, 1"):
        asked = put(recipe, key, split)
        found = wrong(asked).get(dotted(key))
        with pytest.raises(AssertionError) if found else nullcontext():
            served(asked, kept=True)
        expected = weights[0] == "" and (split == "99, 0, 1" or (split == "99, 1, 0" and whole))
        assert bool(found) == expected


def test_keys_that_name_no_corpus_or_one_twice(prefix):
    config = (*LOADER, "config")

    def severities(**changes):
        recipe = on(prefix)
        for key, value in changes.items():
            recipe = put(recipe, (*config, key), value)
        return {key.removeprefix(f"{dotted(config)}."): each.severity for key, each in wrong(recipe).items()}

    assert severities(data_path=None) == {"data_path": "error"}
    assert severities(split=None) == {"split": "error"}
    assert severities(train_data_path=["1", prefix]) == {"train_data_path": "error"}
    both = {"train_data_path": "error", "valid_data_path": "error"}
    assert severities(train_data_path=["1", prefix], valid_data_path=["1", prefix]) == both
    alone = put(put(on(prefix), (*config, "train_data_path"), ["1", prefix]), (*config, "data_path"), None)
    for recipe in (alone, put(alone, (*config, "split"), None)):
        found = wrong(recipe)[f"{dotted(config)}.train_data_path"]
        assert (found.severity, found.right) == ("error", "name it data_path, with split: '1, 0, 0'")
    other = {"data_path": "error", "valid_data_path": "error"}
    assert severities(valid_data_path=["1", prefix], data_path=None, split=None) == other


def test_the_tokens_of_a_corpus_of_another_program(prefix):
    """Nothing beside the pair says which tokenizer made it."""
    Path(f"{prefix}.json").unlink()
    assert wrong(on(prefix)) == {}, "documents may end without an id that nothing reads"
    key, masks = "train_dataset.data_loader.config.eod", (*LOADER, "config", "reset_position_ids")
    found = wrong(put(on(prefix), masks, True))[key]
    assert found.severity == "warning" and "16 of 16 documents" in found.wrong and "such as 1" in found.wrong
    tokens = np.ones(400 * 40, np.uint16)
    tokens[np.arange(2, 41) * 400 - 1] = 0
    tokens.tofile(f"{prefix}.bin")
    assert "1 of 16 documents" in wrong(put(on(prefix), masks, True))[key].wrong
    tokens[[399, 7777]] = 0, 2048
    tokens.tofile(f"{prefix}.bin")
    found = wrong(put(on(prefix), masks, True))
    assert found.keys() == {"model.model_config.vocab_size"}
    assert "holds the token id 2048" in found["model.model_config.vocab_size"].wrong
    assert found["model.model_config.vocab_size"].right == "write at least 2,049, or prepare the corpus again"
    assert wrong(put(put(on(prefix), masks, True), (*LOADER, "config", "pad"), 2048)) == {}, "MindFormers replaces it"


def served(recipe, kept=False):
    """The samples of MindFormers' own data set of a recipe, whose order it keeps beside the corpus."""
    config = recipe["train_dataset"]["data_loader"]["config"]
    if not kept:
        shutil.rmtree(config["data_path"][1], ignore_errors=True)
    sizes = recipe["train_dataset"]["data_loader"]["sizes"]
    config = MegatronDatasetBuilder("GPTDataset", config).init_gpt_dataset_config()
    return BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()[0]


def test_the_order_that_is_kept_of_another_corpus(tmp_path):
    """MindFormers finds it by the path of the corpus, and asks for nothing of the content."""
    prefix, key = write(tmp_path / "data", [400] * 40), "train_dataset.data_loader.config.data_path"
    recipe = on(prefix)
    served(recipe, kept=True)
    assert key not in wrong(recipe)
    for lengths in ([300] * 40, [401] + [400] * 39, [400] * 39, [400] * 20 + [399, 401] + [400] * 18):
        write(tmp_path / "data", lengths)
        assert "keeps the order of samples of another corpus" in wrong(recipe)[key].wrong
    assert wrong(recipe)[key].right.startswith(f"remove {prefix}/cache/GPTDataset_indices/")
    for name, value in (("split", "100, 0, 0"), ("seed", 4), ("seq_length", 64), ("path_to_cache", "")):
        assert key not in wrong(put(recipe, (*LOADER, "config", name), value)), "MindFormers does not read it"
    assert key not in wrong(put(recipe, (*LOADER, "sizes"), [72, 0, 0]))
    assert key not in wrong(put(recipe, (*LOADER, "config", "data_path"), [prefix]))
    for value in (3, True, [prefix]):
        assert "data_loader.config.path_to_cache" in " ".join(wrong(put(recipe, (*LOADER, "config", name), value)))
    write(tmp_path / "data", [500] * 40)
    samples = served(recipe, kept=True)
    with pytest.raises(IndexError, match="dimension is 228"):  # tokens of one sample and of what was a document's end
        [samples[number] for number in range(80)]
    shutil.rmtree(Path(prefix))
    assert key not in wrong(recipe)
    held_out = {"held_out_loss": {"data_path": write(tmp_path / "held", [400] * 40), "every": 10, "samples": 80}}
    served(on(str(tmp_path / "held")), kept=True)
    write(tmp_path / "held", [300] * 40)
    assert wrong(put(recipe, ("plugins",), held_out)).keys() == {"plugins.held_out_loss.data_path"}


def test_the_order_of_a_part_that_is_not_trained_may_end_within_a_sample(tmp_path):
    """MindFormers keeps the last, incomplete sample of the validation part."""
    recipe = on(write(tmp_path / "data", [401] * 40))
    for name, value in (("split", "80, 20, 0"), ("drop_last_partial_validation_sequence", False)):
        recipe = put(recipe, (*LOADER, "config", name), value)
    recipe = put(recipe, (*LOADER, "sizes"), [80, 8, 0])
    served(recipe, kept=True)
    assert "train_dataset.data_loader.config.data_path" not in wrong(recipe)
    write(tmp_path / "data", [400] * 40)
    assert "train_dataset.data_loader.config.data_path" in wrong(recipe)


def test_the_order_of_each_corpus_of_a_blend(tmp_path):
    """MindFormers asks each for its share and 0.5 % more, or without weights for one pass."""
    one, two = (write(tmp_path / name, [400] * 40) for name in "ab")
    for blend in (["0.3", one, "0.7", two], [one], [one, two, two]):
        recipe = put(on(one), (*LOADER, "config", "data_path"), blend)
        served(recipe, kept=True)
        write(tmp_path / "a", [300] * 40)
        assert "keeps the order" in wrong(recipe)["train_dataset.data_loader.config.data_path"].wrong
        write(tmp_path / "a", [400] * 40)


def test_a_corpus_without_a_document(tmp_path, prefix):
    empty, held_out = write(tmp_path / "empty", []), ("plugins", "held_out_loss")
    found = check_recipe(on(empty)).findings
    assert [each.key for each in found] == ["train_dataset.data_loader.config.data_path"]
    assert "holds 0 tokens" in found[0].wrong
    found = check_recipe(put(on(prefix), held_out, {"data_path": empty, "every": 10})).findings
    assert [each.key for each in found] == ["plugins.held_out_loss.data_path"]


def test_a_token_below_zero(prefix):
    Path(f"{prefix}.json").unlink()
    writer = IndexWriter(Path(f"{prefix}.bin"), "int32")
    writer.add(np.array([400] * 40, np.int32), np.full(16000, -100, np.int32))
    writer.finish(Path(f"{prefix}.idx"))
    found = wrong(on(prefix))["model.model_config.vocab_size"]
    assert "the token id -100" in found.wrong and found.right == "prepare the corpus again"


def test_a_padding_id_that_the_text_has(prefix):
    """MindFormers changes the loss mask that it keeps for all samples, if it keeps one."""
    tokens = np.ones(400 * 40, np.uint16)
    tokens[::400] = 5
    tokens.tofile(f"{prefix}.bin")
    config, key = (*LOADER, "config"), "train_dataset.data_loader.config.pad"
    padded = put(on(prefix), (*config, "pad"), 5)
    samples = served(padded)
    counted = [int(samples[number][2].sum()) for number in range(80)]
    assert counted == sorted(counted, reverse=True) and counted[-1] < counted[0]
    assert "the loss of all later samples" in wrong(padded)[key].wrong
    for right in (put(padded, (*config, "eod_mask_loss"), True), put(padded, (*config, "pad"), 6)):
        assert key not in wrong(right)
        samples = served(right)
        places = [np.flatnonzero(samples[number][2] == 0) for number in range(80)]
        assert max(map(len, places)) <= 1, "of its own text only"


@pytest.mark.parametrize(
    ("pad", "eod", "changes", "severity"),
    [
        (-1, -1, {}, None),
        (0, 7, {}, None),
        (7, 7, {}, "error"),
        (7, 7, {"reset_position_ids": True}, "warning"),  # the end of a document becomes token 0
        (0, 0, {}, "error"),  # the loss mask that all samples share
        (0, 0, {"eod_mask_loss": True}, "warning"),
    ],
)
def test_a_padding_id_that_ends_documents(pad, eod, changes, severity):
    recipe = put(MINI, (*LOADER, "config", "data_path"), ["1", "none"])  # the quickstart's corpus has tokens 0
    for key, value in {"pad": pad, "eod": eod, **changes}.items():
        recipe = put(recipe, (*LOADER, "config", key), value)
    finding = wrong(recipe).get("train_dataset.data_loader.config.pad")
    assert (finding.severity if finding else None) == severity


@pytest.mark.parametrize("reset", [None, "reset_position_ids", "reset_attention_mask", "eod_mask_loss"])
def test_a_compressed_mask_that_is_made_once(prefix, reset):
    recipe, key = on(prefix), "train_dataset.data_loader.config.create_compressed_eod_mask"
    for name in ("create_compressed_eod_mask", reset) if reset else ("create_compressed_eod_mask",):
        recipe = put(recipe, (*LOADER, "config", name), True)
    samples = served(recipe)
    assert samples[0][4].shape == (128,)
    with nullcontext() if reset else pytest.raises(AttributeError):
        assert samples[1][4].shape == (128,)
    found = [each.wrong for each in check_recipe(recipe).errors if each.key == key]
    assert any("fails at the second sample" in each for each in found) == (reset is None)


def test_held_out_data_is_checked_as_training_data_is(tmp_path, prefix):
    other = write(tmp_path / "other", [400] * 40, vocabulary=5000, eod=3)
    held_out = {"data_path": [prefix, other], "every": 10}
    found = wrong(put(on(prefix), ("plugins",), {"held_out_loss": held_out}))
    assert found.keys() == {"model.model_config.vocab_size", "train_dataset.data_loader.config.eod"}
    with open(other + ".bin", "ab") as stream:
        stream.write(b"xx")
    assert wrong(put(on(prefix), ("plugins",), {"held_out_loss": held_out})).keys() == {
        "plugins.held_out_loss.data_path"
    }


def test_a_vocabulary_larger_than_the_models(tmp_path):
    found = wrong(on(write(tmp_path / "data", [400] * 40, vocabulary=5000)))
    assert found["model.model_config.vocab_size"].severity == "error"
    assert "5,000" in found["model.model_config.vocab_size"].wrong


def test_another_end_of_document(tmp_path):
    found = wrong(on(write(tmp_path / "data", [400] * 40, eod=3)))
    assert found["train_dataset.data_loader.config.eod"].right == "write 3"


def test_too_few_tokens_for_one_sample(tmp_path):
    """MindFormers repeats a corpus of which it needs a number of samples, and reads several without weights once."""
    assert "128" in str(MINI["model"]["model_config"]["seq_length"])
    key, one, small = (
        "train_dataset.data_loader.config.data_path",
        *(write(tmp_path / name, lengths) for name, lengths in (("one", [400] * 40), ("small", [20]))),
    )
    assert key not in wrong(on(small)) and len(served(on(small))[79][0]) == 128
    assert wrong(put(on(one), (*LOADER, "config", "data_path"), [one, small, small]))[key].severity == "error"
    assert "at least 2" in wrong(on(write(tmp_path / "token", [1])))[key].wrong


def test_a_truncated_pair(prefix):
    with open(prefix + ".bin", "ab") as stream:
        stream.write(b"xx")
    assert "bytes" in wrong(on(prefix))["train_dataset.data_loader.config.data_path"].wrong


@pytest.mark.parametrize(
    ("lengths", "room", "shared", "severity"),
    [
        ([10] * 100 + [30] * 100, 64, {}, "error"),  # 2048 tokens hold 102 documents on average, at most 136
        ([10] * 100 + [30] * 100, 110, {}, "warning"),
        ([10] * 100 + [30] * 100, 2048, {}, None),
        ([300] * 200, 7, {}, "warning"),  # six whole ones and parts of two
        ([300] * 200, 8, {}, None),
        ([300] * 200, 8, {"context_parallel": 2}, "warning"),  # the last entry stays padding
        ([300] * 200, 9, {"context_parallel": 2}, None),
        ([300] * 200, 8, {"context_parallel": 2, "context_parallel_algo": "ulysses_cp"}, None),
    ],
)
def test_documents_of_a_compressed_mask(tmp_path, lengths, room, shared, severity):
    recipe = compressed(write(tmp_path / "data", lengths), room)
    if shared:
        recipe = put(put(recipe, ("use_parallel",), True), ("parallel", "parallel_mode"), 1)
    for key, value in shared.items():
        recipe = put(recipe, ("parallel_config", key), value)
    finding = wrong(recipe).get(ROOM)
    assert (finding.severity if finding else None) == severity


def test_a_sample_may_hold_a_document_of_each_epoch(tmp_path):
    lengths = [1] * 2 + [400] * 6
    prefix = write(tmp_path / "data", lengths)
    most = int(segments_of(build_gpt_index(np.array(lengths, np.int32), 2048, 81, 1234), 0, 80).counts().max())
    assert most > len(lengths) + 1, "more than one epoch has"
    blend = ["1", write(tmp_path / "other", [300] * 200), "1", prefix]
    both = put(compressed(prefix, most - 1), (*LOADER, "config", "data_path"), blend)
    assert len([each for each in check_recipe(both).findings if each.key == ROOM]) == 1, "one advice for all corpora"
    said = wrong(compressed(prefix, most - 1))[ROOM]
    enough = int(re.search("hold ([0-9]+)", said.wrong)[1])
    assert said.severity == "warning" and enough >= most and ROOM not in wrong(compressed(prefix, enough))


def test_only_documents_that_are_trained_on_count(tmp_path):
    split, many = (*LOADER, "config", "split"), write(tmp_path / "many", [300] * 30 + [5] * 900)
    assert wrong(compressed(many, 100))[ROOM].severity == "error", "141 on average"
    assert ROOM not in wrong(put(compressed(many, 100), split, "0.033, 0.967, 0"))
    few = write(tmp_path / "few", [5] * 900 + [300] * 90)
    assert wrong(compressed(few, 100))[ROOM].severity == "warning"
    assert wrong(put(compressed(few, 100), split, "0.9, 0.1, 0"))[ROOM].severity == "error"
    sizes = "train_dataset.data_loader.sizes"
    assert sizes not in wrong(on(many)) and wrong(put(on(many), split, "0.004, 0.996, 0"))[sizes].severity == "warning"


ROOM = "train_dataset.data_loader.config.eod_pad_length"


def compressed(prefix, room):
    """A recipe with samples of 2,048 tokens, and a mask with room for `room` documents."""
    recipe = on(prefix)
    for key in ("create_compressed_eod_mask", "reset_position_ids"):
        recipe = put(recipe, (*LOADER, "config", key), True)
    recipe = put(recipe, (*LOADER, "config", "create_attention_mask"), False)
    recipe = put(recipe, (*LOADER, "config", "eod_pad_length"), room)
    for path in ((*MODEL, "seq_length"), (*MODEL, "max_position_embeddings"), (*LOADER, "config", "seq_length")):
        recipe = put(recipe, path, 2048)
    return recipe


@pytest.mark.parametrize(
    ("value", "word"),
    [
        (["1"], "no prefix"),
        ([], "of a weight and a path"),
        (["1", "a", "b", "c"], "weights to some prefixes only"),
        ([["a"]], "of a weight and a path"),
    ],
)
def test_blends(value, word):
    found = wrong(put(MINI, (*LOADER, "config", "data_path"), value))
    assert word in found["train_dataset.data_loader.config.data_path"].wrong


@pytest.mark.parametrize("shares", [("nan", "1"), ("inf", "1"), ("-1", "2"), ("0", "1")])
def test_shares_of_a_blend_that_are_none(shares, prefix):
    path = (*LOADER, "config", "data_path")
    found = wrong(put(on(prefix), path, [shares[0], prefix, shares[1], prefix]))
    assert "cannot be shares of the data" in found["train_dataset.data_loader.config.data_path"].wrong


def test_passes_over_a_corpus_count_its_share_of_the_samples(tmp_path):
    """1,000 samples of 128 repeat 8 times and more over 16,000 tokens, or 1.6 where a fifth of the samples is taken."""
    small, large = write(tmp_path / "small", [400] * 40), write(tmp_path / "large", [400] * 400)
    key, path = "train_dataset.data_loader.sizes", (*LOADER, "config", "data_path")
    blend = put(put(on(small), (*LOADER, "sizes"), [1008, 0, 0]), path, ["8", large, "2", small])
    assert key not in wrong(blend)
    found = wrong(put(put(blend, (*LOADER, "sizes"), [10080, 0, 0]), path, ["8", large, "2", small]))[key].wrong
    assert "repeat 16 times" in found and "20 % of 10,080 samples" in found and "small" in found
    assert "1,008 samples repeat 8 times" in wrong(put(blend, path, ["1", small]))[key].wrong


def test_corpora_without_weights_are_read_once(tmp_path):
    """MindFormers gives 124 and 67 samples of these, or 87 and 47 of seven tenths, whatever number is asked for."""
    two = [write(tmp_path / "a", [400] * 40), write(tmp_path / "b", [377] * 23)]
    key, sizes = "train_dataset.data_loader.sizes", (*LOADER, "sizes")
    recipe = put(on(two[0]), (*LOADER, "config", "data_path"), two)
    assert key not in wrong(each := put(recipe, sizes, [191, 0, None])) and len(served(each)) == 191
    assert re.search("^error.* the 191 of one pass", str(wrong(put(recipe, sizes, [192, 0, 0]))[key]))
    part = put(recipe, (*LOADER, "config", "split"), "0.7, 0.3, 0")
    more, most = (wrong(put(part, sizes, [count, 0, 0])).get(key) for count in (135, 192))
    assert more is None and "the 134 of one pass" in most.wrong
    for blend in (["1", two[0], "1", two[1]], two[:1]):
        assert key not in wrong(put(put(recipe, sizes, [192, 0, 0]), (*LOADER, "config", "data_path"), blend))


@pytest.mark.parametrize(
    ("blend", "lengths", "samples"),
    [
        ((0.9, *[0.01] * 10), ([43] * 275, *[[400] * 2] * 10), 100),  # 100 of 92 samples
        ((0.9, *[0.01] * 10), ([43] * 300, *[[400] * 2] * 10), 100),  # of 100
        ((7, 0.01, 0.01), ([263], [400] * 2, [431]), 152),
        ((3, 1), ([129] * 20, [1290]), 24),
        ((5, 4, 0.0001), ([400] * 9, [400] * 9, [130]), 1),  # the last corpus gives no sample
    ],
)
def test_a_blend_takes_no_more_of_a_corpus_than_its_passes_have(tmp_path, blend, lengths, samples):
    """MindFormers rounds up what it asks of each corpus, and deals out the sum by the shares."""
    prefixes = [write(tmp_path / str(place), each) for place, each in enumerate(lengths)]
    path = [entry for pair in zip(blend, prefixes, strict=True) for entry in pair]
    recipe, key = put(on(prefixes[0]), (*LOADER, "config", "data_path"), path), "train_dataset.data_loader.sizes"
    for count in range(samples, samples + 16):
        asked = put(put(recipe, (*LOADER, "sizes"), [count, 0, 0]), ("runner_config", "batch_size"), 1)
        found = [each for each in check_recipe(asked).errors if "of which it reads whole passes" in each.wrong]
        with pytest.raises(IndexError, match="out of bounds") if found else nullcontext():
            served(asked)
        if found and (advice := re.match("write ([0-9,]+) samples", found[0].right)):
            other = put(asked, (*LOADER, "sizes"), [int(advice[1].replace(",", "")), 0, 0])
            assert key not in {each.key for each in check_recipe(other).errors}


@pytest.mark.parametrize("weights", [None, ("1",), ("3", "1"), ("", "")])
@pytest.mark.parametrize(
    "guard", [{"rollbacks": 1, "skip": 2}, {"rollbacks": 1}, {"rollbacks": 1, "skipped": [[3, 20]]}]
)
def test_samples_in_the_place_of_those_that_the_spike_guard_leaves_out(tmp_path, weights, guard):
    """The plugin ends a run at its beginning if the data has too few."""
    prefixes = [write(tmp_path / name, [400] * 13) for name in "ab"][: len(weights or "1")]
    path = [entry for pair in zip(weights or ("",), prefixes, strict=True) for entry in pair if entry]
    recipe = put(on(prefixes[0]), (*LOADER, "config", "data_path"), path)
    recipe = put(recipe, ("plugins",), {"spike_guard": {"rollbacks": 1, **guard}})
    skipped, steps, batch = spike_guard.read(guard).skipped, guard.get("skip", 1), View(recipe).global_batch
    for samples in range(batch, 81, 2):
        asked = put(recipe, (*LOADER, "sizes"), [samples, 0, 0])
        needed = 0 if skipped else steps * batch  # a run that goes on may have left out what it had to spare
        spare = spare_of(served(asked, kept=True), skipped, samples, needed)
        assert (spare < needed) == any("spike_guard may leave out" in each.wrong for each in check_recipe(asked).errors)
