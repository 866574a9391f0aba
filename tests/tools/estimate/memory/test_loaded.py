"""Memory under uneven loads, against a count of every device's rows at every moment of the schedule.

The known errors of predicted memory: recorded as they are computed, and what margin and odds follow.
"""

from dataclasses import replace

import numpy as np
import pytest
import yaml
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.memory.terms import OWN, errors
from tests.tools.estimate.test_loads import DEVICES, MODEL, run
from tools.estimate.from_recipe import from_recipe
from tools.estimate.loads import EVEN, Loads, moe_layers, spread, uniform
from tools.estimate.memory.activations import buffers, fullest_pass, mtp_option, saved
from tools.estimate.memory.loaded import Even, judge, limit_ratio, most_possible, needs_of, peaks
from tools.estimate.memory.model import all_stages, layer_options, stage_memory
from tools.estimate.memory.room import (
    DOES_NOT_FIT,
    FILE,
    FITS,
    LEFT_OUT,
    ROWS,
    UNKNOWN,
    MemoryErrors,
    Room,
    known_errors,
)
from tools.estimate.published.rows import read_rows
from tools.estimate.published.validate import predict, summary
from tools.pipeline.schedules import operations
from tools.recipe.load import load_recipe
from tools.search.measured import validate

GRAPH = {"training_graph": True, "keep_gathered": True, "shared_whole": True}
KINDS = [GRAPH, {}, {"shard_weights": True}, {**GRAPH, "ep_mode": "deduplicated"}]
SCHEDULES = ["1f1b", "interleaved_1f1b", "zero_bubble_v"]


def by_device(config, stage, shares):
    """Bytes of the fullest device, of shares [micro-batches, layers, D]: what each holds is added up pass by pass."""
    rows = dict(zip(moe_layers(config), range(shares.shape[1]), strict=False))
    even = stage_memory(config, stage)
    found = []
    for device in range(shares.shape[2]):
        kept, working, sent = {}, [even.working], [even.buffers]
        for micro_batch in range(len(shares)):
            numbers = iter(config.layer_numbers(stage))
            for chunk, kinds in enumerate(config.stage_kinds(stage)):
                options, total = iter(layer_options(config, chunk, stage, len(kinds))), 0.0
                for kind in kinds:
                    own, option = config, mtp_option(config)
                    if kind in ("dense", "moe"):
                        number, option = next(numbers), next(options)
                    if kind in ("moe", "mtp"):
                        row = rows[number] if kind == "moe" else -1
                        own = replace(config, skew=shares[micro_batch, row, device])
                        working.append(fullest_pass(own, [(kind, option)])[1])
                        sent.append(buffers(own, kind) if config.training_graph and kind == "moe" else 0.0)
                    total += saved(own, kind, option)
                kept[micro_batch, chunk] = total
        order = list(operations(config.schedule, stage, config.pp, config.chunks, config.micro_batches))
        ends = {op[1:]: place for place, op in enumerate(order) if op.kind in "BW"}
        held, most = 0.0, 0.0
        for place, op in enumerate(order):
            held += kept[op.micro_batch, op.chunk] * (op.kind == "F")
            most = max(most, held)
            held -= kept[op.micro_batch, op.chunk] * (op.kind != "F" and ends[op[1:]] == place)
        passes = even.static + most + max(working) + max(sent)
        found.append(max(passes, even.in_update - even.buffers + max(sent)))
    return max(found)


def drawn(seed, parts, layers=7, devices=DEVICES):
    made = np.random.default_rng(seed).lognormal(0, 0.5, (1, parts, layers, devices))
    return made / made.mean(axis=-1, keepdims=True)


@pytest.mark.parametrize("changes", KINDS, ids=str)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_fullest_device_is_that_of_a_count_of_all(schedule, changes):
    config = run(schedule, **changes)
    shares = drawn(3, 1)
    every = np.broadcast_to(shares[0], (config.micro_batches, *shares.shape[2:]))
    apart = drawn(4, config.micro_batches)
    for stage in range(config.pp):
        assert peaks(config, stage, shares)[0] == pytest.approx(by_device(config, stage, every), rel=1e-12)
        # micro-batches that are told apart: an upper bound
        exact = by_device(config, stage, apart[0])
        assert exact * (1 - 1e-12) <= peaks(config, stage, apart)[0] < 1.3 * exact


@pytest.mark.parametrize("changes", KINDS, ids=str)
def test_even_loads_take_todays_bytes_exactly(changes):
    for schedule in SCHEDULES:
        for model in (MODEL, replace(MODEL, mtp=1)):
            config = run(schedule, model=model, **changes)
            for stage, memory in enumerate(all_stages(config)):
                assert peaks(config, stage, EVEN.shares)[0] == memory.peak
                assert peaks(config, stage, np.ones((2, 4, 7, DEVICES))).tolist() == [memory.peak] * 2


