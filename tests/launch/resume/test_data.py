"""These tests check which parts of a corpus `RUN/data.json` covers if the corpus is too large to be read whole."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from launch.agent import decide, part
from launch.agent.decide import Rules
from launch.resume import data as data_digest
from launch.resume import data as data_order
from launch.resume import data as skipped
from launch.resume.data import Shuffle, all_steps, differences, most_steps, shuffle_of, shuffles
from launch.run.failure import worker_failure
from launch.run.supervise import Outcome
from plugins.attention_balance.plan import delivery_order, epoch_plan, layout_of
from plugins.attention_balance.samples import build_gpt_index
from plugins.errors import DataError
from plugins.spike_guard.ledger import Entry, read_ledger, write_ledger
from plugins.spike_guard.plan import NO_MORE, SPIKE
from tests.launch.agent.test_decide import A, attempt, end
from tests.launch.conftest import RECIPE
from tests.launch.resume.conftest import stored
from tools.files import atomic
from tools.recipe.load import Recipe, load_recipe


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    """A .bin of 256 blocks and their gaps; blocks made small."""
    monkeypatch.setattr(atomic, "BLOCK", 4)
    (tmp_path / "x.idx").write_bytes(b"index")
    (tmp_path / "x.bin").write_bytes(bytes(256 * 8))
    return tmp_path / "x"


def recipe_of(*path):
    return Recipe({"train_dataset": {"data_loader": {"type": "BlendedMegatronDatasetDataLoader",
                                                     "config": {"data_path": [*map(str, path)]}}}})  # fmt: skip


@pytest.mark.parametrize(
    ("place", "seen"),
    [(0, True), (3, True), (4, False), (256 * 8 - 1, True), (256 * 8 - 4, True), (256 * 8 - 5, False)],
)
def test_blocks_are_spread_over_the_file_the_first_and_last_among_them(corpus, place, seen):
    before = data_digest.digests(recipe_of(corpus))
    tokens = bytearray(256 * 8)
    tokens[place] = 1
    corpus.with_suffix(".bin").write_bytes(tokens)
    assert (data_digest.digests(recipe_of(corpus)) != before) == seen


def test_size_index_and_each_of_several_corpora_count(corpus, tmp_path):
    for ending in ("idx", "bin"):
        (tmp_path / f"y.{ending}").write_bytes(corpus.with_suffix(f".{ending}").read_bytes())
    blend = recipe_of("3", corpus, "1", tmp_path / "y")
    data_digest.keep_digests(blend, tmp_path)
    assert data_digest.replaced(tmp_path, blend) == []
    with (tmp_path / "y.bin").open("ab") as more:
        more.write(b"\0")
    assert data_digest.replaced(tmp_path, blend) == [
        f"{tmp_path / 'y'}.bin is not what it was (2,048 bytes then, 2,049 now): the corpus was prepared anew or "
        "replaced"
    ]
    (tmp_path / "y.idx").write_bytes(b"other")
    assert "y.idx is not what it was: the" in data_digest.replaced(tmp_path, blend)[0]


def test_other_loaders_have_no_corpora():
    assert data_digest.digests(Recipe({"train_dataset": {"data_loader": {"type": "HFDataLoader"}}})) == []


def test_a_missing_file_is_said_and_stops_nothing(tmp_path, capsys):
    data_digest.keep_digests(recipe_of("nowhere"), tmp_path)
    assert "nowhere.idx: this file cannot be read (No such file" in capsys.readouterr().err
    assert not (tmp_path / "data.json").exists()


def test_files_of_instructions_and_their_tokenizer_count(tmp_path):
    data, folder = tmp_path / "a.jsonl", tmp_path / "tokenizer"
    folder.mkdir()
    data.write_text("one")
    for name in ("tokenizer.json", "tokenizer_config.json", "model.safetensors"):
        (folder / name).write_text(name)
    handler = {"type": "AlpacaInstructDataHandler", "tokenizer": {"pretrained_model_dir": str(folder)}}
    told = Recipe({"train_dataset": {"data_loader": {"type": "HFDataLoader", "data_files": str(data),
                                                     "handler": [handler]}}})  # fmt: skip
    data_digest.keep_digests(told, tmp_path)
    (folder / "model.safetensors").write_text("other")
    assert data_digest.replaced(tmp_path, told) == []
    data.write_text("three")
    assert data_digest.replaced(tmp_path, told) == [
        f"{data} is not what it was (3 bytes then, 5 now): the data was prepared anew or replaced"
    ]
    data.write_text("one")
    (folder / "tokenizer.json").write_text("tokenizer_json")
    (changed,) = data_digest.replaced(tmp_path, told)
    assert changed.startswith(f"{folder / 'tokenizer.json'} is not what it was: the")


@given(
    lengths=st.lists(st.integers(5, 40), min_size=4, max_size=12),
    sequence=st.integers(2, 8),
    counts=st.tuples(st.integers(1, 300), st.integers(1, 300)),
)
def test_the_order_stays_exactly_when_the_shuffle_does(lengths, sequence, counts):
    array, tokens = np.array(lengths, np.int32), sum(lengths)
    fewer, more = sorted(counts)
    assume(tokens // sequence > 8)  # of a handful of samples two shuffles may be the same by chance
    one, two = (build_gpt_index(array, sequence, count, seed=7) for count in (fewer, more))
    same = shuffle_of(tokens, fewer, sequence) == shuffle_of(tokens, more, sequence)
    assert same == (len(one) == len(two) and np.array_equal(one.shuffle_index, two.shuffle_index))
    if same:
        assert np.array_equal(one.document_index, two.document_index)


def test_the_corpus_of_the_quickstart():
    """3,663 steps of 8 samples an epoch, as measured with a run that went on wrongly from 3,613 to 3,713 steps."""
    tokens = 3663 * 8 * 128 + 1
    assert shuffle_of(tokens, 3663 * 8, 128) == Shuffle(1, False)
    assert shuffle_of(tokens, 3663 * 8 + 1, 128) == Shuffle(2, True)


def recipe(path=("1", "a"), steps=10, batch=4, **more):
    config = {"data_path": list(path), "seq_length": 8, "split": "1,0,0"}
    loader = {"type": "BlendedMegatronDatasetDataLoader", "sizes": [steps * batch, 0, 0], "config": config}
    return Recipe({"train_dataset": {"data_loader": loader}, "runner_config": {"batch_size": batch}, **more})


@pytest.fixture
def corpora(tmp_path, monkeypatch, write_corpus):
    """Corpora a and b, of 100 samples each."""
    monkeypatch.chdir(tmp_path)
    data_order._training_tokens.cache_clear()
    for name in "ab":
        write_corpus(tmp_path / name, [81] * 10)


@pytest.mark.usefixtures("corpora")
def test_what_a_corpus_is_asked_for_depends_on_its_weight():
    once, again = Shuffle(1, False), Shuffle(2, True)
    assert shuffles(recipe(), 100) == [once] and shuffles(recipe(), 101) == [again]  # 101.505 of 101
    assert shuffles(recipe(["a"]), 101) == [once] and shuffles(recipe(["a"]), 102) == [again]
    assert shuffles(recipe(["3", "a", "1", "b"]), 150) == [again, once]
    assert shuffles(recipe(["a", "b", "a"]), 10**6) == []


@pytest.mark.usefixtures("corpora")
def test_a_share_of_the_documents_makes_a_shorter_epoch():
    half = recipe()
    half["train_dataset"]["data_loader"]["config"]["split"] = "5,5,0"
    assert shuffles(half, 49) == [Shuffle(1, False)] and shuffles(half, 51) == [Shuffle(2, True)]


@pytest.mark.usefixtures("corpora")
def test_the_most_steps_are_those_of_the_present_shuffle():
    assert most_steps(recipe(), 20) == 20
    assert most_steps(recipe(), 50) == 25
    assert most_steps(recipe(steps=25), 50) == 25
    assert most_steps(recipe(["nowhere"]), 50) is None
    assert most_steps(recipe(runner=1) | {"runner_config": {"batch_size": 4, "epochs": 2}}, 50) is None


def growing(*stages, batch=8, **more):
    return recipe(steps=12, batch=batch, plugins={"batch_ramp": {"stages": [list(each) for each in stages]}}, **more)


@pytest.mark.usefixtures("corpora")
def test_a_batch_that_grows_may_change_as_long_as_the_trained_steps_keep_their_samples():
    assert all_steps(growing((2, 2), (5, 4))) == 15, "4 + 12 + 80 samples"
    before = growing((2, 2), (5, 4))
    assert differences(before, before, 4) == differences(before, growing((2, 2), (9, 4)), 5) == []
    (changed,) = differences(before, growing((2, 2), (9, 4)), 6)
    assert changed == "plugins.batch_ramp: until step 6 the samples were 24, would be 20"
    (other,) = differences(before, recipe(batch=8, steps=12), 1)
    assert other == "plugins.batch_ramp: until step 1 the samples were 2, would be 8"
    full, *_ = differences(before, growing((2, 2), (5, 4), batch=16), 1)
    assert "own batch were 8, would be 16" in full


@pytest.mark.usefixtures("corpora")
def test_the_most_steps_of_a_batch_that_grows():
    assert most_steps(growing((2, 2), (5, 4)), 50) == 5 + (100 - 16) // 8, "100 samples are an epoch"


@pytest.mark.usefixtures("corpora")
def test_what_cannot_be_told_is_a_difference_only_where_the_samples_change():
    gone = ["1", "nowhere"]
    assert differences(recipe(gone), recipe(gone), 5) == []
    assert (
        "whether that shuffles anew is unknown: nowhere.idx: there is no such file"
        in differences(recipe(gone), recipe(gone, 12), 5)[0]
    )
    with pytest.raises(DataError):
        shuffles(recipe(gone), 5)


def passes(count, steps):
    return recipe(steps=steps) | {"runner_config": {"batch_size": 4, "epochs": count}}


@pytest.mark.usefixtures("corpora")
def test_where_a_pass_ends_counts_once_it_is_passed():
    before, after = Recipe(passes(2, 10)), Recipe(passes(1, 20))
    assert differences(before, after, 10) == []
    assert differences(before, after, 11) == ["runner_config.epochs 2 of 40 samples would be 1 of 80"]


@pytest.mark.usefixtures("corpora")
def test_a_number_of_steps_that_mindformers_rounds_down_is_refused():
    """45 * (56 / 40) is 62.99... in floating point, so that MindFormers would train one step of samples again."""
    (said,) = differences(recipe(["a"], 100, batch=56), recipe(["a"], 140, batch=40), 45)
    assert said == (
        "the samples of a step were 56, would be 40: MindFormers would skip 62 of the 63 steps that are trained (it "
        "rounds down)"
    )
    assert differences(recipe(["a"], 100, batch=56), recipe(["a"], 140, batch=40), 40) == []


@pytest.mark.usefixtures("corpora")
def test_steps_of_a_checkpoint_have_the_batch_with_which_it_was_saved():
    """The run went on with four samples a step, and ended before it saved: its recipe is not that of the checkpoint."""
    recipes = {batch: recipe(["a"], 240 // batch, batch=batch) for batch in (1, 2, 3, 4, 6, 8, 12)}
    whole = [batch for batch, after in recipes.items() if not differences(recipes[4], after, 2, 6)]
    assert whole == [batch for batch in recipes if 2 * 6 % batch == 0] == [1, 2, 3, 4, 6, 12]
    (said,) = differences(recipes[4], recipes[8], 2, 6)
    assert said == "the samples of a step were 6, would be 8, of which the 12 trained are not a whole number of steps"


def windows(size, steps=20, batch=4, skipped=(), **cost):
    plugins = {"attention_balance": {"window": size, **cost}, "spike_guard": {"skipped": [*map(list, skipped)]}}
    return Recipe(recipe(steps=steps, batch=batch) | {"plugins": plugins})


@pytest.mark.usefixtures("corpora")
def test_a_window_of_steps_that_is_begun_must_be_finished_as_it_was():
    assert differences(windows(4), windows(4), 6) == []
    assert differences(windows(4), windows(2), 8) == []
    assert differences(windows(4), windows(2), 6) == ["plugins.attention_balance.window was 4, would be 2"]
    assert "samples of a step were 4, would be 8" in differences(windows(4), windows(4, 10, batch=8), 6)[0]
    assert differences(windows(4, 18), windows(4, 20), 16) == []
    assert "within the last window" in differences(windows(4, 18), windows(4, 20), 18)[0]
    part, more = (windows(1, steps, skipped=[(2, 4)]) for steps in (18, 20))
    assert differences(part, more, 17) == [] and "within the last window" in differences(part, more, 18)[0]


@pytest.mark.usefixtures("corpora")
def test_so_must_it_with_other_weights_of_its_samples():
    before, after = windows(4, per_pair=2, per_token=3), windows(4, per_pair=2, per_token=5)
    assert differences(before, after, 6) == ["plugins.attention_balance.per_token was 3, would be 5"]
    assert differences(before, after, 8) == []
    assert differences(windows(1, per_pair=2, per_token=3), windows(1, per_pair=2, per_token=5), 6) == []
    assert differences(windows(4), after, 6) == [], "a run of an earlier version has written none down"


def divided(ranks, micro_batches, window=4, skipped=()):
    """A recipe whose step is four samples, divided among data-parallel ranks and accumulated micro-batches."""
    found = windows(window, batch=1, skipped=skipped, per_pair=2, per_token=3)
    found["runner_config"]["gradient_accumulation_steps"] = micro_batches
    return Recipe({**found, "use_parallel": True, "parallel_config": {"data_parallel": ranks}})


def delivered(recipe):
    """The order of 80 samples in which the steps of a recipe train them; those that are left out keep their places."""
    if not recipe["plugins"]["attention_balance"]:
        return np.arange(80)
    layout, costs = layout_of(recipe, recipe["plugins"]["attention_balance"]["window"]), np.arange(80) ** 1.5 % 7 + 1
    return delivery_order(epoch_plan(costs, layout), gathered=layout.micro_batches > 1)


@pytest.mark.usefixtures("corpora")
@pytest.mark.parametrize("skipped", [(), [(2, 4)], [(4, 8)], [(50, 52)], [(2, 4), (30, 32)]])
@pytest.mark.parametrize("window", [1, 2, 4])
@pytest.mark.parametrize("other", [(4, 1), (1, 4), None])
def test_a_window_or_step_that_is_begun_is_not_finished_in_another_layout(skipped, window, other):
    """What a resume accepts trains each sample once, in one order or in two."""
    before, after = divided(2, 2, window, skipped), divided(*(other or (2, 2)), window, skipped)
    after["plugins"]["attention_balance"] = bool(other) and after["plugins"]["attention_balance"]
    one, two = delivered(before), delivered(after)
    kept = [place for place in range(80) if not any(first <= place < stop for first, stop in skipped)]
    accepted = [step for step in range(1, 19) if not differences(before, after, step)]
    for step in accepted:
        done, left = one[kept[: 4 * step]], two[kept[4 * step :]]
        assert len({*done, *left}) == len(kept) and {*left} == {*one[kept[4 * step :]]}
    assert skipped or accepted == [step for step in range(1, 19) if step % window == 0]


@pytest.mark.usefixtures("corpora")
def test_samples_that_are_still_to_be_left_out_are_counted_in_the_same_windows():
    late, early = [(40, 44)], [(4, 8)]
    assert differences(divided(2, 2, skipped=late), divided(2, 2, skipped=late), 4) == []
    (words,) = differences(divided(2, 2, skipped=late), divided(4, 1, skipped=late), 4)
    assert words.endswith("in whose order plugins.spike_guard.skipped counts")
    assert differences(divided(2, 2, skipped=early), divided(4, 1, skipped=early), 7) == [], "they are behind"
    assert differences(divided(2, 2, 1, skipped=late), divided(4, 1, 1, skipped=late), 4) == [], "in each step"


def test_a_loader_of_another_kind_must_stay_as_it_is():
    def other(**loader):
        return Recipe({"train_dataset": {"data_loader": {"type": "HFDataLoader", **loader}}, "seed": 1})

    assert differences(other(path="a"), other(path="a"), 5) == []
    assert differences(other(path="a"), other(path="b"), 5) == ["train_dataset.data_loader has changed"]
    assert "type was 'HFDataLoader', would be" in differences(other(), recipe(), 5)[0]


def instructions(file="a.jsonl", samples=8, **loader):
    handlers = [{"type": "AlpacaInstructDataHandler"}, {"type": "PackingHandler"}, {"type": "take", "n": samples}]
    data = {"type": "HFDataLoader", "data_files": str(file), "handler": handlers, **loader}
    return Recipe({"train_dataset": {"data_loader": data}, "runner_config": {"batch_size": 4}, "seed": 1})


def test_more_instructions_keep_the_order_and_so_does_a_file_that_has_moved(tmp_path):
    for name, text in (("a", "one"), ("b", "one"), ("c", "two")):
        (tmp_path / f"{name}.jsonl").write_text(text)
    a, b, c = (tmp_path / f"{name}.jsonl" for name in "abc")
    assert differences(instructions(a), instructions(b, 80), 2) == []
    assert differences(instructions(a), instructions(c), 2) == [
        f"train_dataset.data_loader.data_files was {str(a)!r}, would be {str(c)!r}"
    ]
    assert differences(instructions(a), instructions(a, split="test"), 2) == ["train_dataset.data_loader has changed"]
    assert all_steps(instructions(a)) == 2
    more_epochs = instructions(a, 80) | {"runner_config": {"batch_size": 4, "epochs": 2}}
    (found,) = differences(instructions(a) | {"runner_config": {"batch_size": 4, "epochs": 3}}, Recipe(more_epochs), 5)
    assert "epochs 3 of 8 samples would be 2 of 80" in found


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
    assert "holds step 12, which spiked: renamed set_aside_iteration_00000012" in err
    assert "attempt 0 ended: " in out and BACK in out and "The run starts again without the samples of the spike" in out


def test_without_a_good_checkpoint_it_starts_from_the_beginning(train, guarded):
    guarded.ends.append(([12], 12, ((88, 96),), BACK))
    code, _, err = train("mini/toy.yaml", "--steps", "20")
    assert code == 0 and [going_on(command) for command in guarded.runs] == [None, None], err


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
        said = None if batch * step <= 96 else "holds step 7, which spiked"
        assert why(folder, step) == said, (batch, step)


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


@pytest.mark.parametrize(
    ("step", "batch", "guilty"),
    [(90, 8, False), (49, 16, False), (50, 16, True), (98, 8, False), (99, 8, True), (25, 32, True), (24, 32, False)],
)
def test_what_a_checkpoint_was_trained_on_is_counted_in_samples(tmp_path, step, batch, guilty):
    """The spike was step 50 of 16 samples; the checkpoint that this attempt had begun from was one of 8 samples."""
    write_ledger(tmp_path, [Entry(50, 50, "", ((49 * 16, 50 * 16),))])
    folder = tmp_path / f"iteration_{step:08d}"
    folder.mkdir()
    (folder / "common.json").write_text(json.dumps({"global_batch_size": batch}))
    (tmp_path / "r.yaml").write_text(GUARDED)
    recipe = load_recipe(tmp_path / "r.yaml")
    assert (skipped.guilty(recipe, tmp_path)(folder, step) is not None) == guilty


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
