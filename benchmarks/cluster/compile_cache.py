"""This program measures the compile cache: the seconds of the first step with and without it, whether the results stay
the same, and the effect of a stale cache.

    python benchmarks/cluster/compile_cache.py RECIPE... [--steps 24] [--set KEY=VALUE]

The program trains each recipe four times: without a cache; with a new cache, which the run fills; from the checkpoint
without a cache; and from the checkpoint with the cache. Then it trains three runs with another `routed_scaling_factor`:
without a cache; with this repository's cache, which must compile anew; and with the graph of the first factor, which
MindSpore's own cache would load. The table also has the processor seconds of the first step, because other work on the
machine changes processor seconds less than seconds.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click

TC3 = str(Path(sys.executable).with_name("tc3"))
FACTOR = "model.model_config.routed_scaling_factor=1.7"


def train(recipe: str, run_dir: Path, *words: str, **environment: str) -> tuple[float, list[dict]]:
    """Run `tc3 train`; return the seconds of the whole command, and the records of the steps that it trained."""
    file = run_dir / "metrics" / "rank_0.jsonl"
    known = len(file.read_text().splitlines()) if file.exists() else 0
    began = time.time()
    done = subprocess.run(
        [TC3, "train", recipe, "--run-dir", str(run_dir), *words],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    lines = map(json.loads, file.read_text().splitlines()[known:])
    return time.time() - began, [line for line in lines if "step" in line]


def report(name: str, seconds: float, steps: list[dict]) -> str:
    """Return the table's line for one run: seconds of the first step and of the command, and the first two losses."""
    first = steps[0]
    losses = ", ".join(str(step["loss"]) for step in steps[:2])
    return f"| {name} | {first['seconds']:.1f} | {first['cpu_seconds']:.1f} | {seconds:.0f} | {losses} |"


def losses(steps: list[dict]) -> list[tuple[float, float]]:
    """Return the loss and the global norm of each step."""
    return [(step["loss"], step["global_norm"]) for step in steps]


@click.command()
@click.argument("recipes", nargs=-1, required=True)
@click.option("--steps", default=24, help="Train this many steps in each run; restarts continue after half of them.")
@click.option("--set", "overrides", multiple=True)
@click.option("--stale/--no-stale", default=True, help="Also make the three runs with another factor.")
def main(recipes: tuple[str, ...], steps: int, overrides: tuple[str, ...], stale: bool) -> None:
    """Run and print."""
    for recipe in recipes:
        with tempfile.TemporaryDirectory() as folder:
            measure(recipe, Path(folder), steps, overrides, stale)


def measure(recipe: str, folder: Path, steps: int, overrides: tuple[str, ...], stale: bool) -> None:
    """Train all runs of one recipe, with and without the compile cache, and print their lines of the table."""
    words = [word for each in overrides for word in ("--set", each)]
    words += ["--steps", str(steps), "--set", f"checkpoint.save_interleaved_steps={steps // 2}"]
    ours = {"TC3_COMPILE_CACHE": str(folder / "caches")}
    print(f"\n{recipe}: load of the machine {os.getloadavg()[0]:.1f}")
    print(
        "| run | first step, s | of the processor, s | whole command, s | first losses |\n|---|---|---|---|---|",
        flush=True,
    )
    found = {}

    def run(name: str, run_dir: Path, *more: str, **environment: str) -> None:
        seconds, made = train(recipe, run_dir, *words, *more, **environment)
        found[name] = made
        print(report(name, seconds, made), flush=True)

    run("without", folder / "without")
    run("fills the cache", folder / "run", **ours)
    for name, environment in (("restart without", {}), ("restart with", ours)):
        copy = folder / name.replace(" ", "_")
        shutil.copytree(folder / "run", copy, symlinks=True)
        for checkpoint in sorted((copy / "checkpoint").glob("iteration_*"))[1:]:
            shutil.rmtree(checkpoint)
        run(name, copy, "--resume", "auto", **environment)
    same = losses(found["without"]) == losses(found["fills the cache"])
    later = losses(found["without"])[-len(found["restart with"]) :]
    same = same and losses(found["restart with"]) == losses(found["restart without"]) == later
    ratio = found["restart with"][0]["seconds"] / found["restart without"][0]["seconds"]
    print(f"losses and norms to the last bit: {'identical' if same else 'NOT IDENTICAL'}")
    print(f"first step of the restart with / without: {ratio:.2f}", flush=True)
    if stale:
        show_stale(run, found, folder, ours)


def show_stale(run, found, folder: Path, ours: dict[str, str]) -> None:
    """Train with another `routed_scaling_factor`: without a cache, with this repository's cache, and with the graph
    that was compiled for the old factor.
    """
    (key,) = (path.parent for path in (folder / "caches").glob("*/key.json"))
    shutil.copytree(key, folder / "unkeyed")
    unkeyed = {"MS_COMPILER_CACHE_ENABLE": "1", "MS_COMPILER_CACHE_PATH": str(folder / "unkeyed")}
    run("factor 1.7 without", folder / "other", "--set", FACTOR)
    run("factor 1.7, our cache", folder / "other_ours", "--set", FACTOR, **ours)
    run("factor 1.7, not keyed", folder / "other_unkeyed", "--set", FACTOR, **unkeyed, TC3_COMPILE_CACHE_KEY="not ours")
    right = losses(found["factor 1.7 without"])
    print(f"our cache: {'right' if losses(found['factor 1.7, our cache']) == right else 'WRONG'}")
    wrong = losses(found["factor 1.7, not keyed"]) == losses(found["without"])
    print(f"not keyed: {'the losses of the old factor' if wrong else 'other losses than those of the old factor'}")


if __name__ == "__main__":
    main()
