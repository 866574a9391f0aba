import numpy as np
import pytest

from plugins.attention_balance.plan import segments_of
from tools.data.index import IndexReader
from tools.data.synthetic import CORPORA, document_lengths, synthetic_index, write_corpus


@pytest.mark.parametrize("sequence_length", CORPORA)
def test_lengths_are_seeded_and_have_a_long_tail(sequence_length):
    sources = CORPORA[sequence_length]
    assert sum(source.share for source in sources) == pytest.approx(1)
    tokens = 20_000_000
    lengths = document_lengths(tokens, sources, 1)
    np.testing.assert_array_equal(lengths, document_lengths(tokens, sources, 1))
    assert not np.array_equal(lengths[:100], document_lengths(tokens, sources, 2)[:100])
    assert lengths.dtype == np.int32 and lengths.min() >= 2
    assert tokens <= lengths.sum() < 1.1 * tokens
    # most documents are short, most tokens are in documents far above the median
    assert np.median(lengths) < 1_500
    assert lengths[lengths > 5 * np.median(lengths)].sum() > 0.3 * lengths.sum()
    assert lengths.max() > 20_000


def test_an_index_holds_the_samples_asked_for():
    index = synthetic_index(64, 131_072, 3)
    assert len(index) >= 64
    assert segments_of(index, 0, 64).values.sum() == 64 * 131_072


def test_a_written_corpus_reads_back(tmp_path):
    lengths = document_lengths(50_000, CORPORA[4_096], 5)[:40]
    write_corpus(tmp_path / "corpus", lengths, 300, 7, seed=1)
    reader = IndexReader(tmp_path / "corpus")
    np.testing.assert_array_equal(reader.lengths, lengths)
    for document in range(len(reader)):
        tokens = reader[document]
        assert tokens[-1] == 7 and not (tokens[:-1] == 7).any()
        assert tokens.min() >= 0 and tokens.max() < 300
