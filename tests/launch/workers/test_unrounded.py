"""The callbacks that leave the rounding to float16 and bfloat16 out of float32 models."""

import inspect
import re
from types import SimpleNamespace

import pytest
from mindformers.core.optim import muon

from launch.workers.unrounded import UnroundedAttention, UnroundedMuon
from plugins.cpu_backend.attention import Unrounded
from tests.plugins.cpu_backend.test_self_attention import of_mindformers


@pytest.mark.parametrize(("dtype", "changed"), [("float32", True), ("bfloat16", False), ("float16", False)])
def test_only_float32_is_left_unrounded(dtype, changed):
    cell = of_mindformers(dtype=dtype)
    UnroundedAttention().on_train_begin(SimpleNamespace(original_args=lambda: SimpleNamespace(train_network=cell)))
    assert isinstance(cell.cast, Unrounded) == changed


def test_muon_finds_float32_where_it_names_bfloat16(monkeypatch):
    """And every other type that its module names."""
    monkeypatch.setattr(muon, "mstype", before := muon.mstype)
    UnroundedMuon().on_train_begin(None)
    assert muon.mstype is not before and muon.mstype.bfloat16 is muon.mstype.float32 is before.float32
    named = set(re.findall(r"mstype\.(\w+)", inspect.getsource(muon)))
    assert named == {each for each in named if hasattr(muon.mstype, each)} >= {"bfloat16", "float32"}
