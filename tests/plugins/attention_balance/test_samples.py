import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plugins.attention_balance import reference
from plugins.attention_balance import samples as module
from plugins.attention_balance.reference import sample_tokens, segments_of_tokens
from plugins.attention_balance.samples import (
    Cost,
    GPTIndex,
    blended,
    build_gpt_index,
    causal_pairs,
    check_apart,
    check_fits,
    check_last_tokens,
    documents_of_items,
    padding_under,
    segments_in_stream_order,
    segments_of,
)
from plugins.errors import DataError, RecipeError

many = settings(max_examples=60)

EOD = 0


@st.composite
def corpora(draw):
    lengths = draw(st.lists(st.integers(1, 12), min_size=2, max_size=25).filter(lambda x: sum(x) > 12))
    sequence_length = draw(st.integers(2, 12))
    per_epoch = (sum(lengths) - 1) // sequence_length
    samples = draw(st.one_of(st.none(), st.integers(1, 3 * per_epoch + 2)))
    return np.array(lengths, np.int32), sequence_length, samples, draw(st.integers(0, 9))


def tokens_of(lengths):
    return [[1] * (length - 1) + [EOD] for length in lengths]


@many
@given(corpora())
def test_segments_are_those_of_the_tokens(corpus):
    lengths, sequence_length, samples, seed = corpus
    index = build_gpt_index(lengths, sequence_length, samples, seed)
    found = segments_of(index, 0, len(index))
    assert len(found) == len(index) >= (samples or 1)
    for item in range(len(index)):
        tokens = reference.sample_tokens(index, tokens_of(lengths), item)
        assert found[item].tolist() == reference.segments_of_tokens(tokens, EOD)
        assert causal_pairs(found)[item] == reference.pairs_of_tokens(tokens, EOD)


@many
@given(corpora(), st.data())
def test_a_range_is_a_part_of_the_whole(corpus, data):
    index = build_gpt_index(*corpus)
    start = data.draw(st.integers(0, len(index)))
    stop = data.draw(st.integers(start, len(index)))
    part, whole = segments_of(index, start, stop), segments_of(index, 0, len(index))
    assert [part[i].tolist() for i in range(len(part))] == [whole[i].tolist() for i in range(start, stop)]
    assert part.counts().tolist() == whole.counts()[start:stop].tolist()


