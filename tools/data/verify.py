"""This module reads a written .bin/.idx pair again, and checks whether the pair is complete, unchanged since it was
written, and equal to its sources.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tools.data import outputs
from tools.data import tokenizer as tokenizers
from tools.data.index import BrokenIndexError, IndexReader
from tools.data.sources import STDLIB_NAMES, Corpus, Skips, chosen, held_out
from tools.data.tokenizer import Coder, Tokenizer
from tools.process.waiting import Reporter

_SHOWN = 10
_BATCH_CHARACTERS = 1 << 18


@dataclass
class Verification:
    """A `Verification` is the outcome of a check of a .bin/.idx pair. The list `findings` holds the errors that were
    found in the files (about 10 at most).

    compared: the number of documents whose content was compared with the source. method: how contents were compared:
    "text" (the decoded ids against the text of the source), "ids" (the source was encoded again and the ids were
    compared, because the tokenizer loses text), or "none".
    """

    prefix: str
    documents: int = 0
    tokens: int = 0
    compared: int = 0
    method: str = "none"
    findings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def summary(self) -> str:
        """Return one line that says how many documents were compared with their sources, and by which method."""
        how = {
            "text": "decoded text equals the source",
            "ids": "ids equal those of the source encoded again (this tokenizer does not keep all text)",
            "none": "sources not at hand, so content was not compared",
        }
        counts = f"{self.documents:,} documents, {self.tokens:,} tokens; {self.compared:,} compared"
        return f"{counts}: {how[self.method]}"

    def to_dict(self) -> dict[str, Any]:
        """Return the outcome of the check as the dictionary that `tc3 data verify --json` prints."""
        return asdict(self)


class _Pair(NamedTuple):
    """A `_Pair` holds a document of the source and the same document of the index."""

    number: int
    where: str
    text: str
    ids: np.ndarray


def verify(
    prefix: str | Path,
    corpus: Corpus | None = None,
    tokenizer: Tokenizer | None = None,
    fraction: float = 1.0,
    reporter: Reporter | None = None,
) -> Verification:
    """Check the .bin and .idx files of `prefix` against their sidecar and their source files.

    corpus, tokenizer: None means the corpus and the tokenizer that the sidecar names; a source file that does not exist
    is reported and skipped.
    fraction: the share of the documents whose content is compared; the structure of the files is always checked
    completely.
    Raises `DataError` if a file is missing; errors inside the files are returned as findings.
    """
    reporter = reporter or Reporter()
    sidecar = outputs.checked_sidecar(prefix)
    report = Verification(str(prefix))
    try:
        reader = IndexReader(prefix)
    except BrokenIndexError as error:
        report.findings.append(str(error))
        return report
    report.documents, report.tokens = len(reader), reader.tokens
    report.findings += _against_sidecar(reader, sidecar)
    report.findings += _ids(reader, sidecar, report.notes, reporter)
    corpus = corpus or _recorded_corpus(sidecar, report.notes)
    if corpus and not report.findings:
        tokenizer = tokenizer or _recorded_tokenizer(prefix, sidecar)
        if tokenizer.fingerprint != sidecar["tokenizer"]["fingerprint"]:
            report.findings.append(f"{tokenizer.spec.folder}: is not the tokenizer that wrote this pair")
        else:
            _content(reader, sidecar, corpus, tokenizer, fraction, report, reporter)
    return report


def _against_sidecar(reader: IndexReader, sidecar: dict[str, Any]) -> list[str]:
    found = {"documents": len(reader), "tokens": reader.tokens, "dtype": reader.dtype.name}
    return [
        f"{reader.idx_path}: holds {key} {value}, the sidecar says {sidecar[key]}"
        for key, value in found.items()
        if value != sidecar[key]
    ]


def _ids(reader: IndexReader, sidecar: dict[str, Any], notes: list[str], reporter: Reporter) -> list[str]:
    """Return what is wrong with the ids, from one pass over `.bin`: digest, largest id, and an end-of-document id at
    each document's end.
    """
    digest, eod_id, largest = hashlib.sha256(), sidecar["eod_id"], -1
    ends = np.cumsum(reader.lengths, dtype=np.int64) - 1  # position of each document's last token
    start = eods = ended = 0
    reporter.start("checking the ids", reader.tokens * reader.dtype.itemsize)
    for block in reader.blocks():
        digest.update(block.data)
        largest = max(largest, int(block.max()))
        eods += int(np.count_nonzero(block == eod_id))
        first, last = np.searchsorted(ends, (start, start + len(block)))
        ended += int(np.count_nonzero(block[ends[first:last] - start] == eod_id))
        start += len(block)
        reporter.advance(block.nbytes)
    findings = []
    if digest.hexdigest() != sidecar["bin_sha256"]:
        findings.append(f"{reader.bin_path}: its sha256 is not the sidecar's: bytes have changed since it was written")
    if largest >= sidecar["vocab_size"]:
        findings.append(f"{reader.bin_path}: holds id {largest}, the vocabulary ends at {sidecar['vocab_size'] - 1}")
    if ended != len(reader):
        findings.append(f"{reader.bin_path}: {len(reader) - ended} documents do not end with id {eod_id}")
    if eods > ended:
        notes.append(f"{eods - ended} end-of-document ids stand inside documents")
    return findings


def _recorded_corpus(sidecar: dict[str, Any], notes: list[str]) -> Corpus | None:
    """Return the corpus that the sidecar names, or None, with a note, when it is not on this machine."""
    for source in sidecar["sources"]:
        if source["input"] in STDLIB_NAMES:
            if source["python"] != platform.python_version():
                notes.append(f"the source is Python {source['python']}'s library, this is {platform.python_version()}")
                return None
        elif not Path(source["input"]).exists():
            notes.append(f"the source {source['input']} is not here; name it with --input")
            return None
    inputs = tuple(source["input"] for source in sidecar["sources"])
    return Corpus(inputs, sidecar["jsonl_key"], tuple(sidecar["globs"]))


def _recorded_tokenizer(prefix: str | Path, sidecar: dict[str, Any]) -> Tokenizer:
    recorded = sidecar["tokenizer"]
    folder = Path(prefix).parent / recorded["path"]
    return tokenizers.load(folder, sidecar["eod_token"], recorded["trust_remote_code"])


def _content(
    reader: IndexReader,
    sidecar: dict[str, Any],
    corpus: Corpus,
    tokenizer: Tokenizer,
    fraction: float,
    report: Verification,
    reporter: Reporter,
) -> None:
    report.method = "text" if tokenizer.lossless else "ids"
    coder = Coder(tokenizer.spec)
    reporter.start("comparing with the source", corpus.measure()[1])
    batch: list[_Pair] = []
    documents = characters = 0
    for where, text, consumed in _documents_of_split(corpus, sidecar):
        reporter.advance(consumed)
        if documents < len(reader) and (documents == 0 or chosen("verify", documents, fraction)):
            batch.append(_Pair(documents, where, text, reader[documents]))
            characters += len(text)
        documents += 1
        if characters >= _BATCH_CHARACTERS:
            _compare(batch, coder, tokenizer, report)
            batch, characters = [], 0
        if len(report.findings) >= _SHOWN:
            return
    _compare(batch, coder, tokenizer, report)
    if documents != len(reader):
        report.findings.append(f"{reader.idx_path}: holds {len(reader)} documents, the source has {documents} now")


def _documents_of_split(corpus: Corpus, sidecar: dict[str, Any]) -> Iterator[tuple[str, str, int]]:
    """Yield (where, text, bytes read) of the documents that belong to the sidecar's split."""
    fraction, seed = sidecar["held_out"]["fraction"], sidecar["held_out"]["seed"]
    wanted = sidecar["split"] == outputs.HELD_OUT
    for index, document in enumerate(corpus.documents(Skips())):
        if held_out(seed, index, fraction) == wanted:
            yield document.where, document.text, document.consumed


def _compare(batch: list[_Pair], coder: Coder, tokenizer: Tokenizer, report: Verification) -> None:
    """Add a finding for each document of `batch` that is not its source's."""
    again = [] if tokenizer.lossless else coder.encode([pair.text for pair in batch])
    for position, pair in enumerate(batch):
        ids = pair.ids[:-1]  # without the end-of-document id
        if tokenizer.lossless:
            same = coder.decode(ids.tolist()) == pair.text
        else:
            same = np.array_equal(ids, again[position])
        if not same:
            report.findings.append(f"document {pair.number} is not its source {pair.where}: one of the two has changed")
    report.compared += len(batch)
