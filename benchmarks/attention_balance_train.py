"""This program measures the step time of two CPU workers with attention balance off and on: the same recipe, corpus and
steps, in one run.

    python benchmarks/attention_balance_train.py [--steps 25] [--pairs 2]

The program trains recipes/mini/pretrain_eod.yaml, smaller but with long samples and many heads, through `tc3 train`,
with the plugin off and on in turn (off on off on), and with one thread for each worker. The corpus is synthetic: its
documents are drawn from the 128K mixture of benchmarks/corpora.py, with medians divided so that a sample has as many
documents as a sample of 128K tokens. Attention takes about the same share of the FLOPs in this model as in
recipes/base/telechat3_105b.yaml at 128K with these documents (0.59); its share of the time on CPU differs. The
attention of a sample costs what its documents cost (plugins/cpu_backend/attention.py).

The results are ratios of step times; absolute times depend on the machine. The time of a step begins when its data is
available; the first steps, which compile, are dropped. In addition to wall time the program reports the processor time
of the worker that used most in a step, which other users of the machine hardly change. The program prints three
predictions for the same steps beside the measured ratio: by only the attending pairs of tokens, by the FLOPs of the
model, and by a line through the measured steps, processor seconds = a + b * (pairs of the slowest rank). The line shows
which part of a step is proportional to the pairs; it only describes these runs and predicts nothing.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean

import click
import numpy as np
import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.corpora import CORPORA, document_lengths  # noqa: E402
from plugins.attention_balance.plan import Layout, balance, epoch_plan  # noqa: E402
from plugins.attention_balance.samples import Cost, build_gpt_index  # noqa: E402
from tools.data.imbalance.recipe import setting_of  # noqa: E402
from tools.data.index import map_lengths, write_corpus  # noqa: E402
from tools.recipe.load import load_recipe  # noqa: E402
from tools.runs.readings import read_metrics  # noqa: E402

RECIPE = ROOT / "recipes" / "mini" / "pretrain_eod.yaml"
LONG = 131_072  # the mixture of documents that is scaled down
VOCABULARY, END = 256, 0
SEED = 1234
WORKERS = 2
DROPPED = 3  # steps at the beginning: compiling, first touch of memory
VARIANTS = ("off", "on")
LOSSES = ("loss", "lm_loss", "mtp_loss", "load_balancing_loss", "global_norm")


@dataclass(frozen=True)
class Run:
    """A `Run` is one training run without its first steps: wall and processor seconds [steps], losses [steps,
    len(LOSSES)] and the log of worker 0.

    cpu is the processor time of the worker that used most in a step.
    """

    seconds: np.ndarray
    cpu: np.ndarray
    losses: np.ndarray
    log: str


@dataclass(frozen=True)
class Predicted:
    """A `Predicted` holds means over steps: the predicted step time without (before) and with the plugin (after),
    relative to a step with equal loads, and the step time without the plugin divided by that with it.
    """

    before: float
    after: float
    ratio: float


def recipe_of(variant: str, prefix: Path, length: int, slots: int, steps: int) -> dict:
    """Return `RECIPE` with one dense and one MoE layer, a small hidden size, many heads and long samples."""
    recipe: dict = {
        "base_config": str(RECIPE),
        "runner_config": {"batch_size": slots},
        "lr_schedule": {"warmup_steps": 4, "total_steps": steps},
        "train_dataset": {
            "data_loader": {
                "sizes": [steps * slots * 2, 0, 0],
                "config": {"seq_length": length, "eod": END, "data_path": ["1", str(prefix)]},
            }
        },
        "model": {
            "model_config": {
                "batch_size": slots,
                "vocab_size": VOCABULARY,
                "seq_length": length,
                "max_position_embeddings": length,
                "hidden_size": 64,
                "intermediate_size": 192,
                "num_hidden_layers": 2,
                "num_attention_heads": 8,
                "q_lora_rank": 32,
                "kv_lora_rank": 32,
                "moe_intermediate_size": 32,
                "moe_shared_expert_intermediate_size": 32,
            }
        },
        "checkpoint": {"save_interleaved_steps": 100_000},
        "plugins": {"held_out_loss": False},
    }
    if variant == "on":
        recipe["plugins"]["attention_balance"] = {"window": 1}
    return recipe


def corpus(folder: Path, length: int, samples: int) -> Path:
    """Write a corpus with room for `samples` samples of `length` tokens, and return its prefix."""
    scaled = tuple(replace(source, median=source.median * length / LONG) for source in CORPORA[LONG])
    lengths = document_lengths(int(1.1 * samples * length), scaled, SEED)
    write_corpus(folder / "corpus", lengths, VOCABULARY, END, SEED)
    return folder / "corpus"


def train(recipe: Path, run_dir: Path) -> Run:
    """Run `tc3 train` on a recipe to its end, with one thread for each worker, and return its measurements."""
    command = [str(Path(sys.executable).with_name("tc3")), "train", str(recipe), "--run-dir", str(run_dir)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise click.ClickException(f"{recipe.name}: {(done.stdout + done.stderr)[-1500:]}")
    ranks = [read_metrics(run_dir / "metrics" / f"rank_{rank}.jsonl").steps for rank in range(WORKERS)]
    kept = sorted(ranks[0])[DROPPED:]
    return Run(
        seconds=np.array([ranks[0][step]["seconds"] for step in kept]),
        cpu=np.array([max(records[step]["cpu_seconds"] for records in ranks) for step in kept]),
        losses=np.array([[ranks[0][step][key] for key in LOSSES] for step in kept]),
        log=(run_dir / "logs" / "worker_0.log").read_text(),
    )


def measure(folder: Path, recipes: Mapping[str, Path], pairs: int) -> dict[str, list[Run]]:
    """Train all runs, with the plugin off and on in turn, and return the runs by variant."""
    runs: dict[str, list[Run]] = {name: [] for name in VARIANTS}
    for pair in range(pairs):
        for name in VARIANTS:
            run = train(recipes[name], folder / f"{name}{pair}")
            times = f"{run.seconds.mean():.3f} s/step, {run.cpu.mean():.3f} of the slower worker's processor"
            click.echo(f"run {pair + 1} of {pairs}, {name}: {times}", err=True)
            runs[name].append(run)
    return runs


def samples_of(recipe: Path, prefix: Path) -> tuple[Layout, np.ndarray, np.ndarray, np.ndarray]:
    """Return the layout, the plan [steps, ...], and for each sample its number of attending token pairs and its
    FLOPs.
    """
    setting = setting_of(load_recipe(recipe), prefix, None)
    index = build_gpt_index(map_lengths(prefix), setting.sequence_length, setting.wanted, setting.seed)
    trained = setting.steps * setting.layout.batch
    pairs = Cost(1.0, 0.0, "pair").of_dataset(index)[:trained]
    flops = setting.cost.of_dataset(index)[:trained]
    return setting.layout, epoch_plan(flops, setting.layout), pairs, flops


def check_plan(run: Run, flops: np.ndarray, plan: np.ndarray, layout: Layout) -> None:
    """Check that the log of a run states the same loads as the plan from which its step time is predicted."""
    found = balance(flops, plan, layout)
    own = f"mean of {len(plan)} steps: {found.before.mean():.3f} without the plugin, {found.after.mean():.3f} with it"
    said = re.search(r"mean of \d+ steps: [\d.]+ without the plugin, [\d.]+ with it", run.log)
    assert said and said.group() == own, f"the run's plan is another one: {said and said.group()!r}, not {own!r}"


def slowest(costs: np.ndarray, plan: np.ndarray, layout: Layout) -> tuple[np.ndarray, np.ndarray]:
    """Return the cost of the slowest rank in each kept step [steps], without and with the plan."""
    found, batch = balance(costs, plan, layout), costs.reshape(len(plan), -1)
    even = batch.sum(1) / layout.ranks
    return (found.before * even)[DROPPED:], (found.after * even)[DROPPED:]


def predict(costs: np.ndarray, plan: np.ndarray, layout: Layout, constant: float = 0.0) -> Predicted:
    """Predict relative step times from the costs of samples; `constant` is added to every rank's cost of a step."""
    even = costs.reshape(len(plan), -1).sum(1)[DROPPED:] / layout.ranks + constant
    before, after = (side + constant for side in slowest(costs, plan, layout))
    return Predicted((before / even).mean(), (after / even).mean(), before.sum() / after.sum())


