"""Rules, one spoilt recipe each: where the finding stands, and what it says would be right.

Lists of recomputed layers are refused when MindFormers' own LayerSetting fails on them, and only then.
"""

import copy
from types import SimpleNamespace

import pytest

from tests.tools.check.mutations import LOADER, MODEL, PARALLEL, put
from tests.tools.check.test_mutations import ROOT, plain
from tools.check.check import check_recipe
from tools.recipe.override import dotted
from tools.schema.schema import load_schema

MINI = plain(ROOT / "recipes" / "mini" / "pretrain.yaml")
SEMI = put(
    put(put(MINI, ("use_parallel",), True), ("parallel", "parallel_mode"), 1), ("context", "device_target"), "Ascend"
)
SEMI["plugins"]["held_out_loss"] = False
SEMI["context"]["dataset_broadcast_opt_level"] = 3
SEMI["runner_config"]["sink_mode"] = True
SEMI["parallel_config"].update(
    data_parallel=4, model_parallel=2, pipeline_stage=4, expert_parallel=8, micro_batch_num=8
)
SEMI["parallel_config"]["use_seq_parallel"] = True
SEMI["parallel"]["dataset_strategy"] = [[4, 1], [4, 1], [4, 1], [4, 1], [4, 1, 1, 1]]
SEMI["parallel"]["pipeline_config"] = {"pipeline_interleave": False, "pipeline_scheduler": "1f1b"}
SEMI["model"]["model_config"].update(num_hidden_layers=10, offset=[1, 1, 0, 0])
SEMI["callbacks"][1]["micro_batch_num"] = 8


def change(recipe, *changes):
    for path, value in changes:
        recipe = put(recipe, path, value)
    return recipe


def findings(recipe, severity="error"):
    return {finding.key: finding for finding in check_recipe(recipe).findings if finding.severity == severity}


YARN, STRETCH = ROOT / "recipes" / "telechat3_36b" / "context_32k.yaml", (*MODEL, "rope_scaling")
TELECHAT2 = ROOT / "recipes" / "telechat2_115b" / "pretrain_8k.yaml"


def test_yarn_without_latent_attention_needs_the_plugin():
    """MindFormers 1.9.0 would end in an AttributeError after the start."""
    found = findings(change(plain(YARN), (("plugins", "yarn"), False)))[dotted((*MODEL, "position_embedding_type"))]
    assert "qk_pos_emb_head_dim" in found.wrong and "gpt_model.py" in found.source and "plugins.yarn" in found.right
    assert check_recipe(YARN).clean


@pytest.mark.parametrize(
    ("kind", "right"),
    [(each, "the training graph has no positions of this kind") for each in ("linear", "dynamic", "llama3", "longrope")]
    + [("telechat3-yarn", 'write "yarn", and plugins.yarn: {attention_factor: telechat3}')],
)
def test_other_ways_to_stretch_positions_are_refused_by_name(kind, right):
    """MindFormers would train without any positions: GPTModel has no branch for them."""
    key = (*STRETCH, "rope_type")
    found = findings(change(plain(YARN), (key, kind)))[dotted(key)]
    assert repr(kind) in found.wrong and right in found.right


@pytest.mark.parametrize(
    ("path", "value", "key", "said"),
    [
        (("plugins", "yarn"), {"factor": 4}, "plugins.yarn.factor", "no such setting"),
        (("plugins", "yarn"), True, "plugins.yarn", "write {attention_factor"),
        ((*STRETCH, "mscale_all_dim"), 1, dotted((*STRETCH, "mscale_all_dim")), "no effect"),
        ((*STRETCH, "rope_type"), "rope", dotted((*STRETCH, "rope_type")), "is not YaRN"),
    ],
)
def test_what_the_yarn_plugin_refuses_stands_at_its_key(path, value, key, said):
    assert said in findings(change(plain(YARN), (path, value)))[key].wrong


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("plugins", "output_biases"), True, "write plugins.output_biases: {}"),
        ((*MODEL, "add_bias_linear"), False, "gives no linear layer a bias"),
        ((*MODEL, "attention_bias"), True, "gives queries, keys and values a bias"),
    ],
)
def test_what_the_plugin_of_telechat2s_biases_refuses_stands_at_its_key(path, value, said):
    assert said in findings(change(plain(TELECHAT2), (path, value)))[dotted(path)].wrong


