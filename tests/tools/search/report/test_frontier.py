from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.estimate.from_recipe import from_recipe
from tools.estimate.time_model import TimeModel
from tools.files.figure import new_figure
from tools.hardware import DEFAULT_HARDWARE
from tools.hardware.load import load_hardware
from tools.recipe.load import load_recipe
from tools.search.ranking.entry import entry_of
from tools.search.report.frontier import draw_timeline, frontier

POINTS = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=30)


@given(POINTS)
def test_frontier_is_what_nobody_beats(points):
    seconds, peaks = np.array(points, float).T
    found = {(seconds[index], peaks[index]) for index in frontier(seconds, peaks)}
    expected = {(s, p) for s, p in points if not any((t <= s and q <= p) and (t, q) != (s, p) for t, q in points)}
    assert found == expected
    assert list(peaks[frontier(seconds, peaks)]) == sorted(p for _, p in expected)


@pytest.mark.parametrize(("micro_batches", "drawn"), [(8, 8), (16, 16), (64, 16)])
def test_of_many_micro_batches_as_many_are_drawn_as_can_be_seen(micro_batches, drawn):
    config = replace(from_recipe(load_recipe("recipes/telechat3_105b/pretrain_4k.yaml")), micro_batches=micro_batches)
    entry, axes = entry_of(config, times := TimeModel(load_hardware(DEFAULT_HARDWARE))), new_figure(4, 3).subplots()
    draw_timeline(axes, entry, times)
    bars = sum(len(bars.get_paths()) for bars in axes.collections)
    assert config.pp == 8 and bars == 2 * drawn * config.pp * config.chunks
    shown = "one step" if micro_batches == drawn else f"{drawn} micro-batches of the step's {micro_batches}"
    assert axes.get_xlabel() == f"seconds, {shown}" and axes.get_title().endswith(f"drawn: {shown}")