def line(runs: Mapping[str, list[Run]], sides: tuple[np.ndarray, np.ndarray]) -> tuple[float, float, float]:
    """Return (a, b, R squared) of the least-squares line cpu = a + b * pairs of the slowest rank over all steps of all
    runs.
    """
    x = np.concatenate([side for name, side in zip(VARIANTS, sides, strict=True) for _ in runs[name]])
    y = np.concatenate([run.cpu for name in VARIANTS for run in runs[name]])
    slope, constant = np.polyfit(x, y, 1)
    return constant, slope, 1 - np.var(y - constant - slope * x) / np.var(y)


def report(runs: Mapping[str, list[Run]], recipe: Path, prefix: Path) -> None:
    """Print the results as Markdown for benchmarks/RESULTS.md."""
    layout, plan, pairs, flops = samples_of(recipe, prefix)
    for run in runs["on"]:
        check_plan(run, flops, plan, layout)
    sides = slowest(pairs, plan, layout)
    constant, slope, fit = line(runs, sides)
    click.echo("\n| pair | clock | s/step, off | s/step, on | off / on | losses and norms differ by at most |")
    click.echo("|---|---|---|---|---|---|")
    for number, (off, on) in enumerate(zip(runs["off"], runs["on"], strict=True), 1):
        apart = np.abs(off.losses - on.losses).max()
        for clock, a, b in (("wall", off.seconds, on.seconds), ("slower worker's processor", off.cpu, on.cpu)):
            ratio = a.mean() / b.mean()
            click.echo(f"| {number} | {clock} | {a.mean():.3f} | {b.mean():.3f} | {ratio:.3f} | {apart:.1e} |")
    click.echo(
        "\n| predicted for these steps by | slowest/mean, off | slowest/mean, on | off / on |\n|---|---|---|---|"
    )
    predictions = {
        "attending pairs": predict(pairs, plan, layout),
        "FLOPs of the model": predict(flops, plan, layout),
        "line through the measured steps": predict(slope * pairs, plan, layout, constant),
    }
    for name, found in predictions.items():
        click.echo(f"| {name} | {found.before:.3f} | {found.after:.3f} | {found.ratio:.3f} |")
    share = slope * sides[0].mean() / mean(run.cpu.mean() for run in runs["off"])
    counted = sum(len(run.seconds) for side in runs.values() for run in side)
    click.echo(
        f"\n{layout.slots} samples of a worker's step, means of {len(sides[0])} steps a run. Of the FLOPs, "
        f"{attention_share(flops, pairs):.0%} are attention. By the line through {counted} steps (R squared {fit:.2f}),"
        f" {share:.0%} of a step without the plugin follows the attending pairs of the slowest rank. {noise(runs)}"
    )