def test_a_sequence_beyond_what_yarn_reaches_is_said():
    found = findings(change(plain(YARN), ((*STRETCH, "factor"), 2)), "warning")
    assert "2 x 8192 tokens are fewer than seq_length 32768" in found[dotted((*STRETCH, "factor"))].wrong


@pytest.mark.parametrize(
    ("key", "value", "wants"),
    [("moe_z_loss_coeff", 0.001, True), ("moe_z_loss_coeff", 0.0, False), ("use_fused_ops_topkrouter", True, True),
     ("use_fused_ops_topkrouter", False, False), ("moe_aux_loss_coeff", 0.001, False)],
)  # fmt: skip
def test_a_key_that_nothing_reads_is_said(key, value, wants):
    """MindFormers 1.9.0 has a z-loss in its configuration, and in no router that trains."""
    found = findings(change(MINI, ((*MODEL, key), value)), "warning").get(dotted((*MODEL, key)))
    assert (found is not None and "no training code reads" in found.wrong) is wants


def test_the_starting_points_are_clean():
    assert findings(MINI) == {}
    assert findings(SEMI) == {}


INTERLEAVED = [
    (("parallel", "pipeline_config"), {"pipeline_interleave": True, "pipeline_scheduler": "1f1b"}),
    ((*MODEL, "pp_interleave_num"), 2),
    ((*MODEL, "offset"), [[1, 1, 0, 0], [0, 0, 0, 0]]),
]
ZBV = [(("parallel", "pipeline_config"), {"pipeline_interleave": True, "pipeline_scheduler": "zero_bubble_v"})]


@pytest.mark.parametrize("changes", [INTERLEAVED, [*INTERLEAVED, *ZBV]])
def test_interleaved_layouts_pass(changes):
    assert findings(change(SEMI, *changes)) == {}


