"""The loop, with a model that counts: the token behind n is n + 1."""

import numpy as np

from launch.generate.loop import continuation
from launch.generate.sampling import likeliest


def counting(seen):
    def logits(ids):
        seen.append(list(ids))
        return np.eye(100)[ids[-1] + 1]

    return logits


def test_it_goes_on_from_what_it_said():
    seen = []
    assert list(continuation(counting(seen), likeliest, [3, 7], 10, 3, None)) == [8, 9, 10]
    assert seen == [[3, 7], [3, 7, 8], [3, 7, 8, 9]]


def test_the_end_of_a_document_is_the_last_token():
    assert list(continuation(counting([]), likeliest, [7], 10, 50, 9)) == [8, 9]


def test_it_sees_no_more_than_its_window():
    seen = []
    assert list(continuation(counting(seen), likeliest, [1, 2, 3, 4], 3, 2, None)) == [5, 6]
    assert seen == [[2, 3, 4], [3, 4, 5]]


def test_each_token_is_there_before_the_next_is_computed():
    seen = []
    words = continuation(counting(seen), likeliest, [1], 10, 5, None)
    assert (next(words), len(seen)) == (2, 1)
