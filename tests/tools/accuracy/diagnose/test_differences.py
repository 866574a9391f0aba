"""Each stage has a fault that only it names first, in runs that NumPy simulates."""

import numpy as np
import pytest

from tests.tools.accuracy.diagnose.simulated import RATE, ROUTER, SHAPES, Run
from tools.accuracy.diagnose.cli import report
from tools.accuracy.diagnose.differences import OtherModelError, diagnose
from tools.accuracy.diagnose.evidence import State, read_side
from tools.accuracy.diagnose.laws import loads_of

EMBEDDING, DENSE, NORM = SHAPES


@pytest.fixture
def pair(tmp_path):
    """Return the verdict on a faultless run and one with a class's methods; `single`: on that one without the other."""

    def compare(fault=Run, single=False, **more):
        b = read_side(fault(tmp_path / "b", **more).write())
        return diagnose(b) if single else diagnose(read_side(Run(tmp_path / "a").write()), b)

    return compare


def first(verdict):
    found = verdict.first[0]
    return found.step, found.stage, found.module


def test_a_rerun_is_equal_and_obeys_all_laws(pair):
    verdict = pair()
    assert verdict.word == "equal" and verdict.bits and not verdict.unknown and not verdict.findings
    assert set(verdict.compared) > {"configuration", "samples", "forward", "gradients", "routers"}


def test_another_layout_is_said_to_be_intended_and_is_equal_within_rounding(pair, tmp_path):
    verdict = pair(ranks=2)
    assert not verdict.findings and not verdict.bits
    assert any(each.words[-1] == "model_parallel" for each in verdict.layout)
    sides = [read_side(tmp_path / name) for name in "ab"]
    assert any("another layout, as intended" in line for line in report(verdict, sides))


def test_a_changed_key_is_named_with_where_it_shows_first(pair):
    class Slower(Run):
        def rate(self, step):
            return 0.9e-3 * (step - 1)

    verdict = pair(Slower, keys={"lr_schedule.learning_rate": 2.7e-3})
    assert verdict.word == "differs: update, step 2; the configuration was changed"
    assert [each.path for each in verdict.changes] == ["lr_schedule.learning_rate"]
    assert first(verdict)[1] == "update"


def test_another_model_is_not_compared(pair):
    with pytest.raises(OtherModelError, match="hidden_size is 64, not 128"):
        pair(keys={"model.model_config.hidden_size": 64})


def test_start(pair):
    class Other(Run):
        def start(self):
            return super().start() | {DENSE: super().start()[DENSE] * np.float32(1.5)}

    assert first(pair(Other)) == (0, "start", "layers.0.mlp")


def test_another_shape_is_not_other_bits(tmp_path, monkeypatch):
    a = Run(tmp_path / "a").write()
    monkeypatch.setitem(SHAPES, DENSE, (6, 5))
    verdict = diagnose(read_side(a), read_side(Run(tmp_path / "b").write()))
    details = {each.detail for each in verdict.findings if each.step == 0}
    assert f"{DENSE}: shape [6, 4] and [6, 5]" in details and not any("bits" in detail for detail in details)


@pytest.mark.parametrize(("rate", "stage"), [(0.0, "start"), (1e-3, "update")])
def test_a_first_step_with_rate_0_shows_what_a_sharded_run_started_from(tmp_path, rate, stage):
    class Sharded(Run):
        def line(self, rank, kind, line):
            """Leave the weights out of the record of a run's start, because a sharded graph has not made them yet."""
            kept = {} if kind == "start" else line["state"]
            super().line(rank, kind, {**line, "state": kept})

        def rate(self, step):
            return super().rate(step) + rate

    class Drawn(Sharded):
        def start(self):
            return super().start() | {DENSE: 1.4 * super().start()[DENSE]}

    a, b = (read_side(kind(tmp_path / kind.__name__).write()) for kind in (Sharded, Drawn))
    verdict = diagnose(a, b)
    assert first(verdict) == (int(rate > 0), stage, "layers.0.mlp")
    assert ("start" in verdict.unknown) == (rate > 0) == any("are unknown" in note for note in a.notes)


def test_samples_of_an_earlier_step_are_recognised(pair):
    class Late(Run):
        def batch(self, step):
            return super().batch(step - 1 if step > 2 else step)

    verdict = pair(Late)
    assert first(verdict) == (3, "samples", "data")
    assert verdict.findings[0].detail == "step 3 of B has the samples of step 2 of A"


