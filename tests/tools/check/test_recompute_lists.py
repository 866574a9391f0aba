"""Lists of recomputed layers: refused when, and only when, MindFormers' own LayerSetting fails on them."""

import copy
from types import SimpleNamespace

import pytest

from tests.tools.check.mutations import MODEL, put
from tests.tools.check.test_rules import INTERLEAVED, SEMI, ZBV, change, findings

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
