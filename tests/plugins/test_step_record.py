"""These tests compare what is recorded of a step with values that are known."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mindspore.train.callback import Callback, RunContext
from mindspore.train.callback._callback import CallbackManager, InternalCallbackParam

from plugins.errors import RecipeError, StoppedError
from plugins.step_record.plan import (
    Adam,
    Settings,
    adam_of,
    digest,
    gradient_square,
    record_file,
    samples_of,
    state_of,
    update_of,
    weight_of,
)
from tests.tools.accuracy.diagnose.simulated import Run


class Counter(int):
    """The number of an optimizer's updates, as a parameter holds it."""

    def asnumpy(self):
        return np.array([self])


ADAM = Adam(1e-3, 0.9, 0.95, 1e-8, 3)


def adamw(weight, moment, square, decay, adam=ADAM, rate=None):
    """The update, written as MindFormers' `adamw.py` writes it."""
    rate = adam.lr if rate is None else rate
    kept = weight * np.float32(1 - rate * decay)
    step = rate / (1 - adam.beta1**adam.count)
    return (kept - moment / (np.sqrt(square / (1 - adam.beta2**adam.count)) + adam.eps) * step).astype(np.float32)


@given(st.integers(0, 1000), st.sampled_from([0.0, 0.1, 0.3]), st.sampled_from([0.5, 1.0, 2.0]))
def test_rate_and_decay_are_found_in_the_update(seed, decay, factor):
    rng = np.random.default_rng(seed)
    weight, moment = rng.normal(0, 0.02, 64).astype(np.float32), rng.normal(0, 1e-3, 64).astype(np.float32)
    square = (moment**2 * rng.uniform(0.2, 1, 64)).astype(np.float32)
    after = adamw(weight, moment, square, decay, rate=factor * ADAM.lr)
    found = update_of(weight, after, moment, square, ADAM)
    assert found["rate"] == pytest.approx(factor * ADAM.lr, rel=1e-4)
    assert found["decay"] == pytest.approx(factor * decay, abs=2e-3)
    assert found["rest"] < 1e-3 and found["square"] > 0


def test_what_cannot_be_told_is_none():
    ones = np.ones(8, np.float32)
    for weight, adam in ((ones, Adam(0.0, 0.9, 0.95, 1e-8, 1)), (ones[:3], ADAM), (ones, ADAM)):
        found = update_of(weight, weight, weight, weight, adam)
        assert (found["square"], found["rate"], found["decay"], found["rest"]) == (0.0, None, None, None)


def test_a_gradient_is_found_in_the_first_moment():
    before, gradient = np.full(4, 0.5), np.array([1.0, -2.0, 3.0, 0.0])
    assert gradient_square(0.9 * before + 0.1 * gradient, before, 0.9) == pytest.approx(14.0)


