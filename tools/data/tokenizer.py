"""This module provides tokenizers: it trains a byte-level BPE on the corpus, or loads a Hugging Face folder.

Worker processes receive a tokenizer as a `TokenizerSpec`, from which they build a `Coder`.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any, NamedTuple

import tokenizers

from plugins.errors import DataError, did_you_mean
from tools.process.children import interruptibly

EOD_TOKEN = "<|endoftext|>"  # id 0 in a tokenizer trained here
SMALLEST_VOCAB = 256 + 1  # every byte, and EOD_TOKEN


class TokenizerSpec(NamedTuple):
    """A `TokenizerSpec` holds the data with which a process can rebuild a tokenizer."""

    backend: str | None  # tokenizer.json; None for a slow Hugging Face tokenizer, which is loaded from `folder`
    folder: str
    trust_remote_code: bool = False


@dataclass(frozen=True)
class Tokenizer:
    """A `Tokenizer` holds the properties of a loaded tokenizer, such as its vocabulary size.

    vocab_size: the largest token id + 1, which is the smallest size of a model's embedding.
    lossless: whether decoding gives back the exact text. fingerprint: a text that is equal for tokenizers that give
    equal ids.
    """

    spec: TokenizerSpec
    vocab_size: int
    eod_id: int
    eod_token: str
    lossless: bool
    fingerprint: str


class Coder:
    """A `Coder` converts text to ids and back. Text in the form of a special token is encoded as ordinary text."""

    def __init__(self, spec: TokenizerSpec) -> None:
        if spec.backend is None:
            self._slow = _load_hugging_face(spec.folder, spec.trust_remote_code)
        else:
            self._slow = None
            self._fast = tokenizers.Tokenizer.from_str(spec.backend)
            self._fast.no_truncation()
            self._fast.no_padding()
            self._fast.encode_special_tokens = True  # "<|endoftext|>" in a document must not end it

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each text, without end-of-document ids."""
        if self._slow is not None:
            flags = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
            return [self._slow(text, **flags)["input_ids"] for text in texts]
        batch = interruptibly(lambda: self._fast.encode_batch_fast(list(texts), add_special_tokens=False))
        return [encoding.ids for encoding in batch]

    def decode(self, ids: Sequence[int]) -> str:
        """Decode the token ids of one document, and return the text."""
        assert self._slow is None, "slow tokenizers are compared by ids"
        return interruptibly(lambda: self._fast.decode(list(ids), skip_special_tokens=False))


def train(texts: Iterable[str], vocab_size: int, folder: Path) -> Tokenizer:
    """Train a byte-level BPE tokenizer of at most `vocab_size` ids, and save it in `folder` so that `AutoTokenizer` can
    load it.

    The same texts give the same files, whatever the number of threads. A small corpus gives fewer ids than
    `vocab_size`.
    Raises `DataError` if `vocab_size` is too small for all 256 bytes and the end-of-document token.
    """
    if vocab_size < SMALLEST_VOCAB:
        raise DataError(f"--vocab-size {vocab_size} is too small: 256 bytes and {EOD_TOKEN} need {SMALLEST_VOCAB}")
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOD_TOKEN],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    _train(backend, texts, trainer)
    folder.mkdir()
    (folder / "tokenizer.json").write_text(backend.to_str(pretty=True), encoding="utf-8")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOD_TOKEN,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1_000_000_000,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    return _describe(backend.to_str(), folder, EOD_TOKEN)


def _train(backend: tokenizers.Tokenizer, texts: Iterable[str], trainer: Any) -> None:
    """Train the tokenizer, and stop reading the corpus at Ctrl-C."""
    interrupted = threading.Event()

    def until_interrupted() -> Iterator[str]:
        for text in texts:
            if interrupted.is_set():
                return
            yield text

    try:
        interruptibly(lambda: backend.train_from_iterator(until_interrupted(), trainer))
    except BaseException:
        interrupted.set()
        raise


def load(folder: str | Path, eod_token: str | None = None, trust_remote_code: bool = False) -> Tokenizer:
    """Load the tokenizer of a Hugging Face folder. This function loads nothing from the network.

    eod_token: the token that ends a document; None means the tokenizer's `eos_token`.
    Raises `DataError` when the folder is missing, is not a tokenizer, or names no end-of-document token.
    """
    if not os.path.isdir(folder):
        raise DataError(
            f"--tokenizer {folder}: there is no such folder; give `bytes`, or the folder of a Hugging Face tokenizer"
        )
    hugging_face = _load_hugging_face(str(folder), trust_remote_code)
    token = eod_token or hugging_face.eos_token
    if not token:
        raise DataError(
            f"--tokenizer {folder}: the tokenizer has no eos_token; name the token that ends documents with --eod-token"
        )
    vocabulary = hugging_face.get_vocab()
    if token not in vocabulary:
        near = did_you_mean(token, list(vocabulary))
        raise DataError(f"--tokenizer {folder}: the end-of-document token {token!r} is not in its vocabulary{near}")
    if hugging_face.is_fast:
        return _describe(hugging_face.backend_tokenizer.to_str(), Path(folder), token)
    ids = json.dumps(sorted(vocabulary.items()))
    return Tokenizer(
        spec=TokenizerSpec(None, str(folder), trust_remote_code),
        vocab_size=max(vocabulary.values()) + 1,
        eod_id=vocabulary[token],
        eod_token=token,
        lossless=False,
        fingerprint=hashlib.sha256(ids.encode()).hexdigest(),
    )


def _load_hugging_face(folder: str, trust_remote_code: bool) -> Any:
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it would say that PyTorch is not there
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
    except Exception as error:  # its loaders let anything through, KeyError included
        reason = shorten(str(error).strip().split("\n")[0], 200, placeholder=" ...")  # one lists hundreds of models
        hint = "; its own code runs only with --trust-remote-code" if "trust_remote_code" in str(error) else ""
        raise DataError(
            f"--tokenizer {folder}: this is not a tokenizer that transformers can load ({reason}){hint}"
        ) from error


def _describe(backend: str, folder: Path, eod_token: str) -> Tokenizer:
    """Return the facts of a fast tokenizer given as the text of its tokenizer.json."""
    vocabulary = tokenizers.Tokenizer.from_str(backend).get_vocab(with_added_tokens=True)
    parts = json.loads(backend)
    deciding = [parts[key] for key in ("added_tokens", "normalizer", "pre_tokenizer", "model")]
    return Tokenizer(
        spec=TokenizerSpec(backend, str(folder)),
        vocab_size=max(vocabulary.values()) + 1,
        eod_id=vocabulary[eod_token],
        eod_token=eod_token,
        lossless=_is_lossless(parts, vocabulary),
        fingerprint=hashlib.sha256(json.dumps(deciding, sort_keys=True).encode()).hexdigest(),
    )


def _is_lossless(parts: dict[str, Any], vocabulary: dict[str, int]) -> bool:
    """Return whether the tokenizer loses nothing: it is byte-level both ways, with nothing normalised, no space put in
    front, and a token for every byte.
    """
    before = json.dumps(parts["pre_tokenizer"])
    return (
        parts["model"]["type"] == "BPE"
        and parts["normalizer"] is None
        and (parts["decoder"] or {}).get("type") == "ByteLevel"
        and '"ByteLevel"' in before
        and '"add_prefix_space": true' not in before
        and vocabulary.keys() >= set(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    )
