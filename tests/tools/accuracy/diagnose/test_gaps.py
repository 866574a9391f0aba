"""These tests hold what `tc3 accuracy diagnose` says of records that are not sound: records that are not whole,
values of a wrong type, keys that one line lacks, values that are not finite. None of them is called equal.
"""

import itertools
import json
import shutil

import numpy as np
import pytest

from plugins.errors import DataError
from plugins.step_record.plan import Adam, record_file, without_update
from tests.corrupted import WRONG, corrupted, kind_of, places, without
from tests.tools.accuracy.diagnose.simulated import ROUTER, SHAPES, Run, but
from tools.accuracy.diagnose import evidence
from tools.accuracy.diagnose.cli import _as_json
from tools.accuracy.diagnose.differences import diagnose
from tools.accuracy.diagnose.evidence import read_side
from tools.recipe.dump import dump_recipe
from tools.recipe.load import load_recipe

BIASES = f"{ROUTER}.expert_bias"
METRICS, STATES = "metrics/rank_{}.jsonl", "metrics/state_rank_{}.jsonl"


def edited(folder, name, edit, rank=0):
    file = folder / name.format(rank)
    file.write_text("".join(edit(file.read_text().splitlines(keepends=True))))
    return folder


def without_line(place):
    return lambda lines: lines[:place] + lines[place + 1 :]


def first(count):
    return lambda lines: lines[:count]


def test_attempts_are_no_difference_of_two_runs(tmp_path):
    """Each line of a run of `tc3 train` names its attempt; a run of msrun by hand has none."""

    def named(lines):
        return [json.dumps({**json.loads(line), "attempt": "0000-a"}) + "\n" for line in lines]

    a, b = (Run(tmp_path / name).write() for name in "ab")
    edited(edited(b, METRICS, named), STATES, named)
    verdict = diagnose(read_side(a), read_side(b))
    assert verdict.word == "equal" and not verdict.gaps


def resumed(lines):
    """After step 2 of 8 tokens, which is step 1 of 16, steps 2 and 3 follow."""
    header, *steps = map(json.loads, lines)
    again = [{**record, "tokens": 16} for record in steps[1:3]]
    return [*lines, *(json.dumps(line) + "\n" for line in ({**header, "start_step": 1}, *again))]


def test_steps_of_another_batch_are_left_out_and_said(tmp_path):
    a, b = (Run(tmp_path / name, steps=4).write() for name in "ab")
    side = read_side(edited(b, METRICS, resumed))
    assert sorted(side.steps) == [2, 3] and sorted(side.states) == [2, 3, 4]
    verdict = diagnose(read_side(a), side)
    assert verdict.word != "equal" and "numbered anew from step 2 on" in " ".join(verdict.gaps)


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_rank_without_a_step_of_the_newest_batch_is_not_compared_by_older_steps(tmp_path, ahead):
    folder = edited(Run(tmp_path / "run", steps=4, ranks=2).write(), METRICS, resumed, ahead)
    with pytest.raises(DataError, match=f"rank {1 - ahead} of 2 has not recorded a step since a resume changed the"):
        read_side(folder)
    side = read_side(edited(folder, METRICS, resumed, 1 - ahead))
    assert sorted(side.steps) == sorted(side.samples) == [2, 3]


@pytest.mark.parametrize(
    ("name", "edit", "rank", "told"),
    [
        (STATES, first(3), 0, "of step 3 are not recorded by all ranks"),
        (STATES, first(2), 1, "of steps 2, 3 are not recorded by all ranks"),
        (STATES, without_line(2), 1, "of step 2 are not recorded by all ranks"),
        (STATES, without_line(0), 1, "the state after step 0, from which it started, is not recorded by all ranks"),
        (METRICS, without_line(2), 0, "step 2 is missing from its metrics"),
        (METRICS, first(2), 1, "steps 2, 3 are missing from the metrics of rank 1"),
        (METRICS, first(3), 1, "step 3 is missing from the metrics of rank 1"),
    ],
)
def test_a_rank_that_recorded_less_than_the_others(tmp_path, name, edit, rank, told):
    a, b = Run(tmp_path / "a", ranks=2).write(), edited(Run(tmp_path / "b", ranks=2).write(), name, edit, rank)
    for verdict in (diagnose(read_side(a), read_side(b)), diagnose(read_side(b), read_side(a)), diagnose(read_side(b))):
        assert not verdict.findings and verdict.word == "nothing differs in what was recorded"
        assert any(told in gap and gap.startswith(str(b)) for gap in verdict.gaps)


