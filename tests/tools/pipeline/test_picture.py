"""Time lines: every operation is drawn once, for as long as it runs; the page has a picture of each schedule."""

import runpy
from pathlib import Path

import numpy as np
import pytest

from tools.files.figure import new_figure
from tools.pipeline.picture import draw_timeline
from tools.pipeline.schedules import PAPER_SCHEDULES
from tools.pipeline.simulate import Durations, simulate

DOCS = Path(__file__).resolve().parents[3] / "docs"


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "dual_pipe_v", "interleaved_1f1b_pairs"])
def test_each_operation_is_drawn_once(schedule):
    chunks = 1 if schedule in ("1f1b", "zb_h1") else 2
    ones = np.ones((chunks, 4))
    found = simulate(schedule, 8, Durations(ones, 2 * ones, ones, hidden=np.full((chunks, chunks, 4), 0.5)))
    axes = new_figure(8, 2).subplots()
    draw_timeline(axes, found)
    boxes = [path.get_extents() for bars in axes.collections for path in bars.get_paths()]
    pairs = sum(int(table[:, -1].sum()) for table in found.table.tables)
    # a pair is two halves of a row, and a frame around both
    assert len(boxes) == sum(map(len, found.orders)) + pairs
    heights = np.array([box.height for box in boxes])
    assert np.isclose(heights, heights.max() / 2).sum() == 2 * pairs
    drawn = sum(box.width * box.height for box in boxes) / heights.max()
    assert drawn == pytest.approx(found.busy.sum() + _framed(found))


def _framed(found):
    """Time of all pairs, whose frames cover them once more."""
    return sum(
        float((ends - starts)[table[:, -1] > 0].sum())
        for starts, ends, table in zip(found.starts, found.ends, found.table.tables, strict=True)
    )


def test_the_page_shows_every_schedule_that_only_papers_have():
    drawn = runpy.run_path(str(DOCS / "pictures" / "schedules.py"))["DRAWN"]
    assert set(PAPER_SCHEDULES) <= set(drawn)
    page = (DOCS / "schedules.md").read_text("utf-8")
    for schedule in drawn:
        assert f"(pictures/schedules/{schedule}.png)" in page
        assert (DOCS / "pictures" / "schedules" / f"{schedule}.png").is_file()
