"""Packing against a slow reference that looks at one token at a time; which loaders it knows.

MindFormers' own handlers on two conversations: what they train, and what they train with the plugin.
"""

from itertools import count, pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mindformers import MindFormerConfig
from mindformers.dataset.dataloader.hf_dataloader import HFDataLoader
from mindformers.dataset.handler import alpaca_handler, base_handler, packing_handler

from plugins.errors import DataError, RecipeError
from plugins.packed_labels import adapter
from plugins.packed_labels.plan import enough, next_token_labels, pack, read

IGNORE = -100
ALPACA = {"type": "AlpacaInstructDataHandler", "seq_length": 8}
PACKING = {"type": "PackingHandler", "seq_length": 8}


SIZES = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=12)  # of prompt and answer


def conversations(sizes):
    """(prompt, answer) each, of tokens that no two places share."""
    fresh = count(1)
    return [tuple([next(fresh) for _ in range(size)] for size in pair) for pair in sizes]


def as_made(pairs, shifted):
    """Return the samples that AlpacaInstructDataHandler (shifted) or CodeAlpacaInstructDataHandler makes of `pairs`."""
    for prompt, answer in pairs:
        labels = [IGNORE] * len(prompt) + answer
        yield {"input_ids": prompt + answer, "labels": labels[1:] + [IGNORE] if shifted else labels}


@given(SIZES, st.booleans(), st.integers(12, 20))
def test_each_token_is_labelled_with_the_one_that_follows_it_in_an_answer(sizes, shifted, seq_length):
    pairs = conversations(sizes)
    columns = pack(as_made(pairs, shifted), shifted, seq_length, pad=0, ignore=IGNORE)
    packed = iter(pairs)
    for tokens, labels, ends in zip(columns["input_ids"], columns["labels"], columns["actual_seq_len"], strict=True):
        assert len(tokens) == len(labels) == seq_length
        begin = 0
        for end in ends:
            prompt, answer = next(packed)
            assert tokens[begin:end] == prompt + answer
            for place in range(begin, end):
                learnt = len(prompt) <= place + 1 - begin < end - begin
                assert labels[place] == (tokens[place + 1] if learnt else IGNORE)
            begin = end
        assert set(tokens[begin:]) <= {0} and set(labels[begin:]) <= {IGNORE}
    assert next(packed, None) is None, "each conversation is packed once"


@given(SIZES, st.integers(12, 20))
def test_a_sample_is_closed_when_the_next_conversation_does_not_fit(sizes, seq_length):
    pairs = conversations(sizes)
    columns = pack(as_made(pairs, True), True, seq_length, 0, IGNORE)
    samples = columns["actual_seq_len"]
    assert all(one[-1] + two[0] > seq_length for one, two in pairwise(samples))


def test_what_cannot_be_learnt_is_left_out():
    long = {"input_ids": [1] * 9, "labels": [1] * 9}
    cut = {"input_ids": [1] * 4, "labels": [IGNORE] * 4}  # its answer would begin behind the end
    begun = {"input_ids": [1, 2, 3], "labels": [IGNORE, 3, 4]}  # its last label is of a token that was cut off
    columns = pack([long, cut, begun], True, 8, 0, IGNORE)
    assert columns["actual_seq_len"] == [[3]]
    assert columns["labels"] == [[IGNORE, 3, 4] + [IGNORE] * 5]
    with pytest.raises(DataError, match="no conversation has an answer within its first 8 tokens"):
        pack([long, cut], True, 8, 0, IGNORE)


@pytest.mark.parametrize("labels", [[2, IGNORE], [2, 3, IGNORE, IGNORE]])
def test_a_conversation_needs_as_many_labels_as_tokens(labels):
    """The labels of all conversations behind it were at other places than their tokens."""
    with pytest.raises(DataError, match=rf"conversation 0 has 3 tokens but {len(labels)} labels; each token must"):
        pack([{"input_ids": [1, 2, 3], "labels": labels}], True, 8, 0, IGNORE)


def test_labels_of_another_kind_are_refused():
    with pytest.raises(DataError, match="conversation 1: the label at token 0 is 3, but the next token is 2"):
        pack([{"input_ids": [1, 2], "labels": [2, IGNORE]}, {"input_ids": [1, 2, 3], "labels": [3, IGNORE, IGNORE]}],
             True, 8, 0, IGNORE)  # fmt: skip


def test_labels_that_are_shifted_stay_and_others_are_shifted_once():
    assert next_token_labels([5, 6, IGNORE], True, IGNORE) == [5, 6, IGNORE]
    assert next_token_labels([IGNORE, 5, 6], False, IGNORE) == [5, 6, IGNORE]


def loader(*handlers, **more):
    return {"type": "HFDataLoader", "handler": [*handlers], **more}


def test_loaders_that_it_knows():
    assert read({}, loader(ALPACA, PACKING)) is True
    assert read({}, loader({"type": "sort"}, {**ALPACA, "type": "CodeAlpacaInstructDataHandler"}, PACKING)) is False


