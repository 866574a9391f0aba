"""These tests check what would change a step under uneven loads: each row against the time model,
and what is unknown.
"""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner

from plugins.expert_balance.plan import imbalance
from plugins.expert_balance.settings import Settings
from tests.plugins.expert_balance.drifting import live
from tests.tools.check.test_mutations import ROOT
from tests.tools.estimate.test_loads import DEVICES, TIMES, run
from tools.estimate.loads import EVEN, loads_of, of_ratios
from tools.experts.cost import ep_report
from tools.experts.what_if import CAPACITIES, lines, move_seconds, what_if
from tools.hardware.load import load_hardware
from tools.layout.advise import step_under

LARGE = str(ROOT / "recipes" / "telechat3_438b" / "pretrain_4k.yaml")


def advised(config, loads, **section):
    """Return the parts of an advice that `what_if` reads."""
    step = step_under(TIMES, config, loads)
    return SimpleNamespace(
        hardware=load_hardware("atlas_800t_a2"),
        written=SimpleNamespace(config=config, step=step),
        loads=loads,
        recipe={"plugins": {"expert_balance": section or False}},
        topology=SimpleNamespace(nodes=1),
    )


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    """A routing log of experts whose load drifts."""
    path = tmp_path_factory.mktemp("log") / "log.jsonl"
    records = live(Settings(every=0), steps=12, layers=7)
    path.write_text("".join(json.dumps({"step": r.step, "tokens": r.tokens.tolist()}) + "\n" for r in records))
    return str(path)


def test_each_row_is_the_step_with_one_thing_changed(log):
    config = run()
    loads = loads_of(log, config)
    found = {one.name: one for one in what_if(advised(config, loads, every=4), log)}
    assert found["as written"].step_s == TIMES.under(config, loads, True).total
    assert found["even loads"].step_s == TIMES.step(config, True).total == TIMES.under(config, EVEN, True).total
    for capacity in CAPACITIES:
        one = found[f"a device takes at most {capacity:g} x the mean"]
        capped = replace(loads, shares=np.minimum(loads.shares, capacity))
        assert one.step_s == TIMES.under(config, capped, True).total
        dropped = np.maximum(loads.shares - capacity, 0).mean()
        assert f"drops {dropped:.1%}" in one.note if dropped else one.note == "drops nothing"
    half = found["expert_parallel: 2"]
    other = replace(config, ep=2)
    assert (
        half.step_s == TIMES.under(replace(other, skew=loads_of(log, other).typical), loads_of(log, other), True).total
    )
    assert half.max_over_mean < loads.typical and "expert_parallel: 8" not in found, "dp 4 has no 8 ranks"


def test_moves_are_replayed_and_their_cost_is_counted(log):
    config = run()
    loads = loads_of(log, config)
    found = {one.name: one for one in what_if(advised(config, loads, every=4, method="swaps"), log)}
    moved = found["experts move every 4 steps (swaps)"]
    records = live(Settings(every=4), steps=12, layers=7)  # the same tokens, by the plugin itself
    ratios = np.stack([imbalance(record.tokens, record.slots, DEVICES) for record in records])[4:]
    assert moved.max_over_mean == pytest.approx(ratios.mean())
    slots = np.stack([record.moved.slots if record.moved else record.slots for record in records])
    cost = move_seconds(TIMES, config, records[0].slots, slots, 3)
    expected = TIMES.under(config, of_ratios(ratios, range(8), ""), True).total + cost / 4
    assert moved.step_s == pytest.approx(expected) and cost > 0
    assert f"{cost:.2f} s over the links" in moved.note
    assert moved.step_s < found["as written"].step_s


def test_the_seconds_of_moves_are_those_of_the_device_that_sends_most():
    config = run()
    first = np.tile(np.arange(32), (7, 1))
    slots = np.tile(first, (2, 1, 1))
    assert move_seconds(TIMES, config, first, slots, 1) == 0
    slots[1, 0, [0, 8]] = slots[1, 0, [8, 0]]  # layer 1 on stage 0: one expert leaves devices 0 and 1
    model = config.model
    size = 3 * model.hidden * model.expert_ffn * (config.weight_item + config.state_item)
    one = TIMES.sending(size, DEVICES)
    assert move_seconds(TIMES, config, first, slots, 1) == pytest.approx(one)
    slots[1, 0, [1, 16]] = slots[1, 0, [16, 1]]  # a second one leaves device 0
    slots[1, 6, [0, 8]] = slots[1, 6, [8, 0]]  # on the other stage at the same time
    two = TIMES.sending(2 * size, DEVICES)
    assert move_seconds(TIMES, config, first, slots, 1) == pytest.approx(two)
    assert move_seconds(TIMES, config, first, slots, 2) == pytest.approx(two / 2)


def test_what_the_loads_do_not_tell_is_unknown(log):
    config = run()
    spread = {one.name: one for one in what_if(advised(config, loads_of("spread:0.5", config)), "spread:0.5")}
    moved = spread["experts move every 20 steps (swaps)"]
    assert moved.step_s is None and "a record or a routing log" in moved.note
    short = what_if(advised(config, loads_of(log, config)), log)[2]
    assert short.step_s is None and "the log has 12 steps, a plan needs more than 20" in short.note
    number = {one.name: one for one in what_if(advised(config, loads_of("1.6", config)), "1.6")}
    assert number["expert_parallel: 2"].step_s is None
    assert number["a device takes at most 1.25 x the mean"].note == "what it drops is unknown"
    text = lines(list(number.values()))
    assert len(text) == 1 + len(number) and " unknown " in text[3] and "max/mean" in text[0]


def test_the_command_shows_the_rows_under_uneven_loads_only():
    shown = CliRunner().invoke(ep_report, [LARGE, "--loads", "1.3"]).stdout
    assert "what would change a step under these loads" in shown
    assert "a token visits at most 1 of 2 nodes: mode deduplicated" in shown
    found = json.loads(CliRunner().invoke(ep_report, [LARGE, "--loads", "1.3", "--json"]).stdout)["reports"][0]
    rows = {row["name"]: row for row in found["what_if"]}
    assert rows["as written"]["step_s"] == found["recipe"]["step_seconds"] > rows["even loads"]["step_s"]
    even = json.loads(CliRunner().invoke(ep_report, [LARGE, "--json"]).stdout)["reports"][0]
    assert even["what_if"] is None and even["recipe"]["step_seconds"] == rows["even loads"]["step_s"]
