"""One reader of `data_path`, which reads as MindFormers does; check, launch, resume, align and imbalance share it."""

from __future__ import annotations

import pytest

from plugins.errors import DataError
from tools.data.index import Blend, read_blend

READABLE = [
    (["a"], ["a"], None),
    (["a", "b"], ["a", "b"], None),
    (["a", "b", "c"], ["a", "b", "c"], None),
    (["1", "2", "3"], ["1", "2", "3"], None),  # an odd number: prefixes, whatever they look like
    (["1", "a"], ["a"], [1.0]),
    (["0.3", "a", "7e-1", " b "], ["a", "b"], [0.3, 0.7]),
    (["2024", "2025"], ["2025"], [2024.0]),
    (["a", "1", "b", "2"], ["a", "1", "b", "2"], None),
]


@pytest.mark.parametrize(("data_path", "prefixes", "weights"), READABLE)
def test_prefixes_and_weights(data_path, prefixes, weights):
    assert read_blend(data_path) == Blend(prefixes, weights)


@pytest.mark.slow
@pytest.mark.parametrize("data_path", [data_path for data_path, *_ in READABLE])
def test_it_reads_as_mindformers_does(data_path):
    from mindformers.dataset.blended_datasets.utils import get_blend_from_list

    prefixes, weights = get_blend_from_list(data_path)
    assert read_blend(data_path) == Blend(list(prefixes), weights)


@pytest.mark.slow
def test_a_weight_that_mindformers_takes_for_a_prefix_is_refused():
    """Of these two it reads one as four corpora, the first called 1, and stops at the other."""
    from mindformers.dataset.blended_datasets.utils import get_blend_from_list

    assert get_blend_from_list(["1", "A", "B", "C"])[0] == ["1", "A", "B", "C"]
    with pytest.raises(AssertionError):
        get_blend_from_list(["A", "B", "1", "C"])


@pytest.mark.parametrize(
    ("data_path", "words"),
    [
        (["1", "A", "B", "C"], "mixes weighted and unweighted"),
        (["A", "B", "1", "C"], "mixes weighted and unweighted"),
        *((wrong, "wants a list such as") for wrong in (None, [], "a", [["a"]], {"a": 1}, [None], [True, "a"])),
        *(([weight, "a"], "no shares of a whole") for weight in ("nan", "inf", -1, 0, float("nan"))),
    ],
)
def test_what_nobody_can_mean_is_refused(data_path, words):
    with pytest.raises(DataError, match=words):
        read_blend(data_path)