@pytest.mark.parametrize(
    ("settings", "data", "words"),
    [
        ({"shift": 1}, loader(ALPACA, PACKING), r"packed_labels\.shift: no such setting"),
        (True, loader(ALPACA, PACKING), r"packed_labels: write plugins\.packed_labels: \{\}, or False"),
        (
            {},
            {"type": "BlendedMegatronDatasetDataLoader"},
            "the plugin corrects only the PackingHandler of an HFDataLoader",
        ),
        ({}, loader(ALPACA, PACKING, streaming=True), "does not stream"),
        ({}, loader(ALPACA), "labels of PackingHandler, but .*handler has no such handler"),
        ({}, {"type": "HFDataLoader"}, "labels of PackingHandler, but .*handler has no such handler"),
        ({}, loader(PACKING, ALPACA), "needs exactly one handler of type AlpacaInstructDataHandler or"),
        ({}, loader({"type": "MyHandler"}, PACKING), "needs exactly one handler of type AlpacaInstructDataHandler or"),
        ({}, loader(ALPACA, {**PACKING, "pack_strategy": "truncate"}), r"handler\.1\.pack_strategy: with 'truncate'"),
    ],
)
def test_what_it_does_not_know_is_named(settings, data, words):
    with pytest.raises(RecipeError, match=words):
        read(settings, data)


def test_more_samples_than_there_are_is_said():
    enough(8, 8)
    with pytest.raises(DataError, match=r"makes only 7 samples, but `take` asks for 8"):
        enough(8, 7)


ROWS = [{"instruction": "say", "input": "", "output": "one two three"}, {"instruction": "go", "output": "four"}]


class Words:
    """A tokenizer of whole words: the first word that it sees is 1."""

    pad_token_id = 0

    def __init__(self):
        self.known = {}

    def __call__(self, text):
        return {"input_ids": [self.known.setdefault(word, len(self.known) + 1) for word in text.split()]}


@pytest.fixture
def data(monkeypatch):
    """Return the samples that AlpacaInstructDataHandler makes of `ROWS`, as a datasets.Dataset."""
    from datasets import Dataset

    monkeypatch.setattr(base_handler, "is_legacy_model", lambda: False)
    handler = alpaca_handler.AlpacaInstructDataHandler(seq_length=100, padding=False, tokenizer=None)
    handler.tokenizer = Words()
    return Dataset.from_list([handler.process(row) for row in ROWS])


@pytest.fixture
def enabled(monkeypatch):
    """The plugin on, and off again after the test."""
    monkeypatch.setattr(packing_handler, "pack_examples", packing_handler.pack_examples)
    monkeypatch.setattr(HFDataLoader, "_process_source", staticmethod(HFDataLoader._process_source))
    handlers = [{"type": "AlpacaInstructDataHandler"}, {"type": "PackingHandler"}]
    adapter.enable(MindFormerConfig(train_dataset={"data_loader": {"type": "HFDataLoader", "handler": handlers}}), {})


def wrong_labels(packed):
    """(token, label) wherever a label that counts is not the next token of its conversation."""
    found = []
    for sample in packed:
        ends = {0, *sample["actual_seq_len"]}
        pairs = zip(sample["input_ids"], [*sample["input_ids"][1:], None], sample["labels"], strict=True)
        for place, (token, after, label) in enumerate(pairs):
            if label != -100 and (label != after or place + 1 in ends):
                found.append((token, label))
    return found


def test_mindformers_labels_are_one_place_too_far_and_end_in_the_padding(data):
    """This test shows the fault of MindFormers that the plugin mends; if the test fails, MindFormers has mended the
    fault.
    """
    packed = list(packing_handler.PackingHandler(seq_length=60, tokenizer=None)(data))
    words = data[0]["input_ids"]
    wrong = wrong_labels(packed)
    assert [label for _, label in wrong].count(0) == len(ROWS), "each conversation ends in training token 0"
    assert (words[-4], words[-2]) in wrong, "the label of a token is the token after the next"


@pytest.mark.usefixtures("enabled")
def test_with_the_plugin_every_label_is_the_next_token_of_an_answer(data):
    (sample,) = packing_handler.PackingHandler(seq_length=120, tokenizer=None)(data)
    assert wrong_labels([sample]) == []
    sizes = [len(row["input_ids"]) for row in data]
    assert sample["actual_seq_len"] == [sizes[0], sum(sizes)]
    learnt = sum(label != -100 for label in sample["labels"])
    assert learnt == sum(label != -100 for row in data for label in row["labels"]) == 4 + 2  # with the word ASSISTANT:


@pytest.mark.usefixtures("enabled")
def test_no_loss_of_mtp_crosses_from_one_conversation_into_the_next(data):
    """MTP shifts labels by one place: at a conversation's last token stands the next one's first label, which is of a
    prompt, and before it the last label of the conversation.
    """
    (sample,) = packing_handler.PackingHandler(seq_length=120, tokenizer=None)(data)
    ends = sample["actual_seq_len"][:-1]
    assert len(ends) == 1 and all(sample["labels"][end - 1] == sample["labels"][end] == -100 for end in ends)


@pytest.mark.usefixtures("enabled")
def test_taking_more_than_there_is_is_said_in_words(data):
    config = SimpleNamespace(process=[{"type": "take", "n": 3}])
    with pytest.raises(DataError, match="makes only 2 samples, but `take`"):
        HFDataLoader.process_dataset(config, data)
    taken, _ = HFDataLoader.process_dataset(SimpleNamespace(process=[{"type": "take", "n": 1}]), data)
    assert len(taken) == 1
