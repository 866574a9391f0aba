"""Notes: what MindFormers computes otherwise than one may expect, told to whom it touches and to nobody else."""

import pytest
import yaml
from click.testing import CliRunner

from tests.tools.check.mutations import MODEL, PARALLEL
from tests.tools.check.test_mutations import RECIPES, ROOT, name, plain
from tests.tools.check.test_rules import INTERLEAVED, MINI, SEMI, ZBV, change, findings
from tools.check.check import check_recipe
from tools.check.cli import check
from tools.recipe.load import load_recipe
from tools.recipe.mini import load_mini
from tools.recipe.override import dotted
from tools.schema.schema import load_schema

MTP = dotted((*MODEL, "num_nextn_predict_layers"))
BALANCING = dotted((*MODEL, "moe_router_load_balancing_type"))
ONE_SAMPLE = [(("runner_config", "batch_size"), 1), ((*MODEL, "batch_size"), 1)]
SHARDED = [(("parallel", "enable_parallel_optimizer"), True), ((*PARALLEL, "data_parallel"), 2)]
CP2 = [((*PARALLEL, "context_parallel"), 2)]
COMPUTE, DISPATCHER = (*MODEL, "compute_dtype"), (*MODEL, "moe_token_dispatcher_type")
ACCUMULATED = (("runner_config", "gradient_accumulation_steps"), 2)
COEFFICIENT, KIND = (*MODEL, "moe_aux_loss_coeff"), (*MODEL, "moe_router_load_balancing_type")


def test_an_embedding_that_is_whole_on_each_rank_is_never_made():
    path = (*PARALLEL, "vocab_emb_dp")
    found = findings(change(SEMI, (path, True)), "warning")[dotted(path)]
    assert "MindFormers changes True to False" in found.wrong and found.source == load_schema().line("vocab_emb_dp")
    assert dotted(path) not in findings(change(SEMI, (path, False)), "warning")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ([], True),
        (INTERLEAVED, True),
        ([*INTERLEAVED, *ZBV], False),  # first and last layer on one stage
        (SHARDED, False),  # the last stage's copy of the embedding gets no gradient
        ([*SHARDED, ((*PARALLEL, "data_parallel"), 1)], True),  # nothing to shard it over
        ([((*MODEL, "num_nextn_predict_layers"), 0)], False),
        ([(("runner_wrapper", "use_clip_grad"), False)], False),
        ([((*PARALLEL, "pipeline_stage"), 1), ((*MODEL, "offset"), 0)], False),
    ],
)
def test_the_norm_of_mtp_in_a_pipeline(changes, told):
    found = findings(change(SEMI, *changes), "note")
    assert (MTP in found) == told
    if told:
        assert "gpt_model.py" in found[MTP].source and "docs/stock-differences.md" in found[MTP].right


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ([], "8 samples"),
        (ONE_SAMPLE, None),
        ([*ONE_SAMPLE, *CP2], "each of the 2 parts"),
        ([*ONE_SAMPLE, (KIND, "sub_seq_aux_loss")], "each of the 2 parts"),
        ([*CP2, (KIND, "gbs_aux_loss")], None),
        ([*CP2, (COEFFICIENT, 0.0)], None),
        ([(("plugins", "group_aux_loss"), True)], None),  # asked to be taken over a group's samples
    ],
)
def test_the_auxiliary_loss(changes, words):
    found = findings(change(SEMI, *changes), "note")
    assert (BALANCING in found) == (words is not None)
    if words:
        assert words in found[BALANCING].wrong and "router.py" in found[BALANCING].source


@pytest.mark.parametrize(
    ("changes", "told"),
    [([], True), ([(COMPUTE, "bfloat16")], False), ([(DISPATCHER, "alltoall")], False)],
)
def test_a_dispatcher_that_rounds_probabilities(changes, told):
    group = [((*MODEL, "npu_nums_per_device"), 2), ((*PARALLEL, "expert_parallel"), 2)]
    float32 = [(COMPUTE, "float32"), (DISPATCHER, "alltoall_deredundency"), *group]
    found = findings(change(SEMI, *float32, *changes), "note")
    assert (dotted(DISPATCHER) in found) == told
    if told:
        assert "token_dispatcher.py" in found[dotted(DISPATCHER)].source


@pytest.mark.parametrize(
    ("changes", "workers", "told"),
    [
        ([], 4, False),  # bfloat16
        ([(COMPUTE, "float32")], 4, True),
        ([(COMPUTE, "float32"), ((*MODEL, "use_flash_attention"), False)], 4, False),
        ([], None, False),  # float32, by the CPU classes, which round nothing
    ],
)
def test_grouped_queries_in_float32_are_rounded(changes, workers, told):
    dense = load_mini(ROOT / "recipes/telechat3_36b/pretrain_8k.yaml", workers=workers)
    found = findings(change(dense, *changes), "note")
    assert (dotted(COMPUTE) in found) == told
    if told:
        assert "attention.py" in found[dotted(COMPUTE)].source and "float16" in found[dotted(COMPUTE)].wrong