@pytest.mark.parametrize(
    ("changes", "key", "words"),
    [
        ([((*MODEL, "offset"), 0)], (*MODEL, "offset"), "leave 2 over"),
        ([((*MODEL, "offset"), [1, 1, 0])], (*MODEL, "offset"), "does not have the shape [4]"),
        ([((*MODEL, "offset"), [4, 0, -2, 0])], (*MODEL, "offset"), "no layer"),
        ([*INTERLEAVED, ((*MODEL, "offset"), [1, 1, 0, 0])], (*MODEL, "offset"), "add up to 4"),
        ([*INTERLEAVED[1:2]], (*MODEL, "pp_interleave_num"), "not interleaved"),
        ([(("recompute_config", "recompute"), [1, 2])], ("recompute_config", "recompute"), "does not fit 4 stages"),
        ([(("swap_config",), {"swap": True})], ("swap_config", "swap"), "drops swap_config"),
        ([(("recompute_config", "select_recompute"), {"mlp.mul": 3})],
         ("recompute_config", "select_recompute", "mlp.mul"), "neither True or False nor a list"),
        ([(("recompute_config", "select_recompute"), [[1, 1, 0]])],
         ("recompute_config", "select_recompute"), "does not fit 4 stages"),
        ([((*MODEL, "swap"), True), (("recompute_config", "recompute"), [4, 10])],
         ("recompute_config", "recompute"), "10 is not a layer of this model, whose layers are numbered"),
        ([*INTERLEAVED, *ZBV, ((*PARALLEL, "micro_batch_num"), 7)],
         (*PARALLEL, "micro_batch_num"), "needs 8 micro-batches"),
        ([(("parallel", "pipeline_config", "pipeline_scheduler"), "seqvpp")],
         ("parallel", "pipeline_config", "pipeline_scheduler"), "needs an interleaved pipeline"),
        ([*INTERLEAVED, (("parallel", "pipeline_config", "pipeline_scheduler"), "seqvpp")],
         ("parallel", "pipeline_config", "pipeline_scheduler"), "trainer refuses seqvpp"),
        ([((*PARALLEL, "expert_parallel"), 3)], (*PARALLEL, "expert_parallel"), "3"),
        ([((*PARALLEL, "model_parallel"), 8)], (*PARALLEL, "model_parallel"), "4 heads"),
        ([((*PARALLEL, "use_seq_parallel"), False)], (*PARALLEL, "use_seq_parallel"), "sequence parallelism"),
        ([((*PARALLEL, "data_parallel"), 8)], ("parallel", "dataset_strategy"), "data_parallel is 8"),
        ([((*MODEL, "moe_token_dispatcher_type"), "alltoall_deredundency"), ((*PARALLEL, "expert_parallel"), 4)],
         (*MODEL, "moe_token_dispatcher_type"), "whole nodes"),
        ([(("parallel", "parallel_optimizer_config"), {"optimizer_weight_shard_size": 3})],
         ("parallel", "parallel_optimizer_config", "optimizer_weight_shard_size"), "does not divide"),
        ([((*PARALLEL, "context_parallel"), 2), ((*PARALLEL, "ulysses_degree_in_cp"), 4)],
         (*PARALLEL, "ulysses_degree_in_cp"), "does not divide context_parallel 2"),
        ([((*PARALLEL, "context_parallel"), 4), ((*PARALLEL, "ulysses_degree_in_cp"), 4)],
         (*PARALLEL, "ulysses_degree_in_cp"), "= 2 x 4"),
        ([(("parallel", "full_batch"), True), (("parallel", "dataset_strategy"), [[2, 1]] * 5)],
         ("parallel", "dataset_strategy"), "data_parallel is 4"),
        ([(("parallel", "full_batch"), False), (("parallel", "dataset_strategy"), "full_batch")],
         ("parallel", "dataset_strategy"), "not a list"),
        ([(("context", "dataset_broadcast_opt_level"), 1)], ("context", "dataset_broadcast_opt_level"), "needs 3"),
        ([((*PARALLEL, "pipeline_stage"), 1), ((*MODEL, "offset"), 0),
          (("runner_config", "gradient_accumulation_steps"), 2)],
         ("callbacks", 1, "gradient_accumulation_steps"), "1, but runner_config.gradient_accumulation_steps is 2"),
        ([(("runner_config", "gradient_accumulation_steps"), 2)],
         ("runner_config", "gradient_accumulation_steps"), "silently replaces"),
    ],
)  # fmt: skip
def test_layouts(changes, key, words):
    found = findings(change(SEMI, *changes))
    assert words in found[dotted(key)].wrong


@pytest.mark.parametrize(
    ("data_parallel", "changes", "refused"),
    [
        (16, [], True),
        (15, [], False),  # 120 devices
        (16, [(("checkpoint", "async_save"), False)], False),
        (16, [(("use_legacy_format",), True)], False),
    ],
)
def test_a_background_save_of_more_ranks_than_an_int8_counts_is_refused(data_parallel, changes, refused):
    """256 ranks that all write add up to 0, which MindFormers takes for a complete save."""
    recipe = change(SEMI, (("checkpoint", "async_save"), True), ((*PARALLEL, "data_parallel"), data_parallel), *changes)
    found = findings(recipe).get("checkpoint.async_save")
    assert (found is not None) is refused
    assert found is None or (
        "cannot hold 128" in found.wrong and found.source == load_schema().line("async_save_ranks")
    )


@pytest.mark.parametrize(("workers", "refused"), [(1, False), (2, True)])
def test_a_background_save_of_several_cpu_workers_is_refused(workers, refused):
    """comm_func.all_reduce ends in "Create kernelmod for op InnerCommAllReduce failed" under msrun on CPU."""
    recipe = change(
        MINI, (("checkpoint", "async_save"), True), (("use_parallel",), True), ((*PARALLEL, "data_parallel"), workers)
    )
    assert ("checkpoint.async_save" in findings(recipe)) is refused


_OPTIMIZER = ("parallel", "parallel_optimizer_config")