def test_of_muon_a_matrix_tells_its_gradient_by_its_own_moment_and_a_norm_is_adamws():
    """As MindFormers' Muon keeps them: a matrix has one moment, and of AdamW's two a single unused number each."""
    rng = np.random.default_rng(5)
    optimizer = {"type": "Muon", "betas": [0.5, 0.5], "adamw_betas": [0.9, 0.95], "momentum": 0.8}
    adam = adam_of(optimizer, lr=1e-2, count=3)
    assert (adam.beta1, adam.beta2, adam.momentum) == (0.9, 0.95, 0.8)
    before = {name: rng.normal(size=size).astype(np.float32) for name, size in
              {"w": (4, 6), "muon_m.w": (4, 6), "n": 8, "adam_m.n": 8}.items()}  # fmt: skip
    before |= {f"adam_{one}.w": np.zeros(1, np.float32) for one in "mv"} | {"muon_m.n": np.zeros(1, np.float32)}
    before["adam_v.n"] = np.square(before["adam_m.n"]) + 0.1
    gradients = {name: rng.normal(size=before[name].shape).astype(np.float32) for name in ("w", "n")}
    now = dict(before)
    now["muon_m.w"] = 0.8 * before["muon_m.w"] + gradients["w"]
    now["w"] = before["w"] - 0.25
    now["adam_m.n"] = 0.9 * before["adam_m.n"] + 0.1 * gradients["n"]
    now["adam_v.n"] = 0.95 * before["adam_v.n"] + 0.05 * np.square(gradients["n"])
    now["n"] = adamw(before["n"], now["adam_m.n"], now["adam_v.n"], 0.0, adam)
    matrix, norm = (weight_of(name, before, now, adam) for name in ("w", "n"))
    assert matrix["gradient"] == pytest.approx(np.square(gradients["w"]).sum(), rel=1e-5)
    assert matrix["square"] == pytest.approx(24 * 0.0625, rel=1e-5)
    assert (matrix["rate"], matrix["decay"], matrix["rest"]) == (None, None, None)
    assert norm["gradient"] == pytest.approx(np.square(gradients["n"]).sum(), rel=1e-4)
    assert norm["rate"] == pytest.approx(1e-2, rel=1e-3) and norm["rest"] < 1e-3

    first = weight_of("w", {}, now, adam_of(optimizer, count=1))
    assert first == {"dimensions": 2, "gradient": pytest.approx(np.square(now["muon_m.w"]).sum(), rel=1e-6)}
    del now["muon_m.w"]
    assert weight_of("w", before, now, adam) is None, "a moment of one element is not the weight's"


@pytest.mark.parametrize(
    ("optimizer", "wanted"),
    [
        ({}, (0.9, 0.999, 1e-8)),
        ({"type": "AdamW", "betas": [0.9, 0.95], "eps": 1e-6}, (0.9, 0.95, 1e-6)),
        ({"type": "Muon", "betas": [0.9, 0.9], "eps": 1.0, "momentum": None}, (0.95, 0.95, 1e-8)),
    ],
)
def test_defaults_are_those_of_mindformers(optimizer, wanted):
    adam = adam_of(optimizer)
    assert (adam.beta1, adam.beta2, adam.eps) == wanted and adam.momentum == 0.95


@pytest.mark.parametrize(
    ("optimizer", "steps"),
    [
        ({"type": "PmaAdamW", "fused_num": 2, "interleave_step": 3}, [6, 12]),
        ({"type": "PmaAdamW", "fused_num": 1}, [1000]),
        ({"type": "AdamW", "fused_num": 2, "interleave_step": 3}, []),
    ],
)
def test_no_rate_explains_a_step_in_which_averages_replace_the_weights(optimizer, steps):
    counts = [count for count in (*range(13), 1000) if adam_of(optimizer, 0.1, count).averaged]
    assert counts == steps
    weight, moment = np.arange(1.0, 9), np.ones(8)
    for count in (5, 6):
        adam = adam_of(optimizer, 0.1, count)
        found = update_of(weight, weight / 2, moment, moment, adam)
        assert found["square"] == pytest.approx(np.square(weight / 2).sum())
        assert (found["rate"] is None) == (count in steps)


def test_a_digest_knows_bits_shape_and_type():
    one = np.zeros((2, 3), np.float32)
    others = [one.reshape(3, 2), one.astype(np.float64), one.view(np.int32), -one]
    assert len({digest(each) for each in [one, *others]}) == 5
    assert digest(one) == digest(np.asfortranarray(one)) and len(digest(one)) == 16


def test_samples_by_column_and_equal_rows_once():
    ids, mask = np.arange(6).reshape(2, 3), np.ones((2, 3))
    found = samples_of(("input_ids", "loss_mask"), (ids, mask))
    assert found == {"input_ids": [digest(ids[0]), digest(ids[1])], "loss_mask": digest(mask[0])}
    assert samples_of(("input_ids",), (ids[:1].repeat(2, 0),)) == {"input_ids": [digest(ids[0])] * 2}


def test_a_state_has_digest_square_and_shape():
    value = np.full((2, 2), 2.0, np.float32)
    assert state_of({"w": value}) == {"w": [digest(value), 16.0, [2, 2]]}