def test_the_cpu_plugin_takes_the_auxiliary_loss_sample_by_sample():
    assert findings(MINI, "note") == {}


def test_notes_never_refuse():
    recipe = ROOT / "recipes" / "mini" / "pretrain_pp2.yaml"
    result = CliRunner().invoke(check, ["--no-build", str(recipe)])
    assert result.exit_code == 0 and "2 notes" in result.output, result.output
    assert all(finding.severity == "note" for finding in check_recipe(recipe).findings if finding.key == MTP)


_DATA = ("train_dataset", "data_loader", "config")
DOCUMENTS, MASKED = (*_DATA, "reset_attention_mask"), (*_DATA, "eod_mask_loss")
SHIFTED = [(DOCUMENTS, True), (("plugins", "mtp_documents"), False)]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (SHIFTED, True),
        ([*SHIFTED, (("plugins", "mtp_documents"), {})], False),
        ([*SHIFTED, (DOCUMENTS, False), (MASKED, True)], False),  # attention sees the whole sample
        ([*SHIFTED, ((*MODEL, "num_nextn_predict_layers"), 0)], False),
    ],
)
@pytest.mark.parametrize("recipe", [MINI, SEMI], ids=["data parallel", "sharded"])
def test_mtp_across_documents(recipe, changes, told):
    base = [((*PARALLEL, "pipeline_stage"), 1), ((*MODEL, "offset"), 0)]  # no other note of MTP
    found = findings(change(recipe, *base, *changes), "note")
    assert (MTP in found) == told
    if told:
        assert (
            "predicts tokens of the next document" in found[MTP].wrong
            and "plugins.mtp_documents: {}" in found[MTP].right
        )
        assert "multi_token_prediction.py" in found[MTP].source


def test_packed_conversations_have_no_mtp_across_documents():
    assert MTP not in findings(load_recipe(ROOT / "recipes/mini/finetune.yaml"), "note")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ([(MASKED, True)], True),
        ([], False),  # all tokens count
        ([(MASKED, True), ((*PARALLEL, "pipeline_stage"), 1), ((*MODEL, "offset"), 0)], False),  # one micro-batch
    ],
)
def test_means_of_micro_batches_that_count_unequally(changes, told):
    found = findings(change(SEMI, *changes), "note")
    assert (dotted(MASKED) in found) == told
    if told:
        assert "which samples share a micro-batch" in found[dotted(MASKED)].wrong
        assert "loss_func.py" in found[dotted(MASKED)].source


def test_means_of_micro_batches_of_conversations():
    kind = "train_dataset.data_loader.type"
    finetune = ROOT / "recipes/telechat3_105b/finetune_4k.yaml"
    assert kind in findings(load_recipe(finetune), "note")
    assert kind not in findings(load_recipe(ROOT / "recipes/mini/finetune.yaml"), "note")  # one micro-batch


GROUPS, CHOSEN, BIAS = ((*MODEL, key) for key in ("n_group", "topk_group", "moe_router_enable_expert_bias"))
TWO_OF_FOUR = [(GROUPS, 4), (CHOSEN, 2)]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ([], False),
        (TWO_OF_FOUR, True),
        ([*TWO_OF_FOUR, (CHOSEN, 4)], False),  # every group may be chosen
        ([*TWO_OF_FOUR, (BIAS, False)], False),
    ],
)
def test_groups_of_experts_are_masked_with_0(changes, told):
    found = findings(change(MINI, *changes), "note")
    assert (dotted(GROUPS) in found) == told
    if told:
        assert "outside the 2 of 4 groups" in found[dotted(GROUPS)].wrong
        assert "router.py" in found[dotted(GROUPS)].source


@pytest.mark.parametrize("path", RECIPES, ids=name)
def test_every_recipe_with_mtp_in_a_pipeline_says_so(path):
    recipe = load_recipe(path)
    degrees = recipe["parallel_config"]
    stages = degrees["pipeline_stage"] if recipe["use_parallel"] else 1
    copies = degrees["data_parallel"] * (degrees.get("context_parallel") or 1)
    sharded = recipe["parallel"].get("enable_parallel_optimizer") and copies > 1
    wanted = recipe["model"]["model_config"]["num_nextn_predict_layers"] > 0 and stages > 1 and not sharded
    assert (MTP in {finding.key for finding in check_recipe(recipe).findings}) == wanted


def notes_of(path):
    return [finding for finding in check_recipe(path).findings if finding.key == "model"]


def modelled_on_its_card(path):
    card = yaml.safe_load((path.parent / "card.yaml").read_text("utf-8"))
    return card["recipes"][path.name].get("kind", card["kind"]) == "modelled"


