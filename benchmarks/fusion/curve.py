"""This program models the report's GroupedMatmul-Reshape-Cast (section 4.5, Figure 6): the speed-up as one kernel, over
the number of rows.

    python -m benchmarks.fusion.curve [--picture docs/pictures/fusion_curve.svg]

[20, 5120, 3072] is the weight gradient of 20 experts: of R rows each expert has R / 20, the depth of its product. The
report gives "approximately 85% higher performance" of the fused kernel and no rows. Seconds are the estimator's.

    unfused   the product in bfloat16, then a Cast that reads 2 bytes and writes 4 of each number
    fused     the longer of the product and what it must move: its operands, and 4 bytes of each number
    overlap   the longer of the product and the Cast: the Cast runs beside it, but through HBM

A Reshape moves no bytes, and kernel launches are left out. No time was measured, because there is no NPU.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

from tools.estimate.configuration import Configuration
from tools.estimate.efficiency import DeviceTimes, cluster
from tools.estimate.from_recipe import from_recipe
from tools.estimate.layer_model import Matmul
from tools.files.figure import new_figure, save_figure
from tools.hardware import DEFAULT_HARDWARE
from tools.recipe.load import load_recipe

ROOT = Path(__file__).resolve().parents[2]
EXPERTS, INPUT, OUTPUT = 20, 5120, 3072
REPORTED = 0.85  # faster, by the report
ROWS = tuple(2**power for power in range(10, 19))


class Point(NamedTuple):
    """A `Point` holds the modelled seconds of the unfused, fused and overlapped kernel at a number of rows."""

    rows: int
    unfused: float
    fused: float
    overlap: float

    @property
    def faster(self) -> float:
        """Return the speed-up of the fused kernel over the unfused kernels; 0 means equally fast."""
        return self.unfused / self.fused - 1

    @property
    def faster_overlap(self) -> float:
        """Return the speed-up of the kernel whose Cast runs beside the product, but through HBM."""
        return self.unfused / self.overlap - 1


def point(times: DeviceTimes, config: Configuration, rows: int) -> Point:
    """Return the modelled seconds of the unfused, fused and overlapped kernel at `rows` rows."""
    numbers = EXPERTS * INPUT * OUTPUT
    product = times.multiplying(config, Matmul(INPUT, OUTPUT, rows / EXPERTS, EXPERTS))
    cast = times.moving((2 + 4) * numbers)
    inside = times.moving(2 * rows * (INPUT + OUTPUT) + 4 * numbers)
    return Point(rows, product + cast, max(product, inside), max(product, cast))


def crossing(times: DeviceTimes, config: Configuration) -> int:
    """Return the largest multiple of 64 rows at which the fused kernel has at least the speed-up that the report
    states.
    """
    return max((rows for rows in range(64, ROWS[-1], 64) if point(times, config, rows).faster >= REPORTED), default=0)


def draw(points: list[Point], device: str, path: Path) -> None:
    """Draw the modelled speed-up over the number of rows."""
    figure = new_figure(8, 4.5)
    axes = figure.subplots()
    rows = [each.rows for each in points]
    axes.plot(rows, [100 * each.faster for each in points], label="modelled: one kernel, cast on the chip")
    beside = [100 * each.faster_overlap for each in points]
    axes.plot(rows, beside, linestyle=":", label="modelled: cast beside the product, through HBM")
    label = f"{REPORTED:.0%}: the report, rows not given"
    axes.axhline(100 * REPORTED, color="black", linestyle="--", label=label)
    axes.set_xscale("log", base=2)
    axes.set_xticks(ROWS, [f"{each:,}" for each in ROWS])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("rows of all 20 experts")
    axes.set_ylabel("% faster than unfused")
    axes.set_title(f"GroupedMatmul-Reshape-Cast, [20, 5120, 3072], {device}: modelled, not measured", fontsize="medium")
    axes.legend(fontsize="small")
    save_figure(figure, path)


def main() -> None:
    """Print the modelled points, and draw them if `--picture` is given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", default=DEFAULT_HARDWARE)
    parser.add_argument("--picture", type=Path)
    arguments = parser.parse_args()
    times = DeviceTimes(cluster(arguments.cluster))
    config = from_recipe(load_recipe(ROOT / "recipes/telechat3_438b/pretrain_4k.yaml"))
    points = [point(times, config, rows) for rows in ROWS]
    print(f"{times.hardware.device}, modelled")
    print(f"{'rows':>8} {'unfused ms':>11} {'fused ms':>9} {'faster':>7} {'through HBM':>12}")
    for each in points:
        print(
            f"{each.rows:8,} {1e3 * each.unfused:11.2f} {1e3 * each.fused:9.2f} {each.faster:7.0%} "
            f"{each.faster_overlap:12.0%}"
        )
    print(f"as much faster as the report says ({REPORTED:.0%}) up to {crossing(times, config):,} rows")
    if arguments.picture:
        fine = sorted({int(2 ** (power / 8)) for power in range(80, 145)})
        draw([point(times, config, rows) for rows in fine], times.hardware.device, arguments.picture)


if __name__ == "__main__":
    main()
