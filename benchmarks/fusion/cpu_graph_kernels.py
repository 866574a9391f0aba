"""Steps of the mini with MindSpore's CPU graph kernels (AKG) and without, in one run: time, and how far losses differ.

    python benchmarks/fusion/cpu_graph_kernels.py [--steps 12] [--pairs 2] [--packages FOLDER]

Variants in turn (A B C A B C): `off`; `on` (`--opt_level=2`); `no Exp` (on, with Exp left to its own kernel). Ratios to
`off` of the same turn are the result. CPU seconds count beside wall seconds, for a shared machine disturbs them less.
AKG needs the package `decorator`, in this environment or in --packages. Needs the corpus of launch/quickstart.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path
from statistics import median

import click

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "recipes" / "mini" / "pretrain.yaml"
VARIANTS = {"off": "--opt_level=0", "on": "--opt_level=2", "no Exp": "--opt_level=2 --disable_cluster_ops=Exp"}
SKIPPED = 2  # steps: the first compiles, the second warms up


def train(flags: str, steps: int, packages: Path | None) -> list[dict[str, float]]:
    """Metrics of each step of one training."""
    path = [str(ROOT), *([str(packages.resolve())] if packages else [])]
    environment = os.environ | {"MS_DEV_GRAPH_KERNEL_FLAGS": flags, "PYTHONPATH": os.pathsep.join(path)}
    with tempfile.TemporaryDirectory() as folder:
        corpus = ROOT / "output" / "data" / "stdlib"
        data = f'train_dataset.data_loader.config.data_path=["1","{corpus}"]'
        settings = ("lr_schedule.warmup_steps=2", "plugins.held_out_loss=False", data)
        overrides = [word for setting in settings for word in ("--set", setting)]
        command = ["tc3", "train", str(RECIPE), "--steps", str(steps), "--run-dir", f"{folder}/run", *overrides]
        # AKG leaves files in the folder in which it is started
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise click.ClickException(f"{flags}: {(done.stdout + done.stderr)[-1500:]}")
        lines = (Path(folder) / "run" / "metrics" / "rank_0.jsonl").read_text("utf-8").splitlines()
    return [record for record in map(json.loads, lines) if "step" in record]


def told(name: str, run: list[dict[str, float]], base: list[dict[str, float]]) -> str:
    """One variant of a turn against `off`."""
    ratios = {
        key: median(step[key] for step in run[SKIPPED:]) / median(step[key] for step in base[SKIPPED:])
        for key in ("cpu_seconds", "seconds")
    }
    apart = [abs(one["loss"] / other["loss"] - 1) for one, other in zip(run, base, strict=True)]
    cpu = median(step["cpu_seconds"] for step in run[SKIPPED:])
    return (
        f"{name:7} {cpu:6.3f} CPU s a step, ratio {ratios['cpu_seconds']:.2f} (wall {ratios['seconds']:.2f}); first "
        f"step {run[0]['cpu_seconds']:.0f} CPU s, ratio {run[0]['cpu_seconds'] / base[0]['cpu_seconds']:.2f}; "
        f"losses apart: step 1 {apart[0]:.1e}, at most {max(apart):.1e}"
    )


@click.command()
@click.option("--steps", default=12, show_default=True, help="Steps of each run.")
@click.option("--pairs", default=2, show_default=True, help="How often each variant runs.")
@click.option("--packages", type=click.Path(path_type=Path, exists=True), help="A folder that has `decorator`.")
def main(steps: int, pairs: int, packages: Path | None) -> None:
    """Print each turn's ratios."""
    for turn in range(pairs):
        runs: dict[str, list[dict[str, float]]] = {}
        for name, flags in VARIANTS.items():
            runs[name] = train(flags, steps, packages)
            click.echo(f"turn {turn + 1}: {told(name, runs[name], runs['off'])}")


if __name__ == "__main__":
    main()
