"""Runs that ranks recorded: put together, compared, traced to a phase."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from plugins.errors import DataError
from tests.tools.accuracy.equivalence import recorded
from tests.tools.accuracy.equivalence.recorded import EXPERTS, ROUTER, WEIGHTS, added, record, scaled, spoil_number, tie
from tools.accuracy.equivalence import runs
from tools.accuracy.equivalence.trained import compare_trained, leeway

BIAS, ALL = f"bias.{ROUTER}", (0, 1, 2, 3)


@pytest.fixture
def one(tmp_path):
    return record(tmp_path / "one")


def test_ranks_are_put_together(one, tmp_path):
    four = record(tmp_path / "four", workers=4)
    assert four.workers == 4 and four.differing == {} and four.samples == one.samples
    for name, value in one.state.items():
        np.testing.assert_array_equal(four.state[name], value)
    for mine, theirs in zip(four.norms, one.norms, strict=True):
        assert mine == pytest.approx(theirs)
    comparison = compare_trained(four, one)
    assert comparison.findings == () and comparison.tensors == 2 * (3 + 1 + 3) + 9 + 4


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (recorded.spoil_data, (1, "forward", "data", "samples", (0, 1, 2, 3))),
        (added(f"start.{EXPERTS}", (0, 0), 1e-7), (1, "forward", "layers.1.experts", f"start of {EXPERTS}", ALL)),
        (recorded.spoil_forward, (1, "forward", "loss", "loss", (0, 1, 2, 3))),
        (recorded.spoil_backward, (1, "backward", "layers.1.experts", "gradient norm", (0, 1, 2, 3))),
        (scaled(f"adam_m.{EXPERTS}", 1.001), (2, "optimizer", "layers.1.experts", f"adam_m.{EXPERTS}", ALL)),
        (added(EXPERTS, (0, 0), 0.1), (2, "optimizer", "layers.1.experts", f"change of {EXPERTS}", ALL)),
        (added(WEIGHTS[0], (0, 0), 1e-6, [2]), (2, "optimizer", "embedding", WEIGHTS[0], (2,))),
        (added(BIAS, (-1, 3), 0.002, [1]), (2, "optimizer", "layers.1.router", BIAS, (1,))),
        (scaled(BIAS, -1), (1, "optimizer", "layers.1.router", "moves of the bias", ALL)),
        (scaled(BIAS, 2), (1, "optimizer", "layers.1.router", "bias", ALL)),
        (recorded.spoil_bias_by_own_load, (1, "optimizer", "layers.1.router", "moves of the bias", (0, 1, 2, 3))),
        (
            added(f"load.{ROUTER}", (1, slice(6, None)), np.float32([-1 / 64, 1 / 64])),
            (2, "optimizer", "layers.1.router", "loads of experts", ALL),
        ),
        (spoil_number("loss"), (2, "optimizer", "loss", "loss", (0, 1, 2, 3))),
        (spoil_number("mtp_loss"), (2, "optimizer", "loss", "mtp_loss", (0, 1, 2, 3))),
        (spoil_number("global_norm"), (2, "optimizer", "gradients", "global norm", (0, 1, 2, 3))),
    ],
)
def test_the_first_difference_names_the_phase(one, tmp_path, spoil, expected):
    first = compare_trained(record(tmp_path / "four", 4, spoil), one).findings[0]
    assert (first.step, first.phase, first.module, first.tensor, first.ranks) == expected


@pytest.mark.parametrize(
    ("spoil", "tensor"),
    [
        (scaled(BIAS, -1), "moves of the bias"),
        (recorded.spoil_clipping, "clipping"),
        (spoil_number("loss"), "loss"),
        (spoil_number("global_norm"), "global norm"),
    ],
)
def test_what_is_wrong_on_both_sides_is_found(tmp_path, spoil, tensor):
    both = [record(tmp_path / str(workers), workers, spoil) for workers in (1, 4)]
    assert [finding.tensor for finding in compare_trained(both[1], both[0]).findings] == [tensor]


def test_another_number_of_steps_is_a_difference(one, tmp_path):
    comparison = compare_trained(record(tmp_path / "three", steps=3), one)
    assert [(each.tensor, each.detail) for each in comparison.findings] == [
        ("steps", "the number of steps is 3, but must be 2")
    ]


def test_a_norm_of_a_weight_that_is_no_number_is_found(one):
    norms = [one.norms[0], {**one.norms[1], EXPERTS: float("nan")}]
    run = dataclasses.replace(one, norms=norms)
    assert [finding.tensor for finding in compare_trained(run, run).findings] == ["gradient norm"]


def test_a_token_at_a_tie_may_move_a_bias_but_not_later_ones(one, tmp_path):
    assert compare_trained(record(tmp_path / "four", 4, tie), one).findings == ()
    moved = record(tmp_path / "moved", 4, tie)
    moved.state[f"bias.{ROUTER}"][2, 2] += np.float32(0.001)
    assert [finding.tensor for finding in compare_trained(moved, one).findings] == ["bias"]


def test_a_training_is_a_child_that_ends_with_the_command(tmp_path, monkeypatch):
    """`tc3` is the one beside Python; tests/tools/accuracy/align/test_comparison.py tests how `run_child` ends it."""

    def run_child(command, **_):
        assert command[:2] == [str(Path(sys.executable).with_name("tc3")), "train"]
        return subprocess.CompletedProcess(command, 1, "", "no kernel\n")

    monkeypatch.setattr(runs.children, "run_child", run_child)
    with pytest.raises(runs.RunFailedError, match=r"^no kernel$"):
        runs.train({"callbacks": []}, tmp_path / "run")


def test_a_sign_of_noise_is_no_difference(one):
    """AdamW moves a weight by the learning rate whatever its gradient's size is."""
    moment = one.state[f"least.{EXPERTS}"].copy()
    moment[3, 3] = 1e-14
    weight = one.state[EXPERTS].copy()
    weight[3, 3] += 0.1
    quiet = dataclasses.replace(one, state={**one.state, f"least.{EXPERTS}": moment})
    moved = dataclasses.replace(quiet, state={**quiet.state, EXPERTS: weight})
    assert compare_trained(moved, quiet).findings == ()
    # the sum of weights of which PmaAdamW makes averages moves with them, and is compared where noise decides nothing
    total = {f"pma_weight_sma.{EXPERTS}": 0.001 * one.state[EXPERTS]}
    with_sum = dataclasses.replace(quiet, state={**quiet.state, **total})
    for place, found in (((3, 3), 0), ((0, 0), 1)):
        other = {name: value.copy() for name, value in total.items()}
        other[f"pma_weight_sma.{EXPERTS}"][place] += 0.1
        spoilt = dataclasses.replace(with_sum, state={**with_sum.state, **other})
        assert len(compare_trained(spoilt, with_sum).findings) == found, place
    assert leeway(moment, 1e-4, 0.2)[3, 3] == 0.4
    assert np.sort(leeway(moment, 1e-4, 0.2), axis=None)[-2] < 0.01


