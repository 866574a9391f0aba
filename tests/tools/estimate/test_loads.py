"""Loads of devices: how they are read, and the step time under them against a simulation of every device."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.estimator import pairs
from plugins.errors import DataError, RecipeError
from plugins.expert_balance.record import append
from plugins.expert_balance.settings import Settings
from tests.plugins.expert_balance.drifting import live
from tools.estimate.configuration import Configuration, Recompute, even_layers
from tools.estimate.efficiency import cluster
from tools.estimate.loads import (
    EVEN,
    PUBLISHED_SPREAD,
    Loads,
    family_of,
    loads_of,
    moe_layers,
    of_ratios,
    spread,
    trained,
    uniform,
)
from tools.estimate.memory.model import layer_options
from tools.estimate.time_model import TimeModel
from tools.model import Model
from tools.pipeline.schedules import is_v_shaped, operations

TIMES = TimeModel(cluster("atlas_800t_a2"))
DEVICES = 4
MODEL = Model(
    ("dense", *["moe"] * 7),
    **{"hidden": 2048, "heads": 16, "kv_heads": 16, "head_dim": 128, "ffn": 4096, "vocab": 32000},
    **{"experts": 32, "top_k": 4, "expert_ffn": 1024, "shared_ffn": 1024},
)
SCHEDULES = {"1f1b": 1, "interleaved_1f1b": 2, "zb_h1": 1, "zero_bubble_v": 2}
RATIOS = st.floats(1, 3)


def run(schedule="1f1b", **changes):
    chunks = SCHEDULES.get(schedule, 2)
    same = {"dp": DEVICES, "pp": 2, "ep": DEVICES, "sequence": 2048, "micro_batches": 4, "overlap_pp": True}
    again = Recompute(full=tuple(tuple(min(1, held) for held in row) for row in even_layers(8, 2, chunks)))
    config = Configuration(MODEL, layers=even_layers(8, 2, chunks), schedule=schedule, recompute=again, **same)
    return replace(config, **changes)


def by_device(config, tokens):
    """Pipeline seconds of one step, device by device and operation by operation, of tokens [micro-batches, layers, D].

    A device's layer takes as long as its tokens say; all devices of the group leave dispatch and combine together.
    """
    rows = dict(zip(moe_layers(config), range(tokens.shape[1]), strict=True))
    lasting = {}
    for stage in range(config.pp):
        for chunk, kinds in enumerate(config.stage_kinds(stage)):
            first = sum(config.layers[before][stage] for before in range(chunk))
            numbers = config.layer_numbers(stage)[first:]
            options = layer_options(config, chunk, stage, len(kinds))
            for micro_batch, counted in enumerate(tokens):
                forward, backward, place = 0.0, 0.0, 0
                for kind in kinds:
                    loads, option = [1.0], "none"
                    if kind in ("dense", "moe"):
                        number, option, place = numbers[place], options[place], place + 1
                        if kind == "moe":
                            loads = counted[rows[number]] / counted[rows[number]].mean()
                    each = [TIMES.layer(replace(config, skew=max(1.0, load)), kind) for load in loads]
                    forward += max(layer.forward.total for layer in each)
                    backward += max(layer.backward.total + layer.again(option).total for layer in each)
                lasting["F", micro_batch, chunk, stage] = forward
                lasting["B", micro_batch, chunk, stage] = backward
    return play(config, lasting)


def play(config, lasting):
    """The end of the last operation, where each stage runs its own in order and transfers take nothing."""
    waiting = {
        stage: list(operations(config.schedule, stage, config.pp, config.chunks, config.micro_batches))
        for stage in range(config.pp)
    }
    assert not is_v_shaped(config.schedule)
    places = [(chunk, stage) for chunk in range(config.chunks) for stage in range(config.pp)]
    done, free = {}, dict.fromkeys(waiting, 0.0)
    while any(waiting.values()):
        for stage, left in waiting.items():
            while left:
                op = left[0]
                at = places.index((op.chunk, stage))
                if op.kind == "F":
                    needed = ("F", op.micro_batch, *places[at - 1]) if at else None
                else:
                    last = at + 1 == len(places)
                    needed = ("F", op.micro_batch, *places[at]) if last else ("B", op.micro_batch, *places[at + 1])
                if needed and needed not in done:
                    break
                name = (op.kind, op.micro_batch, op.chunk, stage)
                free[stage] = done[name] = max(free[stage], done.get(needed, 0.0)) + lasting[name]
                left.pop(0)
    return max(free.values())


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b"])
def test_a_recorded_load_takes_as_long_as_every_device_simulated(tmp_path, schedule, apart):
    config = run(schedule)
    tokens = np.random.default_rng(1).integers(1, 900, (2, config.micro_batches if apart else 1, 7, 32))
    path = tmp_path / "log.jsonl"
    lines = [
        {"step": step, "micro_batch": part, "tokens": counts.tolist()}
        for step, parts in enumerate(tokens, 1)
        for part, counts in enumerate(parts)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    loads = loads_of(str(path), config)
    on = tokens.reshape(2, -1, 7, DEVICES, 8).sum(-1)
    for step in range(2):
        every = np.broadcast_to(on[step], (config.micro_batches, *on.shape[2:]))
        found = TIMES.step(config, simulated=True, ratios=loads.ratios[step])
        assert found.pipeline == pytest.approx(by_device(config, every), rel=1e-6)
        assert sum(found.by_part.values()) == pytest.approx(found.total)
    assert TIMES.under(config, loads, True).total == pytest.approx(
        np.mean([TIMES.step(config, True, one).total for one in loads.ratios]), rel=2e-3
    )


@pytest.mark.parametrize("ratios", [(3.0, 1.0), (1.0, 3.0)])
def test_micro_batches_that_take_turns_count_as_often_as_they_come(ratios):
    """Of three micro-batches two have the first of two loads; without a pipeline nobody waits."""
    config = replace(run(), pp=1, layers=((8,),), micro_batches=3, recompute=Recompute())
    step = TIMES.step(config, simulated=True, ratios=np.array(ratios)[:, None])
    each = [TIMES.step(replace(config, skew=ratio), simulated=True).pipeline / 3 for ratio in ratios]
    assert step.pipeline == pytest.approx(2 * each[0] + each[1])
    assert sum(step.parts.values()) == pytest.approx(step.pipeline)
    assert step.by_part["bubble"] == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("simulated", [False, True])
@pytest.mark.parametrize("schedule", [*SCHEDULES, "interleaved_1f1b_pairs", "dual_pipe_v"])
def test_even_loads_and_one_ratio_are_todays_numbers_to_the_last_digit(schedule, simulated):
    config = run(schedule)
    assert TIMES.under(config, EVEN, simulated) == TIMES.step(config, simulated)
    assert TIMES.step(config, simulated, np.ones((4, 7))) == TIMES.step(config, simulated)
    busy = TIMES.step(replace(config, skew=1.3), simulated)
    assert TIMES.under(config, uniform(1.3), simulated) == busy
    # and the general way, by layers that differ by less than a float shows
    near = np.full((1, 7), 1.3)
    near[0, 0] = np.nextafter(1.3, 2)
    assert TIMES.step(config, simulated, near).total == pytest.approx(busy.total, rel=1e-9)


@given(st.data(), st.sampled_from([*SCHEDULES, "interleaved_1f1b_pairs"]), st.sampled_from([1, 4]), st.booleans())
@settings(max_examples=30)
def test_more_on_one_device_never_makes_a_step_shorter(data, schedule, parts, simulated):
    config = run(schedule)
    shares = np.array(data.draw(st.lists(RATIOS, min_size=parts * 7, max_size=parts * 7))).reshape(parts, 7)
    part, layer = data.draw(st.integers(0, parts - 1)), data.draw(st.integers(0, 6))
    more = shares.copy()
    more[part, layer] += data.draw(st.floats(0, 2))
    before, after = (TIMES.step(config, simulated, one).total for one in (shares, more))
    assert after >= before * (1 - 1e-12)
    assert before >= TIMES.step(config, simulated).total * (1 - 1e-12)


def test_a_run_is_read_with_its_placements_and_at_another_degree(tmp_path):
    records = live(Settings(every=2), steps=6, layers=7)
    for record in records:
        append(tmp_path / "metrics" / "expert_load.jsonl", record)
    config = run()
    loads = loads_of(str(tmp_path), config)
    assert loads.steps == (1, 2, 3, 4, 5, 6) and loads.shares.shape == (6, 1, 7, 4)
    placed = np.zeros(32)
    placed[records[3].slots[2]] = records[3].tokens[2]
    on = placed.reshape(4, 8).sum(1)
    np.testing.assert_allclose(loads.shares[3, 0, 2], on / on.mean())
    wide = loads_of(str(tmp_path), replace(config, dp=8, ep=8))
    assert wide.shares.shape[-1] == 8 and wide.typical > loads.typical
    assert "6 recorded steps" in loads.words and "at worst" in loads.words
    assert loads.as_json()["max_over_mean"]["worst"] == loads.ratios.max()


def test_csv_says_the_same_as_jsonl(tmp_path):
    config = run()
    tokens = np.random.default_rng(2).integers(1, 99, (2, 7, 32))
    lines = ["step,layer,expert,tokens"]
    lines += [f"{step},{layer + 1},{expert},{count}" for (step, layer, expert), count in np.ndenumerate(tokens)]
    (tmp_path / "log.csv").write_text("\n".join(lines) + "\n")
    (tmp_path / "log.jsonl").write_text("".join(json.dumps({"tokens": one.tolist()}) + "\n" for one in tokens))
    one, other = (loads_of(str(tmp_path / name), config) for name in ("log.csv", "log.jsonl"))
    np.testing.assert_array_equal(one.shares, other.shares)


def test_an_mtp_layer_has_its_own_row_or_the_last_ones(tmp_path):
    config = run(model=replace(MODEL, mtp=1))
    even, last = np.ones((1, 7)), np.array([[1.0] * 6 + [2.0]])
    own = np.array([[1.0] * 7 + [2.0]])
    seconds = [TIMES.step(config, ratios=one).total for one in (even, own, last)]
    assert seconds[0] < seconds[1] < seconds[2]


def test_spreads_are_drawn_alike_and_grow():
    assert spread(0.5, 7, 4) is spread(0.5, 7, 4) and isinstance(spread(0.5, 7, 4), Loads)
    typical = [spread(deviation, 7, 16).typical for deviation in (0.0, 0.2, 0.6, 1.0)]
    assert typical[0] == 1 and typical == sorted(typical)
    assert loads_of("spread:0.2", run()).shares.mean() == pytest.approx(1)
    assert loads_of("published", run()).shares.shape == (256, 1, 7, 4)
    assert loads_of("1.5", run()) == uniform(1.5) or loads_of("1.5", run()).typical == 1.5
    assert of_ratios(np.full((2, 7), 1.1), (1, 2), "x").ratios.shape == (2, 1, 7)


@pytest.mark.slow
def test_published_pairs_are_within_fifteen_percent():
    """With the spread of `--loads published`, and each by what the other pair needs."""
    found = pairs()
    for one in found:
        assert one["predicted"] == pytest.approx(one["measured"], rel=0.08), one["id"]
        assert one["left_out"] == pytest.approx(one["measured"], rel=0.15), one["id"]
        assert one["with_what_it_needs"] == pytest.approx(one["measured"], rel=0.002), one["id"]
    assert np.mean([one["needs"] for one in found]) == pytest.approx(PUBLISHED_SPREAD, abs=0.005)


def test_a_trained_router_is_as_uneven_as_published():
    config = run()
    assert family_of(config) == "mha"
    loads = loads_of("trained", config)
    assert loads.shares.shape == (256, 1, 7, 4) and "Gini 0.105" in loads.words
    assert loads.shares.mean(axis=-1) == pytest.approx(1) and loads.steps == tuple(range(1, 257))
    # one expert on a device: the devices' own Gini coefficient is the published one
    each = np.sort(trained("mla", 40, 256, 256).shares, axis=-1)
    ranks = np.arange(1, 257)
    gini = (2 * (ranks * each).sum(-1) / (256 * each.sum(-1)) - 257 / 256).mean()
    assert gini == pytest.approx(0.24, abs=0.005)
    assert loads.typical < trained("mla", 7, 32, 4).typical < loads_of("published", config).typical
    assert family_of(replace(config, model=replace(MODEL, kv_heads=4))) == "gqa"


GOOD = {"step": 1, "tokens": [[3] * 32] * 7}
BAD = {  # name -> lines, what the message has after the file
    "nothing": ([], "log.jsonl: tokens: the log holds no loads"),
    "half a line": ([GOOD, '{"step": 2, "tok'], "log.jsonl:2: this line is not JSON"),
    "no counts": ([{"step": 1}], "log.jsonl:1: tokens: the key is missing"),
    "no table": ([{"tokens": 3}], "log.jsonl:1: tokens: write a list for each MoE layer"),
    "one layer as a list": ([{"tokens": [3, 4]}], "log.jsonl:1: tokens: write a list for each MoE layer"),
    "a layer without experts": ([{"tokens": [[]]}], "log.jsonl:1: tokens: write a list for each MoE layer"),
    "a misspelt key": ([{**GOOD, "mirco_batch": 0}], "log.jsonl:1: mirco_batch: .*did you mean 'micro_batch'"),
    "a negative count": ([{"tokens": [[3, -1]] * 7}], r"log.jsonl:1: tokens\[0\]\[1\]: the value must be .*, not '-1'"),
    "NaN": (
        [{"tokens": [[3, 1], [float("nan"), 2]]}],
        r"log.jsonl:1: tokens\[1\]\[0\]: the value must be .*, not 'nan'",
    ),
    "a count in words": ([{"tokens": [["a"]]}], r"tokens\[0\]\[0\]: the value must be .*, not 'a'"),
    "unlike rows": ([{"tokens": [[3, 1], [2]]}], "log.jsonl:1: tokens: the layers differ in their numbers of experts"),
    "other experts": (
        [{"tokens": [[3] * 16] * 7}],
        "log.jsonl:1: tokens: the log has 16 experts, but the recipe has 32",
    ),
    "other layers": (
        [{"tokens": [[3] * 32] * 6}],
        "log.jsonl:1: tokens: the log has 6 MoE layers, but the recipe has 7",
    ),
    "an empty layer": (
        [{"tokens": [*[[3] * 32] * 6, [0] * 32]}],
        r"log.jsonl:1: tokens\[6\]: no expert of this layer received a token",
    ),
    "a step of no number": ([{**GOOD, "step": 1.5}], "log.jsonl:1: step: the value must be a whole number from 0 to"),
    "a step twice": ([GOOD, GOOD], "log.jsonl:2: micro_batch: step 1 has micro-batch 0 twice"),
    "unlike steps": ([GOOD, {"step": 2, "tokens": [[3] * 16] * 7}], "log.jsonl:2: tokens: this line has"),
    "a missing micro-batch": (
        [GOOD, {**GOOD, "micro_batch": 1}, {**GOOD, "step": 2}],
        "log.jsonl:3: micro_batch: step 2 has 1 micro-batches, but other steps have 2",
    ),
}
BAD_CSV = {
    "nothing": ("", "log.csv: tokens: the log holds no loads"),
    "no column": ("step,layer,expert\n1,1,1\n", "log.csv:1: tokens: this column is missing"),
    "another column": ("step,layer,expert,tokens,rank\n", "log.csv:1: rank: no such column"),
    "half a line": (
        "step,layer,expert,tokens\n1,1,0,5\n1,1\n",
        "log.csv:3: expert: the line has 2 values for the 4 columns",
    ),
    "NaN": ("step,layer,expert,tokens\n1,1,0,nan\n", "log.csv:2: tokens: the value must be .*, not 'nan'"),
    "a negative count": ("step,layer,expert,tokens\n1,1,0,-5\n", "log.csv:2: tokens: the value must be .*, not '-5'"),
    "an expert twice": (
        "step,layer,expert,tokens\n1,1,0,5\n1,1,0,6\n",
        "log.csv:3: expert: layer 1 has expert 0 twice",
    ),
    "a giant expert": (
        "step,layer,expert,tokens\n1,1,999999999,5\n",
        "log.csv:2: expert: the value must be .*, not .999",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_logs_are_refused_with_line_and_key(tmp_path, name):
    lines, message = BAD[name]
    path = tmp_path / "log.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    with pytest.raises(DataError, match=message) as found:
        loads_of(str(path), run())
    assert "\n" not in str(found.value)


@pytest.mark.parametrize("name", BAD_CSV)
def test_bad_tables_are_refused_with_line_and_key(tmp_path, name):
    text, message = BAD_CSV[name]
    (tmp_path / "log.csv").write_text(text)
    with pytest.raises(DataError, match=message):
        loads_of(str(tmp_path / "log.csv"), run())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nothere.jsonl", "there is no such file; give one of the words 'even', 'published' and 'trained'"),
        ("spread:x", "'x' is not a number"),
        ("spread:nan", "not finite"),
        ("spread:9", "out of range"),
        ("0.5", "out of range"),
        ("nan", "not finite"),
        ("4.5", "at most 4, because 4 devices share the experts"),
        ("900", r"at most \d+, because each token goes to \d+ of \d+ experts"),
    ],
)
def test_bad_words_are_refused(text, message):
    with pytest.raises((RecipeError, DataError), match=message):
        loads_of(text, run())
    with pytest.raises(RecipeError, match="no experts"):
        dense = replace(MODEL, pattern=("dense",) * 8, experts=0, top_k=0)
        loads_of("even", Configuration(dense, layers=((8,),)))


def test_a_log_that_cannot_be_read_is_refused_without_pythons_words(tmp_path):
    log = tmp_path / "log.csv"
    log.write_bytes(b"step\xff")
    with pytest.raises(DataError, match=r"log\.csv: the file cannot be read: byte 5 is not UTF-8$"):
        loads_of(str(log), run())


def test_a_number_for_several_degrees_is_at_most_what_few_devices_can_have():
    most = MODEL.experts / MODEL.top_k
    assert loads_of("4.5", run(), of_many=True).typical == DEVICES == 4
    assert loads_of("1.5", run(ep=1), of_many=True).typical == 1
    assert loads_of(f"{most}", run(dp=32, ep=32)).typical == most == 8
    for of_many in (True, False):
        with pytest.raises(RecipeError, match="because each token goes to"):
            loads_of(f"{most + 1}", run(), of_many)