@pytest.mark.parametrize("path", RECIPES, ids=name)
def test_a_modelled_recipe_says_what_it_lacks(path):
    found = notes_of(path)
    assert len(found) == modelled_on_its_card(path)
    assert all(note.severity == "note" and "not for training" in note.wrong for note in found)


def test_a_child_of_a_modelled_recipe_says_so_too(tmp_path):
    child = tmp_path / "child.yaml"
    parent = ROOT / "recipes" / "pangu_ultra_moe_718b" / "pretrain_4k.yaml"
    child.write_text(f"base_config: {parent}\noutput_dir: ./child\n")
    (found,) = notes_of(child)
    assert "not for training" in found.wrong


@pytest.mark.parametrize("text", ["- a list\n", "model: mine\n", "{", "recipes: 3\n"])
def test_a_card_of_another_kind_says_nothing(tmp_path, text):
    (tmp_path / "card.yaml").write_text(text)
    mine = tmp_path / "mine.yaml"
    mine.write_text(f"base_config: {ROOT / 'recipes' / 'mini' / 'pretrain.yaml'}\n")
    assert notes_of(mine) == []


DEALT = ("plugins", "attention_balance")
BALANCED = [(DEALT, {"window": 1})]
APART = [(DOCUMENTS, True), (("plugins", "mtp_documents"), {})]


@pytest.mark.parametrize(
    ("changes", "key", "loss"),
    [
        ([(MASKED, True)], dotted(MASKED), "in the loss"),
        (APART, "plugins.mtp_documents", "in the MTP loss"),
        ([*APART, ((*MODEL, "num_nextn_predict_layers"), 0)], None, ""),
        ([*APART, (("calculate_per_token_loss",), True)], None, ""),
        ([*APART, ((*PARALLEL, "pipeline_stage"), 1)], None, ""),  # one micro-batch
        ([*APART, ((*PARALLEL, "pipeline_stage"), 1), ACCUMULATED], "plugins.mtp_documents", "in the MTP loss"),
        ([(DOCUMENTS, True)], None, ""),
    ],
)
def test_micro_batches_that_count_different_numbers_of_tokens(changes, key, loss):
    found = findings(change(SEMI, *changes), "note")
    told = {name for name, note in found.items() if "depends on which samples share a micro-batch" in note.wrong}
    assert told == ({key} if key else set())
    if key:
        assert loss in found[key].wrong and "loss_func.py" in found[key].source


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ([*BALANCED, *ONE_SAMPLE], None),
        ([*BALANCED, *ONE_SAMPLE, (MASKED, True)], "with eod_mask_loss micro-batches have different numbers"),
        ([*BALANCED, *ONE_SAMPLE, *APART], "with mtp_documents micro-batches have different numbers"),
        ([*BALANCED, *ONE_SAMPLE, (MASKED, True), ((*PARALLEL, "pipeline_stage"), 1)], None),  # one micro-batch a step
        ([*ONE_SAMPLE, (MASKED, True)], None),  # nothing is dealt
        (BALANCED, "all 8 samples"),
        ([*BALANCED, (COEFFICIENT, 0.0)], None),
        ([*BALANCED, *ONE_SAMPLE, (KIND, "gbs_aux_loss")], "gbs_aux_loss counts"),
        ([*BALANCED, *ONE_SAMPLE, (("plugins", "group_aux_loss"), True)], "an EP group has at the same time"),
    ],
)
def test_samples_that_are_dealt_to_other_micro_batches(changes, words):
    found = findings(change(SEMI, *changes), "note")
    assert ("plugins.attention_balance" in found) == (words is not None)
    if words:
        note = found["plugins.attention_balance"]
        assert words in note.wrong and "docs/attention-balance.md" in note.right and "loss_func.py" in note.source


def test_the_cpu_classes_take_the_auxiliary_loss_sample_by_sample():
    assert "plugins.attention_balance" not in findings(change(MINI, *BALANCED), "note")


@pytest.mark.parametrize(
    ("keys", "wrong"),
    [
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"sliding_window": 4096}, "sliding_window"),
        ({"sliding_window": 4096, "use_sliding_window": False}, None),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"layer_types": ["full_attention"]}, None),
        ({"softmax_scale": 0.1}, "softmax_scale"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"partial_rotary_factor": 1.0}, None),
    ],
)
def test_keys_of_a_public_model_that_the_training_graph_does_not_compute(keys, wrong):
    dense = plain(ROOT / "recipes" / "telechat3_36b" / "pretrain_8k.yaml")
    found = findings(change(dense, *(((*MODEL, key), value) for key, value in keys.items())))
    assert (dotted((*MODEL, wrong)) in found) if wrong else not [key for key in keys if dotted((*MODEL, key)) in found]
