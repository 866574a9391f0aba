import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plugins.attention_balance.reference import sample_tokens, segments_of_tokens
from plugins.attention_balance.samples.eod import check_apart, check_fits, check_last_tokens, documents_of_items
from plugins.attention_balance.samples.gpt_index import build_gpt_index
from plugins.errors import DataError, RecipeError

EOD = 0


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
        "eod_pad_length: 8 is less than the 9 documents of sample 2 (step 2); 2 of 5 samples have too many, "
        "sample 3 the most: write 12 or more"
    )
    with pytest.raises(RecipeError) as error:
        check_fits(np.array([3, 8, 9, 12, 1]), 8, 2)
    assert words in str(error.value)


def test_documents_have_to_end_with_the_recipes_token():
    check_last_tokens(np.array([7, 7, 7]), 7, "corpus")
    with pytest.raises(DataError, match=r"eod: 1 is not how documents of corpus end: 2 of the 3.*token 7"):
        check_last_tokens(np.array([7, 1, 7]), 1, "corpus")