@pytest.mark.parametrize(("level", "refused"), [("level1", True), ("level2", False), ("level3", True)])
@pytest.mark.parametrize("shard", [True, False])
def test_mindspore_takes_sharded_gradients_beside_level2_alone(level, refused, shard):
    """set_auto_parallel_context looks at the key, not at its value; level2 makes False True."""
    flat = change(SEMI, ((*MODEL, "disable_lazy_inline"), True))  # with lazy inline: the test below
    both = {"optimizer_level": level, "gradient_accumulation_shard": shard}
    found = findings(put(flat, _OPTIMIZER, both))
    assert (dotted((*_OPTIMIZER, "gradient_accumulation_shard")) in found) == (refused or not shard)
    assert findings(put(flat, _OPTIMIZER, {"optimizer_level": level})) == {}
    warned = findings(put(flat, _OPTIMIZER, {"optimizer_level": level}), "warning")
    assert (dotted((*_OPTIMIZER, "optimizer_level")) in warned) == (level == "level3")


@pytest.mark.parametrize(("key", "value"), [("gradient_accumulation_shard", True), ("optimizer_level", "level2")])
def test_sharded_gradients_in_a_pipeline_are_a_compile_that_does_not_end(key, value):
    """recipes/mini/pretrain_pp2.yaml and 48 devices of the 105B were compiled: docs/memory.md."""
    recipe = put(SEMI, _OPTIMIZER, {key: value})
    found = findings(recipe)
    assert found.keys() == {dotted((*_OPTIMIZER, key))}
    assert found[dotted((*_OPTIMIZER, key))].source == load_schema().line("endless_compile")
    whole = ((*PARALLEL, "pipeline_stage"), 1), ((*PARALLEL, "data_parallel"), 16), ((*MODEL, "offset"), 0)
    for other in (whole, [((*MODEL, "disable_lazy_inline"), True)]):
        assert dotted((*_OPTIMIZER, key)) not in findings(change(recipe, *other))
    accumulated = change(recipe, *whole, (("runner_config", "gradient_accumulation_steps"), 2))
    assert dotted((*_OPTIMIZER, key)) in findings(accumulated)  # the search is that of a pipeline
    assert findings(put(SEMI, _OPTIMIZER, {"gradient_accumulation_shard": False})) == {}


def test_mindspore_itself_refuses_the_same_levels():
    import mindspore as ms

    for level in ("level1", "level2", "level3"):
        for shard in (True, False):
            both = {"optimizer_level": level, "gradient_accumulation_shard": shard}
            ms.reset_auto_parallel_context()
            if level == "level2":
                ms.set_auto_parallel_context(parallel_optimizer_config=both)
            else:
                with pytest.raises(ValueError, match="cannot set grad_accumulation_shard"):
                    ms.set_auto_parallel_context(parallel_optimizer_config=both)
    ms.reset_auto_parallel_context()


FEW = ((*PARALLEL, "micro_batch_num"), 3), (("callbacks", 1, "micro_batch_num"), 3)


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ([*INTERLEAVED], "micro_interleaved"),
        ([*INTERLEAVED, (("parallel", "pipeline_config", "pipeline_scheduler"), "seqsmartvpp")], "micro_seqvpp"),
        ([((*MODEL, "disable_lazy_inline"), True)], "micro_not_inlined"),
        ([((*PARALLEL, "micro_batch_num"), 1), (("callbacks", 1, "micro_batch_num"), 1)], "micro_one"),
    ],
)
def test_fewer_micro_batches_than_stages_where_mindspore_refuses_them(changes, rule):
    """Each was compiled past the check, but for the layout without lazy inline: MindSpore said what is cited."""
    found = findings(change(SEMI, *FEW, *changes))[dotted((*PARALLEL, "micro_batch_num"))]
    assert found.source == load_schema().line(rule) and "libmindspore_frontend.so: " in found.source


@pytest.mark.parametrize("scheduler", [None, "gpipe", "seqpipe"])
def test_fewer_micro_batches_than_stages_are_a_warning_where_they_compile(scheduler):
    changes = [*INTERLEAVED, (("parallel", "pipeline_config", "pipeline_scheduler"), scheduler)] if scheduler else []
    recipe = change(SEMI, *FEW, *changes)
    assert findings(recipe) == {}
    assert "idle for about 50%" in findings(recipe, "warning")[dotted((*PARALLEL, "micro_batch_num"))].wrong


def test_an_exclusion_of_no_operators_excludes_nothing():
    found = findings(put(SEMI, ("recompute_config", "select_recompute_exclude"), True), "warning")
    assert "excludes nothing" in found["recompute_config.select_recompute_exclude"].wrong


