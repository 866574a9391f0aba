"""Which recipes run as the sharded graph on CPU."""

import pytest

from plugins.semi_auto_cpu.chosen import chosen, splits_model


@pytest.mark.parametrize(
    ("mode", "splits", "runs"),
    [
        (0, False, False),
        (1, True, True),
        ("SEMI_AUTO_PARALLEL", True, True),
        ("semi_auto_parallel", True, True),
        (2, True, False),
        ("DATA_PARALLEL", False, False),
        (None, False, False),
    ],
)
def test_the_mode_decides(mode, splits, runs):
    parallel = {} if mode is None else {"parallel_mode": mode}
    assert splits_model(mode) == splits
    assert chosen({"context": {"device_target": "CPU"}, "parallel": parallel}) == runs
    assert not chosen({"context": {"device_target": "Ascend"}, "parallel": parallel})
    assert not chosen({"parallel": parallel}) and not chosen({})


@pytest.mark.parametrize("spoilt", [5, "text", [1]])
@pytest.mark.parametrize("section", ["context", "parallel"])
def test_a_section_that_is_no_mapping_chooses_nothing(section, spoilt):
    recipe = {"context": {"device_target": "CPU"}, "parallel": {"parallel_mode": 1}, section: spoilt}
    assert not chosen(recipe)
