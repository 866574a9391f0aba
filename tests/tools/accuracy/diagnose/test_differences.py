"""Each stage has a fault that only it names first, in runs that NumPy simulates."""

import numpy as np
import pytest

from tests.tools.accuracy.diagnose.simulated import RATE, ROUTER, SHAPES, Run, but
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
    slower = but(rate=lambda rate, _: 0.9 * rate)
    verdict = pair(slower, keys={"lr_schedule.learning_rate": 2.7e-3})
    assert verdict.word == "differs: update, step 2; the configuration was changed"
    assert [each.path for each in verdict.changes] == ["lr_schedule.learning_rate"]
    assert first(verdict)[1] == "update"


def test_another_model_is_not_compared(pair):
    with pytest.raises(OtherModelError, match="hidden_size is 64, not 128"):
        pair(keys={"model.model_config.hidden_size": 64})


def scaled(factor, only=DENSE):
    return lambda made, step, name: made * np.float32(factor if only in (name, "") else 1)


class SecondMoment(Run):
    def step(self, step, before, recorded=True):
        spoilt = before | {f"adam_v.{NORM}": before[f"adam_v.{NORM}"] * np.float32(2)} if step == 3 else before
        return super().step(step, spoilt, recorded)


class Late(Run):
    def batch(self, step):
        return super().batch(step - 1 if step > 2 else step)


