"""Recipes of models that this repository does not ship, in MindFormers' own classes: what their training models compute
decides what is counted, and what they drop is an error.

MindFormers' router with groups of experts: the fault that `tc3 check` notes, by execution, against NumPy.
"""

import numpy as np
import pytest
import yaml
from mindformers.parallel_core.training_graph.transformer.moe.router import TopKRouter
from mindformers.parallel_core.transformer_config import TransformerConfig
from mindspore import Tensor, nn

from plugins.cpu_backend.layers import TopK
from plugins.errors import RecipeError
from tests.tools.check.mutations import MODEL
from tests.tools.check.test_mutations import ROOT, plain
from tests.tools.check.test_rules import findings
from tools.check.check import check_recipe
from tools.recipe.load import Recipe
from tools.recipe.override import dotted
from tools.schema.sources import fixed_fields
from tools.weights.convert_plan import model_of


def qwen3_moe(**changes):
    """A recipe of grouped-query attention and experts in MindFormers' own class of Qwen3."""
    recipe = plain(ROOT / "recipes" / "telechat3_36b" / "pretrain_8k.yaml")
    sizes = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "routed_scaling_factor": 1.0}
    own = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], **sizes, **changes}
    recipe["model"]["model_config"].update(own)
    return recipe


def test_qwen3_has_norms_of_queries_and_keys_and_may_tie():
    hidden, layers, vocabulary = 6144, 64, 131072
    attention = hidden * 128 * (48 + 2 * 8) + 48 * 128 * hidden + 2 * 128
    layer = attention + 8 * hidden + 8 * 3 * hidden * 128 + 2 * hidden
    total = layers * layer + 2 * vocabulary * hidden + hidden
    assert check_recipe(qwen3_moe()).table["parameters_total"] == total
    tied = qwen3_moe(tie_word_embeddings=True)
    assert dotted((*MODEL, "tie_word_embeddings")) not in findings(tied, "warning")
    assert check_recipe(tied).table["parameters_total"] == total - vocabulary * hidden


def test_routers_without_a_factor_are_refused():
    """Public config.json files of Qwen3-MoE have none; MindFormers then multiplies by None as it compiles."""
    without = qwen3_moe()
    assert dotted((*MODEL, "routed_scaling_factor")) not in findings(without)
    del without["model"]["model_config"]["routed_scaling_factor"]
    assert "multiply by this number" in findings(without)[dotted((*MODEL, "routed_scaling_factor"))].wrong


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_qwen3_ties_by_one_key_only(kind):
    key = "untie_embeddings_and_output_weights"
    found = findings(qwen3_moe(model_type=kind, **{key: False}), "warning")[dotted((*MODEL, key))]
    assert "only by tie_word_embeddings" in found.wrong and found.right == "leave the key out"
    assert dotted((*MODEL, key)) not in findings(qwen3_moe(model_type=kind, **{key: True}), "warning")


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("qk_layernorm", False, "always has qk_layernorm = True"),
        ("first_k_dense_replace", 1, "always has first_k_dense_replace = 0"),
        ("mtp_num_layers", 1, "always has mtp_num_layers = 0"),
        ("decoder_sparse_step", 2, "drops this key"),
        ("mlp_only_layers", [0], "drops this key"),
        ("model_type", "glm4_moe", "refuses to train it"),
        ("model_type", "qwen2", "refuses to train it"),
    ],
)
def test_what_the_training_model_does_not_compute_is_an_error(key, value, said):
    found = findings(qwen3_moe(**{key: value}))[dotted((*MODEL, key))]
    assert said in found.wrong and "model_type" in found.right
    off = {"qk_layernorm": True, "first_k_dense_replace": 0, "num_nextn_predict_layers": 0, "decoder_sparse_step": 1}
    assert dotted((*MODEL, key)) not in findings(qwen3_moe(**off, mlp_only_layers=[]))


@pytest.mark.parametrize(("key", "value"), [("decoder_sparse_step", 2), ("mlp_only_layers", [0])])
def test_a_key_of_qwen3s_experts_is_only_unknown_to_a_dense_model(key, value):
    recipe = plain(ROOT / "recipes" / "telechat3_36b" / "pretrain_8k.yaml")
    recipe["model"]["model_config"][key] = value
    told = [error.wrong for error in check_recipe(recipe).errors if error.key == dotted((*MODEL, key))]
    assert len(told) == 1 and "there is no key of this name" in told[0]


