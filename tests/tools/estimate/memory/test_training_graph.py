"""The formulas against tensors that MindSpore 2.9.0's compiled forwards hand to their backwards (`tc3 dryrun --quick`).

MiB of a chunk of the 438B recipe (deredundency unless said): its sizes in what it keeps for a micro-batch.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from tools.estimate.from_recipe import from_recipe
from tools.estimate.memory.training_graph import kept
from tools.recipe.load import load_recipe

RECIPES = Path(__file__).parents[4] / "recipes"
MIB = 1 << 20


@pytest.fixture(scope="module")
def config():
    return from_recipe(load_recipe(RECIPES / "telechat3_438b" / "pretrain_4k.yaml"))


@pytest.mark.parametrize(
    ("changes", "option", "layers_and_head", "two_kinds"),
    [
        ({"dp": 256, "tp": 2}, "select", 3920.1, 2636.2),
        ({"dp": 64, "tp": 8}, "none", 1047.4, 758.4),
        ({"dp": 256, "tp": 2, "ep_mode": "deduplicated"}, "none", 5122.8, 3918.9),
    ],
)
def test_what_compiled_graphs_keep(config, changes, option, layers_and_head, two_kinds):
    laid = replace(config, **changes)
    moe, dense, head = (kept(laid, kind, option) / MIB for kind in ("moe", "dense", "head"))
    assert moe + head == pytest.approx(layers_and_head, rel=0.01)
    assert moe + dense == pytest.approx(two_kinds, rel=0.01)


def test_padding_of_alltoall_is_not_counted():
    """105B, tp 8: 2,816 rows for 2,048 copies in six tensors and the first product."""
    config = from_recipe(load_recipe(RECIPES / "telechat3_105b" / "pretrain_4k.yaml"))
    found = (kept(config, "moe") + kept(config, "dense")) / MIB
    assert found == pytest.approx(317.5, rel=0.1)
    padded = 768 * 2 * (6 * config.model.hidden + 2 * config.model.expert_ffn) / MIB
    assert found + padded == pytest.approx(317.5, rel=0.02)
