"""The modelled curve of the report's example: a longhand sum at one point, and where it must go."""

import pytest

from benchmarks.fusion.curve import REPORTED, ROWS, crossing, point
from tools.estimate.efficiency import DeviceTimes, cluster
from tools.estimate.from_recipe import from_recipe
from tools.recipe.load import load_recipe

TIMES = DeviceTimes(cluster("atlas_800t_a2"))
CONFIG = from_recipe(load_recipe("recipes/telechat3_438b/pretrain_4k.yaml"))


def test_a_point_is_the_sum_written_out():
    """16,384 rows: 819.2 an expert; the product is bound by the cube units."""
    found = point(TIMES, CONFIG, 16384)
    reached, depth = TIMES.reached, 16384 / 20
    share = reached.matmul * depth / (depth + reached.half_size)
    product = 2 * 16384 * 5120 * 3072 / (294.9e12 * share)
    cast = 6 * 20 * 5120 * 3072 / (1.6e12 * reached.memory)
    assert found.unfused == pytest.approx(product + cast)
    assert found.fused == pytest.approx(product)


def test_fused_is_never_slower_and_gains_less_where_the_product_is_long():
    points = [point(TIMES, CONFIG, rows) for rows in ROWS]
    assert all(each.fused <= each.overlap <= each.unfused for each in points)
    assert points[-1].faster < 0.1
    rows = crossing(TIMES, CONFIG)
    assert point(TIMES, CONFIG, rows).faster >= REPORTED > point(TIMES, CONFIG, rows + 64).faster
