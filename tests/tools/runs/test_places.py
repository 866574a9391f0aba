"""Steps of several starts of a run are compared by the samples that they train, whatever numbers they have."""

import json
import math
import random
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner

from plugins.lines import OF, Span, spans_file
from tests.tools.runs.builders import append, header, step
from tools.runs import attempts, readings, render
from tools.runs.attempts import End, Plan
from tools.runs.cli import runs
from tools.runs.places import END, Numbering, begins_anew, translated
from tools.runs.readings import Part, Readings, load_run, read_evaluations, read_held_out, read_metrics, read_parts
from tools.runs.study import spikes, study
from tools.runs.watch import Kept, Watch

SEQUENCE = 4  # tokens of a sample
BEGIN = 1_700_000_000.0
STAGES, FULL = [[5, 4], [11, 8]], 12  # of a ramp


class Story:
    """A run of some attempts, written as a launch writes it; the truth is kept sample by sample, not by steps."""

    def __init__(self, folder, seed, ramp=False):
        self.folder, self.rng, self.ramp = folder, random.Random(seed), ramp
        self.now, self.number, self.count = 0, -1, 0
        self.saved = []  # (samples, step, batch) of checkpoints
        self.steps = []  # (attempt, step, loss, samples until its end), in the order in which they were made
        self.owner, self.owner_in_metrics = {}, {}  # sample -> the step that trained it last: its index in `steps`
        self.evaluations = []  # (samples, loss)
        self.batch = self.metrics_batch = 0  # of the newest attempt; of the newest that has made a step
        self.begin, self.went_back, self.sizes = 0, False, {}
        (folder / "metrics").mkdir(parents=True)

    def time(self):
        return BEGIN + self.now

    def line(self, name, record):
        append(self.folder / "metrics" / name, {**record, OF: self.plan.name})

    def batch_at(self, number):
        return next((size for end, size in STAGES if number <= end), FULL) if self.ramp else self.batch

    def until(self, number):
        return sum(self.batch_at(each) for each in range(1, number + 1))

    def attempt(self, steps, batch=None, back=False, evaluates=False, saves=3):
        """One attempt of so many steps, which goes on from the newest checkpoint, or from an older one (`back`)."""
        while back and self.saved and self.rng.random() < 0.7:
            self.saved.pop()
            self.went_back = True
        self.begin, of, size = self.saved[-1] if self.saved else (0, 0, 0)
        fitting = [each for each in (4, 8, 12, 16) if self.begin % each == 0]
        self.batch = FULL if self.ramp else batch or self.rng.choice(fitting or [size])
        start = of if self.ramp else self.begin // self.batch
        self.number += 1
        self.sizes[self.number] = self.batch
        resume = f"/disk/iteration_{of:08d}" if of else None
        name = f"{self.number:04d}-x"
        self.plan = Plan(
            self.number, self.time(), ["a"], 1, "a", 1, resume=resume, step=of, name=name, start=start, batch=self.batch
        )
        attempts.write(attempts.folder_of(self.folder, self.number) / attempts.PLAN, self.plan)
        recipe = {"runner_config": {"batch_size": self.batch}, "model": {"model_config": {"seq_length": SEQUENCE}}}
        recipe["plugins"] = {"batch_ramp": {"stages": STAGES}} if self.ramp else {}
        for file in (attempts.recipe_file(self.folder, self.plan), self.folder / "recipe.yaml"):
            file.write_text(json.dumps(recipe))
        self.forget(self.owner)
        self.now += 5
        if evaluates:
            self.evaluate(start)
        self.train(start, steps, saves, evaluates)
        self.now += 2
        end = End("a", self.time(), "failed", "step", start + steps)
        attempts.write(attempts.folder_of(self.folder, self.number) / f"{attempts.END}a.json", end)

    def forget(self, owner):
        for sample in [sample for sample in owner if sample >= self.begin]:
            del owner[sample]

    def train(self, start, steps, saves, evaluates):
        described, began = None, self.time()
        for number in range(start + 1, start + steps + 1):
            size = self.batch_at(number)
            self.now += 3 if size != described else 1
            if size != described:
                self.line("rank_0.jsonl", {"total_steps": 99, "start_step": number - 1, "time": began})
            self.count += 1
            loss = math.nan if self.rng.random() < 0.2 else 5.0
            self.line("rank_0.jsonl", {"step": number, "time": self.time(), "seconds": 3 if size != described else 1,
                                       "loss": loss, "global_norm": 1.0, "learning_rate": self.count,
                                       "tokens": size * SEQUENCE})  # fmt: skip
            if described is None:
                self.forget(self.owner_in_metrics)
                self.metrics_batch = self.batch
            described = size
            for sample in range(self.until(number - 1), self.until(number)):
                self.owner[sample] = self.owner_in_metrics[sample] = len(self.steps)
            self.steps.append((self.number, number, loss, self.until(number)))
            if number % saves == 0:
                self.saved.append((self.until(number), number, self.batch))
                self.line("spans.jsonl", vars(Span("save", number, self.time(), self.time(), True)))
            if evaluates and number % 4 == 0:
                self.evaluate(number)

    def evaluate(self, number):
        place = self.until(number)
        self.evaluations = [(old, loss) for old, loss in self.evaluations if old < place]
        self.evaluations.append((place, len(self.steps) + self.number / 100))
        self.line("held_out.jsonl", {"step": number, "held_out_loss": self.evaluations[-1][1]})

    def stands(self, owner):
        """Whether each step stands: no sample of it was trained again, nor will be."""
        found = []
        for index, (attempt, number, _, end) in enumerate(self.steps):
            begin = end - (self.batch_at(number) if self.ramp else self.sizes[attempt])
            found.append(all(owner.get(sample) == index for sample in range(begin, end)))
        return found

    def kept(self):
        """Index -> number, as the newest steps are counted, of the first step that stands in each of them."""
        found = {}
        for index, stands in enumerate(self.stands(self.owner_in_metrics)):
            _, number, _, end = self.steps[index]
            if stands:
                found.setdefault(number if self.ramp else -(-end // self.metrics_batch), index + 1)
        return found


def told(tmp_path, seed, ramp):
    """A story of some attempts; after each of them it is yielded."""
    story = Story(tmp_path / "run", seed, ramp)
    story.attempt(story.rng.randrange(2, 14), evaluates=True)
    yield story
    for _ in range(story.rng.randrange(1, 6)):
        steps = story.rng.choice([0, 1, story.rng.randrange(2, 14)])
        saves = story.rng.randrange(1, 6)
        story.attempt(steps, back=story.rng.random() < 0.3, evaluates=story.rng.random() < 0.7, saves=saves)
        yield story


CASES = [*((seed, False) for seed in range(50)), *((seed, True) for seed in range(20))]


@pytest.mark.parametrize(("seed", "ramp"), CASES)
def test_what_stands_is_what_no_sample_of_was_trained_again(tmp_path, seed, ramp):
    *_, story = told(tmp_path, seed, ramp)
    found, stands = study(story.folder), story.stands(story.owner)
    assert (found.ledger.kept_steps, found.ledger.lost_steps) == (sum(stands), len(stands) - sum(stands))
    seconds = {kind: value / 1e6 for kind, value in found.ledger.totals().items()}
    assert (seconds["kept"], seconds["lost"]) == (sum(stands), len(stands) - sum(stands))
    expected = [(number, one) for (_, number, loss, _), one in zip(story.steps, stands, strict=True) if loss != loss]
    assert [(one.step, one.stands) for one in found.spikes] == expected
    last = story.steps[-1][3]
    if story.saved and not story.went_back:
        risk = math.ceil((last - story.saved[-1][0]) / story.metrics_batch)
        ahead = story.steps[-1][1] - story.saved[-1][1]
        assert found.checkpoints.at_risk == max(0, ahead if ramp else risk)
    assert not [note for note in found.notes if "unknown" in note or "do not" in note]
    changed = [note for note in found.notes if "the global batch was changed" in note]
    assert bool(changed) == (not ramp and len({story.sizes[attempt] for attempt, *_ in story.steps}) > 1)


@pytest.mark.parametrize(("seed", "ramp"), CASES)
def test_the_records_of_steps_and_evaluations_are_those_of_the_samples(tmp_path, seed, ramp):
    *_, story = told(tmp_path, seed, ramp)
    readings = read_metrics(story.folder / "metrics" / "rank_0.jsonl")
    assert {number: record["learning_rate"] for number, record in readings.steps.items()} == story.kept()
    assert all(record["step"] == number for number, record in readings.steps.items())
    found = {number: one.loss for number, one in read_evaluations(story.folder).items()}
    places = {
        story.until(number) if ramp else round(number * story.metrics_batch): loss for number, loss in found.items()
    }
    assert list(places.items()) == story.evaluations and read_held_out(story.folder) == found


@pytest.mark.parametrize(("seed", "ramp"), CASES)
def test_a_run_that_is_followed_counts_the_same(tmp_path, seed, ramp):
    watch = None
    for story in told(tmp_path, seed, ramp):
        watch = watch or Watch(story.folder)
        status, stands = watch.look(), story.stands(story.owner)
        assert status.goodput == pytest.approx(sum(stands) / story.now)
        assert replace(Watch(story.folder).look(), quiet=0.0) == replace(status, quiet=0.0)
        newest, number, *_ = story.steps[-1]
        if newest == story.number:
            assert status.step == number
        else:  # it will go on from there
            left = story.plan.step if ramp else story.begin // story.metrics_batch
            assert status.step == min(number, left)


def changed(folder, one=8, two=16, steps=20, saved=10):
    """A run of so many steps that goes on from a checkpoint with another batch, and is to train its first step."""
    story = Story(folder, 0)
    story.attempt(steps, one, saves=saved)
    story.saved = story.saved[:1]
    story.attempt(0, two)
    return story


def test_an_older_plan_does_not_say_where_another_batch_begins(tmp_path):
    story = changed(tmp_path / "run")
    assert study(story.folder).ledger.kept_steps == 10 and Watch(story.folder).look().step == 10
    file = attempts.folder_of(story.folder, 1) / attempts.PLAN
    attempts.write(file, replace(story.plan, start=None, batch=0))
    assert study(story.folder).ledger.kept_steps == 10, "all steps on record are counted alike"
    story.attempt(2, 16)
    attempts.write(attempts.folder_of(story.folder, 2) / attempts.PLAN, replace(story.plan, start=None, batch=0))
    story.saved = [(80, 10, 8)]
    story.attempt(0, 16)
    attempts.write(attempts.folder_of(story.folder, 3) / attempts.PLAN, replace(story.plan, start=None, batch=0))
    found = study(story.folder)
    assert "unknown after which step attempt 3 began" in " ".join(found.notes)
    assert (found.ledger.kept_steps, found.ledger.lost_steps) == (12, 10)
    assert Watch(story.folder).look().goodput is None


def test_where_attempts_began_does_not_matter_before_the_first_step(tmp_path):
    """An older version's run that began from a checkpoint of another run: the global batch was said to have changed."""
    story = Story(tmp_path / "run", 0)
    story.saved = [(80, 10, 8)]
    for number in range(3):
        story.attempt(3 * (number == 2), 8)
        file = attempts.folder_of(story.folder, number) / attempts.PLAN
        attempts.write(file, replace(story.plan, start=None, batch=0))
        assert study(story.folder).notes == []


def test_the_recipes_of_attempts_are_read_only_where_the_batch_was_changed(tmp_path, monkeypatch):
    """Each of many attempts that made no step cost the reading of its recipe."""
    story, read = Story(tmp_path / "run", 0), []
    monkeypatch.setattr(
        readings, "recipe_file", lambda folder, plan: read.append(plan) or attempts.recipe_file(folder, plan)
    )
    story.attempt(12, 8, saves=4)
    story.attempt(0, 8), story.attempt(0, 8)
    assert study(story.folder).ledger.lost_steps == 0 and not read
    story.attempt(0, 16)
    assert study(story.folder).ledger.lost_steps == 0 and read == [story.plan]


def test_an_attempt_whose_recipe_is_gone_is_not_guessed_at(tmp_path):
    story = changed(tmp_path / "run")
    attempts.recipe_file(story.folder, story.plan).unlink()
    found = study(story.folder)
    assert "unknown after which step attempt 1 began" in " ".join(found.notes) and found.ledger.lost_steps == 0
    assert Watch(story.folder).look().goodput is None


def test_records_without_tokens_are_said_not_to_tell(tmp_path):
    story = Story(tmp_path / "run", 0)
    story.attempt(20, 8, saves=10), story.attempt(3, 8)
    file = story.folder / "metrics" / "rank_0.jsonl"
    assert "do not state the tokens" not in " ".join(study(story.folder).notes)
    file.write_text(file.read_text().replace('"tokens": 32, ', "").replace(', "tokens": 32', ""))
    assert (
        "Some records do not state the tokens of a step"
        in CliRunner().invoke(runs, ["report", str(story.folder)]).output
    )


def test_evaluations_of_which_nothing_says_how_they_count_are_said(tmp_path):
    """A run without attempts: the lines name none."""
    story = Story(tmp_path / "run", 0)
    story.attempt(20, 8, saves=10, evaluates=True), story.attempt(3, 16, evaluates=True)
    for file in (story.folder / "metrics").iterdir():
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        file.write_text("".join(json.dumps({key: line[key] for key in line if key != OF}) + "\n" for line in lines))
    found = study(story.folder)
    assert "unknown how the steps of all held-out losses count" in " ".join(found.notes)
    assert (found.ledger.kept_steps, found.ledger.lost_steps) == (23, 0), "the steps themselves tell"


def test_steps_saved_after_the_run_went_back_are_the_newest(tmp_path):
    """The largest step that was ever sealed counted, which was left behind."""
    story = Story(tmp_path / "run", 0)
    story.attempt(12, 8, saves=4)
    story.saved = story.saved[:1]
    story.attempt(3, 8, saves=2)
    found = study(story.folder).checkpoints
    assert (found.newest, found.at_risk) == (6, 1)


def test_a_spike_that_a_planned_attempt_will_train_again_does_not_stand(tmp_path):
    """Its steps counted as lost, but the spike in them stood."""
    story = Story(tmp_path / "run", 0)
    story.rng = random.Random(3)
    story.attempt(12, 8, saves=4)
    story.saved = story.saved[:1]
    story.attempt(0, 8)
    found = study(story.folder)
    assert found.ledger.lost_steps == 8 and found.spikes
    assert all(one.stands == (one.step <= 4) for one in found.spikes)


@pytest.mark.parametrize(("units", "start", "high"), [((8, 16), 50, range(31)), ((16, 8), 80, range(41, 105))])
def test_a_step_is_judged_by_the_steps_that_stood_before_it_whatever_their_numbers(units, start, high):
    """Steps 51 to 100 of 8 samples stand before step 51 of 16; and steps 41 to 80 of 16 not before step 81 of 8."""
    parts = [Part(0, unit=units[0]), Part(start, unit=units[1])]
    for number in range(1, 105 if units[0] == 16 else 101):
        parts[0].add({"step": number, "loss": (50.0 if number in high else 5.0) + number % 3 / 100})
    parts[1].add({"step": start + 1, "loss": 50.0})
    newest = spikes(parts, [start * units[1], END])[-1]
    assert (newest.step, newest.value, newest.stands) == (start + 1, 50.0, True)


def test_the_picture_falls_back_only_where_steps_were_lost(tmp_path):
    story = Story(tmp_path / "run", 0)
    story.attempt(10, 8, saves=10), story.attempt(5, 16)
    figure = render._figure([study(story.folder)])
    (line,) = figure.axes[1].lines
    shown = line.get_ydata()[~np.isnan(line.get_ydata())]
    assert shown.tolist() == [*np.arange(11) / 2, *range(5, 11)]


def test_the_interval_between_saves_is_counted_as_the_newest_steps(tmp_path):
    """Steps 10, 20 and 30 of 8 samples, then 20, 25 and 30 of 16."""
    story = Story(tmp_path / "run", 0)
    story.attempt(30, 8, saves=10), story.attempt(15, 16, saves=5)
    (story.folder / "recipe.yaml").unlink()
    assert spans_file(story.folder).exists() and study(story.folder).checkpoints.steps == 5


@pytest.mark.parametrize(
    ("number", "of", "into", "found"),
    [(100, 8, 16, 50), (25, 8, 16, 12.5), (50, 16, 8, 100), (7, None, 8, 7), (7, 8, 0, 7)],
)
def test_a_step_has_the_number_of_its_place(number, of, into, found):
    got = translated(number, of, into)
    assert got == found and isinstance(got, type(found))


def test_a_header_that_a_kill_broke_is_missed_by_the_tokens(tmp_path):
    """Steps 1 to 50 of 16 samples, and 81 of 8 samples, after the checkpoint of step 40."""
    file = tmp_path / "rank_0.jsonl"
    append(file, header(99), *({**step(number), "tokens": 64} for number in range(1, 51)))
    append(file, *({**step(number), "tokens": 32} for number in range(81, 84)))
    one, two = read_parts(file)
    assert (one.unit, two.unit, two.start_step) == (64, 32, 80)
    assert one.place(40) == two.begin < one.place(41)
    kept = Kept(file)
    kept.look()
    assert kept.seconds == pytest.approx(0.5 * (40 + 3))
    assert not begins_anew({"step": 51, "tokens": 64}, 50, 64) and begins_anew({"step": 50}, 50, None)


@pytest.mark.parametrize("wrong", ["text", {}, math.nan, -1, 0])
def test_tokens_that_are_no_number_of_tokens_tell_nothing(wrong):
    readings, numbering = Readings(), Numbering()
    for number in (1, 2):
        assert not numbering.see(number, wrong, begins=True)
        readings.add({"step": number, "loss": 5.0, "seconds": 1.0, "tokens": wrong})
    assert numbering.unsure and numbering.unit is None and sorted(readings.steps) == [1, 2]


@pytest.mark.parametrize("steps", [0, 2])
def test_a_checkpoint_of_another_run_counts_steps_of_its_own_batch(tmp_path, steps):
    """The checkpoint's step 10 of 8 samples counted as step 10 of this run's 16 until the first step was made."""
    story = Story(tmp_path / "run", 0)
    story.attempt(20, 16, saves=50)
    story.saved = [(80, 10, 8)]
    story.attempt(steps, 8)
    assert story.plan.start == story.plan.step == 10
    ledger = study(story.folder).ledger
    assert (ledger.kept_steps, ledger.lost_steps) == (5 + steps, 15)
    assert Watch(story.folder).look().step == (12 if steps else 5)
    assert load_run(story.folder).unit_of(story.plan.name) == 8 * SEQUENCE