@pytest.mark.parametrize(
    ("edit", "told"),
    [
        (first(3), "of step 3 are not recorded, although plugins.step_record asks for them"),
        (without_line(2), "of step 2 are not recorded"),
        (without_line(0), "the state from which it started is not recorded"),
    ],
)
def test_a_record_that_is_cut(tmp_path, edit, told):
    a, b = Run(tmp_path / "a").write(), edited(Run(tmp_path / "b").write(), STATES, edit)
    verdict = diagnose(read_side(a), read_side(b))
    assert verdict.word == "nothing differs in what was recorded" and any(told in gap for gap in verdict.gaps)


def test_a_run_that_ended_early_is_not_called_equal(tmp_path):
    a, b = Run(tmp_path / "a").write(), Run(tmp_path / "b").write()
    edited(edited(b, METRICS, first(3)), STATES, first(3))
    verdict = diagnose(read_side(a), read_side(b))
    assert verdict.word == "nothing differs in what was recorded"
    assert [gap.partition(": ")[2] for gap in verdict.gaps] == [
        "step 2 of 3 is its last: it is still training, or ended early"
    ]


def test_steps_that_are_not_printed_are_no_gap_and_have_no_gradients_to_compare(tmp_path):
    """Metrics of every second step: by how much the others' gradients were clipped is not known."""

    class Seldom(Run):
        def metrics(self, rank, line):
            if line.get("step", 2) % 2 == 0:
                super().metrics(rank, line)

    callbacks = [{"type": "MFLossMonitor", "per_print_times": 2}]
    a, b = Run(tmp_path / "a").write(), Seldom(tmp_path / "b", keys={"callbacks": callbacks}).write()
    side = read_side(b)
    verdict = diagnose(read_side(a), side)
    assert not side.gaps and sorted(side.steps) == [2] and not verdict.findings


def test_what_a_resumed_run_had_recorded_before_it_went_back_is_not_its_own(tmp_path):
    """It is resumed from step 1 with another rate, and records only one step of that part."""

    faster = but(rate=lambda rate, _: 2 * rate)
    folder, later = Run(tmp_path / "run").write(), faster(tmp_path / "later", resumed_from=1).write()
    edited(later, STATES, first(2))
    for file in (folder / "metrics").iterdir():
        with file.open("a") as whole:
            whole.write((later / "metrics" / file.name).read_text())
    recipe = load_recipe(folder / "recipe.yaml")
    recipe["plugins"]["step_record"]["steps"] = 1
    dump_recipe(recipe, folder / "recipe.yaml")
    side = read_side(folder)
    assert sorted(side.states) == [1, 2] and not diagnose(side).findings and not side.gaps


def changed(place, change):
    def edit(lines):
        record = json.loads(lines[place])
        change(record)
        return [*lines[:place], json.dumps(record) + "\n", *lines[place + 1 :]]

    return edit


@pytest.mark.parametrize(
    ("name", "change", "told"),
    [
        (METRICS, lambda line: line.pop("samples"), "the metrics of rank 0 lack `samples` of step 2"),
        (METRICS, lambda line: line.update(lm_loss=None), "the lm_loss of step 2 is missing"),
        (
            METRICS,
            lambda line: line.update(step=10**12),
            "999,999,999,997 of the steps up to 1000000000000 are missing",
        ),
        (METRICS, lambda line: line.pop("global_norm"), "lack `global_norm` of step 2"),
        (STATES, lambda line: line["state"].pop(f"adam_v.{next(iter(SHAPES))}"), "after step 2 lacks `state.adam_v."),
    ],
)
def test_what_only_some_steps_or_ranks_have(tmp_path, name, change, told):
    ranks = 2 if name == STATES else 1
    a, b = (Run(tmp_path / side, ranks=ranks).write() for side in "ab")
    edited(b, name, changed(2, change))
    for sides in ((a, b), (b, a)):
        verdict = diagnose(*map(read_side, sides))
        assert not verdict.findings and verdict.word == "nothing differs in what was recorded"
        assert any(gap.startswith(str(b)) and told in gap for gap in verdict.gaps)


@pytest.fixture
def copied(tmp_path, monkeypatch):
    """Write a run; return its folder and that of a copy, whose recipe is not read again."""

    def copy(kind, **more):
        whole = kind(tmp_path / "whole", **more).write()
        recipe = evidence.load_recipe(whole / "recipe.yaml")
        monkeypatch.setattr(evidence, "load_recipe", lambda _: recipe)
        run = shutil.copytree(whole, tmp_path / "run")
        assert diagnose(read_side(whole), read_side(run)).word == "equal"
        return whole, run

    return copy


