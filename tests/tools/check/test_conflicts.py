"""MindFormers' own relocation of experts: what is refused, and the demonstration that it is wrong. The micro-batches
that zero_bubble_v needs. Flags of chunks, and exclusions, among recompute settings. Loaders that need the list of a
dataset strategy. Rules of initial weights.
"""

import re
import types

import numpy as np
import pytest

from plugins import pipeline_layout
from plugins.batch_ramp.plan import fewest_micro_batches
from plugins.errors import RecipeError
from plugins.hugging_face_weights.plan import Model, rows
from tests.tools.check.mutations import LOADER, MODEL, PARALLEL, put
from tests.tools.check.test_rules import (
    INTERLEAVED,
    MINI,
    PLAIN,
    SEMI,
    STAGES,
    TWO_CHUNKS,
    ZBV,
    change,
    findings,
    without,
)
from tests.tools.checkpoint.test_stored import saved
from tools.check.check import check_recipe
from tools.check.conflicts import KEYS
from tools.pipeline.schedules import check_schedule
from tools.recipe.mini_strategy import Degrees, least_micro_batches
from tools.recipe.override import dotted
from tools.recipe.view import View

UNSAVED = [each for each in SEMI["callbacks"] if each["type"] != "CheckpointMonitor"]


def said(recipe, key, severity="error"):
    found = check_recipe(recipe).findings
    return [each.wrong for each in found if each.key == dotted((*MODEL, key)) and each.severity == severity]


BY_TOKEN = "calculate_per_token_loss"


@pytest.mark.parametrize("section", [MODEL, ("runner_wrapper",)])
def test_a_loss_by_tokens_is_chosen_at_the_top_level_only(section):
    """MindFormers gives the top-level value to the model, whatever its own section says."""
    key = dotted((*section, BY_TOKEN))
    alone = findings(change(SEMI, ((*section, BY_TOKEN), True)))[key]
    assert "which is False" in alone.wrong and "base_trainer.py" in alone.source
    assert key not in findings(change(SEMI, ((*section, BY_TOKEN), True), ((BY_TOKEN,), True)))
    assert key in findings(change(SEMI, ((*section, BY_TOKEN), False), ((BY_TOKEN,), True)))


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ([], True),
        ([*INTERLEAVED, *ZBV, ((*MODEL, "moe_aux_loss_coeff"), 0.0)], False),
        ([((*PARALLEL, "pipeline_stage"), 1)], False),
        ([((*PARALLEL, "pipeline_stage"), 1), (("runner_config", "gradient_accumulation_steps"), 2)], True),
    ],
)
def test_a_loss_by_tokens_is_refused_where_micro_batches_are_added_up(changes, refused):
    """Executed with two steps of accumulation, and compiled with two stages: MindSpore's `Unstack` of one loss."""
    found = findings(change(SEMI, ((BY_TOKEN,), True), *changes))
    assert (BY_TOKEN in found) == refused
    if refused:
        assert "ends while it compiles" in found[BY_TOKEN].wrong and "wrapper.py" in found[BY_TOKEN].source


def test_a_loss_by_tokens_is_refused_where_the_auxiliary_loss_would_hardly_count():
    """Executed on two stages: after two steps the router's first moment was 23 % off, and losses agreed."""
    found = findings(change(SEMI, ((BY_TOKEN,), True), *INTERLEAVED, *ZBV))[BY_TOKEN]
    assert "divided by the 8 micro-batches twice" in found.wrong and "moe_aux_loss_coeff: 0" in found.right


@pytest.fixture
def startable():
    """A recipe that MindFormers' relocation starts with: four experts a device, and no checkpoints."""
    recipe = put(put(SEMI, ("callbacks",), UNSAVED), ("parallel", "enable_parallel_optimizer"), False)
    recipe = put(recipe, (*MODEL, "n_group"), 1)
    return put(recipe, (*MODEL, "topk_group"), 1)


def test_it_is_refused_where_it_would_start(startable):
    (wrong,) = said(put(startable, (*MODEL, KEYS[1]), True), KEYS[1])
    assert "do not arrive in the slots of the router's map" in wrong


def test_one_expert_a_device_is_sent_in_the_only_order_that_there_is(startable):
    recipe = put(startable, (*MODEL, "n_routed_experts"), 8)
    assert said(put(recipe, (*MODEL, KEYS[1]), True), KEYS[1]) == []


def test_printing_loads_costs_the_checkpoints(startable):
    recipe = put(startable, (*MODEL, KEYS[0]), True)
    assert said(recipe, KEYS[0]) == []
    (warning,) = said(recipe, KEYS[0], "warning")
    assert "saves no checkpoint" in warning


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ((*MODEL, "moe_token_dispatcher_type"), "alltoall_zero_redundancy", "only with the alltoall dispatcher"),
        (("optimizer", "type"), "PmaAdamW", "only with AdamW"),
        (("parallel", "enable_parallel_optimizer"), True, "parallel.enable_parallel_optimizer"),
        ((*MODEL, "n_group"), 2, "n_group above 1"),
        (("callbacks",), MINI["callbacks"], "CheckpointMonitor"),
    ],
)
def test_what_mindformers_stops_at(startable, key, path, value, words):
    recipe = put(put(startable, (*MODEL, key), True), path, value)
    assert any(words in wrong for wrong in said(recipe, key)), said(recipe, key)