def without(recipe, *keys):
    left = put(recipe, ("seed",), 1)
    for key in keys:
        del left["parallel"][key]
    return left


def test_mindformers_fills_in_a_strategy_and_full_batch():
    """base_trainer.py, _get_columns_with_strategy and _set_full_batch_with_strategy."""
    assert findings(without(SEMI, "dataset_strategy")) == {}
    assert findings(put(SEMI, ("parallel", "full_batch"), True)) == {}


def test_ulysses_is_its_degree():
    """The algorithm's name is read nowhere in graph mode: 4 heads over tp 2 x cp 4 gather keys and values."""
    named = change(SEMI, ((*PARALLEL, "context_parallel"), 4), ((*PARALLEL, "context_parallel_algo"), "ulysses_cp"))
    assert dotted((*PARALLEL, "ulysses_degree_in_cp")) not in findings(named)
    assert "has no effect on its own" in findings(named, "warning")[dotted((*PARALLEL, "context_parallel_algo"))].wrong
    degree = (*PARALLEL, "ulysses_degree_in_cp")
    two = change(SEMI, ((*PARALLEL, "context_parallel"), 2), (degree, 2))
    assert "does not compile" in findings(two)[dotted(degree)].wrong  # values are narrower than queries here
    equal = put(
        two,
        (*MODEL, "v_head_dim"),
        sum(SEMI["model"]["model_config"][key] for key in ("qk_head_dim", "qk_pos_emb_head_dim")),
    )
    assert dotted(degree) not in findings(equal)
    assert "gathers keys and values over all context-parallel ranks" in findings(equal, "warning")[dotted(degree)].wrong


@pytest.mark.parametrize(("key", "value"), [("tie_word_embeddings", True),
                                            ("untie_embeddings_and_output_weights", False)])  # fmt: skip
def test_nothing_is_tied(key, value):
    dense = plain(ROOT / "recipes" / "telechat3_36b" / "pretrain_8k.yaml")
    tied = put(dense, (*MODEL, key), value)
    assert "never ties" in findings(tied, "warning")[dotted((*MODEL, key))].wrong
    tables = [check_recipe(recipe).table for recipe in (dense, tied)]
    assert tables[0]["parameters_total"] == tables[1]["parameters_total"]
    assert tables[0]["flops_per_token"] == tables[1]["flops_per_token"]


def test_heads_divide_the_width_even_where_a_head_has_its_own():
    dense = plain(ROOT / "recipes" / "telechat3_36b" / "pretrain_8k.yaml")
    spoilt = change(dense, ((*MODEL, "num_attention_heads"), 40), ((*MODEL, "head_dim"), 128))
    assert "hidden_size" in findings(spoilt)[dotted((*MODEL, "num_attention_heads"))].wrong


@pytest.mark.parametrize(
    ("changes", "key", "words"),
    [
        ([((*MODEL, "qk_rope_head_dim"), 32)], (*MODEL, "qk_rope_head_dim"), "qk_pos_emb_head_dim = 16"),
        ([((*MODEL, "scoring_func"), "softmax")], (*MODEL, "scoring_func"), "moe_router_score_function = 'sigmoid'"),
        ([((*MODEL, "moe_router_topk"), 4)], (*MODEL, "moe_router_topk"), "sets too"),
        ([((*MODEL, "batch_size"), 2)], (*MODEL, "batch_size"), "by runner_config.batch_size"),
        ([((*MODEL, "use_attn_mask_compression"), True)], (*MODEL, "use_attn_mask_compression"), "2048"),
        ([((*MODEL, "apply_rope_fusion"), True)], (*MODEL, "apply_rope_fusion"), "no fused RoPE"),
        ([(("runner_config", "sink_mode"), True)], ("runner_config", "sink_mode"), "multiplies the epochs"),
        ([((*MODEL, "compute_dtype"), "bfloat16")], (*MODEL, "compute_dtype"), "CPU"),
        ([(("runner_wrapper", "use_clip_grad"), False)], ("runner_wrapper", "use_clip_grad"), "None for the norm"),
        ([((*LOADER, "config", "reset_attention_mask"), True), ((*LOADER, "config", "create_attention_mask"), False)],
         (*LOADER, "config", "reset_attention_mask"), "other documents"),
        ([(("callbacks",), MINI["callbacks"][:1])], ("callbacks",), "TopkBiasBalanceCallback"),
        ([(("callbacks", 1, "gradient_accumulation_steps"), 2)], ("callbacks", 1, "gradient_accumulation_steps"),
         "updated wrongly"),
        ([(("optimizer", "eps"), "1e-8")], ("optimizer", "eps"), "must be a number"),
        ([((*PARALLEL, "context_parallel_algo"), "hybrid_cp")], (*PARALLEL, "context_parallel_algo"), "not one of"),
        ([(("train_dataset", "batch_size"), 4)], ("train_dataset", "batch_size"), "overwrites"),
        ([(("plugins", "held_out_lost"), {})], ("plugins", "held_out_lost"), "no key of this name"),
        ([(("plugins", "held_out_loss", "evry"), 3)], ("plugins", "held_out_loss", "evry"), "no such setting"),
    ],
)  # fmt: skip
def test_one_process(changes, key, words):
    found = findings(change(MINI, *changes))
    assert words in found[dotted(key)].wrong