def test_the_update_is_the_fullest_moment_until_the_loads_need_more():
    """Of stage 5 of the 105B's fine-tuning, whose passes keep little: the update holds no rows of experts."""
    config = from_recipe(load_recipe("recipes/telechat3_105b/finetune_4k.yaml"))
    memory = stage_memory(config, 5)
    assert memory.in_update > memory.in_passes
    assert peaks(config, 5, EVEN.shares)[0] == memory.in_update
    slightly = float(peaks(config, 5, uniform(1.01).shares)[0])
    assert slightly - memory.in_update < 0.01 * (memory.in_passes - memory.static), "of rows only buffers count"


def test_an_mtp_layer_grows_with_its_own_load():
    config = run(model=replace(MODEL, mtp=1), **GRAPH)
    shares = np.ones((1, 1, 8, DEVICES))
    shares[0, 0, 7, 2] = 2.0
    grown = [float(peaks(config, stage, shares)[0]) - stage_memory(config, stage).peak for stage in (0, 1)]
    assert grown[0] == 0 and grown[1] > 0
    every = np.broadcast_to(shares[0], (config.micro_batches, 8, DEVICES))
    assert peaks(config, 1, shares)[0] == pytest.approx(by_device(config, 1, every), rel=1e-12)


@given(st.integers(0, 10**6), st.sampled_from(SCHEDULES), st.sampled_from(KINDS), st.sampled_from([1, 4]), st.data())
@settings(max_examples=40)
def test_more_on_one_device_never_takes_fewer_bytes(seed, schedule, changes, parts, data):
    config = run(schedule, **changes)
    shares = drawn(seed, parts)
    more = shares.copy()
    place = tuple(data.draw(st.integers(0, size - 1)) for size in shares.shape)
    more[place] += data.draw(st.floats(0, 3))
    for stage in range(config.pp):
        assert peaks(config, stage, more)[0] >= peaks(config, stage, shares)[0]


def test_the_limit_is_where_it_is_full():
    config = run(**GRAPH)
    even = stage_memory(config, 0).peak
    assert limit_ratio(config, 0, even - 1) == 0
    found = limit_ratio(config, 0, 1.1 * even)
    assert 1 < found < most_possible(config) == 4
    assert peaks(config, 0, uniform(found).shares)[0] == pytest.approx(1.1 * even)
    assert limit_ratio(config, 0, 10 * even) == 4


def test_the_verdict_counts_steps():
    config = run(**GRAPH)
    most = max(memory.peak for memory in all_stages(config))
    shares = np.ones((3, 1, 7, DEVICES))
    shares[1, 0, :, 2], shares[2, 0, :, 2] = 1.02, 3.0
    loads = Loads(shares, (11, 12, 13), "made loads")
    between = float(max(peaks(config, stage, shares)[1] for stage in (0, 1)))
    room = Room(cap=between + 10, source="a test", margin=1 - (most + 10) / (between + 10))
    judged = judge(config, room, loads)
    assert judged.verdict == DOES_NOT_FIT and judged.over.tolist() == [False, False, True]
    assert judged.open.tolist() == [False, True, False]
    first, second = judged.lines
    assert "fits at even loads, and up to a max/mean of 1.0" in first
    assert "1 of 3 steps needs more than the limit (most often on stage " in second
    assert "), 1 more within the model's known error" in second
    assert "step 13 on stage" in second
    assert judged.as_json()["steps"] == {"all": 3, "need_more": 1, "open": 1}
    assert judge(config, room).verdict == FITS and len(judge(config, room).lines) == 1
    assert judge(config, room, uniform(1.02)).verdict == UNKNOWN
    small, large = (Room(cap, "a test", 0.0) for cap in (most / 2, 100 * most))
    assert "does not surely fit at even loads" in judge(config, small).lines[0]
    assert "every load that a router can give (max/mean 4)" in judge(config, large).lines[0]
    assert "all of 256 steps fit" in judge(config, large, spread(0.5, 7, 4)).lines[1]


def test_what_is_compiled_counts_at_even_loads_and_only_what_loads_add_is_modelled():
    config = run(**GRAPH)
    even = stage_memory(config, 1).peak
    counted = Even(1, 0.98 * even, even, 1.03 * even)
    shares = drawn(5, 1)
    for found, at_even in zip(
        needs_of(config, 1, EVEN.shares, counted), (counted.least, even, counted.most), strict=True
    ):
        assert found.tolist() == [at_even]
    least, total, most = needs_of(config, 1, shares, counted)
    assert total == pytest.approx(peaks(config, 1, shares), rel=1e-12)
    more, error = total - even, known_errors().margin
    assert least - counted.least == pytest.approx((1 - error) * more)
    assert most - counted.most == pytest.approx((1 + error) * more)
    # a compile that equals the model, and knows no error: the same limit, less the error of what loads add
    exact, room = Even(1, even, even, even), Room(1.1 * even, "a test", 0.0)
    ratio = limit_ratio(config, 1, room.bytes)
    judged = judge(config, room, uniform(ratio), [exact])
    assert judged.stages == (1,) and judged.full == 1 and judged.fits and 1 < judged.up_to < ratio
    assert judged.verdict == UNKNOWN and judge(config, room, uniform(judged.up_to), [exact]).verdict == FITS
    assert judge(config, room, uniform(1.2 * ratio), [exact]).verdict == DOES_NOT_FIT


