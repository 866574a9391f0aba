"""This module draws the lengths of a corpus's documents for tests and benchmarks, seeded and without any text.

Each source has log-normal document lengths, clipped; mixed, they have the long tail of a pre-training corpus:
most documents short, most tokens in the long ones. The medians, spreads and shares are assumptions (orders of magnitude
of web pages, code files, papers and books in tokens; long documents up-sampled for long contexts, as context extension
does), not measurements of TeleChat3's corpus.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from plugins.attention_balance.samples import GPTIndex, build_gpt_index


@dataclass(frozen=True)
class Source:
    """A `Source` is one kind of document: its share of the corpus's tokens, its median and longest number of tokens,
    and the sigma of the logarithm of this number.
    """

    share: float
    median: float
    sigma: float
    longest: int = 1 << 21

    def mean(self) -> float:
        """Return the mean number of tokens of a document before long documents are cut."""
        return self.median * float(np.exp(self.sigma**2 / 2))


def _mixture(web: float, code: float, papers: float, books: float) -> tuple[Source, ...]:
    """Return the sources of a corpus in which web pages, code, papers and books have the given shares of the tokens."""
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
    """Return document lengths, int32 [documents], which are at least `tokens` together. Each length is at least 2: one
    token and the end of the document.

    The sources are mixed document by document. The result depends on the arguments only.
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
    """Return the index of a dataset of at least `samples` samples. The dataset is one epoch of a corpus that is made
    for `sequence_length`.

    sequence_length: 4,096, 32,768 or 131,072 (the keys of `CORPORA`).
    """
    lengths = document_lengths(samples * sequence_length + 1, CORPORA[sequence_length], seed)
    return build_gpt_index(lengths, sequence_length, None, seed)
