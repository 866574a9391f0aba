"""Runs that ranks recorded: put together, compared, traced to a phase."""

import dataclasses

import numpy as np
import pytest

from plugins.errors import DataError
from tests.tools.accuracy.recorded import (
    EXPERTS,
    WEIGHTS,
    record,
    spoil_backward,
    spoil_copy,
    spoil_data,
    spoil_forward,
    spoil_moment,
    spoil_start,
    spoil_weight,
)
from tools.accuracy import equivalence_runs as runs
from tools.accuracy.equivalence_trained import compare_trained, leeway


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
    assert comparison.findings == () and comparison.tensors == 2 * (3 + 1 + 3) + 9


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (spoil_data, (1, "forward", "data", "samples", (0, 1, 2, 3))),
        (spoil_start, (1, "forward", "layers.1.experts", f"start of {EXPERTS}", (0, 1, 2, 3))),
        (spoil_forward, (1, "forward", "loss", "loss", (0, 1, 2, 3))),
        (spoil_backward, (1, "backward", "layers.1.experts", "gradient norm", (0, 1, 2, 3))),
        (spoil_moment, (2, "optimizer", "layers.1.experts", f"adam_m.{EXPERTS}", (0, 1, 2, 3))),
        (spoil_weight, (2, "optimizer", "layers.1.experts", f"change of {EXPERTS}", (0, 1, 2, 3))),
        (spoil_copy, (2, "optimizer", "embedding", WEIGHTS[0], (2,))),
    ],
)
def test_the_first_difference_names_the_phase(one, tmp_path, spoil, expected):
    first = compare_trained(record(tmp_path / "four", 4, spoil), one).findings[0]
    assert (first.step, first.phase, first.module, first.tensor, first.ranks) == expected


def test_a_sign_of_noise_is_no_difference(one):
    """AdamW moves a weight by the learning rate whatever its gradient's size is."""
    moment = one.state[f"least.{EXPERTS}"].copy()
    moment[3, 3] = 1e-14
    weight = one.state[EXPERTS].copy()
    weight[3, 3] += 0.1
    quiet = dataclasses.replace(one, state={**one.state, f"least.{EXPERTS}": moment})
    moved = dataclasses.replace(quiet, state={**quiet.state, EXPERTS: weight})
    assert compare_trained(moved, quiet).findings == ()
    assert leeway(moment, 1e-4, 0.2)[3, 3] == 0.4
    assert np.sort(leeway(moment, 1e-4, 0.2), axis=None)[-2] < 0.01


def test_leeway_is_none_without_a_gradient_and_shrinks_with_it():
    np.testing.assert_allclose(leeway(np.array([0.0, 1.0, 4.0, 1e-20]), 1e-2, 1.0), [0.0, 0.02 * 1.25**0.5, 0.02, 2.0])


def test_a_run_without_a_record_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"no rank_0\.json"):
        runs.read_run(tmp_path)
    record(tmp_path, workers=2)
    (tmp_path / "equivalence/rank_1.npz").unlink()
    with pytest.raises(DataError, match="rank 1 of 2 has recorded nothing"):
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