class Held:
    """A `Held` stands in for a MindSpore parameter, with the methods that the tested code calls."""

    def __init__(self, value):
        self.value = np.array(value)

    def asnumpy(self):
        return self.value

    def set_data(self, tensor):
        self.value = tensor.asnumpy()


def misplaced(experts, ranks, seed):
    """Experts whose weights are not where the map says, after one relocation of MindFormers' own code on all ranks.

    A rank's "weights" are the numbers of the logical experts that it holds; only the exchange is played here.
    """
    from mindformers.core.callback.callback import ExpertParallelManager
    from mindformers.parallel_core.training_graph.transformer.moe import expert_mapping, moe_layer

    load = np.random.default_rng(seed).lognormal(size=experts).astype(np.float32)
    weights, sent, maps = np.arange(experts).reshape(ranks, -1), [], []
    for rank in range(ranks):
        moe_layer.get_rank = lambda rank=rank: rank
        layer = types.SimpleNamespace(
            expert_mapping=Held(np.arange(experts, dtype=np.int32)), expert_load_history=Held(load), ep=ranks,
            num_local_experts=experts // ranks, config=types.SimpleNamespace(num_moe_experts=experts),
            expert_relocation_optimizer=expert_mapping.ExpertDynamicRelocation(),
        )  # fmt: skip
        wanted, order = moe_layer.MoELayer.initialize_expert_relocation_dispatcher(layer)
        counts, _ = ExpertParallelManager(list(range(ranks)), rank, experts).update_communication_info(wanted)
        sent.append(np.split(weights[rank][order], np.cumsum(counts)[:-1]))
        maps.append(layer.expert_mapping.value)
    assert all(np.array_equal(maps[0], other) for other in maps)
    arrived = np.concatenate([sent[source][rank] for rank in range(ranks) for source in range(ranks)])
    return int((arrived[maps[0]] != np.arange(experts)).sum())


@pytest.fixture
def moe_layer(monkeypatch):
    from mindformers.parallel_core.training_graph.transformer.moe import moe_layer

    monkeypatch.setattr(moe_layer, "get_rank", moe_layer.get_rank)  # `misplaced` replaces it
    return moe_layer


def test_mindformers_relocation_misplaces_experts(moe_layer):
    """192 experts on 8 devices, as the 105B has them: from 17 a device on the sort is unstable on every host."""
    assert all(misplaced(192, 8, seed) > 50 for seed in range(5))


def test_the_sort_is_the_reason_with_24_experts_a_device_and_not_all_of_it_with_48(moe_layer, monkeypatch):
    argsort, stable = np.argsort, types.SimpleNamespace(**vars(np))
    stable.argsort = lambda keys: argsort(keys, kind="stable")
    monkeypatch.setattr(moe_layer, "np", stable)
    assert [misplaced(192, 8, seed) for seed in range(5)] == [0] * 5
    assert all(misplaced(384, 8, seed) > 50 for seed in range(5)), "a set gives its slots back in another order"


def test_weights_whose_experts_have_moved_are_refused_without_the_plugin(tmp_path):
    folder = saved(tmp_path, [1, 0, 2, 3])
    found = check_recipe(put(MINI, ("checkpoint", "load_path"), str(folder))).errors
    assert [each.key for each in found] == ["checkpoint.load_path"] and "restore-order" in found[0].wrong


@pytest.mark.parametrize(
    ("dtype", "words"),
    [("bfloat16", "no bfloat16 kernels"), ("float16", "verified only in float32"), ("fp16", "float16")],
)
def test_a_type_in_which_no_cpu_run_computes_is_refused_for_its_own_reason(dtype, words):
    (wrong,) = said(put(MINI, (*MODEL, "compute_dtype"), dtype), "compute_dtype")
    assert words in wrong and ("bfloat16" in wrong) is (dtype == "bfloat16")


@pytest.mark.parametrize("each", [2, 3])
def test_how_many_micro_batches_zero_bubble_v_needs_is_said_once(each, monkeypatch):
    """The check, the schedules, a ramp and the mini recipe read the one number (MindFormers' is 2)."""
    monkeypatch.setitem(pipeline_layout.MICRO_BATCHES_OF_A_STAGE, "zero_bubble_v", each)
    recipe = change(SEMI, *INTERLEAVED, *ZBV, ((*PARALLEL, "micro_batch_num"), 4 * each - 1))
    assert f"write at least {4 * each}" in findings(recipe)["parallel_config.micro_batch_num"].right
    check_schedule("zero_bubble_v", 7, 2, 7 * each)
    with pytest.raises(RecipeError, match=f"at least {7 * each} micro-batches"):
        check_schedule("zero_bubble_v", 7, 2, 7 * each - 1)
    assert fewest_micro_batches(7, "zero_bubble_v") == 7 * each
    assert least_micro_batches(View(recipe), Degrees(pp=7)) == 7 * each


