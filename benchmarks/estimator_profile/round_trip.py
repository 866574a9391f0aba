"""This program tests whether the CPU profile of one mini predicts the step of another one with other layers, experts
and batch.

    python benchmarks/estimator_profile/round_trip.py [--steps 30] [--data output/data/stdlib] [--only NAME]

The reference, recipes/mini/pretrain.yaml with one worker, trains under MindSpore's profiler through MindFormers' own
callback; `tc3 search calibrate` makes a cluster file of its profile. Each other mini recipe trains without the
profiler, and its step time is predicted from that file. The baseline is the reference's step time scaled by the FLOPs
of matmuls.

Because the machine may have other work, two numbers are measured: the lower quartile of the steps' seconds, and that of
the steps' processor seconds, which do not contain the time of other work (nearly all operators of a mini recipe run in
one thread). Errors are computed for both numbers, and for the processor seconds divided by those of the reference, a
ratio that does not mix a profile made under load with steps without load. Absolute times depend on the machine; the
errors are the result.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import click
import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
RECIPE = ROOT / "recipes" / "mini" / "pretrain.yaml"
M = "model.model_config"
MINIS = {
    "reference": (),
    "five layers": (f"{M}.num_hidden_layers=5",),
    "32 experts": (f"{M}.n_routed_experts=32",),
    "batch of 4": ("runner_config.batch_size=4",),
    "batch of 16": ("runner_config.batch_size=16",),
    "five layers, 8 experts, batch of 4": (
        f"{M}.num_hidden_layers=5", f"{M}.n_routed_experts=8", "runner_config.batch_size=4",
    ),
    "two dense layers of four, hidden 192": (
        f"{M}.num_hidden_layers=4", f"{M}.first_k_dense_replace=2", f"{M}.hidden_size=192",
    ),
}  # fmt: skip


def overrides(name: str, steps: int, data: str) -> tuple[str, ...]:
    """Return the settings of a mini recipe, whose corpus has enough samples for `steps` steps."""
    return (
        *MINIS[name],
        f"train_dataset.data_loader.sizes.0={steps * 16}",
        f'train_dataset.data_loader.config.data_path=["1","{data}"]',
        "checkpoint.save_interleaved_steps=100000",
    )


def worker(name: str, steps: int, data: str, folder: Path, profiled: bool) -> None:
    """Train one run in this process, with one thread for operators."""
    import mindspore as ms

    from launch.train import build_config, train

    recipe = build_config(RECIPE, overrides(name, steps, data), folder, None)
    recipe["plugins"] = {}
    batch = recipe["runner_config"]["batch_size"]
    recipe["train_dataset"]["data_loader"]["sizes"][0] = steps * batch
    if profiled:
        recipe["callbacks"].append(
            {"type": "ProfileMonitor", "start_step": 5, "stop_step": steps - 1, "profiler_level": 1,
             "output_path": str(folder), "data_simplification": False}
        )  # fmt: skip
    ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
    train(recipe)


def run(name: str, steps: int, data: str, folder: Path, profiled: bool) -> tuple[float, float]:
    """Return the lower quartiles of the steps' seconds and processor seconds of a mini recipe that trains in a separate
    process.
    """
    command = [sys.executable, __file__, "--worker", name, "--steps", str(steps), "--data", data]
    command += ["--folder", str(folder), *(["--profiled"] if profiled else [])]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise click.ClickException(f"{name}: {(done.stdout + done.stderr)[-1500:]}")
    records = map(json.loads, (folder / "metrics" / "rank_0.jsonl").read_text().splitlines())
    kept = [record for record in records if record.get("step", 0) > 4]
    return tuple(float(np.percentile([record[key] for record in kept], 25)) for key in ("seconds", "cpu_seconds"))


def predicted(name: str, cluster: Path, data: str) -> tuple[float, float]:
    """Return the predicted seconds of a mini recipe's step on a cluster, and its FLOPs of matmuls."""
    from tools.estimate.efficiency import cluster as load
    from tools.estimate.from_recipe import from_recipe
    from tools.estimate.time_model import TimeModel
    from tools.profile.study import flops
    from tools.recipe.load import load_recipe
    from tools.recipe.override import apply_overrides

    config = from_recipe(apply_overrides(load_recipe(RECIPE), overrides(name, 1, data)))
    return TimeModel(load(str(cluster))).step(config).total, flops(config, 0)


@click.command()
@click.option("--steps", default=30, show_default=True, help="Train this many steps in each run.")
@click.option("--data", default=str(ROOT / "output/data/stdlib"), help="Train on the corpus with this prefix.")
@click.option(
    "--only", multiple=True, type=click.Choice(list(MINIS)), help="Predict only these minis, beside the reference."
)
@click.option(
    "--keep",
    type=click.Path(path_type=Path),
    help="Keep all files in this folder; a profile in it is used again.",
)
@click.option("--worker", "name", type=click.Choice(list(MINIS)), hidden=True)
@click.option("--folder", type=click.Path(path_type=Path), hidden=True)
@click.option("--profiled", is_flag=True, hidden=True)
def main(
    steps: int, data: str, only: tuple[str, ...], keep: Path | None, name: str | None, folder: Path, profiled: bool
) -> None:
    """Print each mini's step, measured and predicted."""
    if name:
        worker(name, steps, data, folder, profiled)
        return
    if not Path(f"{data}.idx").exists():
        raise click.ClickException("the corpus is missing: tc3 data prepare --input stdlib --output output/data/stdlib")
    with tempfile.TemporaryDirectory() as temporary:
        place = keep or Path(temporary)
        (place / "profiled").mkdir(parents=True, exist_ok=True)
        if not any((place / "profiled").rglob("FRAMEWORK")):
            run("reference", steps, data, place / "profiled", True)
        cluster = place / "host.yaml"
        tc3 = [sys.executable, "-c", "from launch.cli import tc3; tc3()"]
        command = [*tc3, "search", "calibrate", str(place / "profiled")]
        command += ["--recipe", str(RECIPE), "--out", str(cluster), "--force"]
        click.echo(subprocess.run(command, cwd=ROOT, text=True, check=True, stdout=subprocess.PIPE).stdout)
        compare(steps, data, only or tuple(MINIS), place, cluster)


def compare(steps: int, data: str, names: tuple[str, ...], place: Path, cluster: Path) -> None:
    """Print one line with measured and predicted step times for each mini recipe."""
    base: tuple[float, ...] = ()
    heads = ("step s", "cpu s", "model s", "of step", "of cpu", "over the reference", "FLOPs over the reference")
    click.echo("  ".join((f"{'mini':38}", *heads)))
    for name in dict.fromkeys(("reference", *names)):
        folder = place / name.replace(" ", "_").replace(",", "")
        folder.mkdir(parents=True, exist_ok=True)
        wall, cpu = run(name, steps, data, folder, False)
        model, flops = predicted(name, cluster, data)
        base = base or (cpu, model, flops)
        grown, by_model, by_flops = cpu / base[0], model / base[1], flops / base[2]
        errors = (model / wall - 1, model / cpu - 1, by_model / grown - 1, by_flops / grown - 1)
        click.echo(f"{name:38} {wall:7.3f} {cpu:6.3f} {model:8.3f} " + "  ".join(f"{error:+8.1%}" for error in errors))


if __name__ == "__main__":
    main()