OUTPUT = ["0" * 16, 1.0, [1.0, 2.0, 3.0, 4.0]]


class Whole(Run):
    """A run in one CPU process, which also records the outputs of its modules."""

    def line(self, rank, kind, line):
        if kind == "start":
            line = {**line, "effective": {"optimizer.eps": 1e-8, "model.type": "moe", "model.depth": None}}
        elif line["step"] == 1:
            line = {**line, "modules": {"layers.0.mlp": OUTPUT}}
        super().line(rank, kind, line)

    def parts(self, rank):
        names = {prefix + name: shape for name, shape in SHAPES.items() for prefix in ("", "adam_m.", "adam_v.")}
        return {name: [list(shape), [0] * len(shape)] for name, shape in names.items()}

    def write(self):
        super().write()
        super().line(0, "end", {"step": self.last, "end": True, "state": {}, "modules": {"layers.0.mlp": OUTPUT}})
        return self.folder


@pytest.mark.slow
@pytest.mark.parametrize("name", ["metrics/rank_0.jsonl", "metrics/state_rank_0.jsonl"])
def test_no_value_of_a_wrong_type_is_computed_with(copied, name):
    """Each key of each kind of line, with each wrong type; what a run may write as well is not called equal."""
    whole, run = copied(Whole, steps=1)
    file, refused = run / name, 0
    lines = file.read_text().splitlines(keepends=True)
    for place, line in enumerate(lines):
        for path, wrong in itertools.product(places(json.loads(line)), WRONG):
            text, right = corrupted(line, path, wrong)
            if type(right) is type(wrong) and type(wrong) in (float, str, bool):
                continue
            file.write_text("".join([*lines[:place], text, *lines[place + 1 :]]))
            at = f"{file}: line {place + 1}: {'.'.join(map(str, path))}"
            try:
                side = read_side(run)
            except DataError as error:
                refused += 1
                assert at in str(error) and "but must be" in str(error) and "\n" not in str(error)
                continue
            alike = right is None or kind_of(right) == kind_of(wrong) or path[0] == "effective"
            assert alike or wrong is None or wrong == {}, at
            word = diagnose(read_side(whole), side).word
            assert alike or word != "equal", at
    assert refused > 100


def test_the_number_of_a_step_that_no_run_has_is_refused(tmp_path):
    file = Run(tmp_path / "run").write() / "metrics" / "rank_0.jsonl"
    file.write_text(file.read_text() + json.dumps({"step": 10**20, "loss": 1.0}) + "\n")
    with pytest.raises(DataError, match="step is 100000000000000000000, but must be the number of a step"):
        read_side(tmp_path / "run")


@pytest.mark.parametrize("key", ["loads", "biases"])
def test_a_router_with_another_number_of_experts_on_one_line(tmp_path, key):
    run = Run(tmp_path / "run").write()
    file = record_file(run, 0)
    lines = file.read_text().splitlines(keepends=True)
    lines[2], _ = corrupted(lines[2], (key, ROUTER), [0.5])
    file.write_text("".join(lines))
    with pytest.raises(
        DataError, match=f"line 3: {key}.{ROUTER} has 1 numbers, but must have 4, as in the lines before"
    ):
        read_side(run)


UNREAD = {("software",), ("held_bytes",)}  # below them: what is not installed is left out, and bytes are not compared


@pytest.mark.parametrize(
    ("kind", "name", "steps"),
    [
        (Run, "metrics/rank_1.jsonl", 1),
        (Run, "metrics/state_rank_1.jsonl", 2),
        (Whole, "metrics/state_rank_0.jsonl", 1),
    ],
)
def test_no_run_with_a_line_that_lacks_a_key_is_called_equal(copied, kind, name, steps):
    whole, run = copied(kind, steps=steps, ranks=2 if kind is Run else 1)
    file, told = run / name, 0
    lines = file.read_text().splitlines(keepends=True)
    for place, line in enumerate(lines):
        for path in places(json.loads(line)):
            text = None if path[:-1] in UNREAD else without(line, path)
            if text is None:
                continue
            file.write_text("".join([*lines[:place], text, *lines[place + 1 :]]))
            try:
                verdict = diagnose(read_side(whole), read_side(run))
            except DataError as error:
                assert f"{file}: line {place + 1}" in str(error)
                continue
            told += 1
            assert verdict.word != "equal", (place, path)
            assert verdict.gaps and all(gap.startswith(str(run)) for gap in verdict.gaps), (place, path)
    assert told > 5


WEIGHT = "embedding.word_embeddings.weight"


