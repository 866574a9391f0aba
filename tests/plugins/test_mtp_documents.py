"""These tests check which tokens begin a document, and for which recipes the plugin works.

MindFormers' MTP layer on packed documents, forward and backward, against each document in a sample of its own.
"""

from unittest import mock

import mindspore as ms
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mindformers.parallel_core.training_graph.transformer import utils
from mindformers.parallel_core.transformer_config import TransformerConfig
from mindspore import Tensor, nn

from plugins.cpu_backend.model import build_gpt
from plugins.cpu_backend.reference import document_mask
from plugins.errors import RecipeError
from plugins.mtp_documents import adapter
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
    ("written", "layers"),
    [
        ({}, 1),
        ({"num_nextn_predict_layers": None}, 0),
        ({"num_nextn_predict_layers": 0}, 0),
        ({"mtp_num_layers": 1}, 1),
    ],
)
def test_a_recipe_that_writes_no_number_of_mtp_layers_has_mindformers_own(written, layers):
    assert adapter.layers_of(written) == layers


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


pytestmark = pytest.mark.usefixtures("graph_mode")
LENGTH, VOCABULARY, END_TOKEN = 12, 32, 5
ROWS = [[5, 7], [9, 3]]  # tokens of the documents of each sample


class Losses(nn.Cell):
    """The MTP loss of a GPTModel, of which gradients are taken, and its loss of the next token."""

    def __init__(self, gpt):
        super().__init__(auto_prefix=False)
        self.gpt = gpt

    def construct(self, tokens, labels, loss_mask, mask):
        lm_loss, mtp_loss, _, _ = self.gpt(tokens, attention_mask=mask, labels=labels, loss_mask=loss_mask)
        return mtp_loss, lm_loss


@pytest.fixture(scope="module")
def gpt():
    """A dense model with one MTP layer."""
    config = TransformerConfig(
        num_layers=1, mtp_num_layers=1, mtp_loss_scaling_factor=0.3, num_attention_heads=2, num_query_groups=2,
        kv_channels=8, hidden_size=16, ffn_hidden_size=32, seq_length=LENGTH, vocab_size=VOCABULARY,
        max_position_embeddings=LENGTH, position_embedding_type="rope", compute_dtype="float32", attention_dropout=0.0,
        hidden_dropout=0.0, params_dtype="float32", add_bias_linear=False, fused_norm=False, hidden_act="swiglu",
        gated_linear_unit=True, use_flash_attention=True, batch_size=len(ROWS),
    )  # fmt: skip
    ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
    ms.set_seed(1)
    with mock.patch.object(utils, "is_legacy_model", return_value=False):  # a recipe says so in MindFormers' context
        built = build_gpt(config)
    rng = np.random.default_rng(0)
    for weight in built.get_parameters():
        if weight.requires_grad:
            weight.set_data(Tensor(weight.asnumpy() + 0.2 * rng.standard_normal(weight.shape).astype(np.float32)))
    return built.set_train()


@pytest.fixture(scope="module")
def documents():
    """Per row, (tokens, labels) of each document; the label of an end is the next document's first token."""
    rng = np.random.default_rng(1)
    rows = []
    for lengths in ROWS:
        ids = rng.integers(6, VOCABULARY, sum(lengths) + 1)
        ids[np.cumsum(lengths) - 1] = END_TOKEN
        cuts = np.cumsum(lengths)[:-1]
        rows.append(list(zip(np.split(ids[:-1], cuts), np.split(ids[1:], cuts), strict=True)))
    return rows


def batch(rows):
    """Samples [B, LENGTH] of the documents of each row, padded with tokens 0 that count in no loss."""
    tokens, labels, counts = (np.zeros((len(rows), LENGTH), dtype) for dtype in (np.int32, np.int32, np.float32))
    for row, parts in enumerate(rows):
        for values, place in ((tokens, 0), (labels, 1)):
            whole = np.concatenate([part[place] for part in parts])
            values[row, : len(whole)] = whole
        counts[row, : sum(len(part[0]) for part in parts)] = 1.0
    mask = document_mask((tokens[:, :-1] == END_TOKEN).astype(np.int32))
    return tokens, labels, counts, mask


def step_of(gpt):
    """Return the function for the present model; MindSpore compiles the function once, at its first batch."""
    return ms.value_and_grad(Losses(gpt), None, gpt.trainable_params(), has_aux=True)


def run(gpt, step, rows):
    """Of one batch: the sum of the next tokens' losses, that of the MTP losses, and the latter's gradients."""
    arrays = batch(rows)
    (mtp_loss, lm_loss), gradients = step(*map(Tensor, arrays))
    tokens = arrays[2].sum()
    pairs = tokens - (len(rows) if type(gpt.mtp) is not adapter.BlockWithinDocuments else sum(map(len, rows)))
    losses = lm_loss.asnumpy().item() * tokens, mtp_loss.asnumpy().item() * pairs
    return *losses, [each.asnumpy() * pairs for each in gradients]


def alone(gpt, step, documents):
    """`run` of all documents, each in a sample of its own."""
    parts = [run(gpt, step, [[row[place]] for row in documents]) for place in range(len(ROWS))]
    return *(sum(part[place] for part in parts) for place in (0, 1)), [
        first + second for first, second in zip(*(part[2] for part in parts), strict=True)
    ]


@pytest.mark.slow
def test_documents_have_the_loss_and_the_gradients_that_they_have_alone(gpt, documents):
    """Attention included: a leak through the masks of the MTP layer would show here, too."""
    own = step_of(gpt)  # of MindFormers' own block
    wanted, stock = alone(gpt, own, documents), run(gpt, own, documents)
    adapter.keep_within(gpt, END_TOKEN)
    found = run(gpt, step_of(gpt), documents)
    np.testing.assert_allclose([*found[:2], stock[0]], [*wanted[:2], wanted[0]], rtol=1e-6)
    for gradient, expected in zip(found[2], wanted[2], strict=True):
        np.testing.assert_allclose(gradient, expected, atol=2e-6 * np.abs(expected).max())
    # each end of a document inside a sample counts one more pair in the stock block
    apart = [np.abs(one - other).max() / np.abs(other).max() for one, other in zip(stock[2], wanted[2], strict=True)]
    assert stock[1] > wanted[1] + 1 and max(apart) > 0.05
    ids = batch(documents)[0]
    np.testing.assert_array_equal(gpt.mtp.continues(Tensor(ids)).asnumpy()[:, 1:], continues(ids, END_TOKEN)[:, 1:])