def test_the_order_of_samples_and_their_masks(pair, tmp_path):
    class Turned(Run):
        def batch(self, step):
            return [each[::-1] for each in super().batch(step)]

    class Masked(Run):
        def batch(self, step):
            ids, mask = super().batch(step)
            return ids, mask * np.array([[1], [0]], np.int32)

    assert "another order" in pair(Turned).findings[0].detail
    masked = diagnose(read_side(tmp_path / "a"), read_side(Masked(tmp_path / "c").write()))
    assert first(masked) == (1, "samples", "data") and "loss_mask of 1 of 2" in masked.findings[0].detail


def test_forward(pair):
    class Other(Run):
        def loss(self, step):
            return super().loss(step) + 1e-7

    assert first(pair(Other)) == (1, "forward", "model")


def test_a_wrong_decoder_explains_a_loss_of_the_routers_that_errs_more(pair, tmp_path):
    class Routers(Run):
        def aux(self, step):
            return 2.0

    class Both(Routers):
        def loss(self, step):
            return super().loss(step) + 1e-3

    assert [each.module for each in pair(Both).first] == ["model", "router"]
    verdict = diagnose(read_side(tmp_path / "a"), read_side(Routers(tmp_path / "c").write()))
    assert [each.module for each in verdict.first] == ["router"]


def test_other_bits_do_not_hide_the_difference_that_comes_after_them(pair, tmp_path):
    class Both(Run):
        def loss(self, step):
            return super().loss(step) + 1e-9

        def decay(self, name):
            return 0.1

    verdict = pair(Both)
    assert first(verdict) == (2, "update", "layers.0.norms") and verdict.findings[0].stage == "forward"
    text = "\n".join(report(verdict, [read_side(tmp_path / name) for name in "ab"]))
    assert f"before it, {verdict.before} differ in bits only" in text and verdict.before >= 2


def test_a_restored_tensor_whose_values_changed_places_has_its_norm(pair):
    class Swapped(Run):
        def restored(self, state):
            return state | {f"adam_m.{DENSE}": state[f"adam_m.{DENSE}"][::-1].copy()}

    verdict = pair(Swapped, resumed_from=2)
    assert first(verdict) == (2, "resume", "layers.0.mlp") and "other bits" in verdict.first[0].detail


def test_in_another_layout_losses_may_differ_by_rounding(pair):
    class Rounded(Run):
        def loss(self, step):
            return super().loss(step) + 1e-7

    assert not pair(Rounded, ranks=2).findings


def test_a_gradient_names_its_weight_and_factor_though_clipping_scales_all(pair):
    class Halved(Run):
        def gradient(self, step, name):
            return super().gradient(step, name) * np.float32(0.5 if name == DENSE else 1)

    verdict = pair(Halved)
    assert first(verdict) == (1, "gradients", "layers.0.mlp") and "1/2 times" in verdict.findings[0].detail
    assert len(verdict.first) == 1, "the others are only clipped by another factor"


def test_one_factor_of_all_gradients_is_told_once(pair):
    class Summed(Run):
        def gradient(self, step, name):
            return super().gradient(step, name) * np.float32(2)

    verdict = pair(Summed, ranks=2)
    assert first(verdict) == (1, "gradients", "all weights")
    assert verdict.first[0].detail == "the gradients of all 3 weights are 2 times as large"


def test_a_wrong_loss_is_placed_by_the_gradients(pair):
    class Other(Run):
        def loss(self, step):
            return super().loss(step) + 1e-3

        def gradient(self, step, name):
            return super().gradient(step, name) * np.float32(1.1 if name == DENSE else 1)

    verdict = pair(Other)
    assert (
        first(verdict) == (1, "forward", "model")
        and f"near it, norm of the gradient of {DENSE}" in verdict.first[0].detail
    )


def test_a_share_of_the_same_batch_is_the_layout(pair):
    keys = {"parallel_config.data_parallel": 2, "runner_config.batch_size": 2, "model.model_config.batch_size": 2}
    verdict = pair(ranks=2, keys={**keys, "parallel_config.model_parallel": 1})
    assert not verdict.changes and {each.words[-1] for each in verdict.layout} >= {"data_parallel", "batch_size"}


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_wrong_global_norm_needs_no_reference(pair, ranks):
    class Twice(Run):
        def norm(self, gradients):
            return 2 * super().norm(gradients)

    verdict = pair(Twice, single=True, ranks=ranks)
    assert first(verdict) == (1, "norm and clipping", "global norm") and "1/2 times" in verdict.findings[0].detail


def test_a_weight_that_should_not_decay_needs_no_reference(pair):
    class All(Run):
        def decay(self, name):
            return 0.1

    verdict = pair(All, single=True)
    assert (
        first(verdict) == (2, "update", "layers.0.norms")
        and "decayed by 0.1, but must decay by 0" in verdict.findings[0].detail
    )


def test_a_rate_that_is_not_the_printed_one_needs_no_reference(pair):
    class Half(Run):
        def rate_used(self, step):
            return self.rate(step) / 2

    assert first(pair(Half, single=True))[:2] == (2, "update")


