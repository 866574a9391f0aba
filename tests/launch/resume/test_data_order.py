"""When more samples keep the order of a corpus, held against the index that GPTDataset builds."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from launch.resume import data_order
from launch.resume.data_order import Shuffle, all_steps, differences, most_steps, shuffle_of, shuffles
from plugins.attention_balance.samples import build_gpt_index
from plugins.errors import DataError
from tools.recipe.load import Recipe


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
    data_order._tokens.cache_clear()
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


@pytest.mark.usefixtures("corpora")
def test_what_cannot_be_told_is_a_difference_only_where_the_samples_change():
    gone = ["1", "nowhere"]
    assert differences(recipe(gone), recipe(gone), 5) == []
    assert "cannot be told: nowhere.idx: no such file" in differences(recipe(gone), recipe(gone, 12), 5)[0]
    with pytest.raises(DataError):
        shuffles(recipe(gone), 5)


def passes(count, steps):
    return recipe(steps=steps) | {"runner_config": {"batch_size": 4, "epochs": count}}


@pytest.mark.usefixtures("corpora")
def test_where_a_pass_ends_counts_once_it_is_passed():
    before, after = Recipe(passes(2, 10)), Recipe(passes(1, 20))
    assert differences(before, after, 10) == []
    assert differences(before, after, 11) == ["runner_config.epochs 2 of 40 samples would be 1 of 80"]


def windows(size, steps=20, batch=4, **cost):
    return Recipe(recipe(steps=steps, batch=batch) | {"plugins": {"attention_balance": {"window": size, **cost}}})


@pytest.mark.usefixtures("corpora")
def test_a_window_of_steps_that_is_begun_must_be_finished_as_it_was():
    assert differences(windows(4), windows(4), 6) == []
    assert differences(windows(4), windows(2), 8) == []
    assert differences(windows(4), windows(2), 6) == ["plugins.attention_balance.window was 4, would be 2"]
    assert "samples of a step were 4, would be 8" in differences(windows(4), windows(4, 10, batch=8), 6)[0]
    assert differences(windows(4, 18), windows(4, 20), 16) == []
    assert "within the last window" in differences(windows(4, 18), windows(4, 20), 18)[0]


@pytest.mark.usefixtures("corpora")
def test_so_must_it_with_other_weights_of_its_samples():
    before, after = windows(4, per_pair=2, per_token=3), windows(4, per_pair=2, per_token=5)
    assert differences(before, after, 6) == ["plugins.attention_balance.per_token was 3, would be 5"]
    assert differences(before, after, 8) == []
    assert differences(windows(1, per_pair=2, per_token=3), windows(1, per_pair=2, per_token=5), 6) == []
    assert differences(windows(4), after, 6) == [], "a run of an earlier version has written none down"


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
