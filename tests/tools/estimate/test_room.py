import pytest

from plugins.errors import RecipeError
from tools.estimate.memory_model import GIB
from tools.estimate.room import limit_of


def test_limit_of_a_recipe():
    assert limit_of({"context": {"max_device_memory": "55.5GB"}}) == int(55.5 * GIB)
    assert limit_of({"context": {}}) == 0
    with pytest.raises(RecipeError, match=r"context.max_device_memory: '55' is not of the form 55.5GB"):
        limit_of({"context": {"max_device_memory": "55"}})
