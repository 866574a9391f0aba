import sys
import types

import pytest

from plugins.cpu_backend.compat import OutdatedPatchError, replace


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
    with pytest.raises(OutdatedPatchError, match=r"patched_module\.answer no longer contains"):
        replace(module, "answer", "return other(41)", better)
    assert module.answer is original


def test_the_installed_versions_still_hold_every_patched_line():
    from mindspore.communication import comm_func

    from plugins.cpu_backend import compat

    compat.after_context()
    from mindformers.checkpoint import sharded_tensor
    from mindformers.core.callback import callback

    for patched in (callback._get_separate_loss, sharded_tensor.get_strategy_metadata):
        assert patched.tc3_patch
    before = comm_func.barrier
    compat.before_mindformers(distributed=False)
    assert comm_func.barrier is before, "one process keeps MindSpore's own barrier"
