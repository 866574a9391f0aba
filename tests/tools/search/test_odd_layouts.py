"""Layouts of which no recipe has the like: degrees of 3 and 5, chunks of one layer, 61 layers, models only of experts
or without any. All tools give one number for each, and what a search makes of them is a recipe that `tc3 check`
accepts.
"""

import copy
import random
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner

from tools.check.check import check_recipe
from tools.check.groups import splits_over
from tools.estimate.efficiency import cluster
from tools.estimate.from_recipe import from_recipe
from tools.estimate.memory.loaded import peaks
from tools.estimate.memory.model import all_stages
from tools.estimate.memory.time_line import simulated, time_line
from tools.estimate.time_model import TimeModel
from tools.layout.offsets import put
from tools.model import parameters, stage_parameters
from tools.recipe.load import load_recipe
from tools.search.candidates import candidate_of, configuration
from tools.search.cli import search
from tools.search.overlay import changed, overlay
from tools.search.ranking.rank import rank
from tools.search.request import PLANNED, Request, read_limit

TIMES = TimeModel(cluster("atlas_800t_a2"))
MODEL = ("model", "model_config")
SIZES = {"hidden_size": 5760, "vocab_size": 131040, "intermediate_size": 11520, "seq_length": 36864}
EXPERTS = {"n_routed_experts": 48, "moe_intermediate_size": 1440}


def spread(layers, pp, chunks):
    """The offset that puts one layer more on the first chunks, for what is left over."""
    more = [1] * (layers % (pp * chunks)) + [0] * (pp * chunks - layers % (pp * chunks))
    rows = [more[first : first + pp] for first in range(0, pp * chunks, pp)]
    return rows if chunks > 1 else rows[0] if pp > 1 else 0


def drawn(seed):
    """A recipe with drawn degrees, model, batch, sharding and recomputation."""
    pick = random.Random(seed).choice
    experts = seed % 3 > 0
    pp, tp, cp, dp = pick([1, 2, 3, 5]), pick([1, 2, 4, 8]), pick([1, 1, 3, 6]), pick([1, 3, 4, 5, 12])
    chunks = pick([1, 2, 3]) if pp > 1 else 1
    layers = pick([pp * chunks, pp * chunks + 1, 61])
    numbers = pick([pp, 3 * pp]) if pp > 1 else 1
    steps = pick([1, 2]) if pp == 1 else 1
    model = SIZES | {"num_hidden_layers": layers, "num_attention_heads": 48, "offset": spread(layers, pp, chunks)}
    model |= {"pp_interleave_num": chunks, "compute_dtype": pick(["bfloat16", "float32"])}
    base = "telechat3_105b/pretrain_4k" if experts else "telechat3_36b/pretrain_8k"
    recipe = copy.deepcopy(load_recipe(f"recipes/{base}.yaml"))
    degrees = {"data_parallel": dp, "model_parallel": tp, "context_parallel": cp, "pipeline_stage": pp}
    if experts:
        degrees["expert_parallel"] = pick([one for one in (1, 2, 3, 4, 6, 8, 12) if dp * tp % one == 0])
        shared = pick([0, 1, 2])
        model |= EXPERTS | {"num_nextn_predict_layers": pick([0, 1]), "first_k_dense_replace": pick([0, 1, layers])}
        for name in ("n_shared_experts", "moe_shared_expert_intermediate_size"):
            del recipe["model"]["model_config"][name]
        model |= {"n_shared_experts": shared, "moe_shared_expert_intermediate_size": 1440 * shared} if shared else {}
    else:
        model["num_key_value_heads"] = pick([24, 48])
    values = {(*MODEL, key): value for key, value in model.items()}
    values |= {("parallel_config", key): value for key, value in degrees.items()}
    values[("parallel_config", "micro_batch_num")] = numbers
    values[("parallel_config", "use_seq_parallel")] = tp > 1
    values |= {("runner_config", "batch_size"): pick([1, 2]), ("runner_config", "gradient_accumulation_steps"): steps}
    values |= {("recompute_config", key): pick([True, False]) for key in ("recompute", "select_comm_recompute")}
    values[("parallel", "enable_parallel_optimizer")] = pick([True, False])
    values |= {("parallel", "pipeline_config", "pipeline_interleave"): chunks > 1}
    values |= {("parallel", "pipeline_config", "pipeline_scheduler"): "1f1b"}
    values[("train_dataset", "data_loader", "config", "seq_length")] = SIZES["seq_length"]
    values[("parallel", "dataset_strategy")] = [[dp, *row[1:]] for row in recipe["parallel"]["dataset_strategy"]]
    for callback in recipe["callbacks"]:
        if callback["type"] == "TopkBiasBalanceCallback":
            callback |= {"gradient_accumulation_steps": steps, "micro_batch_num": numbers}
    put(recipe, values)
    return recipe


