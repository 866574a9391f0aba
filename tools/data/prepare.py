"""This module runs the steps of `tc3 data prepare`: it reads the corpus, trains or loads the tokenizer, writes the
`.bin/.idx` of each split, checks them and publishes them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from plugins.errors import DataError
from tools.data import outputs
from tools.data import tokenizer as tokenizers
from tools.data.index import IndexWriter, choose_dtype
from tools.data.sources import Corpus, Skips, held_out, spread
from tools.data.tokenizer import Coder, Tokenizer, TokenizerSpec
from tools.data.verify import verify
from tools.files.atomic import real_path
from tools.process.children import ordered_map
from tools.process.waiting import Reporter

TRAIN_BYTES = 32 << 20  # a tokenizer is trained on about this much text, spread over the corpus
VERIFY_BYTES = 64 << 20  # about this much text is decoded and compared after writing
_JOB_CHARACTERS = 1 << 18  # text handed to a worker at a time


@dataclass(frozen=True)
class PrepareOptions:
    """A `PrepareOptions` holds the options of one run of `tc3 data prepare`.

    output: the prefix of the output files. tokenizer: "bytes" (train a tokenizer of `vocab_size` ids) or a Hugging Face
    folder.
    held_out: the fraction of documents in the held-out split, 0 for no split; `seed` decides which documents. dtype:
    "auto", "uint16" or "int32".
    """

    corpus: Corpus
    output: Path
    tokenizer: str = "bytes"
    vocab_size: int = 2048
    eod_token: str | None = None
    trust_remote_code: bool = False
    dtype: str = "auto"
    held_out: float = 0.0
    seed: int = 1234
    workers: int = 1
    strict: bool = False
    force: bool = False

    @property
    def splits(self) -> tuple[str, ...]:
        """Return the names of the splits: "train", and "heldout" if a held-out split is requested."""
        return ("train", outputs.HELD_OUT) if self.held_out else ("train",)

    def split_of(self, index: int) -> str:
        """Return the split to which document `index` belongs."""
        return outputs.HELD_OUT if held_out(self.seed, index, self.held_out) else "train"


class _Job(NamedTuple):
    split: str
    texts: list[str]
    consumed: int  # bytes read from disk for it


class _Encoded(NamedTuple):
    split: str
    lengths: np.ndarray  # int32 [documents], tokens each
    tokens: np.ndarray  # dtype [sum of lengths]
    text_bytes: int
    consumed: int


def prepare(options: PrepareOptions, reporter: Reporter | None = None) -> dict[str, Any]:
    """Write, check and publish the .bin and .idx files of `options.output`, and return the sidecar of the training
    split.

    If there is a held-out split, the key "heldout" holds its sidecar. No file appears under the prefix unless all files
    are right. The memory hardly depends on the size of the corpus: it holds the largest document, a few MB per worker,
    and 4 bytes per document (28 bytes during the check). Raises `DataError` for every fault that the user can correct.
    """
    reporter = reporter or Reporter()
    trains = options.tokenizer == "bytes"
    outputs.check_prefix(options.output, options.splits, trains, options.force)
    for folder in outputs.leftovers(options.output):
        reporter.log(f"{folder}: left by a run that was killed; delete it unless that run is still going")
    reporter.start("looking at the files", 0)
    _keep_inputs(options)
    files, size = options.corpus.measure()
    reporter.log(f"{files:,} files, {size:,} bytes")
    try:
        with outputs.staged(options.output) as stage:
            tokenizer = _tokenizer(options, stage, size, reporter)
            sidecars = _write(options, stage, tokenizer, size, reporter)
            _check(options, stage, tokenizer, size, reporter)
            outputs.publish(stage, options.output, options.splits, options.force)
    except OSError as error:  # disk full, or the folder went away
        raise DataError(f"--output {options.output}: {error.strerror or error}") from error
    return sidecars["train"] | {split: sidecars[split] for split in options.splits[1:]}


def _keep_inputs(options: PrepareOptions) -> None:
    """Raise `DataError` if an output file would replace an input file."""
    outs = {path.name: path for path in outputs.files_of(options.output, options.splits) if os.path.exists(path)}
    for path in options.corpus.files() if outs else ():
        if path.name in outs and os.path.samefile(path, outs[path.name]):
            raise DataError(
                f"--output {options.output}: this would overwrite the input {path}; choose another --output"
            )


def _tokenizer(options: PrepareOptions, stage: Path, size: int, reporter: Reporter) -> Tokenizer:
    if options.tokenizer != "bytes":
        reporter.start("loading the tokenizer", 0)
        return tokenizers.load(options.tokenizer, options.eod_token, options.trust_remote_code)
    reporter.start("measuring the text", size)
    # `size` does not say: a .gz holds several times its size, JSON lines less text than bytes
    total = sum(len(text.encode()) for text in _training_texts(options, reporter))
    reporter.start("training the tokenizer", size)
    texts = spread(_training_texts(options, reporter), total, TRAIN_BYTES)
    folder = stage / outputs.tokenizer_name(options.output.name)
    tokenizer = tokenizers.train(texts, options.vocab_size, folder)
    if tokenizer.vocab_size < options.vocab_size:
        share = f"about {TRAIN_BYTES:,} of the {total:,}" if total > TRAIN_BYTES else f"all {total:,}"
        reporter.log(
            f"the tokenizer has {tokenizer.vocab_size:,} ids, not {options.vocab_size:,}: {share} bytes of text to"
            " train it on give no more"
        )
    return tokenizer


def _training_texts(options: PrepareOptions, reporter: Reporter) -> Iterator[str]:
    for index, document in enumerate(options.corpus.documents(Skips(options.strict))):
        reporter.advance(document.consumed)
        if options.split_of(index) == "train":
            yield document.text


def _write(
    options: PrepareOptions, stage: Path, tokenizer: Tokenizer, size: int, reporter: Reporter
) -> dict[str, dict[str, Any]]:
    """Encode every document into the pairs below `stage`; return the sidecar of each split."""
    dtype = choose_dtype(options.dtype, tokenizer.vocab_size)
    skips = Skips(options.strict, reporter)
    paths = {split: str(stage / outputs.split_name(options.output.name, split)) for split in options.splits}
    text_bytes = dict.fromkeys(paths, 0)
    reporter.start("encoding", size)
    with ExitStack() as stack:
        writers = {split: IndexWriter(Path(f"{path}.bin"), dtype) for split, path in paths.items()}
        for writer in writers.values():
            stack.callback(writer.close)
        make = partial(_encoder, tokenizer.spec, tokenizer.eod_id, dtype)
        for encoded in ordered_map(make, _jobs(options, skips), options.workers):
            writers[encoded.split].add(encoded.lengths, encoded.tokens)
            text_bytes[encoded.split] += encoded.text_bytes
            reporter.advance(encoded.consumed)
        _require_documents(options, writers, skips)
        sidecars = {}
        for split, writer in writers.items():
            writer.finish(Path(f"{paths[split]}.idx"))
            sidecars[split] = _sidecar(options, split, writer, tokenizer, text_bytes[split], skips)
            outputs.write_json(Path(f"{paths[split]}.json"), sidecars[split])
    if summary := skips.summary():
        reporter.log(summary)
    return sidecars


def _jobs(options: PrepareOptions, skips: Skips) -> Iterator[_Job]:
    """Group documents into jobs of one split each, in document order within a split."""
    waiting: dict[str, list[str]] = {split: [] for split in options.splits}
    characters = dict.fromkeys(waiting, 0)
    consumed = 0
    for index, document in enumerate(options.corpus.documents(skips)):
        split = options.split_of(index)
        waiting[split].append(document.text)
        characters[split] += len(document.text)
        consumed += document.consumed
        if characters[split] >= _JOB_CHARACTERS:
            yield _Job(split, waiting[split], consumed)
            waiting[split], characters[split], consumed = [], 0, 0
    for split, texts in waiting.items():
        if texts:
            yield _Job(split, texts, consumed)
            consumed = 0


def _encoder(spec: TokenizerSpec, eod_id: int, dtype: str) -> Callable[[_Job], _Encoded]:
    """Return the function that a worker applies to each job: ids of each document, then `eod_id`."""
    coder = Coder(spec)

    def encode(job: _Job) -> _Encoded:
        documents = coder.encode(job.texts)
        for ids in documents:
            ids.append(eod_id)
        lengths = np.array([len(ids) for ids in documents], dtype=np.int32)
        tokens = np.fromiter(chain.from_iterable(documents), dtype=dtype, count=int(lengths.sum(dtype=np.int64)))
        return _Encoded(job.split, lengths, tokens, sum(len(text.encode()) for text in job.texts), job.consumed)

    return encode


def _require_documents(options: PrepareOptions, writers: dict[str, IndexWriter], skips: Skips) -> None:
    total = sum(writer.documents for writer in writers.values())
    if not total:
        why = f": {skips.summary()}; the first skipped item is {skips.first}" if skips.first else ""
        raise DataError(f"--input {' '.join(options.corpus.inputs)}: the corpus has no documents{why}")
    for split, writer in writers.items():
        if not writer.documents:
            raise DataError(
                f"--held-out {options.held_out:g} of {total} documents leaves the {split} split empty;"
                " a text file is one document: give more files, JSON lines, another fraction or another --seed"
            )


def _sidecar(
    options: PrepareOptions, split: str, writer: IndexWriter, tokenizer: Tokenizer, text_bytes: int, skips: Skips
) -> dict[str, Any]:
    """Return everything that a recipe or a check must know about the pair. `skipped` counts the whole corpus."""
    return {
        "format": "tc3-data-1",
        "split": split,
        "documents": writer.documents,
        "tokens": writer.tokens,  # one end-of-document id a document included
        "text_bytes": text_bytes,
        "dtype": writer.dtype.name,
        "bin_sha256": writer.sha256,
        "vocab_size": tokenizer.vocab_size,
        "eod_id": tokenizer.eod_id,
        "eod_token": tokenizer.eod_token,
        "tokenizer": {
            "path": _tokenizer_path(options),
            "lossless": tokenizer.lossless,
            "fingerprint": tokenizer.fingerprint,
            "trust_remote_code": options.trust_remote_code,
        },
        "sources": options.corpus.describe(),
        "jsonl_key": options.corpus.jsonl_key,
        "globs": list(options.corpus.globs),
        "held_out": {"fraction": options.held_out, "seed": options.seed},
        "skipped": dict(skips.counts),
    }


def _tokenizer_path(options: PrepareOptions) -> str:
    """Return only the name of the tokenizer's folder if the folder is (or will be) beside the pair, so that both can be
    moved together; otherwise return its absolute path.
    """
    if options.tokenizer == "bytes":
        return outputs.tokenizer_name(options.output.name)
    folder = real_path(options.tokenizer)
    return folder.name if folder.parent == real_path(options.output.parent) else str(folder)


def _check(options: PrepareOptions, stage: Path, tokenizer: Tokenizer, size: int, reporter: Reporter) -> None:
    """Read the new pairs in the staging folder back; raise `DataError` if a pair differs from its sources."""
    fraction = min(1.0, VERIFY_BYTES / max(size, 1))
    for split in options.splits:
        prefix = stage / outputs.split_name(options.output.name, split)
        report = verify(prefix, options.corpus, tokenizer, fraction, reporter)
        if report.findings:
            raise DataError(
                f"the {split} split differs from its source when it is read back, so no output was written: "
                f"{report.findings[0]}"
            )
        reporter.log(f"checked {split}: {report.summary()}")