def test_leeway_is_none_without_a_gradient_and_shrinks_with_it():
    np.testing.assert_allclose(leeway(np.array([0.0, 1.0, 4.0, 1e-20]), 1e-2, 1.0), [0.0, 0.02 * 1.25**0.5, 0.02, 2.0])


@pytest.mark.parametrize("name", [WEIGHTS[0], f"adam_m.{WEIGHTS[0]}", f"load.{ROUTER}", f"least.{WEIGHTS[0]}"])
def test_a_tensor_that_a_run_did_not_record_is_a_difference(one, tmp_path, name):
    found = compare_trained(record(tmp_path, change=lambda rank, arrays, *_: arrays.pop(name)), one)
    assert [(each.tensor, each.detail) for each in found.findings] == [(name, "the run did not record it")]


@pytest.mark.parametrize("rate", [0.1 * (1 + 2**-8), 0.0, float("nan"), None])
def test_another_learning_rate_is_a_difference(one, tmp_path, rate):
    found = compare_trained(record(tmp_path, change=lambda _, *more: more[-1][1].update(learning_rate=rate)), one)
    assert [(each.step, each.phase, each.tensor) for each in found.findings] == [(2, "optimizer", "learning rate")]


def test_a_rank_that_lacks_a_tensor_or_a_step_is_refused(tmp_path):
    def lacks_a_tensor(rank, arrays, *_):
        if rank:
            del arrays[WEIGHTS[0]]

    def lacks_a_step(rank, arrays, content, _):
        content["squares"] = content["squares"][: 2 - rank]

    def lacks_samples(rank, arrays, content, _):
        content["samples"] = content["samples"][:1]

    for name, change, words in (
        ("c", lacks_samples, "rank 0 recorded 1 of 2 steps; train again"),
        ("a", lacks_a_tensor, f"only one of rank 0 and rank 1 recorded {WEIGHTS[0]}; train again"),
        ("b", lacks_a_step, "rank 1 recorded 1 of 2 steps; train again"),
    ):
        with pytest.raises(DataError, match=words):
            record(tmp_path / name, 2, change)


def test_a_run_without_a_record_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"no rank_0\.json"):
        runs.read_run(tmp_path)
    record(tmp_path, workers=2)
    (tmp_path / "metrics/rank_0.jsonl").unlink()
    with pytest.raises(DataError, match=r"rank_0\.jsonl: the file is missing"):
        runs.read_run(tmp_path)
    (tmp_path / "equivalence/rank_1.npz").unlink()
    with pytest.raises(DataError, match="rank 1 of 2 ranks did not record its results"):
        runs.read_run(tmp_path)


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("embedding.word_embeddings.weight", "embedding"),
        ("decoder.layers.0.self_attention.linear_proj.weight", "layers.0.attention"),
        ("decoder.layers.0.self_attention.q_layernorm.weight", "layers.0.norms"),
        ("decoder.layers.0.mlp.linear_fc1.weight", "layers.0.mlp"),
        ("decoder.layers.1.mlp.experts.weight2", "layers.1.experts"),
        ("decoder.layers.1.mlp.router.weight", "layers.1.router"),
        ("decoder.layers.1.mlp.shared_experts.linear_fc1.weight", "layers.1.shared_expert"),
        ("mtp.layers.0.eh_proj.weight", "mtp.layers.0.eh_proj"),
        ("mtp.layers.0.transformer_layer.mlp.experts.weight1", "mtp.layers.0.experts"),
        ("decoder.final_layernorm.weight", "norms"),
        ("output_layer.weight", "head"),
    ],
)
def test_groups_of_weights(name, group):
    assert runs.group_of(name) == group
