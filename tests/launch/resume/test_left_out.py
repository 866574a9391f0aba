"""After a spike a run goes on without the guilty samples, from a checkpoint that has trained none of them."""

import json
import shutil
import time
from types import SimpleNamespace

import pytest

from launch.agent import decide, part
from launch.agent.decide import Rules
from launch.resume import data as skipped
from launch.resume.data import differences
from launch.run.failure import worker_failure
from launch.run.supervise import Outcome
from plugins.lines import Span, note
from plugins.spike_guard.ledger import Entry, read_ledger, write_ledger
from plugins.spike_guard.plan import NO_MORE, SPIKE
from tests.launch.agent.test_decide import A, attempt, end
from tests.launch.conftest import RECIPE
from tests.launch.resume.conftest import stored
from tools.recipe.load import Recipe

GUARDED = RECIPE.replace("plugins: {", "plugins: {spike_guard: {rollbacks: 2}, ")
BACK = "spike: step 12: loss is NaN; going back to before step 12, without the samples of step 12"


@pytest.fixture
def guarded(runs, workplace, save, monkeypatch):
    """The toy recipe with the guard on; its workers end as `ends` says: (checkpoints, guilty step, samples, words)."""
    (workplace / "mini" / "toy.yaml").write_text(GUARDED)
    run_dir = workplace / "output" / "mini-toy"
    ends = []
    answer = part.supervise

    def supervise(command, *more):
        done = answer(command, *more)
        if len(runs) > len(ends):
            return done
        checkpoints, first, samples, words = ends[len(runs) - 1]
        for step in checkpoints:
            save(run_dir / "checkpoint", step)
        if first:
            write_ledger(run_dir, [*read_ledger(run_dir), Entry(first, first, words, samples)])
        log = run_dir / "logs" / "worker_0.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(f"tc3: stopped: {words}\n")
        return Outcome(1, worker_failure(log, 0, 1))

    monkeypatch.setattr(part, "supervise", supervise)
    return SimpleNamespace(run_dir=run_dir, ends=ends, runs=runs)


def going_on(command):
    """The step that a command resumes from; None for one that begins."""
    return int(command[-1][-8:]) if "--resume" in command else None


def test_a_run_goes_back_to_before_the_guilty_step_without_restarts(train, guarded):
    guarded.ends.append(([8, 10, 12, 16], 12, ((88, 96),), BACK))
    code, out, err = train("mini/toy.yaml", "--steps", "20")
    assert code == 0, err
    assert [going_on(command) for command in guarded.runs] == [None, 10]
    left = sorted(path.name for path in (guarded.run_dir / "checkpoint").glob("*iteration*"))
    assert left == ["iteration_00000008", "iteration_00000010", *(f"set_aside_iteration_000000{n}" for n in (12, 16))]
    assert stored(guarded.run_dir)["plugins"]["spike_guard"] == {"rollbacks": 2, "skipped": [[88, 96]]}
    assert "holds samples of step 12, which spiked: renamed set_aside_iteration_00000012" in err
    assert "attempt 0 ended: " in out and BACK in out and "The run starts again without the samples of the spike" in out


def test_without_a_good_checkpoint_it_starts_from_the_beginning(train, guarded):
    guarded.ends.append(([12], 12, ((88, 96),), BACK))
    code, _, err = train("mini/toy.yaml", "--steps", "20")
    assert code == 0 and [going_on(command) for command in guarded.runs] == [None, None], err


def test_what_was_set_aside_may_be_removed(train, guarded):
    """A resume took its absence for that of the run's checkpoints, and named no way on."""
    guarded.ends.append(([12], 12, ((88, 96),), BACK))
    first = time.time()
    assert train("mini/toy.yaml", "--steps", "20")[0] == 0
    note(guarded.run_dir, Span("save", 12, first, first, sealed=True))
    shutil.rmtree(guarded.run_dir / "checkpoint" / "set_aside_iteration_00000012")
    code, _, err = train("mini/toy.yaml", "--steps", "20", "--resume", "auto")
    assert code == 0 and [going_on(command) for command in guarded.runs] == [None] * 3, err
    note(guarded.run_dir, Span("save", 12, time.time(), time.time(), sealed=True))
    code, _, err = train("mini/toy.yaml", "--steps", "20", "--resume", "auto")
    assert code == 2 and "although this run saved one at step 12" in err, "that one is missing"


