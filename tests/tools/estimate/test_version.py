"""A changed model of time and memory has another version, so that no stored result of an older one is taken as new.

`data/predictions.yaml` has the predictions of recipes and of one run in which each value that a recipe can set is
changed in turn. `MODEL_VERSION` is the digest of that file: when a prediction changes, write the file anew by
`.venv/bin/python -m tests.tools.estimate.test_version`, which prints the version to write.
"""

import hashlib
from dataclasses import fields, replace
from pathlib import Path

import pytest
import yaml

from tools.estimate.configuration import ATTENTION, EXPERTS, MODEL_VERSION, Configuration, Cut, Recompute, even_layers
from tools.estimate.efficiency import cluster
from tools.estimate.from_recipe import from_recipe
from tools.estimate.memory.model import all_stages
from tools.estimate.memory.room import known_errors
from tools.estimate.time_model import TimeModel
from tools.hardware.units import GIB
from tools.layout.resolve import resolve
from tools.model import Adapters, Latent, Model, pattern_of
from tools.recipe.load import load_recipe

FILE = Path(__file__).parent / "data" / "predictions.yaml"
RECIPES = [
    *("telechat3_438b/pretrain_4k", "telechat3_105b/pretrain_4k", "telechat3_105b/context_128k"),
    *("telechat3_438b/context_32k", "telechat3_438b/context_128k", "telechat3_36b/pretrain_8k"),
    *("xing4_29b/pretrain_4k", "mini/pretrain_muon"),
]
MOE = Model(
    pattern_of(9, 16, 2), hidden=1024, heads=16, kv_heads=16, head_dim=0, ffn=4096, vocab=16384, gated=True,
    latent=Latent(query_rank=384, kv_rank=128, nope=64, rope=32, value=64), qk_norm=True, experts=16, top_k=4,
    expert_ffn=512, shared_ffn=512, mtp=1,
)  # fmt: skip
LAYERS = even_layers(9, 4, 1)
SOME = tuple(tuple(min(1, held) for held in row) for row in LAYERS)
BASE = Configuration(
    MOE, dp=8, tp=2, pp=4, ep=8, layers=LAYERS, sequence=4096, micro_batches=8, overlap_dp=True, shared_whole=True,
    keep_gathered=True, training_graph=True, shard_threshold=65536, recompute=Recompute(full=SOME),
)  # fmt: skip
_TWO = {"layers": even_layers(9, 4, 2), "recompute": Recompute()}
# each field of a run (and of its model) that a recipe can set -> other values
CHANGES = {
    "dp": [{"dp": 16}],
    "tp": [{"tp": 4, "dp": 4}],
    "cp": [{"cp": 2}, {"cp": 2, "ulysses": 2}, {"cp": 3, "ep": 16}],
    "pp": [{"pp": 1, "layers": ((9,),), "recompute": Recompute()}],
    "ep": [{"ep": 1}, {"ep": 16}, {"model": replace(MOE, experts=24), "dp": 12, "ep": 6}],  # 6: some are on two nodes
    "layers": [{"layers": ((3, 2, 2, 2),)}, {"layers": ((3, 3, 3, 0),)}],
    "schedule": [{"schedule": "gpipe"}]
    + [{"schedule": name, **_TWO} for name in ("interleaved_1f1b", "seqsmartvpp", "zero_bubble_v")],
    "sequence": [{"sequence": 8192}],
    "batch": [{"batch": 2}],
    "micro_batches": [{"micro_batches": 3}],
    "dtype": [{"dtype": "fp32"}],
    "weight_item": [{"weight_item": 2}],
    "state_item": [{"state_item": 12}],
    "matrix_state_item": [{"matrix_state_item": 4}],
    "recompute": [
        {"recompute": Recompute()},
        {"recompute": Recompute(full=LAYERS)},
        {"recompute": Recompute(select=LAYERS)},
        {"recompute": Recompute(communication=LAYERS)},
        {"recompute": Recompute(full=SOME, replay_tp=False)},
        {"recompute": Recompute(operators=((ATTENTION, SOME), (EXPERTS, LAYERS)))},
    ],
    "sequence_parallel": [{"sequence_parallel": False}],
    "ep_mode": [{"ep_mode": name, "ep": 16} for name in ("hierarchical", "deduplicated")],
    "shard_optimizer": [{"shard_optimizer": False}],
    "shard_gradients": [{"shard_gradients": True}],
    "shard_threshold": [{"shard_threshold": 1 << 40}],
    "shard_size": [{"shard_size": 2}],
    "keeps_scores": [{"keeps_scores": True}],
    "overlap_dp": [{"overlap_dp": False}],
    "ep_cut": [{"ep_cut": Cut((1, 2), 1)}],
    "shared_beside": [{"shared_beside": True}],
    "skew": [{"skew": 1.5}],
    "fp32_residual": [{"fp32_residual": True}],
    "adapters": [{"adapters": Adapters(8, (("proj",),))}],
    "attended": [{"attended": 0.25}],
    "ulysses": [{"cp": 4, "ulysses": 4}],
    "model": [
        {"model": replace(MOE, mtp=0)},
        {"model": replace(MOE, shared_ffn=0)},
        {"model": replace(MOE, streams=4, sinkhorn=3)},
        {"model": replace(MOE, latent=None, head_dim=64, kv_heads=4)},
        {"model": replace(MOE, qkv_bias=True, bias=True)},
        {"model": replace(MOE, latent=None, head_dim=64, kv_heads=4), "dtype": "fp32"},
        {"model": replace(MOE, gated=False)},
        {"model": replace(MOE, pattern=pattern_of(9), experts=0, top_k=0, shared_ffn=0), "ep": 1},
        {"model": replace(MOE, node_limit=1, groups=4), "ep_mode": "deduplicated", "ep": 16},
    ],
}
# of other software: no recipe sets them
_OTHERS = {
    *("expert_tp", "shard_weights", "wide_gradients", "flash", "fused", "overlap_tp", "overlap_tp_backward"),
    *("overlap_pp", "overlap_ep", "shared_whole", "keep_gathered", "training_graph", "logit_bytes", "spare_gradients"),
    *("cp_exchanges_heads", "layer_only", "contiguous", "graphs"),
}
RUNS = {"base": {}} | {
    f"{name} {number}": change for name, changes in CHANGES.items() for number, change in enumerate(changes, 1)
}
TIMES = TimeModel(cluster("atlas_800t_a2"))