def noise(runs: Mapping[str, list[Run]]) -> str:
    """Return a sentence that says how much the step times of equal runs differ on this machine."""
    if len(runs["off"]) == 1:
        return "One pair: no measure of noise."
    walls = [[run.seconds.mean() for run in side] for side in runs.values()]
    processors = [[run.cpu.mean() for run in side] for side in runs.values()]
    wall, cpu = (max(max(side) / min(side) - 1 for side in times) for times in (walls, processors))
    return f"Runs of one variant differ by at most {wall:.1%} by the wall's clock, {cpu:.1%} by the processor's."


def attention_share(flops: np.ndarray, pairs: np.ndarray) -> float:
    """Return the share of attention in the model's FLOPs. All samples have the same number of tokens, so FLOPs are a
    linear function of attending pairs.
    """
    slope, _ = np.polyfit(pairs, flops, 1)
    return slope * pairs.sum() / flops.sum()


@click.command()
@click.option(
    "--steps", default=25, show_default=True, help=f"Train this many steps; the first {DROPPED} do not count."
)
@click.option("--pairs", default=2, show_default=True, help="Run both variants this many times.")
@click.option("--length", default=2048, show_default=True, help="Number of tokens in each sample.")
@click.option("--slots", default=6, show_default=True, help="Give each worker this many samples in a step.")
@click.option(
    "--keep", type=click.Path(path_type=Path, exists=True), help="Write corpus and runs to this empty folder."
)
def main(steps: int, pairs: int, length: int, slots: int, keep: Path | None) -> None:
    """Measure the time of a step without and with plugins/attention_balance."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = keep.absolute() if keep else Path(temporary)
        prefix = corpus(folder, length, steps * slots * 2)
        recipes = {name: folder / f"{name}.yaml" for name in VARIANTS}
        for name, path in recipes.items():
            path.write_text(yaml.safe_dump(recipe_of(name, prefix, length, slots, steps)))
        report(measure(folder, recipes, pairs), recipes["on"], prefix)


if __name__ == "__main__":
    main()