@pytest.mark.parametrize(
    "path",
    [
        ("biases",),
        ("parts",),
        ("biases", "decoder.layers.1.mlp.router"),
        ("weights", WEIGHT),
        ("weights", WEIGHT, "gradient"),
        ("weights", WEIGHT, "rate"),
        ("state", f"adam_m.{WEIGHT}"),
        ("parts", WEIGHT),
    ],
)
def test_one_run_by_itself(tmp_path, path):
    """A state with a gap is not judged by the laws either: what it lacks would break them."""
    run = Run(tmp_path / "run", steps=1, ranks=2).write()
    file = run / "metrics" / "state_rank_1.jsonl"
    start, step = file.read_text().splitlines(keepends=True)
    file.write_text(start + without(step, path))
    verdict = diagnose(read_side(run))
    assert verdict.word == "nothing differs in what was recorded"
    assert [gap.partition(": ")[2] for gap in verdict.gaps] == [
        f"the state after step 1 lacks `{'.'.join(path)}` on rank 1"
    ]


EMBEDDING, DENSE, NORM = SHAPES


def verdict_on(folder, fault, single=True, **more):
    """The verdict on a run with a class's methods, and on a faultless run before it unless `single`."""
    b = read_side(fault(folder / "b", **more).write())
    return diagnose(b) if single else diagnose(read_side(Run(folder / "a").write()), b)


class Spoilt(Run):
    def record(self, rank, step, before, after, *more):
        spoilt = {DENSE: after[DENSE] * np.float32(np.nan)} if step == 3 else {}
        super().record(rank, step, before, after | spoilt, *more)


class NotANumber(Run):
    def gradient(self, step, name):
        made = super().gradient(step, name)
        if step == 3 and name == DENSE:
            made[0, 0] = np.nan
        return made


Lost = but(loss=lambda loss, step: float("nan") if step == 3 else loss)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("single", [True, False])
@pytest.mark.parametrize(
    ("fault", "stage", "module"),
    [(Spoilt, "update", "layers.0.mlp"), (NotANumber, "gradients", "layers.0.mlp"), (Lost, "forward", "model")],
)
def test_what_is_not_a_number_is_never_equal(tmp_path, fault, stage, module, single, ranks):
    verdict = verdict_on(tmp_path, fault, single, ranks=ranks)
    found = verdict.first[0]
    assert (found.step, found.stage, found.module) == (3, stage, module)
    told = json.dumps(_as_json(verdict, []), allow_nan=False)
    assert json.loads(told)["findings"][0]["error"] is None


@pytest.mark.parametrize("single", [True, False])
def test_a_global_norm_that_is_infinite_is_a_difference(tmp_path, single):
    """Clipping by it leaves nothing of the gradients. The comparison divided by 0."""

    class Overflow(Run):
        def metrics(self, rank, line):
            super().metrics(rank, line | ({"global_norm": float("inf")} if line.get("step") == 3 else {}))

    found = verdict_on(tmp_path, Overflow, single).first[0]
    assert (found.step, found.stage, found.module) == (3, "norm and clipping", "global norm")


@pytest.mark.parametrize(("skipped", "findings"), [(False, 1), (True, 0)])
def test_a_global_norm_that_is_not_a_number_is_a_finding_of_a_run_that_records_only_its_metrics(
    tmp_path, skipped, findings
):
    class Plain(Run):
        def line(self, rank, kind, line):
            pass

        def metrics(self, rank, line):
            spoilt = {"global_norm": float("nan"), "overflow": skipped} if line.get("step") == 3 else {}
            super().metrics(rank, line | spoilt)

    verdict = verdict_on(tmp_path, Plain, keys={"plugins.step_record": False})
    assert [(each.step, each.stage) for each in verdict.findings] == [(3, "norm and clipping")] * findings


class Skipped(Run):
    skipped = (2,)
    flag = {"skipped": True}  # which earlier versions did not record

    def step(self, step, before, recorded=True):
        if step not in self.skipped:
            return super().step(step, before, recorded)
        adam = Adam(self.rate(step), 0.9, 0.95, 1e-8, 1)
        moved = before[BIASES] + self.move(self.load(step)).astype(np.float32)  # a callback does so all the same
        after = before | {BIASES: moved}
        self.record(0, step, before, after, adam, self.load(step), float("inf"))
        return after

    def line(self, rank, kind, line):
        if line["step"] in self.skipped:
            line |= self.flag | ({"weights": without_update(line["weights"])} if self.flag else {})
        super().line(rank, kind, line)

    def metrics(self, rank, line):
        super().metrics(rank, line | ({"overflow": True} if line.get("step") in self.skipped else {}))


