"""Which backend a recipe trains on."""

import pytest

from launch.workers.backends import Ascend, Cpu, ShardedCpu, backend_of


@pytest.mark.parametrize(
    ("target", "mode", "backend"),
    [
        ("Ascend", 1, Ascend),
        ("Ascend", 0, Ascend),
        ("CPU", 0, Cpu),
        ("CPU", "data_parallel", Cpu),
        ("CPU", 1, ShardedCpu),
        ("CPU", "semi_auto_parallel", ShardedCpu),
    ],
)
def test_target_and_parallel_mode_choose_it(target, mode, backend):
    recipe = {"context": {"device_target": target}, "parallel": {"parallel_mode": mode}}
    assert type(backend_of(recipe)) is backend


def test_on_ascend_nothing_is_replaced():
    """Each step of an Ascend device does nothing, and imports neither MindSpore nor a plugin's adapter."""
    backend = Ascend()
    assert backend.collectives is None
    assert [backend.before_mindformers({}), backend.after_import(), backend.after_context(), backend.enable({})] == [
        None
    ] * 4
    with backend.own_errors():
        pass