def predicted(config):
    """GiB of each stage, and seconds of a step; without these where adapters train."""
    times = [] if config.adapters else [TIMES.step(config, simulated=True).total]
    return [float(f"{number:.9g}") for number in (*(stage.peak / GIB for stage in all_stages(config)), *times)]


def of_recipe(name):
    return from_recipe(resolve(load_recipe(f"recipes/{name}.yaml")))


def stored():
    return yaml.safe_load(FILE.read_text(encoding="utf-8"))


def digest():
    return hashlib.sha256(FILE.read_bytes()).hexdigest()[:12]


def test_the_version_is_the_digest_of_what_the_model_predicts():
    assert digest() == MODEL_VERSION, "write this digest to MODEL_VERSION of tools/estimate/configuration.py"


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_are_predicted_as_the_version_says(name):
    assert predicted(of_recipe(name)) == pytest.approx(stored()[name], rel=1e-6), __doc__


@pytest.mark.parametrize("name", RUNS)
def test_runs_are_predicted_as_the_version_says(name):
    assert predicted(replace(BASE, **RUNS[name])) == pytest.approx(stored()[name], rel=1e-6), __doc__


def test_the_margin_that_layouts_leave_is_that_of_the_version():
    assert stored()["margin"] == [known_errors().margin]


def test_every_value_that_a_recipe_can_set_is_changed_and_counts():
    assert set(CHANGES) | _OTHERS == {one.name for one in fields(Configuration)}
    assert not set(CHANGES) & _OTHERS
    assert set(stored()) == {*RECIPES, "margin", *RUNS}
    same = [name for name in RUNS if name != "base" and stored()[name] == stored()["base"]]
    assert same == []


if __name__ == "__main__":
    every = {name: predicted(of_recipe(name)) for name in RECIPES}
    every["margin"] = [known_errors().margin]
    every |= {name: predicted(replace(BASE, **change)) for name, change in RUNS.items()}
    FILE.write_text("".join(f"{name}: {numbers}\n" for name, numbers in every.items()), encoding="utf-8")
    print(digest())