@many
@given(corpora())
def test_in_small_chunks_nothing_changes(corpus):
    lengths, sequence_length, samples, seed = corpus
    whole = build_gpt_index(lengths, sequence_length, samples, seed)
    costs = Cost(2.0, 3.0).of(segments_of(whole, 0, len(whole)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_CHUNK", 3)
        patch.setattr(module, "_SEGMENTS", 4)
        index = build_gpt_index(lengths, sequence_length, samples, seed)
        np.testing.assert_array_equal(index.sample_index, whole.sample_index)
        np.testing.assert_array_equal(Cost(2.0, 3.0).of_dataset(index), costs)
        assert max(len(part.values) for _, part in segments_in_stream_order(index)) <= 4 + sequence_length


def test_samples_that_begin_at_the_end_of_a_document_have_no_empty_segment():
    # the index of a dataset without the extra token: a sample ends behind a document, not at the start of the next
    index = GPTIndex(
        np.array([3, 5, 4], np.int32), np.arange(3, dtype=np.int32), np.array([[0, 0], [1, 1], [2, 0], [2, 4]]), [], 4
    )
    index = GPTIndex(index.lengths, index.document_index, index.sample_index, np.array([2, 0, 1]), 4)
    assert [segments_of(index, 0, 3)[i].tolist() for i in range(3)] == [[4], [3, 1], [4]]


def test_an_index_of_another_corpus_is_refused():
    index = build_gpt_index(np.full(10, 7, np.int32), 8, None, 1)
    other = GPTIndex(np.full(10, 6, np.int32), index.document_index, index.sample_index, index.shuffle_index, 8)
    with pytest.raises(DataError, match=r"tokens, but the sequence length is 8: the cached indices belong to another"):
        segments_of(other, 0, len(other))


def test_a_corpus_below_one_sample_is_refused():
    with pytest.raises(DataError, match="only 8 tokens, but one sample needs 9"):
        build_gpt_index(np.array([8], np.int32), 8, None, 1)


def test_blended_datasets():
    out = blended([np.array([1.0, 2.0]), np.array([10.0, 20.0])], np.array([0, 1, 1, 0]), np.array([1, 0, 1, 0]))
    assert out.tolist() == [2, 10, 20, 1]


def test_cost_of_a_sample():
    cost = Cost(per_pair=3.0, per_token=500.0)
    index = build_gpt_index(np.array([3, 6], np.int32), 8, None, 0)
    (total,) = cost.of_dataset(index)
    assert total in {cost.per_pair * pairs + cost.per_token * 8 for pairs in (6 + 15, 21 + 3)}


@pytest.mark.slow
@pytest.mark.parametrize("samples", [None, 5, 40, 97, 130, 10_000])
def test_the_index_is_that_of_mindformers(samples, tmp_path, monkeypatch):
    monkeypatch.setenv("LOG_MF_PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    dataset = pytest.importorskip("mindformers.dataset.blended_datasets.gpt_dataset")
    from mindformers.dataset.blended_datasets.utils import Split

    lengths = np.random.default_rng(1).integers(2, 90, 100).astype(np.int32)

    class Stub(dataset.GPTDataset):
        def __init__(self):
            self.config = dataset.GPTDatasetConfig(
                random_seed=1234, sequence_length=48, blend=(["x"], None), blend_per_split=[None] * 3, split="1,0,0",
                tokenizer=None, reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False,
            )  # fmt: skip
            self.config.mock = True
            self.dataset = type("Documents", (), {"sequence_lengths": lengths})
            self.indices = np.arange(len(lengths), dtype=np.int32)
            self.num_samples, self.index_split = samples, Split.train

    theirs = Stub()._build_document_sample_shuffle_indices()
    ours = build_gpt_index(lengths, 48, samples, 1234)
    for one, other in zip(theirs, (ours.document_index, ours.sample_index, ours.shuffle_index), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.slow
def test_the_compressed_mask_is_the_cumulative_sum_of_the_segments(tmp_path, monkeypatch):
    monkeypatch.setenv("LOG_MF_PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    dataset = pytest.importorskip("mindformers.dataset.blended_datasets.gpt_dataset")
    index = build_gpt_index(np.random.default_rng(2).integers(2, 9, 60).astype(np.int32), 24, None, 3)
    documents = [[1] * (length - 1) + [EOD] for length in index.lengths]
    found = segments_of(index, 0, len(index))
    for item, count in enumerate(found.counts()):
        tokens = np.array(reference.sample_tokens(index, documents, item))
        ends = np.cumsum(found[item])
        for pad in (count, count + 3):
            mask = dataset._get_eod_attention_mask(tokens, EOD, int(pad))
            np.testing.assert_array_equal(mask, np.pad(ends, (0, pad - count), constant_values=24))
        # what `Segments.counts` says: one too many passes without the end of the last document, two too many raise
        assert dataset._get_eod_attention_mask(tokens, EOD, int(count) - 1)[-1] == ends[-2]
        with pytest.raises(ValueError, match="exceeds"):
            dataset._get_eod_attention_mask(tokens, EOD, int(count) - 2)


@pytest.mark.parametrize(
    "config",
    [
        {"create_compressed_eod_mask": True},
        {"create_compressed_eod_mask": True, "create_attention_mask": False, "reset_attention_mask": False},
        {"reset_attention_mask": True},
        {"reset_attention_mask": True, "create_attention_mask": True},
    ],
)
def test_documents_are_apart(config):
    check_apart(config, {})


@pytest.mark.parametrize(
    ("config", "model", "words"),
    [
        ({}, {}, "every sample costs the same"),
        ({"reset_position_ids": True, "eod_mask_loss": True}, {}, "every sample costs the same"),
        ({"reset_attention_mask": True, "create_attention_mask": False}, {}, "without create_attention_mask"),
        ({"reset_attention_mask": True}, {"use_attn_mask_compression": True}, "use_attn_mask_compression"),
    ],
)
def test_documents_that_see_each_other_are_refused(config, model, words):
    with pytest.raises(RecipeError, match=words):
        check_apart(config, model)


def test_the_refusal_of_a_recipe_without_masks_names_the_plugin_once():
    """A check of the recipe writes the key before the words."""
    with pytest.raises(RecipeError) as refused:
        check_apart({}, {})
    assert refused.value.key == "plugins.attention_balance" and refused.value.key not in refused.value.wrong


@settings(max_examples=40)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=30), st.integers(2, 24), st.integers(0, 9))
def test_documents_are_those_in_the_tokens(lengths, sequence_length, seed):
    if sum(lengths) <= sequence_length:
        lengths.append(sequence_length + 1)
    documents = [[1] * (length - 1) + [EOD] for length in lengths]
    index = build_gpt_index(np.array(lengths, np.int32), sequence_length, 10, seed)
    expected = [len(segments_of_tokens(sample_tokens(index, documents, item), EOD)) for item in range(len(index))]
    np.testing.assert_array_equal(documents_of_items(index), expected)


def test_the_mask_takes_as_many_documents_as_it_has_entries():
    check_fits(np.array([3, 8, 1]), 8, 2)
    words = (
        "eod_pad_length: 8 is not enough for the 9 documents of sample 2 (step 2); 2 of 5 samples have too many "
        "documents, and sample 3 has the most: write 12 or more"
    )
    with pytest.raises(RecipeError) as error:
        check_fits(np.array([3, 8, 9, 12, 1]), 8, 2)
    assert words in str(error.value)


def test_where_ranks_share_the_queries_the_last_entry_stays_padding():
    padding = padding_under(2, "colossalai_cp")
    assert (padding, padding_under(1, "colossalai_cp"), padding_under(2, "ulysses_cp")) == (1, 0, 0)
    check_fits(np.array([3, 7]), 8, 2, padding)
    with pytest.raises(RecipeError, match=r"the 8 documents of sample 1 .*: write 9 or more, which"):
        check_fits(np.array([3, 8]), 8, 2, padding)


def test_documents_have_to_end_with_the_recipes_token():
    check_last_tokens(np.array([7, 7, 7]), 7, "corpus")
    with pytest.raises(DataError, match=r"eod: documents of corpus do not end with token 1: 2 of 3.*token 7"):
        check_last_tokens(np.array([7, 1, 7]), 1, "corpus")
