"""MindFormers' own handlers on two conversations: what they train, and what they train with the plugin."""

from types import SimpleNamespace

import pytest
from mindformers import MindFormerConfig
from mindformers.dataset.dataloader.hf_dataloader import HFDataLoader
from mindformers.dataset.handler import alpaca_handler, base_handler, packing_handler

from plugins.errors import DataError
from plugins.packed_labels import adapter

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
    """What AlpacaInstructDataHandler makes of `ROWS`, as a datasets.Dataset."""
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
    """Why the plugin is there; when this fails, MindFormers has mended it."""
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