def test_only_models_that_mindformers_trains_are_told_for_keys_that_are_missing(tmp_path):
    """Both keys are told, although they have one place: that of the section."""
    recipe = qwen3_moe()
    config = recipe["model"]["model_config"]
    del config["model_type"], config["architectures"]
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    errors = {error.key: error for error in check_recipe(tmp_path / "recipe.yaml").errors}
    keys = [dotted((*MODEL, key)) for key in ("model_type", "architectures")]
    types, classes = (errors[key].right.removeprefix("write one of ") for key in keys)
    trained = {"deepseek_mtp", "deepseek_v3", "qwen3", "qwen3_moe", "telechat3", "telechat3_moe", "telechat3_mtp"}
    assert set(types.split(", ")) == trained
    names = ("DeepseekV3", "Qwen3", "Qwen3Moe", "TeleChat3", "TeleChat3Moe")
    assert classes == ", ".join(f"{name}ForCausalLM" for name in names) + ", in a list"


def test_no_other_key_is_told_for_one_that_the_training_model_does_not_read():
    found = findings(qwen3_moe(num_nextn_predict_layers=1))[dotted((*MODEL, "num_nextn_predict_layers"))]
    assert "leave the key out" in found.right and "mtp_num_layers" not in found.right


def test_fields_that_a_training_model_does_not_hand_on_are_read_from_its_source():
    texts = ["GPTModel(transformer_layer_spec=get_gpt_layer_local_spec(qk_layernorm=True, num_experts=config.n))"]
    off = {"first_k_dense_replace": 0, "moe_layer_freq": 1, "multi_latent_attention": False, "mtp_num_layers": 0}
    assert fixed_fields(texts) == {"qk_layernorm": True, **off}
    assert fixed_fields([*texts, "get_gpt_decoder_block_spec(config)"]) == {}
    assert fixed_fields([]) == {}


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_weights_of_qwen3_are_refused_by_the_model_type(kind):
    """They were told to write qk_layernorm: False, which tc3 check refuses."""
    with pytest.raises(RecipeError, match=f"model_type: tc3 does not convert {kind}, whose"):
        model_of(Recipe(qwen3_moe(model_type=kind)))


TOKENS, EXPERTS, GROUPS, TOP_K = 4096, 8, 2, 2


class Choices(nn.Cell):
    """The experts that a router chooses for its logits."""

    def __init__(self, router):
        super().__init__()
        self.router = router

    def construct(self, logits):
        return self.router.routing(logits)[1]


@pytest.fixture(scope="module")
def router():
    """MindFormers' router. A token chooses one group."""
    built = TopKRouter(TransformerConfig(
        num_attention_heads=2, num_layers=2, hidden_size=16, num_moe_experts=EXPERTS, moe_router_topk=TOP_K,
        moe_router_num_groups=GROUPS, moe_router_group_topk=1, moe_router_score_function="sigmoid", seq_length=TOKENS,
        moe_router_topk_scaling_factor=1.0, moe_router_enable_expert_bias=True, compute_dtype="float32",
        moe_router_load_balancing_type="seq_aux_loss", params_dtype="float32", add_bias_linear=False,
    ))  # fmt: skip
    built.topk = built.afb_topk = built.tc_topk = TopK()
    return built


def outside(router, bias):
    """The share of choices outside the token's group, as MindFormers executes it and as NumPy predicts it of a mask
    that is 0.

    The bias is that of all experts.
    """
    logits = np.random.default_rng(0).standard_normal((TOKENS, EXPERTS)).astype(np.float32)
    router.expert_bias.set_data(Tensor(np.full(EXPERTS, bias, np.float32)))
    chosen = Choices(router)(Tensor(logits[None])).asnumpy()[0]
    scores = 1 / (1 + np.exp(-logits)) + np.float32(bias)
    best = np.sort(scores.reshape(TOKENS, GROUPS, -1), -1)[..., -TOP_K:]
    group = np.arange(EXPERTS) // (EXPERTS // GROUPS)
    allowed = group == best.sum(-1).argmax(-1)[:, None]
    predicted = np.argsort(-np.where(allowed, scores, 0), -1, kind="stable")[:, :TOP_K]
    return tuple(float(np.mean(~np.take_along_axis(allowed, which, 1))) for which in (chosen, predicted))


@pytest.mark.slow
@pytest.mark.usefixtures("graph_mode")
@pytest.mark.parametrize(("bias", "share"), [(0.0, 0.0), (-0.25, 0.0004), (-0.5, 0.064), (-0.75, 0.588), (-1.0, 1.0)])
def test_a_low_bias_lets_forbidden_groups_in(router, bias, share):
    executed, predicted = outside(router, bias)
    assert executed == pytest.approx(predicted, abs=1e-4)
    assert executed == pytest.approx(share, abs=5e-4)
