"""This program compares a step of the mini in MindSpore's sharded graph with the data-parallel mini on two workers, in
one run.

    python benchmarks/sharded_step.py [--steps 12] [LAYOUT ...]

LAYOUT: tp2, pp2, pp2_interleaved, cp2 (recipes/mini/pretrain_LAYOUT.yaml), by default tp2 and pp2. The baseline is
recipes/mini/pretrain_dp2.yaml: the same model and global batch through this repository's classes for CPU. The results
are the ratio of the first steps (which compile) and the ratio of the median times of the later steps; absolute seconds
depend on the machine. The aims are at most 2 for the first step and at most 4 for the later steps. The program needs
the corpus of launch/quickstart.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

import click

ROOT = Path(__file__).resolve().parents[1]
BASELINE, LAYOUTS = "dp2", ("tp2", "pp2", "pp2_interleaved", "cp2")


def run(layout: str, steps: int) -> tuple[float, float]:
    """Return the seconds of the first step, counted from MindFormers' call to train, and the median seconds of the
    later steps.
    """
    recipe = ROOT / "recipes" / "mini" / f"pretrain_{layout}.yaml"
    with tempfile.TemporaryDirectory() as folder:
        command = [str(Path(sys.executable).with_name("tc3")), "train", str(recipe), "--steps", str(steps)]
        settings = ["lr_schedule.warmup_steps=0", "plugins.held_out_loss=False"]
        command += ["--run-dir", f"{folder}/run", *(word for one in settings for word in ("--set", one))]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            raise click.ClickException(f"{layout}: {(done.stdout + done.stderr)[-1500:]}")
        lines = (Path(folder) / "run" / "metrics" / "rank_0.jsonl").read_text().splitlines()
    seconds = [record["seconds"] for record in map(json.loads, lines) if "step" in record]
    return seconds[0], median(seconds[2:])


@click.command()
@click.argument("layouts", nargs=-1, type=click.Choice(LAYOUTS))
@click.option(
    "--steps", default=12, type=click.IntRange(min=4), show_default=True, help="Train this many steps in each run."
)
def main(layouts: tuple[str, ...], steps: int) -> None:
    """Print ratios of sharded layouts to the data-parallel baseline."""
    first, later = run(BASELINE, steps)
    click.echo(f"{BASELINE}: first step {first:.1f} s, later {later:.2f} s (baseline)")
    for layout in layouts or LAYOUTS[:2]:
        own_first, own_later = run(layout, steps)
        ratios = f"first step {own_first / first:.2f}x, later {own_later / later:.2f}x"
        click.echo(f"{layout}: {ratios} ({own_first:.1f} s, {own_later:.2f} s)")


if __name__ == "__main__":
    main()