def test_the_second_moment_shows_in_the_state_first(pair):
    class Other(Run):
        def step(self, step, before, recorded=True):
            spoilt = before | {f"adam_v.{NORM}": before[f"adam_v.{NORM}"] * np.float32(2)} if step == 3 else before
            return super().step(step, spoilt, recorded)

    assert first(pair(Other)) == (3, "update", "layers.0.norms")


def test_copies_that_differ_between_ranks(pair):
    class Apart(Run):
        def copy(self, rank, name, value):
            return value + np.float32(1e-6 * rank) if name == NORM and value.any() else value

    verdict = pair(Apart, single=True, ranks=2)
    found = verdict.findings[0]
    assert (found.step, found.stage, found.detail, found.ranks) == (0, "start", f"{NORM}: copies differ", (1,))
    assert {(each.step, each.stage) for each in verdict.findings} >= {(1, "update"), (2, "update")}


def test_biases_that_differ_between_ranks_are_the_routers(pair):
    class Apart(Run):
        def copy(self, rank, name, value):
            return value + np.float32(0.001 * rank) if name.endswith("expert_bias") and value.any() else value

    assert first(pair(Apart, single=True, ranks=2)) == (1, "routers", "layers.1.router")


def test_gradients_that_were_clipped_wrongly_are_not_blamed(pair):
    """Each is clipped by its own norm, and the global norm is right."""

    class Alone(Run):
        def gradient(self, step, name):
            made = super().gradient(step, name)
            return made * np.float32(min(1, 0.5 / np.linalg.norm(made)))

        def norm(self, gradients):
            return super().norm({name: super(Alone, self).gradient(self.at, name) for name in gradients})

        def step(self, step, before, recorded=True):
            self.at = step
            return super().step(step, before, recorded)

    assert first(pair(Alone)) == (1, "norm and clipping", "global norm")


@pytest.mark.parametrize("sign", [-1, 0, 2])
def test_a_bias_that_does_not_move_against_its_load(pair, sign):
    class Wrong(Run):
        def move(self, load):
            return sign * super().move(load)

    verdict = pair(Wrong, single=True)
    assert first(verdict) == (1, "routers", "layers.1.router") and "must move by +0.001" in verdict.findings[0].detail
    assert f"{RATE:g}" in verdict.findings[0].detail


def test_choices_that_are_counted_twice(pair):
    class Twice(Run):
        def load(self, step):
            return 2 * super().load(step)

    verdict = pair(Twice, single=True)
    assert (
        first(verdict)[1] == "routers"
        and "sum of the experts' shares is 2, but must be 1" in verdict.findings[0].detail
    )


def test_a_router_that_counts_nothing(pair):
    class Silent(Run):
        def load(self, step):
            return np.zeros(4, np.float32)

    verdict = pair(Silent, single=True)
    assert first(verdict) == (1, "routers", "layers.1.router")
    assert verdict.first[0].detail == f"{ROUTER}: no rank has counted a choice"


def test_another_sign_of_a_bias_has_the_same_norm_and_is_the_routers(pair):
    class Other(Run):
        def move(self, load):
            return -super().move(load)

    assert {each.stage for each in pair(Other).first} == {"routers"}


def test_a_bias_at_its_share_may_move_either_way(pair):
    class Even(Run):
        def load(self, step):
            return np.full(4, 0.25 + 1e-8 * step, np.float32)

        def move(self, load):
            return np.array([RATE, -RATE, 0, 0], np.float32)

    assert not pair(Even, single=True).findings


def test_loads_of_data_parallel_ranks_are_averaged(tmp_path):
    side = read_side(Run(tmp_path / "run").write())
    line = side.states[1].lines[0]
    side.states[1].lines[1] = line | {"loads": {ROUTER: line["loads"][ROUTER][::-1]}}
    mean = loads_of(side, 1)[ROUTER]
    assert mean == pytest.approx(mean[::-1]) and sum(mean) == pytest.approx(1)


class Staged(Run):
    """Two micro-batches, whose choices are counted one after the other, in a pipeline."""

    def __init__(self, folder, coefficient=0.0):
        sizes = {f"parallel_config.{name}": 2 for name in ("pipeline_stage", "micro_batch_num")}
        keys = {"use_parallel": True, "parallel.parallel_mode": 1, "runner_config.batch_size": 2, **sizes}
        super().__init__(folder, keys={**keys, "model.model_config.moe_aux_loss_coeff": coefficient})
        self.ranks = 2

    def cut(self, rank, state):
        return dict(state)

    def parts(self, rank):
        return {}

    def load(self, step):
        return 2 * super().load(step)

    def move(self, load):
        return super().move(load / 2)

    def aux(self, step):
        return float("nan")


