"""The callback that leaves the rounding to float16 out of float32 models."""

from types import SimpleNamespace

import pytest

from launch.workers.unrounded_attention import UnroundedAttention
from plugins.cpu_backend.attention import Unrounded
from tests.plugins.cpu_backend.test_self_attention import of_mindformers


@pytest.mark.parametrize(("dtype", "changed"), [("float32", True), ("bfloat16", False), ("float16", False)])
def test_only_float32_is_left_unrounded(dtype, changed):
    cell = of_mindformers(dtype=dtype)
    UnroundedAttention().on_train_begin(SimpleNamespace(original_args=lambda: SimpleNamespace(train_network=cell)))
    assert isinstance(cell.cast, Unrounded) == changed
