"""Which tokens begin a document, and which recipes the plugin serves."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plugins.errors import RecipeError
from plugins.mtp_documents.plan import check, continues, crosses
from plugins.mtp_documents.reference import rolled
from tools.recipe.load import load_recipe

END = 0


def shifted(values):
    """MindFormers' `roll_tensor`: a whole sample by one place, with 0 at its end."""
    return np.concatenate((values[:, 1:], np.zeros_like(values[:, :1])), 1)


@given(st.integers(1, 4), st.integers(1, 20), st.randoms(use_true_random=False))
def test_what_is_kept_and_then_shifted_is_shifted_document_by_document(rows, length, random):
    tokens = np.array([[random.randrange(4) for _ in range(length)] for _ in range(rows)], np.int32)
    values = np.array([[random.randrange(1, 99) for _ in range(length)] for _ in range(rows)])
    np.testing.assert_array_equal(shifted(values * continues(tokens, END)), rolled(values, tokens, END))


def test_the_reference_is_one_sample_for_each_document():
    tokens, values = np.array([[3, 0, 4, 4, 0, 7]]), np.array([[10, 11, 12, 13, 14, 15]])
    np.testing.assert_array_equal(rolled(values, tokens, END), [[11, 0, 13, 14, 0, 0]])
    np.testing.assert_array_equal(continues(tokens, END), [[1, 1, 0, 1, 1, 0]])
    assert shifted(values).tolist() == [[11, 12, 13, 14, 15, 0]], "the fault"


def recipe():
    return load_recipe("recipes/mini/pretrain_eod.yaml")


def test_the_end_is_the_token_at_which_the_dataset_resets_its_mask():
    ours = recipe()
    ours["train_dataset"]["data_loader"]["config"]["eod"] = 7
    assert check({}, ours, layers=1) == 7


@pytest.mark.parametrize(
    ("change", "layers", "words"),
    [
        (
            {"type": "HFDataLoader"},
            1,
            "samples of BlendedMegatronDatasetDataLoader, but this recipe has 'HFDataLoader'",
        ),
        ({}, 0, "the model has none; leave the plugin out"),
        ({"config": {"reset_attention_mask": False}}, 1, "attention crosses the ends of documents"),
        ({"config": {"eod": None}}, 1, r"config\.eod: None is not a token id"),
    ],
)
def test_what_the_plugin_refuses(change, layers, words):
    ours = recipe()
    loader = ours["train_dataset"]["data_loader"]
    loader["config"].update(change.pop("config", {}))
    loader.update(change)
    with pytest.raises(RecipeError, match=words):
        check({}, ours, layers)


@pytest.mark.parametrize(
    ("config", "model", "layers", "told"),
    [
        ({"create_compressed_eod_mask": True}, {}, 1, True),
        ({"create_compressed_eod_mask": True}, {}, 0, False),
        ({"reset_attention_mask": True}, {}, 1, True),
        ({"reset_attention_mask": True, "create_attention_mask": False}, {}, 1, False),
        ({"reset_attention_mask": True}, {"use_attn_mask_compression": True}, 1, False),
        ({"eod_mask_loss": True, "reset_position_ids": True}, {}, 1, False),
    ],
)
def test_documents_must_be_apart_for_the_model(config, model, layers, told):
    assert crosses(config, model, layers) is told