@pytest.mark.parametrize(
    ("path", "right"),
    [
        (("runner_confg",), "'runner_config'"),
        (("optimizer", "weigth_decay"), "'weight_decay'"),
        (("parallel", "gradient_mean"), "'gradients_mean'"),
        ((*LOADER, "config", "flavour"), "remove the key"),
        (("runner_config", "hidden_size"), "model.model_config"),
        ((*MODEL, "model_parallel"), "parallel_config"),
    ],
)
def test_an_unknown_key_comes_with_a_suggestion(path, right):
    found = findings(put(MINI, path, 1))
    assert right in found[dotted(path)].right


def test_an_anchor_is_reported_once():
    from tools.recipe.load import load_recipe
    from tools.recipe.override import get_path, shared_paths

    spoilt = load_recipe(ROOT / "recipes" / "mini" / "pretrain.yaml")
    for path in shared_paths(spoilt, ("train_dataset", "num_parallel_workers")):
        get_path(spoilt, path[:-1])[path[-1]] = 0
    found = [finding for finding in check_recipe(spoilt).findings if "num_parallel_workers" in finding.key]
    assert len(found) == 1 and found[0].line > 1


def test_a_finding_in_a_base_names_the_base(tmp_path):
    base = (ROOT / "recipes" / "mini" / "pretrain.yaml").read_text("utf-8").replace("weight_decay", "weight_dekay")
    (tmp_path / "base.yaml").write_text(base, "utf-8")
    (tmp_path / "child.yaml").write_text("base_config: ./base.yaml\nseed: 3\n", "utf-8")
    finding = check_recipe(tmp_path / "child.yaml").errors[0]
    assert finding.file == str(tmp_path / "base.yaml")
    assert "weight_dekay" in base.splitlines()[finding.line - 1]


def test_a_class_of_ones_own_is_left_alone():
    recipe = put(MINI, ("optimizer",), {"type": "Mine", "auto_register": "my.module.Mine", "anything": 1})
    assert findings(recipe) == {}


_FLAT = change(
    SEMI,
    *(((*PARALLEL, key), value) for key, value in {"pipeline_stage": 1, "micro_batch_num": 1}.items()),
    ((*MODEL, "offset"), 0),
    ((*MODEL, "pp_interleave_num"), 1),
    (("parallel", "enable_parallel_optimizer"), True),
    (("runner_config", "gradient_accumulation_steps"), 2),
    (("parallel", "dataset_strategy"), [[4, 1]] * 4 + [[4, 1, 1, 1]]),
)