@pytest.mark.parametrize(("stages", "found"), [([[2, 4]], []), ([[1, 4]], [2])])
def test_the_steps_of_a_ramp_have_fewer_passes(tmp_path, stages, found):
    """Two of four micro-batches until step 2."""

    class Ramped(Staged):
        def load(self, step):
            return super().load(step) * (1 if step < 3 else 2)

        def move(self, load):
            return super().move(load / load.sum() * 2)

    run = Ramped(tmp_path / "run")
    run.recipe["parallel_config"]["micro_batch_num"] = 4
    run.recipe["plugins"]["batch_ramp"] = {"stages": stages}
    assert [each.step for each in diagnose(read_side(run.write())).findings] == found


@pytest.mark.parametrize(("coefficient", "found"), [(0.0, []), (0.001, ["router"] * 6)])
def test_a_pipeline_counts_each_micro_batch_and_logs_no_auxiliary_loss(tmp_path, coefficient, found):
    keys = {"model.model_config.moe_aux_loss_coeff": coefficient}
    one, staged = Run(tmp_path / "a", keys=keys).write(), Staged(tmp_path / "b", coefficient).write()
    verdict = diagnose(read_side(one), read_side(staged))
    assert [each.module for each in verdict.findings] == found, (
        "a loss that is not trained is logged as 0 / 0, which is not a fault"
    )


def test_the_counters_of_another_stages_router_are_not_copies():
    line = {"state": {f"{ROUTER}.weight": ["w", 1.0, [4]], f"{ROUTER}.expert_bias": ["b", 1.0, [4]]}}
    idle = {"state": {**line["state"], f"{ROUTER}.expert_bias": ["0", 0.0, [4]]}}
    state = State(1, {0: line, 1: idle})
    assert state.tensors({})[f"{ROUTER}.expert_bias"].differing == (1,)
    parts = {0: {f"{ROUTER}.weight": [[4], [0]]}, 1: {"decoder.final_layernorm.weight": [[4], [0]]}}
    assert state.tensors(parts)[f"{ROUTER}.expert_bias"].differing == ()


def test_what_a_resume_did_not_restore(pair):
    class Fresh(Run):
        def restored(self, state):
            return state | {f"adam_m.{DENSE}": np.zeros_like(state[f"adam_m.{DENSE}"])}

    verdict = pair(Fresh, resumed_from=2)
    assert first(verdict) == (2, "resume", "layers.0.mlp")
    assert verdict.findings[0].detail.startswith(f"adam_m.{DENSE}: norm")


def test_a_resume_that_restores_all_is_equal_in_the_steps_of_both(pair):
    verdict = pair(resumed_from=2, keys={"checkpoint.load_path": "x", "checkpoint.no_load_optim": False})
    assert verdict.word == "equal in the steps that both runs recorded"
    assert "resume" in verdict.compared and "start" not in verdict.compared


def test_a_bias_that_moves_wrongly_in_the_first_step_after_a_resume(pair):
    class Turned(Run):
        def move(self, load):
            return -super().move(load)

    restored = staticmethod(lambda state: state | {f"{ROUTER}.expert_bias": np.zeros(4, np.float32)})
    verdict = pair(type("Later", (Turned,), {"restored": restored}), steps=3, resumed_from=2, ranks=2)
    assert first(verdict) == (3, "routers", "layers.1.router")


def test_a_resume_that_is_told_to_leave_the_optimizer_out_is_a_changed_key(pair):
    verdict = pair(resumed_from=2, keys={"checkpoint.load_path": "x", "checkpoint.no_load_optim": True})
    assert [each.path for each in verdict.changes] == ["checkpoint.no_load_optim"]


def test_a_run_that_went_on_in_its_own_folder_is_held_against_itself(tmp_path):
    class Fresh(Run):
        def restored(self, state):
            return state | {f"{ROUTER}.expert_bias": np.zeros(4, np.float32)}

    folder = Run(tmp_path / "run", steps=2).write()
    Fresh(tmp_path / "later", resumed_from=2).write()
    for file in (folder / "metrics").iterdir():
        with file.open("a") as whole:
            whole.write((tmp_path / "later" / "metrics" / file.name).read_text())
    verdict = diagnose(read_side(folder))
    assert first(verdict) == (2, "resume", "layers.1.router")


def test_findings_are_sorted_by_step_and_stage(pair):
    class Everything(Run):
        def loss(self, step):
            return super().loss(step) + (step > 1)

        def batch(self, step):
            return super().batch(step + (step > 2))

        def move(self, load):
            return -super().move(load)

    orders = [each.order for each in pair(Everything).findings]
    assert orders == sorted(orders) and orders[0][0] == 1 and orders[-1][0] == 3
