from types import SimpleNamespace

import numpy as np
import pytest

from plugins.ep_overlap import settings
from plugins.errors import RecipeError


def test_what_is_written_is_read():
    assert settings.read({"chunks": [2, 4], "stride": 2}) == ((2, 4), 2)
    assert settings.read({"chunks": "auto"}) == ("auto", 1)


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ({}, "write `chunks:`"),
        (True, "write `chunks:`"),
        ({"chunk": [1, 2]}, "write `chunks:`"),
        ({"chunks": [1, 2], "strides": 1}, "did you mean 'stride'"),
        ({"chunks": [0, 2]}, "from 1 on"),
        ({"chunks": 4}, "neither auto"),
        ({"chunks": [1, 2.0]}, "neither auto"),
        ({"chunks": [1, 2], "stride": -1}, "whole number"),
    ],
)
def test_wrong_settings_are_refused(written, message):
    with pytest.raises(RecipeError, match=message):
        settings.read(written)


def test_slices_are_of_the_sequence_that_a_rank_holds():
    config = SimpleNamespace(seq_length=64, tensor_model_parallel_size=2, context_parallel_size=4)
    slices = settings.slices(2, (2, 4), config)
    assert sorted(np.concatenate(slices)) == list(range(2 * 64 // 8))
    assert slices[1].tolist() == [2, 3]