def test_the_rate_of_steps_that_need_more_is_said():
    config = run(**GRAPH)
    shares = np.ones((40, 1, 7, DEVICES))
    shares[7, 0, :, 1] = 3.0
    most = max(memory.peak for memory in all_stages(config))
    words = judge(config, Room(1.02 * most, "a test", 0.0), Loads(shares, tuple(range(40)), "made loads")).lines[1]
    assert "1 of 40 steps needs more than the limit (most often on stage" in words
    shares[9, 0, :, 1] = 3.0
    words = judge(config, Room(1.02 * most, "a test", 0.0), Loads(shares, tuple(range(40)), "made loads")).lines[1]
    assert "2 of 40 steps need more than the limit (1 step in 20, most often on stage" in words


@pytest.fixture(scope="module")
def predictions():
    return [predict(row) for row in read_rows(ROWS) if row.use == "fit"]


def test_what_is_recorded_is_what_validate_computes(predictions):
    computed = {found.row.id: found.memory_error for found in predictions}
    assert set(computed) == set(known_errors().errors) and None not in computed.values()
    assert known_errors().differences(computed) == []
    assert all(0 <= computed[name] - error < 1e-4 for name, error in known_errors().errors.items())


def test_the_margin_is_at_least_what_the_worst_run_took_more_than_predicted(predictions):
    worst = summary(predictions, "memory_error")["all"]["worst"]
    low = min(found.memory_error for found in predictions)
    assert known_errors().missed == pytest.approx(-low, abs=1e-4)
    assert 0.03 < known_errors().missed <= worst + 1e-4 and worst < 0.05
    assert known_errors().margin == LEFT_OUT and MemoryErrors({"a": -0.2}).margin == 0.2
    assert summary(predictions, "memory_error")["all"]["mean"] < 0.01


def test_odds_are_the_share_of_runs_that_would_have_fit(predictions):
    known, limit = known_errors(), 64.0
    measured = [(found.peak_memory_gb, found.peak_memory_gb / (1 + found.memory_error)) for found in predictions]
    for predicted in (50.0, 59.3, 61.0, 63.85, 64.0, 70.0):
        fit = sum(real / said * predicted <= limit for said, real in measured)
        assert known.fits(predicted, limit) == f"{fit} of {len(measured)}"
    assert known.fitting(limit * (1 - known.margin), limit) == len(measured)
    assert known.fitting(0.998 * limit, limit) < 0.7 * len(measured)  # what winners were filled to


def test_the_margin_is_what_a_group_misses_without_its_own_terms():
    rows = [row for row in read_rows(ROWS) if row.use == "fit"]
    assert {row.group for row in rows} == set(OWN)
    found = [errors([row for row in rows if row.group == group], terms.get("all")) for group, terms in OWN.items()]
    missed = -np.concatenate(found).min()
    assert LEFT_OUT - 0.005 < missed <= LEFT_OUT
    assert 0.01 < np.abs(np.concatenate(found)).mean() < 0.02


def test_rows_that_are_only_shown_are_in_no_error(predictions):
    shown = {row.id for row in read_rows(ROWS)} - {found.row.id for found in predictions}
    assert shown and not shown & set(known_errors().errors)
    assert len(known_errors().errors) == len(predictions) == 37


def test_nothing_is_missed_by_predictions_that_are_never_too_low():
    assert MemoryErrors({"a": 0.1, "b": 0.0}).missed == 0


def test_validate_records_and_notices_what_changed(tmp_path, monkeypatch):
    runner, errors = CliRunner(), tmp_path / "errors.yaml"
    result = runner.invoke(validate, [str(ROWS), "--record", str(errors)])
    assert result.exit_code == 0 and errors.read_text("utf-8") == FILE.read_text("utf-8")
    assert "exists" in str(runner.invoke(validate, [str(ROWS), "--record", str(errors)]).exception)
    changed = dict(known_errors().errors, torchtitan_0=-0.1)
    monkeypatch.setattr("tools.search.measured.known_errors", lambda: MemoryErrors(changed))
    result = runner.invoke(validate, [str(ROWS)])
    assert result.exit_code == 1
    assert "torchtitan_0: its memory error is -4.78%, errors.yaml has -10.00%" in result.stderr
    assert runner.invoke(validate, [str(ROWS), "--record", str(errors), "--force"]).exit_code == 0


def test_the_file_of_errors_holds_nothing_else():
    assert list(yaml.safe_load(FILE.read_text("utf-8"))) == ["errors"]
