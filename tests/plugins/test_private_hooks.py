import sys
import types
from types import SimpleNamespace

import mindspore as ms
import pytest
from mindspore import nn
from mindspore.train.dataset_helper import _DataWrapper

from plugins.private_hooks import OutdatedHookError, relies_on, replace, replaced, train_step


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "patched_module.py").write_text("def answer():\n    return compute(41)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "patched_module", raising=False)
    return __import__("patched_module")


def better():
    return 42


def test_replaces_while_the_line_stands(module):
    replacement = types.FunctionType(better.__code__, {})
    replace(module, "answer", "return compute(41)", replacement)
    assert module.answer() == 42
    replace(module, "answer", "return compute(41)", better)
    assert module.answer is replacement, "a second call must not stack patches"


def test_refuses_when_the_line_has_changed(module):
    original = module.answer
    with pytest.raises(OutdatedHookError, match=r"patched_module\.answer no longer contains"):
        replace(module, "answer", "return other(41)", better)
    assert module.answer is original


def test_replaced_for_a_while_comes_back_even_from_an_error(module):
    original = module.answer
    with (
        pytest.raises(ZeroDivisionError),
        replaced(module, "answer", "return compute(41)", types.FunctionType(better.__code__, {})),
    ):
        assert module.answer() == 42
        raise ZeroDivisionError
    assert module.answer is original


def test_what_relies_on_a_line_says_where_it_was(module):
    relies_on(module.answer, "compute(41)")
    with pytest.raises(OutdatedHookError, match=r"patched_module\.answer no longer contains the line 'compute\(42\)'"):
        relies_on(module.answer, "compute(42)")


def test_the_train_step_is_found_in_sink_mode_too():
    step = nn.Dense(2, 2)
    assert train_step(SimpleNamespace(train_network=step)) is step
    fetching = _DataWrapper(step, [ms.float32], [[1, 2]], "queue")
    assert train_step(SimpleNamespace(train_network=fetching)) is step