def test_a_step_without_an_update_says_so_and_has_no_gradient(tmp_path, monkeypatch):
    """The loss scale has skipped it: its moments are the old ones, from which a gradient would be made up."""
    from plugins.step_record import adapter

    arrays = {name: np.full(8, 0.5, np.float32) for name in ("w", "adam_m.w", "adam_v.w")}
    weights = [SimpleNamespace(name="w")]
    step = SimpleNamespace(optimizer=SimpleNamespace(parameters=weights, global_step=Counter(4)))
    for name, value in (("train_step", step), ("_arrays", arrays), ("_parts", {}), ("_effective", {})):
        monkeypatch.setattr(adapter, name, lambda params, value=value: value)
    config = SimpleNamespace(optimizer={}, output_dir=str(tmp_path), train_dataset=None, use_parallel=True)
    monkeypatch.setattr(adapter, "get_real_rank", lambda: 0)
    record = adapter.Record(config, 2)
    record.begin(None, 3)
    for number, count in ((4, 4), (5, 5)):
        step.optimizer.global_step = Counter(count)
        record.end(None, number, 1e-3)
        record.complete(None)
    _, skipped, made = map(json.loads, record_file(tmp_path, 0).read_text().splitlines())
    assert skipped["skipped"] is True and skipped["weights"] == {"w": {"dimensions": 1}} and skipped["updates"] == 4
    assert "skipped" not in made and made["weights"]["w"]["gradient"] > 0


@pytest.mark.parametrize(
    ("ended", "own"),
    [(StoppedError, True), (SystemExit, False), (StoppedError, False)],
    ids=["not finite", "saved on request", "not finite in a save"],
)
def test_the_line_of_the_step_that_ends_the_run_is_written(tmp_path, monkeypatch, ended, own):
    from plugins.step_record import adapter

    class Monitor(Callback):
        initial_step = 0

        def on_train_step_end(self, run_context):
            if own:
                raise ended("step 1: loss is NaN")

    arrays = {name: np.full(8, np.nan, np.float32) for name in ("w", "adam_m.w", "adam_v.w")}
    step = SimpleNamespace(optimizer=SimpleNamespace(parameters=[SimpleNamespace(name="w")], global_step=Counter(0)))
    for name, value in (("train_step", step), ("_arrays", arrays), ("_parts", {}), ("_effective", {})):
        monkeypatch.setattr(adapter, name, lambda params, value=value: value)
    monkeypatch.setattr(adapter, "get_real_rank", lambda: 0)
    config = SimpleNamespace(optimizer={}, output_dir=str(tmp_path), train_dataset=None, use_parallel=True)
    context = RunContext(InternalCallbackParam(cur_step_num=1))
    monitor = adapter._recording(Monitor, adapter.Record(config, 2))()
    with pytest.raises(ended), CallbackManager([monitor]) as callbacks:
        callbacks.on_train_begin(context)
        step.optimizer.global_step = Counter(1)
        callbacks.on_train_step_end(context)
        raise ended("by another callback")
    _, line = map(json.loads, record_file(tmp_path, 0).read_text().splitlines())
    assert (line["step"], line["updates"]) == (1, 1) and "w" in line["weights"]


def test_settings():
    assert Settings.read({}).steps == 3
    with pytest.raises(RecipeError, match=r"plugins\.step_record\.steps: 0 is not allowed; write a number of steps"):
        Settings.read({"steps": 0})


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_takes_as_many_bytes_as_the_docs_say(tmp_path, ranks):
    run = Run(tmp_path / "run", ranks=ranks).write()
    text = record_file(run, 0).read_text().splitlines()[-1]
    line = json.loads(text)
    parts = ((line["state"], 60), (line["weights"], 185), (line["parts"], 20))
    expected = sum(len(name) + each for names, each in parts for name in names)
    expected += 40 * sum(map(len, line["loads"].values()))
    assert expected == pytest.approx(len(text), rel=0.15)
