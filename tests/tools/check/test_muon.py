"""These tests check that `tc3 check` refuses what MindFormers' Muon would refuse only after the launch."""

import re
from pathlib import Path

import pytest

from tests.tools.check.mutations import MODEL, put
from tests.tools.check.test_rules import MINI, SEMI, change, findings
from tools.check.check import check_recipe
from tools.recipe.dump import dump_recipe
from tools.recipe.load import load_recipe
from tools.recipe.mini_ascend import ascend_minis

MUON = {"type": "Muon", "adamw_betas": [0.9, 0.95], "weight_decay": 0.1}
SHARD_SIZE = ("parallel", "parallel_optimizer_config")
WHOLE = {"optimizer_weight_shard_size": 4, "parallel_optimizer_threshold": 0}


@pytest.mark.parametrize(
    ("changes", "key", "words"),
    [
        ([], None, ""),
        ([((*MODEL, "multi_latent_attention"), False)], "optimizer.type", "multi-latent attention"),
        ([(("optimizer", "swap"), True)], "optimizer.swap", "cannot swap its state"),
        (
            [(("parallel", "enable_parallel_optimizer"), True)],
            "parallel.parallel_optimizer_config.optimizer_weight_shard_size",
            "the number of ranks that share a matrix",
        ),
        (
            [(("parallel", "enable_parallel_optimizer"), True), (SHARD_SIZE, {"optimizer_weight_shard_size": 8})],
            "parallel.parallel_optimizer_config.optimizer_weight_shard_size",
            "there are only 4, not 8",
        ),
        (
            [(("parallel", "enable_parallel_optimizer"), True), (SHARD_SIZE, {"optimizer_weight_shard_size": 1})],
            "parallel.parallel_optimizer_config.optimizer_weight_shard_size",
            "the number of ranks that share a matrix",
        ),
        ([((*MODEL, "params_dtype"), "bf16")], "model.model_config.params_dtype", "refuses the assignment"),
        ([(("optimizer", "ns_steps"), 3)], "optimizer.ns_steps", "takes five"),
        ([(("optimizer", "ns_steps"), 5)], None, ""),
        ([(("optimizer", "qk_clip_threshold"), 0)], "optimizer.qk_clip_threshold", "to zero"),
        ([((*MODEL, "mla_qkv_concat"), True)], "model.model_config.mla_qkv_concat", "as one matrix"),
        (
            [(("parallel", "enable_parallel_optimizer"), True), (SHARD_SIZE, {"optimizer_weight_shard_size": 4})],
            "parallel.parallel_optimizer_config.parallel_optimizer_threshold",
            "as if it were a shard",
        ),
        (
            [(("parallel", "enable_parallel_optimizer"), True), (SHARD_SIZE, WHOLE)],
            None,
            "",
        ),
    ],
)
def test_what_muon_refuses_once_it_is_built_is_refused_before(changes, key, words):
    found = findings(change(SEMI, (("optimizer",), MUON), *changes))
    if key is None:
        assert found == {}
    else:
        assert words in found[key].wrong and re.search(r"(muon|gpt_model)\.py:", found[key].source)


def test_a_model_without_latent_attention_is_not_told_of_projections_that_it_lacks():
    changes = ((*MODEL, "multi_latent_attention"), False), ((*MODEL, "mla_qkv_concat"), True)
    found = findings(change(SEMI, (("optimizer",), MUON), *changes))
    assert not [finding for finding in found.values() if "as one matrix" in finding.wrong]


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("betas", [0.9, 0.95], "no key of this name"),
        ("use_fused", True, "no key of this name"),
        ("eps", 1e-8, "did you mean 'adamw_eps'"),
        ("momentum", 1.0, "below 1"),
        ("adamw_betas", [0.9, 1.5], "below 1"),
        ("matched_adamw_rms", -0.2, "at least 0"),
    ],
)
def test_keys_of_adamw_and_numbers_that_make_no_sense_are_named(key, value, words):
    found = findings(change(SEMI, (("optimizer",), {**MUON, key: value})))
    (path, finding) = next(iter(found.items()))
    assert path.startswith(f"optimizer.{key}") and words in str(finding), finding


@pytest.mark.parametrize(
    ("settings", "share"),
    [
        ({}, "89.3%"),
        ({"fused_num": 4}, "59.0%"),
        ({"fused_num": 30}, "99.9%"),
        ({"fused_num": 31}, None),
        ({"fused_algo": "sma", "fused_num": 4}, None),
        ({"ema_alpha": 0.9, "fused_num": 3}, None),
        ({"ema_alpha": 1e-17}, "0.0%"),
        ({"interleave_step": 1000}, None),  # the run ends before its first average does
    ],
)
def test_an_average_that_begins_at_zero_does_not_take_the_place_of_weights(settings, share):
    """Weights of a run with the default alpha and fused_num 4 had 0.59 of their norm after step 4."""
    found = findings(
        change(MINI, (("optimizer",), {**MINI["optimizer"], "type": "PmaAdamW", "interleave_step": 1, **settings}))
    )
    finding = found.get("optimizer.fused_num")
    assert (finding is None) == (share is None), found
    if finding:
        assert f"it is {share} of" in finding.wrong and finding.right.startswith(
            "write fused_algo: sma, or fused_num: "
        )
        assert "pma_adamw.py:66" in finding.source


def test_muon_needs_a_sharded_graph_on_cpu():
    assert "only" not in str(findings(MINI).get("optimizer.type"))
    assert "bfloat16" in findings(put(MINI, ("optimizer",), MUON))["optimizer.type"].wrong


def test_muon_needs_groups_of_ranks_on_one_device_too(tmp_path):
    """A recipe of one device without use_parallel, for Ascend."""
    path = Path(__file__).parents[3] / "recipes/telechat3_105b/pretrain_4k_muon.yaml"
    one = ascend_minis(load_recipe(path), "corpus", 12, (2,))[1]
    dump_recipe(one, tmp_path / "one.yaml")
    assert [str(error) for error in check_recipe(load_recipe(tmp_path / "one.yaml")).errors] == []
    dump_recipe({**one, "use_parallel": False}, tmp_path / "one.yaml")
    (error,) = check_recipe(load_recipe(tmp_path / "one.yaml")).errors
    assert "optimizer.type: Muon needs communication groups" in str(error) and "use_parallel: True" in str(error)
