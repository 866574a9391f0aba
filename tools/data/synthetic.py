"""A corpus with realistic document lengths, for tests and benchmarks: seeded, and made without any text.

Each source has log-normal document lengths, clipped; mixed, they have the long tail of a pre-training corpus: most
documents short, most tokens in the long ones. The medians, spreads and shares are assumptions (orders of magnitude of
web pages, code files, papers and books in tokens; long documents up-sampled for long contexts, as context extension
does), not measurements of TeleChat3's corpus.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from plugins.attention_balance.samples.gpt_index import GPTIndex, build_gpt_index
from tools.data.index import IndexWriter


@dataclass(frozen=True)
class Source:
    """One kind of document. share: of the corpus's tokens; median: tokens; sigma: of the log; longest: tokens."""

    share: float
    median: float
    sigma: float
    longest: int = 1 << 21

    def mean(self) -> float:
        """Mean tokens of a document, before clipping."""
        return self.median * float(np.exp(self.sigma**2 / 2))


def _mixture(web: float, code: float, papers: float, books: float) -> tuple[Source, ...]:
    """Shares of the tokens -> sources."""
    return (
        Source(web, 600, 1.1),
        Source(code, 1_000, 1.3),
        Source(papers, 9_000, 0.7),
        Source(books, 90_000, 0.8),
    )


# sequence length -> what it is trained on; longer contexts train on longer documents
CORPORA = {
    4_096: _mixture(web=0.70, code=0.15, papers=0.10, books=0.05),
    32_768: _mixture(web=0.45, code=0.20, papers=0.20, books=0.15),
    131_072: _mixture(web=0.35, code=0.20, papers=0.20, books=0.25),
}


def document_lengths(tokens: int, sources: tuple[Source, ...], seed: int) -> np.ndarray:
    """int32 [documents], at least `tokens` together, each at least 2 (one token and the end of the document).

    The sources are mixed document by document. The result depends on the arguments alone.
    """
    random = np.random.default_rng(seed)
    parts = []
    for source in sources:
        wanted, have = int(tokens * source.share) + 1, 0
        while have < wanted:
            count = int((wanted - have) / source.mean()) + 16
            drawn = random.lognormal(np.log(source.median), source.sigma, count)
            lengths = np.clip(np.rint(drawn), 2, source.longest).astype(np.int32)
            needed = int(np.searchsorted(np.cumsum(lengths, dtype=np.int64), wanted - have)) + 1
            parts.append(lengths[:needed])
            have += int(parts[-1].sum(dtype=np.int64))
    lengths = np.concatenate(parts)
    random.shuffle(lengths)
    return lengths


def synthetic_index(samples: int, sequence_length: int, seed: int) -> GPTIndex:
    """The index of a dataset of at least `samples` samples, one epoch of a corpus made for `sequence_length`.

    sequence_length: 4,096, 32,768 or 131,072 (the keys of `CORPORA`).
    """
    lengths = document_lengths(samples * sequence_length + 1, CORPORA[sequence_length], seed)
    return build_gpt_index(lengths, sequence_length, None, seed)


def write_corpus(prefix: Path, lengths: np.ndarray, vocab_size: int, end_of_document: int, seed: int) -> None:
    """Write a corpus of these lengths as PREFIX.bin and PREFIX.idx: random ids, each document ends with its end id.

    lengths: int32 [documents]; ids are drawn from [0, vocab_size) without `end_of_document`.
    """
    random = np.random.default_rng(seed)
    writer = IndexWriter(Path(f"{prefix}.bin"), "int32")
    for start in range(0, len(lengths), 1024):
        some = lengths[start : start + 1024]
        ids = random.integers(0, vocab_size - 1, int(some.sum(dtype=np.int64)), dtype=np.int32)
        ids += ids >= end_of_document
        ids[np.cumsum(some, dtype=np.int64) - 1] = end_of_document
        writer.add(some, ids)
    writer.finish(Path(f"{prefix}.idx"))