# fault, how the run is written, the first finding, and what it says
PAIRS = {
    "start": (
        but(start=lambda made: made | {DENSE: made[DENSE] * np.float32(1.5)}), {}, (0, "start", "layers.0.mlp"), "norm",
    ),
    "samples of an earlier step": (
        Late, {}, (3, "samples", "data"), "step 3 of B has the samples of step 2 of A",
    ),
    "the order of samples": (
        but(batch=lambda made, _: [each[::-1] for each in made]), {}, (1, "samples", "data"), "another order",
    ),
    "a mask": (
        but(batch=lambda made, _: (made[0], made[1] * np.array([[1], [0]], np.int32))), {}, (1, "samples", "data"),
        "loss_mask of 1 of 2",
    ),
    "forward": (but(loss=lambda loss, _: loss + 1e-7), {}, (1, "forward", "model"), "loss"),
    "a wrong loss is placed by the gradients": (
        but(loss=lambda loss, _: loss + 1e-3, gradient=scaled(1.1)), {}, (1, "forward", "model"),
        f"near it, norm of the gradient of {DENSE}",
    ),
    "a gradient, though clipping scales the others": (
        but(gradient=scaled(0.5)), {}, (1, "gradients", "layers.0.mlp"), "1/2 times",
    ),
    "one factor of all gradients": (
        but(gradient=scaled(2, "")), {"ranks": 2}, (1, "gradients", "all weights"),
        "the gradients of all 3 weights are 2 times as large",
    ),
    "the second moment": (SecondMoment, {}, (3, "update", "layers.0.norms"), "adam_v"),
    "another sign of a bias, which has the same norm": (
        but(move=lambda move, _: -move), {}, (1, "routers", "layers.1.router"), "expert_bias",
    ),
    "restored values that changed places": (
        but(restored=lambda _, state: state | {f"adam_m.{DENSE}": state[f"adam_m.{DENSE}"][::-1].copy()}),
        {"resumed_from": 2}, (2, "resume", "layers.0.mlp"), "other bits",
    ),
    "a moment that was not restored": (
        but(restored=lambda _, state: state | {f"adam_m.{DENSE}": 0 * state[f"adam_m.{DENSE}"]}),
        {"resumed_from": 2}, (2, "resume", "layers.0.mlp"), f"adam_m.{DENSE}: norm",
    ),
}  # fmt: skip
ALONE = {
    "the global norm": (but(norm=lambda norm, _: 2 * norm), {}, (1, "norm and clipping", "global norm"), "1/2 times"),
    "the global norm of two ranks": (
        but(norm=lambda norm, _: 2 * norm), {"ranks": 2}, (1, "norm and clipping", "global norm"), "1/2 times",
    ),
    "a weight that should not decay": (
        but(decay=lambda *_: 0.1), {}, (2, "update", "layers.0.norms"), "decayed by 0.1, but must decay by 0",
    ),
    "a rate that is not the printed one": (
        but(rate_used=lambda rate, _: rate / 2), {}, (2, "update", "embedding"), "learning rate of",
    ),
    "biases that differ between ranks": (
        but(copy=lambda made, rank, name, value: made + np.float32(0.001 * rank) * name.endswith("expert_bias")
            * value.any()),
        {"ranks": 2}, (1, "routers", "layers.1.router"), "copies differ",
    ),
    **{
        f"a bias that moves {sign} times": (
            but(move=lambda move, _, sign=sign: sign * move), {}, (1, "routers", "layers.1.router"),
            f"must move by +{RATE:g}",
        )
        for sign in (-1, 0, 2)
    },
    "choices that are counted twice": (
        but(load=lambda load, _: 2 * load), {}, (1, "routers", "layers.1.router"),
        "sum of the experts' shares is 2, but must be 1",
    ),
    "a router that counts nothing": (
        but(load=lambda load, _: 0 * load), {}, (1, "routers", "layers.1.router"),
        f"{ROUTER}: no rank has counted a choice",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("name", "single"), [*((name, False) for name in PAIRS), *((name, True) for name in ALONE)])
def test_a_fault_is_named_first_by_its_stage(pair, name, single):
    fault, more, place, words = (ALONE if single else PAIRS)[name]
    verdict = pair(fault, single, **more)
    assert first(verdict) == place and words in verdict.first[0].detail
    assert single or {(each.stage, each.module) for each in verdict.first} == {place[1:]}, "others only follow from it"


@pytest.mark.parametrize(
    ("fault", "single", "ranks"),
    [
        (but(loss=lambda loss, _: loss + 1e-7), False, 2),  # rounding, in another layout
        (but(load=lambda _, step: np.full(4, 0.25 + 1e-8 * step, np.float32),  # at its share a bias may move either way
             move=lambda *_: np.array([RATE, -RATE, 0, 0], np.float32)), True, 1),
    ],
)  # fmt: skip
def test_what_is_right_is_no_finding(pair, fault, single, ranks):
    assert not pair(fault, single, ranks=ranks).findings


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


def test_a_wrong_decoder_explains_a_loss_of_the_routers_that_errs_more(pair, tmp_path):
    routers = but(aux=lambda *_: 2.0)
    assert [each.module for each in pair(but(routers, loss=lambda loss, _: loss + 1e-3)).first] == ["model", "router"]
    verdict = diagnose(read_side(tmp_path / "a"), read_side(routers(tmp_path / "c").write()))
    assert [each.module for each in verdict.first] == ["router"]


def test_other_bits_do_not_hide_the_difference_that_comes_after_them(pair, tmp_path):
    verdict = pair(but(loss=lambda loss, _: loss + 1e-9, decay=lambda *_: 0.1))
    assert first(verdict) == (2, "update", "layers.0.norms") and verdict.findings[0].stage == "forward"
    text = "\n".join(report(verdict, [read_side(tmp_path / name) for name in "ab"]))
    assert f"before it, {verdict.before} differences are in bits only" in text and verdict.before >= 2


def test_a_share_of_the_same_batch_is_the_layout(pair):
    keys = {"parallel_config.data_parallel": 2, "runner_config.batch_size": 2, "model.model_config.batch_size": 2}
    verdict = pair(ranks=2, keys={**keys, "parallel_config.model_parallel": 1})
    assert not verdict.changes and {each.words[-1] for each in verdict.layout} >= {"data_parallel", "batch_size"}


def test_copies_that_differ_between_ranks(pair):
    apart = but(copy=lambda made, rank, name, value: made + np.float32(1e-6 * rank) * (name == NORM and value.any()))
    verdict = pair(apart, single=True, ranks=2)
    found = verdict.findings[0]
    assert (found.step, found.stage, found.detail, found.ranks) == (0, "start", f"{NORM}: copies differ", (1,))
    assert {(each.step, each.stage) for each in verdict.findings} >= {(1, "update"), (2, "update")}


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
    run = but(
        Staged,
        load=lambda load, step: load * (1 if step < 3 else 2),
        move=lambda _, load: Run.move(run, load / load.sum()),
    )(tmp_path / "run")
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


def test_a_resume_that_restores_all_is_equal_in_the_steps_of_both(pair):
    verdict = pair(resumed_from=2, keys={"checkpoint.load_path": "x", "checkpoint.no_load_optim": False})
    assert verdict.word == "equal in the steps that both runs recorded"
    assert "resume" in verdict.compared and "start" not in verdict.compared


def test_a_bias_that_moves_wrongly_in_the_first_step_after_a_resume(pair):
    zeros = {f"{ROUTER}.expert_bias": np.zeros(4, np.float32)}
    turned = but(move=lambda move, _: -move, restored=lambda state, _: state | zeros)
    verdict = pair(turned, steps=3, resumed_from=2, ranks=2)
    assert first(verdict) == (3, "routers", "layers.1.router")


def test_a_resume_that_is_told_to_leave_the_optimizer_out_is_a_changed_key(pair):
    verdict = pair(resumed_from=2, keys={"checkpoint.load_path": "x", "checkpoint.no_load_optim": True})
    assert [each.path for each in verdict.changes] == ["checkpoint.no_load_optim"]


def test_a_run_that_went_on_in_its_own_folder_is_held_against_itself(tmp_path):
    fresh = but(restored=lambda state, _: state | {f"{ROUTER}.expert_bias": np.zeros(4, np.float32)})
    folder = Run(tmp_path / "run", steps=2).write()
    fresh(tmp_path / "later", resumed_from=2).write()
    for file in (folder / "metrics").iterdir():
        with file.open("a") as whole:
            whole.write((tmp_path / "later" / "metrics" / file.name).read_text())
    verdict = diagnose(read_side(folder))
    assert first(verdict) == (2, "resume", "layers.1.router")


def test_findings_are_sorted_by_step_and_stage(pair):
    everything = but(
        loss=lambda loss, step: loss + (step > 1),
        batch=lambda made, step: (made[0] + 100 * (step > 2), made[1]),
        move=lambda move, _: -move,
    )
    orders = [each.order for each in pair(everything).findings]
    assert orders == sorted(orders) and orders[0][0] == 1 and orders[-1][0] == 3