@pytest.mark.parametrize(
    ("changes", "weights"),
    [
        ({}, "experts"),
        ({(*PARALLEL, "expert_parallel"): 4}, ""),
        ({("runner_config", "gradient_accumulation_steps"): 1}, ""),
        ({("parallel", "enable_parallel_optimizer"): False}, ""),
        (
            {
                (*PARALLEL, "data_parallel"): 1,
                (*PARALLEL, "expert_parallel"): 1,
                ("parallel", "dataset_strategy"): [[1, 1]] * 4 + [[1, 1, 1, 1]],
            },
            "weights that model_parallel cuts",
        ),
    ],
)
def test_accumulated_gradients_that_sharded_optimizers_never_see(changes, weights):
    """Executed on CPU processes: dp 2, ep 2 and tp 2, with two steps of accumulation; both train without the shards."""
    found = findings(change(_FLAT, *changes.items()))
    key = "runner_config.gradient_accumulation_steps"
    assert (key in found) == bool(weights), found
    if weights:
        assert f"{weights} become zero" in found[key].wrong
        assert found[key].source == load_schema().line("lost_gradients")


STAGES, LAYERS = 4, 10
PLAIN, TWO_CHUNKS, V = SEMI, change(SEMI, *INTERLEAVED), change(SEMI, *INTERLEAVED, *ZBV)
SWAPPED = put(SEMI, (*MODEL, "swap"), True)
NORM, MUL = r".*\.norm", r"mlp\.mul"
ROWS = [[1, 1, 0, 0], [0, 0, 0, 1]]
VALUES = [
    *(True, False, [], [1, 1, 0, 1], [True, False, True, False], [1, 1], [1] * 5),
    *(ROWS, [[1, 1, 0, 0]], [True, ROWS[1]], [ROWS[0], True], [False, False], [ROWS[0], [1, 1]]),
    *(
        [NORM],
        [NORM, MUL],
        {NORM: True},
        {MUL: False},
        {MUL: []},
        {NORM: ROWS, MUL: True},
        {NORM: [1, 1, 0, 1]},
        {MUL: [ROWS[0], False]},
    ),
]
# no failure, but not what is written: a list for fewer stages leaves the others out, a flag is layer 0 or 1
TAKEN_OTHERWISE = [[[1, 1], [False, False]], [[True, False, True, False], [False, False]]]
KEYS = [
    *("recompute", "select_recompute", "select_comm_recompute"),
    *("select_recompute_exclude", "select_comm_recompute_exclude"),
]


def fails_in_mindformers(recipe, key, value, monkeypatch):
    """Build MindFormers' table of the layers and look every layer up."""
    from mindformers.parallel_core.training_graph.transformer import utils

    monkeypatch.setattr(utils, "is_legacy_model", lambda: False)
    chunks = recipe["model"]["model_config"].get("pp_interleave_num", 1)
    context = {"pipeline_interleave": chunks > 1, **recipe["parallel"]["pipeline_config"]}
    monkeypatch.setattr(utils.ms, "get_auto_parallel_context", context.get)
    swap = recipe["model"]["model_config"].get("swap", False)
    settings = dict.fromkeys(KEYS, False) | {key: copy.deepcopy(value)}  # it turns lists round in place
    config = SimpleNamespace(
        **settings, cpu_offloading=swap, cpu_offloading_num_layers=None, op_swap=None, mp_comm_recompute=True,
        parallel_optimizer_comm_recompute=False, recompute_slice_activation=False,
        pipeline_model_parallel_size=STAGES, gradient_aggregation_group=4,
    )  # fmt: skip
    layer = SimpleNamespace(recompute=lambda **_: None, _cells={})
    try:
        table = utils.LayerSetting(LAYERS, recipe["model"]["model_config"]["offset"], config, chunks)
        for number in range(LAYERS):
            (table.set_recompute_select_layer_index if swap else table.set_recompute)(layer, number)
    except (ValueError, TypeError, IndexError, KeyError):
        return True
    return False


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("layout", [PLAIN, TWO_CHUNKS, V, SWAPPED], ids=["plain", "two chunks", "v", "swapped"])
def test_what_mindformers_fails_on_is_refused(layout, key, monkeypatch):
    for value in VALUES:
        if key == "recompute" and (isinstance(value, dict) or value in ([NORM], [NORM, MUL])):
            continue  # patterns are for the others
        found = findings(put(layout, ("recompute_config", key), value))
        refused = any(name.startswith(f"recompute_config.{key}") for name in found)
        if value in TAKEN_OTHERWISE[layout is SWAPPED]:
            continue
        assert refused == fails_in_mindformers(layout, key, value, monkeypatch), value
