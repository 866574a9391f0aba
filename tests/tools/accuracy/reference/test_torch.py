"""The live reference: Hugging Face against the forward pass in NumPy, and faults that only a backward pass has."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the reference runs live where torch is: pip install -e '.[align]'")
pytest.importorskip("transformers")

from tests.tools.accuracy.align import cases  # noqa: E402
from tools.accuracy.align.comparison import Comparison, compare_records  # noqa: E402
from tools.accuracy.align.sides import of_reference  # noqa: E402
from tools.accuracy.reference import train  # noqa: E402
from tools.accuracy.reference.forward import Forward  # noqa: E402
from tools.accuracy.reference.start import Hyper, initial_weights, nudged  # noqa: E402
from tools.accuracy.reference.train import Reference  # noqa: E402

HYPER = Hyper(rates=[0.0, 1e-3, 2e-3], betas=(0.9, 0.95), eps=1e-8, decay=0.1, clip=0.5)


def batches(model, steps=3):
    ids = cases.tokens(model, steps)
    mask = np.ones(ids.shape, np.float32)
    mask[:, 0, :3] = 0
    return {"input_ids": ids, "labels": np.roll(ids, -1, axis=2), "loss_mask": mask}


def record(model, prepare=lambda reference: None, run=train.run, hyper=HYPER, weights=None):
    weights = initial_weights(model, 0) if weights is None else weights
    reference = Reference(model, weights)
    prepare(reference)
    batch = batches(model)
    return of_reference(run(reference, hyper, batch), weights, batch)


def compared(ours, theirs, floor=None):
    comparison = Comparison("ours", "theirs")
    compare_records(comparison, ours, theirs, floor, HYPER, 8)
    return comparison.stages


@pytest.mark.parametrize(
    "model",
    [
        cases.sizes(),
        cases.sizes(mtp=0, q_lora_rank=None),
        cases.sizes(n_group=4, topk_group=2, n_shared_experts=2),
        cases.sizes(rope_scaling=cases.YARN),
        cases.sizes(norm_topk_prob=False, first_k_dense_replace=0),
        cases.sizes(mtp=0, first_k_dense_replace=2),  # no router
    ],
)
def test_hugging_face_is_the_forward_pass_in_numpy(model):
    weights, ids = initial_weights(model, 0), cases.tokens(model)
    got = train.forward(Reference(model, weights), batches(model))
    want = Forward(model, weights).run(ids[0])
    assert {name.removeprefix("trace/") for name in got} == set(want)
    for name, value in want.items():
        assert np.abs(got[f"trace/{name}"] - value).max() < 1e-5, name


def test_a_rerun_is_bit_identical_and_a_nudge_stays_within_the_tolerances():
    model = cases.sizes()
    one, two = record(model), record(model)
    stages = compared(one, two)
    assert [stage.status for stage in stages] == ["passed"] * 4
    assert all(row.error == 0 for stage in stages for row in stage.rows)
    moved = record(model, weights=nudged(initial_weights(model, 0)))
    moved.initial = one.initial
    assert all(stage.status in ("passed", "undecided") for stage in compared(moved, one, moved))


def scale_gradient(reference):
    """The backward pass of layer 1's attention, and nothing of the forward one."""
    reference.model.model.layers[1].self_attn.o_proj.register_full_backward_hook(
        lambda module, into, out: (into[0] * 1.01,)
    )


def test_a_fault_in_backward_alone_passes_forward_and_fails_backward():
    model = cases.sizes(mtp=0)
    stages = compared(record(model, scale_gradient), record(model))
    assert [stage.status for stage in stages] == ["passed", "failed"]
    assert "backward meets model.layers.1.self_attn.kv_b_proj.weight first" in stages[1].reason


@pytest.mark.parametrize(("wrong", "group"), [("all", "no_weight_decay"), ("none", "weight_decay")])
def test_decay_of_the_wrong_group(monkeypatch, wrong, group):
    def optimizer_of(model, hyper):
        decay = hyper.decay if wrong == "all" else 0.0
        return torch.optim.AdamW(
            model.parameters(), lr=0.0, betas=hyper.betas, eps=hyper.eps, weight_decay=decay, foreach=False
        )

    model = cases.sizes()
    theirs = record(model)
    monkeypatch.setattr(train, "optimizer_of", optimizer_of)
    stages = compared(record(model), theirs)
    assert [stage.status for stage in stages] == ["passed", "passed", "failed"]
    assert f"group {group}" in stages[2].reason and "decayed by" in stages[2].reason