@pytest.mark.parametrize("flag", [{"skipped": True}, {}], ids=["recorded", "of an earlier version"])
def test_a_step_that_the_loss_scale_skipped_is_a_gap(tmp_path, monkeypatch, flag):
    """The optimizer left everything as it was; a gradient computed from its moments is made up."""
    monkeypatch.setattr(Skipped, "flag", flag)
    a, b = (read_side(Skipped(tmp_path / name).write()) for name in "ab")
    assert set(a.states) == {1, 2, 3} and a.gradients(2) == a.moves(2) == {} and a.gradients(3)
    for verdict in (diagnose(a, b), diagnose(a)):
        assert "equal" not in verdict.word
        assert any("step 2 was skipped, because gradients overflowed the loss scale" in gap for gap in verdict.gaps)
        assert not [each for each in verdict.findings if each.step == 2]


@pytest.mark.parametrize("flag", [{"skipped": True}, {}], ids=["recorded", "of an earlier version"])
@pytest.mark.parametrize("steps", [(1,), (2,), (3,), (1, 2)])
def test_a_step_that_only_one_run_skipped_lacks_nothing(tmp_path, monkeypatch, steps, flag):
    monkeypatch.setattr(Skipped, "flag", flag)
    monkeypatch.setattr(Skipped, "skipped", steps)
    a, b = read_side(Skipped(tmp_path / "a").write()), read_side(Run(tmp_path / "b").write())
    for verdict in (diagnose(a, b), diagnose(b, a)):
        assert not [gap for gap in verdict.gaps if "lack" in gap]
        assert len(verdict.gaps) == 1 and "skipped" in verdict.gaps[0]


@pytest.mark.parametrize("steps", [(1, 2, 3), (2,)])  # (2,): plugins.batch_ramp gives the optimizer all weights again
@pytest.mark.parametrize(("left_out", "gap"), [(("weights", "parts"), False), (("weights",), True)])
def test_weights_of_other_stages_that_a_resumed_rank_holds_are_no_gap(tmp_path, left_out, gap, steps):
    """After a resume a rank of a pipeline has weights of other stages in memory, and its optimizer leaves them out."""
    name = list(SHAPES)[2]

    class Stage(Run):
        def line(self, rank, kind, line):
            for key in left_out:
                if rank and key in line and (key == "parts" or line["step"] in steps):
                    line[key] = {each: told for each, told in line[key].items() if not each.endswith(name)}
            super().line(rank, kind, line)

    verdict = diagnose(read_side(Stage(tmp_path / "a", ranks=2).write()))
    assert any(f"lacks `weights.{name}` on rank 1" in each for each in verdict.gaps) == gap
    assert (verdict.word == "equal") != gap


@pytest.mark.parametrize("clipped", [True, False])
def test_what_a_run_does_not_have_is_not_compared(tmp_path, clipped):
    class Dense(Run):
        def line(self, rank, kind, line):
            state = {name: told for name, told in line["state"].items() if not name.startswith(ROUTER)}
            super().line(rank, kind, line | {"state": state, "biases": {}} | ({"loads": {}} if "loads" in line else {}))

        def metrics(self, rank, line):
            super().metrics(rank, line | ({"global_norm": None} if "step" in line else {}))

    verdict = verdict_on(tmp_path, Dense, keys={"runner_wrapper.use_clip_grad": clipped})
    assert {"routers", "norm and clipping"}.isdisjoint(verdict.compared)
    assert verdict.unknown == ("norm and clipping",) * clipped and (verdict.word == "equal") != clipped


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("decoder.layers.1.mlp.experts.weight1", "layers.1.experts"),
        ("decoder.layers.0.attn_hc.hc_fn", "layers.0.attn_hc"),
    ],
)
def test_weights_with_other_names_are_compared_in_another_layout_too(tmp_path, monkeypatch, name, module):
    """Experts' weights and those of residual streams: their second moments, and at the start the weights themselves."""
    monkeypatch.setitem(SHAPES, name, (4, 6))

    class Moment(Run):
        def step(self, step, before, recorded=True):
            spoilt = before | {f"adam_v.{name}": before[f"adam_v.{name}"] * np.float32(2)} if step == 3 else before
            return super().step(step, spoilt, recorded)

    drawn = but(start=lambda made: made | {name: made[name] * np.float32(1.5)})
    for fault, step, stage in ((Moment, 3, "update"), (drawn, 0, "start")):
        verdict = verdict_on(tmp_path / stage, fault, single=False, ranks=2)
        found = verdict.first[0]
        assert not verdict.bits and (found.step, found.stage, found.module) == (step, stage, module)