@pytest.mark.parametrize(
    ("layout", "flags"), [(TWO_CHUNKS, [True, False]), (TWO_CHUNKS, [False, True]), (PLAIN, [True])]
)
def test_flags_of_chunks_without_a_list_count_for_stages_and_are_refused(layout, flags):
    """MindFormers takes them for stages 0 and 1, and recomputes nothing on the others."""
    assert STAGES == 4
    found = findings(put(layout, ("recompute_config", "recompute"), flags))
    assert "does not fit 4 stages" in found["recompute_config.recompute"].wrong


@pytest.mark.parametrize(
    ("key", "pattern", "chosen", "dropped"),
    [
        ("select_recompute", {r"mlp\.mul": False}, {r"mlp\.(mul|add)": [1]}, True),
        ("select_recompute", [r".*\.norm"], [r"input_layernorm\.norm"], True),
        ("select_recompute", [r"mlp\.experts\.mul"], [r"mlp\.experts"], False),
        ("select_recompute", [r"mlp\.mul"], True, False),
        ("select_comm_recompute", [r".*\.norm"], [r".*\.norm"], True),
    ],
)
def test_an_exclusion_that_drops_a_chosen_pattern_in_all_layers(key, pattern, chosen, dropped):
    recipe = change(SEMI, (("recompute_config", key), chosen), (("recompute_config", f"{key}_exclude"), pattern))
    found = findings(recipe, "warning").get(f"recompute_config.{key}_exclude")
    assert (found is not None and "in all layers" in found.wrong) == dropped


@pytest.mark.parametrize(
    ("target", "std", "refused"),
    [
        ("decoder.layers.*", 0.02, True),
        ("decoder.layers.*", 0, False),
        ("decoder.layers.0.*", 0.02, False),
        ("mtp.*", 0.02, True),
        ("(", 0.02, False),
    ],
)
def test_rules_of_initial_weights_must_not_draw_the_biases_of_routers(target, std, refused):
    """The first layer of the mini is dense; a pattern that is none is for MindFormers to refuse."""
    rules, key = [{"target": target, "init_method_std": std}], (*MODEL, "param_init_std_rules")
    recipe = change(MINI, ((*MODEL, "num_nextn_predict_layers"), 1), (key, rules))
    assert (dotted(key) in findings(recipe)) == refused


@pytest.mark.parametrize(
    ("target", "std", "words"),
    [
        ("decoder.layers.*norm", 0.02, "input_layernorm.weight, which would begin around zero"),
        (".*kv_layernorm", 0, "self_attention.kv_layernorm.weight, which would begin with zero"),
        ("decoder.final", 0.02, "decoder.final_layernorm.weight"),
        (".*bias", 0.02, ""),  # latent attention has none by this key
        (".*qkv.*bias", 0.02, "linear_qkv.bias, which would begin with random numbers"),
        (".*", 0, "input_layernorm"),
        ("decoder.layers.*(linear|experts).*weight", 0.02, ""),
    ],
)
def test_rules_of_initial_weights_that_match_norms_or_biases(target, std, words):
    key = (*MODEL, "param_init_std_rules")
    biases = ((*MODEL, "attention_bias"), True), ((*MODEL, "moe_router_enable_expert_bias"), False)
    latent = ((*MODEL, "multi_latent_attention"), "linear_qkv" not in words)
    recipe = change(MINI, *biases, latent, (key, [{"target": target, "init_method_std": std}]))
    said = [each.wrong for each in check_recipe(recipe).findings if each.key == dotted(key)]
    assert [words in each for each in said] == [True] * bool(words)


def test_the_pattern_that_is_proposed_draws_neither_biases_nor_norms():
    key = (*MODEL, "param_init_std_rules")
    found = findings(change(MINI, (key, [{"target": ".*", "init_method_std": 0.02}])))
    pattern = found[dotted(key)].right.split()[-1]
    names = {row.mindformers for row in rows(Model(layers=2, mtp_layers=0, dense=1, experts=4, latent_query=True))}
    kept = {name for name in names if name.endswith(("layernorm.weight", "expert_bias"))}
    drawn = {name for name in names if re.match(pattern, name)}
    assert drawn == {name for name in names - kept if name.startswith("decoder.layers.")} and len(drawn) > 10


def test_loaders_need_a_list_to_find_the_ranks_that_read_data():
    """`get_dp_from_dataset_strategy` of MindFormers' tools/utils.py raises an error for a text."""
    strategy = ("parallel", "dataset_strategy")
    whole = put(SEMI, strategy, "full_batch")
    conversations = without(put(SEMI, LOADER, {"type": "HFDataLoader", "data_files": "x"}), "dataset_strategy")
    for recipe in (without(whole, "full_batch"), put(whole, ("parallel", "full_batch"), True), conversations):
        assert "by which the loader finds" in findings(recipe)[dotted(strategy)].wrong
    for key, value in (("create_attention_mask", True), ("use_broadcast_data", False)):
        assert dotted(strategy) not in findings(put(conversations, (*LOADER, key), value))
