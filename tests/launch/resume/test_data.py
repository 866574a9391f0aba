"""These tests check which parts of a corpus `RUN/data.json` covers if the corpus is too large to be read whole."""

import shutil

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from launch.resume import data as data_digest
from launch.resume import data as data_order
from launch.resume.data import Shuffle, all_steps, differences, most_steps, shuffle_of, shuffles
from plugins.attention_balance.plan import delivery_order, epoch_plan, layout_of
from plugins.attention_balance.samples import build_gpt_index
from plugins.errors import DataError
from tools.files import atomic
from tools.recipe.load import Recipe


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
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer.json.orig").write_text("{}")
    assert len(data_digest.replaced(tmp_path, told)) == 1, "no tokenizer is read from a copy"
    (folder / "tokenizer.json").unlink()  # it was said to be unknown whether anything had changed
    assert data_digest.replaced(tmp_path, told) == [
        "the files of the data and its tokenizer were a.jsonl, tokenizer.json, tokenizer_config.json, are now a.jsonl, "
        "tokenizer_config.json"
    ]


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
    assert most_steps(recipe(), 20) == 20 and most_steps(recipe(), 7) == 7
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


@pytest.mark.usefixtures("corpora")
def test_corpora_may_move_and_keep_their_weights_and_their_content(tmp_path, write_corpus):
    write_corpus(tmp_path / "c", [81] * 9)
    for name in "ab":
        for file in tmp_path.glob(f"{name}.*"):
            shutil.copy(file, tmp_path / f"new_{file.name}")
    both, moved = recipe(["3", "a", "1", "b"]), recipe(["3", "new_a", "1", "new_b"])
    assert differences(both, moved, 5) == []
    for other in (["1", "a", "1", "b"], ["3", "a"], ["3", "a", "1", "c"], ["3", "a", "1", "b", "1", "c"]):
        (said,) = differences(both, recipe(other), 5)
        assert said == f"train_dataset.data_loader.config.data_path was ['3', 'a', '1', 'b'], would be {other!r}"
    for file in tmp_path.glob("a.*"):
        file.unlink()
    assert differences(both, moved, 5) == [], "what is gone has moved"


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