def test_a_second_spike_sets_nothing_aside_that_was_made_without_the_first_samples(train, guarded):
    guarded.ends.append(([8], 12, ((88, 96),), BACK))
    guarded.ends.append(([16], 18, ((144, 152),), BACK))
    assert train("mini/toy.yaml", "--steps", "20")[0] == 0
    assert [going_on(command) for command in guarded.runs] == [None, 8, 16]
    assert stored(guarded.run_dir)["plugins"]["spike_guard"]["skipped"] == [[88, 96], [144, 152]]


def test_checkpoints_of_another_global_batch_are_judged_by_their_samples(tmp_path):
    """96 samples are 12 steps of 8, or 6 of 16: the steps of both have small and large numbers."""
    recipe = recipe_with_skipped()
    write_ledger(tmp_path, [Entry(7, 7, "", ((96, 112),))])  # of a run that went on with 16 samples
    why = skipped.guilty(recipe, tmp_path)
    for batch, step in ((8, 8), (8, 12), (16, 6), (8, 13), (8, 14), (16, 7), (32, 3), (32, 4)):
        folder = tmp_path / f"{batch}_{step}"
        folder.mkdir()
        (folder / "common.json").write_text(json.dumps({"global_batch_size": batch}))
        said = None if batch * step <= 96 else "holds samples of step 7, which spiked"
        assert why(folder, step) == said, (batch, step)
    write_ledger(tmp_path, [Entry(7, 7, "", ((96, 112),)), Entry(11, 11, "", ((80, 88),))])  # then with 8 samples
    assert skipped.guilty(recipe, tmp_path)(tmp_path / "8_14", 14) == "holds samples of step 11, which spiked", (
        "the first in the data"
    )


def test_a_guard_that_gives_up_ends_the_run(train, guarded):
    guarded.ends.append(([8], None, (), f"spike: step 12: loss is NaN; the run has gone back 2 times, and {NO_MORE}"))
    code, _, err = train("mini/toy.yaml", "--steps", "20", "--restarts", "3")
    assert code == 1 and len(guarded.runs) == 1 and NO_MORE in err


def test_a_resume_by_hand_goes_on_without_them_too(train, guarded):
    guarded.ends.append(([8, 12], None, (), "interrupted before it went back"))
    assert train("mini/toy.yaml", "--steps", "20")[0] == 1
    write_ledger(guarded.run_dir, [Entry(12, 12, "", ((88, 96),))])
    guarded.ends.append(([], None, (), "ends"))
    train("mini/toy.yaml", "--steps", "20", "--resume", "auto")
    assert going_on(guarded.runs[-1]) == 8
    assert stored(guarded.run_dir)["plugins"]["spike_guard"]["skipped"] == [[88, 96]]


def test_a_resume_without_the_ledger_or_with_another_one_is_refused(train, guarded, save):
    guarded.ends.append(([8], 12, ((88, 96),), BACK))
    assert train("mini/toy.yaml", "--steps", "20")[0] == 0
    save(guarded.run_dir / "checkpoint", 16)
    ledger = guarded.run_dir / "skipped.json"
    ledger.rename(ledger.with_suffix(".away"))
    code, _, err = train("mini/toy.yaml", "--steps", "20", "--resume", "auto")
    assert code == 2 and "plugins.spike_guard.skipped was [[88, 96]], would be none (RUN/skipped.json" in err
    write_ledger(guarded.run_dir, [Entry(11, 11, "", ((80, 88),))])
    code, _, err = train(
        "mini/toy.yaml", "--steps", "20", "--resume", str(guarded.run_dir / "checkpoint/iteration_00000016")
    )
    assert code == 2 and "skipped was [[88, 96]], would be [[80, 88]]" in err
    ledger.with_suffix(".away").replace(ledger)
    assert train("mini/toy.yaml", "--steps", "20", "--resume", "auto")[0] == 0
    assert going_on(guarded.runs[-1]) == 16