def test_each_step_by_itself_from_its_own_states():
    """A run that records its states is the other side; every step from these is the run's own."""
    model = cases.sizes()
    weights, batch = initial_weights(model, 0), batches(model)
    reference = Reference(model, weights)
    optimizer = train.optimizer_of(reference.model, HYPER)
    states, losses = [], []

    def state():
        named = dict(reference.model.named_parameters())
        moments = {kind: {name: optimizer.state[weight][key].numpy().copy() for name, weight in named.items()
                          if weight in optimizer.state}
                   for kind, key in (("moment", "exp_avg"), ("square", "exp_avg_sq"))}  # fmt: skip
        return {"weight": {name: train.array(value) for name, value in reference.model.state_dict().items()}, **moments}

    for index, rate in enumerate(HYPER.rates):
        states.append(state())
        losses.append(train.differentiate(reference, optimizer, train.batch_of(batch, index))[0]["loss"])
        train.step(reference, optimizer, HYPER, rate)
    states.append(state())
    single = train.single_steps(Reference(model, weights), HYPER, batch, states, [{}, {}, {}])
    assert np.array_equal(single["loss"], losses) and not single["update"].any() and not single["bias"].any()
    states[2]["moment"]["lm_head.weight"] *= 1.1
    single = train.single_steps(Reference(model, weights), HYPER, batch, states, [{}, {}, {}])
    assert single["update"][2] > 1e-3 and not single["update"][:2].any()


def test_the_rule_of_the_bias_is_judged_by_the_other_sides_counts():
    """A choice that moved is no fault of the rule; a bias that goes the wrong way is one, tie or no tie."""
    model = cases.sizes(mtp=0)
    reference = Reference(model, initial_weights(model, 0))
    bias, batch = "model.layers.1.mlp.gate.e_score_correction_bias", batches(model, 1)
    reference.losses(train.batch_of(batch, 0))
    before, counts = reference.model.state_dict()[bias].clone(), reference.counts(1).numpy()
    share = counts.sum() / len(counts)
    high, low = (int(np.flatnonzero(side)[0]) for side in (counts > share, counts < share))
    counts[[high, low]] = counts[[low, high]]  # as if the other side had sent them elsewhere
    hyper = Hyper(rates=[0.0], betas=HYPER.betas, eps=HYPER.eps, decay=0.0, clip=0.0)
    weights = {name: train.array(value) for name, value in reference.model.state_dict().items()}
    by_counts = before.numpy() + np.float32(model.bias_rate) * np.sign(share - counts).astype(np.float32)
    loads = [{"1": (counts / counts.sum()).astype(np.float32)}]
    for sign, apart in ((1, 0.0), (-1, 2 * model.bias_rate)):
        after = {**weights, bias: before.numpy() + sign * (by_counts - before.numpy())}
        states = [{"weight": weights}, {"weight": after}]
        single = train.single_steps(reference, hyper, batch, states, loads)
        assert single["bias"][0] == pytest.approx(apart, abs=1e-7)
        assert single["moved"][0] == abs(counts[high] - counts[low]) and single["tokens"][0] == batch["loss_mask"].sum()


def test_an_expert_without_tokens_still_decays():
    """PyTorch leaves out a weight without gradient; MindFormers' gradient is zero, and its AdamW goes on."""
    model = cases.sizes(mtp=0)
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    weights = initial_weights(model, 0)
    weights[bias] = np.where(np.arange(8) == 3, -10, weights[bias]).astype(np.float32)
    one = record(model, weights=weights)
    name = "model.layers.1.mlp.experts.3.down_proj.weight"
    assert not one.gradient[name].any()
    np.testing.assert_allclose(one.updated[name], one.initial[name] * (1 - 1e-3 * 0.1), rtol=1e-6)
