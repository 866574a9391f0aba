"""This module packs conversations into samples of full length, in which each token's label is the next token. The
module is pure Python.

MindFormers 1.9.0's PackingHandler shifts labels by one place (`dataset/handler/packing_handler.py`), although
AlpacaInstructDataHandler has already shifted them: the model is trained to predict the token after the next token.
PackingHandler also puts the padding token behind the last label instead of the ignored label, so at the end of each
conversation the model is trained to predict token 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from plugins.errors import DataError, RecipeError
from plugins.settings import Section

KEY = "plugins.packed_labels"
LOADER = "train_dataset.data_loader"
PACKING = "PackingHandler"
# who makes conversations of text, and whether the labels that come from there are those of the next token already
SHIFTED = {"AlpacaInstructDataHandler": True, "CodeAlpacaInstructDataHandler": False}


@dataclass(frozen=True)
class Settings(Section):
    """The plugin has no settings."""

    KEY = KEY
    RIGHT = f"write {KEY}: {{}}, or False"
    CHANGE = ("numbers", "other data")


def read(settings: Any, loader: Mapping[str, Any]) -> bool:
    """Return whether a `train_dataset.data_loader` shifts each label to the next token before it packs.

    Raises:
        RecipeError: a setting is wrong, or this plugin does not support the packing of the loader.
    """
    Settings.read(settings)
    if loader.get("type") != "HFDataLoader" or loader.get("streaming"):
        raise RecipeError(
            f"the plugin corrects only the {PACKING} of an HFDataLoader that does not stream, but this recipe has "
            "another loader; take the plugin out",
            KEY,
        )
    entries = loader.get("handler")
    handlers = [entry for entry in entries if isinstance(entry, Mapping)] if isinstance(entries, list) else []
    types = [str(entry.get("type")) for entry in handlers]
    if PACKING not in types:
        raise RecipeError(
            f"the plugin corrects the labels of {PACKING}, but {LOADER}.handler has no such handler; take the plugin "
            "out",
            KEY,
        )
    place = types.index(PACKING)
    if (strategy := handlers[place].get("pack_strategy", "pack")) != "pack":
        raise RecipeError(
            f"{LOADER}.handler.{place}.pack_strategy: with {strategy!r} the handler delivers the lengths of "
            "conversations, but the loader reads these numbers as the conversations' ends; write 'pack'"
        )
    makers = [name for name in types[:place] if name in SHIFTED]
    if len(makers) != 1:
        known = " or ".join(SHIFTED)
        raise RecipeError(f"{LOADER}.handler: {KEY} needs exactly one handler of type {known} before {PACKING}")
    return SHIFTED[makers[0]]


def next_token_labels(labels: Sequence[int], shifted: bool, ignore: int) -> list[int]:
    """Return the labels of one conversation, [tokens], in which each token's label is the next token; the last token
    has no label unless text was cut off after it.
    """
    return list(labels) if shifted else [*labels[1:], ignore]


def pack(
    conversations: Iterable[Mapping[str, Sequence[int]]], shifted: bool, seq_length: int, pad: int, ignore: int
) -> dict[str, list[list[int]]]:
    """Return samples of whole conversations, in the order of the conversations, as the columns that HFDataLoader reads.

    A conversation is left out if it is longer than a sample, or if it has no label because its answer was cut off.

    Args:
        conversations: `input_ids` and `labels` of equal length, as the previous handler makes them.
        shifted: whether the label at a token is the next token; otherwise the label is the token itself.
        seq_length: the number of tokens of a sample.
        pad: the token after the last conversation.
        ignore: the label of tokens that are not learnt.

    Returns:
        `input_ids` and `labels`, [samples][seq_length]; `actual_seq_len`, [samples][conversations]: the end of each
            conversation.

    Raises:
        DataError: the labels have neither form, or there is no sample.
    """
    columns: dict[str, list[list[int]]] = {"input_ids": [], "labels": [], "actual_seq_len": []}
    tokens: list[int] = []
    labels: list[int] = []
    ends: list[int] = []
    for number, conversation in enumerate(conversations):
        own = next_token_labels(conversation["labels"], shifted, ignore)
        if len(own) > seq_length or all(label == ignore for label in own):
            continue
        _check(conversation["input_ids"], own, number, ignore)
        if len(tokens) + len(own) > seq_length:
            _add(columns, tokens, labels, ends, seq_length, pad, ignore)
            tokens, labels, ends = [], [], []
        tokens += conversation["input_ids"]
        labels += own
        ends.append(len(tokens))
    if tokens:
        _add(columns, tokens, labels, ends, seq_length, pad, ignore)
    if not columns["labels"]:
        raise DataError(
            f"{LOADER}.data_files: no conversation has an answer within its first {seq_length:,} tokens "
            f"(seq_length); give other conversations, or raise seq_length"
        )
    return columns


def enough(wanted: int, made: int) -> None:
    """Refuse a recipe that takes more packed samples than its conversations fill.

    Raises:
        DataError: `wanted` samples are requested, `made` samples exist.
    """
    if wanted > made:
        raise DataError(
            f"{LOADER}.handler (for held-out data: plugins.held_out_loss.samples): the data makes only {made:,} "
            f"samples, but `take` asks for {wanted:,}: take fewer (--steps), add data, or train more epochs"
        )


def _check(tokens: Sequence[int], labels: Sequence[int], number: int, ignore: int) -> None:
    """Raise DataError if the labels of a conversation are not its next tokens; the last label may be that of a token
    that was cut off.
    """
    if len(tokens) != len(labels):
        raise DataError(
            f"{LOADER}.data_files: conversation {number} has {len(tokens)} tokens but {len(labels)} labels; each "
            f"token must have one label"
        )
    for position, (after, label) in enumerate(zip(tokens[1:], labels, strict=False)):
        if label not in (ignore, after):
            raise DataError(
                f"{LOADER}.data_files: conversation {number}: the label at token {position} is {label}, but the next "
                f"token is {after}: {KEY} supports only handlers in which each label is the next token or ignored"
            )


def _add(
    columns: dict[str, list[list[int]]],
    tokens: list[int],
    labels: list[int],
    ends: list[int],
    seq_length: int,
    pad: int,
    ignore: int,
) -> None:
    rest = seq_length - len(tokens)
    columns["input_ids"].append(tokens + [pad] * rest)
    columns["labels"].append(labels + [ignore] * rest)
    columns["actual_seq_len"].append(ends)
