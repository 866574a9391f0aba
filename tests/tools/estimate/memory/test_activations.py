"""What a pass needs beside what is kept, and how logits travel, against MindSpore 2.9.0's compiled graphs."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from tools.estimate.configuration import Configuration, Recompute
from tools.estimate.from_recipe import from_recipe
from tools.estimate.memory.activations import mtp_option, working
from tools.estimate.memory.training_graph import kept, logit_exchanges
from tools.model.architecture import Model, pattern_of
from tools.recipe.load import load_recipe

RECIPES = Path(__file__).parents[4] / "recipes"
MIB = 1 << 20
LAYER, HEAD, BOTH = ["moe"], ["moe", "head"], ["moe", "mtp", "head"]


def run(name, **changes):
    return replace(from_recipe(load_recipe(RECIPES / f"telechat3_{name}.yaml")), **changes)


# most MiB alive in a backward (`tc3 dryrun`), every layer recomputed: of a stage in the middle and of the last one
RECOMPUTED = [
    ("438b/pretrain_4k", LAYER, 3277.0),
    ("438b/context_32k", LAYER, 3775.0),
    ("438b/context_128k", LAYER, 4451.0),
    ("1119b/pretrain_4k", LAYER, 2896.1),
    ("1119b/context_32k", LAYER, 4108.5),
    ("1119b/context_128k", LAYER, 4784.5),
    ("105b/pretrain_4k", LAYER, 1227.2),
    ("105b/context_32k", LAYER, 1418.7),
    ("105b/context_128k", LAYER, 1901.6),
    ("36b/pretrain_8k", ["dense"], 939.0),
    ("36b/pretrain_8k", ["dense", "head"], 1536.0),
    ("438b/context_128k", HEAD, 8192.0),  # two whole [131072, 1, 131072 / 8] tensors
    ("1119b/pretrain_4k", BOTH, 3262.1),
    ("1119b/context_32k", BOTH, 4900.5),
    ("1119b/context_128k", BOTH, 8704.0),
    ("105b/pretrain_4k", BOTH, 1380.2),
    ("105b/context_32k", BOTH, 1792.0),
    ("105b/context_128k", BOTH, 3584.0),
]


@pytest.mark.parametrize(("name", "kinds", "mib"), RECOMPUTED)
def test_a_pass_that_recomputes_needs_what_the_compiled_backward_needs(name, kinds, mib):
    assert -0.15 < working(run(name), kinds) / MIB / mib - 1 < 0.15


@pytest.mark.parametrize(
    ("name", "changes", "kinds", "mib"),
    [
        ("438b/pretrain_4k", {}, ["dense", "moe"], 2560.0),
        ("438b/pretrain_4k", {"dp": 64, "tp": 8}, HEAD, 2018.5),
        ("438b/pretrain_4k", {"ep_mode": "deduplicated"}, ["dense", "moe"], 2744.0),
        ("438b/pretrain_4k", {"ep_mode": "deduplicated"}, HEAD, 3072.0),
        ("438b/pretrain_4k", {"dp": 512, "tp": 1}, HEAD, 6144.0),
        ("105b/pretrain_4k", {}, ["dense", "moe"], 1118.2),
        ("105b/pretrain_4k", {}, BOTH, 1246.3),
    ],
)
def test_a_pass_without_recomputation(name, changes, kinds, mib):
    assert working(run(name, recompute=Recompute(), **changes), kinds) / MIB == pytest.approx(mib, rel=0.09)


@pytest.mark.parametrize(
    ("name", "gathered"),
    [
        ("438b/context_128k", 768 + 512),  # AllGathers of (131072, 16, 192) and (131072, 16, 128), bf16, by each layer
        ("438b/context_32k", 384 + 256),  # (32768, 32, 192) and (32768, 32, 128)
        ("1119b/context_128k", 768 + 512),
        ("105b/context_128k", 192 + 128),  # (131072, 4, 192) and (131072, 4, 128)
    ],
)
def test_keys_and_values_are_kept_as_gathered(name, gathered):
    """The gradients hold ReduceScatters of the same shapes and no AllGather, so they use what forward gathered."""
    config = run(name)
    alone = replace(config, cp=1, sequence=config.rank_tokens)
    for kind in ("dense", "moe"):
        more = (kept(config, kind) - kept(alone, kind)) / MIB
        assert more == pytest.approx(gathered * (1 - 1 / config.cp))
        assert kept(config, kind, "full") == kept(alone, kind, "full")


@pytest.mark.parametrize(
    ("dp", "cp", "name", "size", "ranks", "strides"),
    [
        (8, 8, "438b/context_128k", 4096, 8, [8, 64]),
        (32, 4, "438b/context_32k", 1024, 2, [4, 8, 16, 32, 64, 128, 256]),
        (16, 8, "438b/context_32k", 512, 2, [4, 8, 16, 32, 64, 128, 256]),
        (64, 2, "438b/context_32k", 2048, 2, [4, 8, 16, 32, 64, 128, 256]),
    ],
)
def test_logits_are_exchanged_as_in_the_graph_of_the_last_stage(dp, cp, name, size, ranks, strides):
    """A forward's AllGathers and AlltoAlls of a micro-batch's logits, MiB; backward has as many again."""
    found = logit_exchanges(run(name, dp=dp, cp=cp))
    assert Counter(found) == {(size * MIB, ranks, stride): 2 for stride in strides}


@pytest.mark.parametrize("changes", [{"dp": 1}, {"cp": 1}, {"training_graph": False}])
def test_logits_stay_where_one_of_their_axes_is_whole(changes):
    assert logit_exchanges(run("438b/context_128k")) != []
    assert logit_exchanges(run("438b/context_128k", **changes)) == []


def test_digits_of_numbers_that_are_no_powers_of_one_base_reach_all_ranks():
    for dp, cp in [(6, 2), (12, 4), (3, 2), (5, 5), (10, 4)]:
        found = logit_exchanges(run("438b/context_32k", dp=dp, cp=cp, ep=1))
        _, base, last = found[-1]
        assert last * base >= 4 * dp * cp > last


MODEL = Model(pattern_of(6), hidden=64, heads=4, kv_heads=4, head_dim=16, ffn=128, vocab=256, mtp=1)


@pytest.mark.parametrize(
    ("full", "option"),
    [
        (None, "none"),
        (((1, 0), (0, 0)), "none"),
        (((2, 1), (2, 0)), "none"),
        (((0, 0), (0, 1)), "full"),
        (((2, 1), (2, 1)), "full"),
    ],
)
def test_mtp_recomputes_as_the_last_layer(full, option):
    config = Configuration(MODEL, pp=2, layers=((2, 1), (2, 1)), recompute=Recompute(full=full))
    assert mtp_option(config) == option


def test_the_last_layer_may_be_before_an_empty_chunk_or_on_the_first_stage():
    empty = Configuration(MODEL, pp=2, layers=((2, 2), (2, 0)), recompute=Recompute(full=((0, 0), (2, 0))))
    assert mtp_option(empty) == "full"
    turned = replace(empty, schedule="zero_bubble_v", layers=((2, 1), (2, 1)))
    assert mtp_option(turned) == "full"  # chunk 1 ends on stage 0
    assert mtp_option(replace(turned, recompute=Recompute(full=((2, 1), (0, 1))))) == "none"
