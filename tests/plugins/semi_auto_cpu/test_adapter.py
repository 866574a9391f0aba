"""Which operators Python computes."""

from types import SimpleNamespace

from plugins.semi_auto_cpu import adapter
from plugins.semi_auto_cpu.kernels import KERNELS, LOW_PRECISION
from plugins.semi_auto_cpu.ranks import Ranks


def test_what_mindspores_backend_adds_itself_is_python_s_from_the_start(monkeypatch):
    """TensorMove is in no graph that the pass sees, and MindSpore's own refuses bfloat16, whatever the weights are."""
    registered, replaced = [], {}
    library = SimpleNamespace(
        set_host=lambda function, rank: None,
        set_cluster=lambda ranks: None,
        replace=lambda name, low=False: replaced.setdefault(name, low),
        register=registered.append,
        add_pass=lambda done, missing: None,
    )
    monkeypatch.setattr(adapter.library, "load", lambda: library)
    adapter.Host(Ranks(1, 0), SimpleNamespace(size=1, rank=0), lambda: None)
    assert "TensorMove" in registered
    assert set(replaced) >= KERNELS.keys() | LOW_PRECISION.keys()