def test_starting_over_forgets_the_ledger(train, guarded):
    guarded.ends.append(([8], 12, ((88, 96),), BACK))
    assert train("mini/toy.yaml", "--steps", "20")[0] == 0
    assert train("mini/toy.yaml", "--steps", "20", "--force")[0] == 0
    assert not (guarded.run_dir / "skipped.json").exists()
    assert stored(guarded.run_dir)["plugins"]["spike_guard"] == {"rollbacks": 2}


def recipe_with_skipped(skipped=(), batch=4, **plugins):
    loader = {"type": "BlendedMegatronDatasetDataLoader", "sizes": [80, 0, 0], "config": {}}
    plugins = {"spike_guard": {"skipped": [list(pair) for pair in skipped]}, **plugins}
    runner = {"batch_size": batch}
    return Recipe({"train_dataset": {"data_loader": loader}, "runner_config": runner, "plugins": plugins})


def test_only_what_is_trained_must_have_left_out_the_same():
    assert differences(recipe_with_skipped(), recipe_with_skipped([(20, 24)]), 5) == []
    assert (
        "skipped was none, would be [[20, 24]]"
        in differences(recipe_with_skipped(), recipe_with_skipped([(20, 24)]), 6)[0]
    )
    assert differences(recipe_with_skipped([(20, 24)]), recipe_with_skipped([(20, 24), (28, 32)]), 6) == []
    assert differences(recipe_with_skipped([(20, 24)]), recipe_with_skipped([(20, 24)], batch=8), 6) == []
    balance = {"attention_balance": {"window": 1}}
    words = "the samples of a step were 4, would be 8, in whose order plugins.spike_guard.skipped counts"
    assert differences(
        recipe_with_skipped([(20, 24)], **balance), recipe_with_skipped([(20, 24)], 8, **balance), 6
    ) == [words]
    assert differences(recipe_with_skipped(**balance), recipe_with_skipped(batch=8, **balance), 6) == []


def test_a_window_is_finished_where_the_left_out_samples_end():
    """With a step left out, step 7 ends with the eighth step's samples: two windows of four."""
    one, two = ({"attention_balance": {"window": window}} for window in (4, 2))
    assert differences(recipe_with_skipped([(4, 8)], **one), recipe_with_skipped([(4, 8)], **two), 7) == []
    assert (
        "window was 4, would be 2"
        in differences(recipe_with_skipped([(4, 8)], **one), recipe_with_skipped([(4, 8)], **two), 8)[0]
    )


def test_a_recipe_without_the_guard_leaves_nothing_out_and_touches_nothing(tmp_path):
    write_ledger(tmp_path, [Entry(12, 12, "", ((88, 96),))])
    off = Recipe({"plugins": {"spike_guard": False}})
    skipped.apply_ledger(off, tmp_path)
    skipped.put_guilty_aside(off, tmp_path, tmp_path)
    assert off["plugins"] == {"spike_guard": False} and skipped.left_out(off) == ()


def test_spikes_do_not_count_as_failures():
    message = f"{SPIKE}step 12: loss is NaN; going back"
    spiked = [attempt(end(A, 100, "spike", message=message), hosts=[A], number=number) for number in range(5)]
    rules = Rules(restarts=0)
    for number, each in enumerate(spiked):
        said = decide.verdict(each, spiked[:number], rules, lambda hosts: None)
        assert (said.decision, said.wait, said.cause) == ("restart", 0.0, "spike")
        spiked[number] = attempt(*each.ends.values(), hosts=[A], number=number, judged=said)
    failed = attempt(end(A, 100, "exit", code=1), hosts=[A], number=5)
    assert decide.verdict(failed, spiked, Rules(restarts=1), lambda hosts: None).decision == "restart"
    no_more = attempt(end(A, 100, "spike", message=f"{SPIKE}step 12; {NO_MORE}"), hosts=[A])
    assert decide.verdict(no_more, [], Rules(restarts=9), lambda hosts: None).decision == "give up"