@pytest.mark.parametrize("seed", range(10))
def test_every_tool_says_the_same_of_an_odd_layout(seed):
    recipe = drawn(seed)
    run = from_recipe(recipe)
    errors = [str(error) for error in check_recipe(recipe).errors]
    assert len(errors) == (not splits_over(run.devices)) and all("MindSpore splits a model over" in e for e in errors)
    assert overlay(recipe, run) == {}
    assert parameters(run.model) == sum(stage_parameters(run.model, run.layers))
    step, every = TIMES.step(run, simulated=True), all_stages(run)
    assert sum(step.by_part.values()) == pytest.approx(step.total) and min(step.by_part.values()) >= 0
    assert 0 <= step.bubble < 1 and 0 < TIMES.mfu(run, step.total) < 1
    forward, backward, _ = TIMES.chunks(run)
    for stage, memory in enumerate(every):
        assert time_line(run, stage, simulated(run, forward, backward)).peak == pytest.approx(memory.peak)
        if run.model.experts:
            assert peaks(run, stage, np.ones((1, 1, 1, 1)))[0] == memory.peak

    own = candidate_of(run)
    limits = tuple(read_limit(f"{name}={getattr(own, name)}") for name in ("dp", "tp", "pp", "cp", "ep", "vpp", "mbs"))
    asked = Request(run, TIMES.hardware, run.devices, run.global_batch, 1e15, "a test", limits=limits)
    ranking = rank(asked)
    found = [ranking.at(index) for index in range(len(ranking.seconds))]
    if errors:  # predictions hold for any number of devices, but a search offers none that MindSpore does not take
        assert not found
        return
    assert {one.candidate.shard for one in found} >= {own.shard}
    for one in (one for one in found if one.candidate.recompute != PLANNED):
        made = configuration(asked, one.candidate)
        assert one.peak == pytest.approx(max(memory.peak for memory in all_stages(made)), rel=1e-12)
        assert one.seconds == pytest.approx(TIMES.step(made).total, rel=1e-12)
    made = configuration(asked, random.Random(seed).choice(found).candidate)
    child = changed(recipe, made)
    assert replace(from_recipe(child), ulysses=made.ulysses) == made
    assert [str(error) for error in check_recipe(child).errors] == []


@pytest.mark.usefixtures("stand_in_placement")
def test_a_written_recipe_of_a_dense_model_names_no_dispatch(tmp_path):
    limits = [word for limit in ("pp=2", "tp=8", "vpp=1", "cp=1", "mbs=1") for word in ("--limit", limit)]
    words = ["recipes/telechat3_36b/pretrain_8k.yaml", *limits, "--top", "1", "--write", str(tmp_path / "o.yaml")]
    assert CliRunner().invoke(search, words, catch_exceptions=False).exit_code == 0
    said = (tmp_path / "o.yaml").read_text("utf-8")
    assert "Found by tc3 search: tp8 pp2" in said and "dispatch" not in said
