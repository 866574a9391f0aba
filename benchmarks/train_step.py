"""This program compares the steps per second of the mini recipe with our grouped matmul in blocks and with one
block-diagonal matmul, in one run.

    python benchmarks/train_step.py [--steps 40] [--pairs 2]

Both variants train the same recipe through the same trainer, in turn (A B A B), and only the experts differ. The
baseline multiplies every token by every expert's weights, zeros included, which is the shortest form with operators
that MindSpore has on CPU. The results are ratios of times; absolute times depend on the machine. The program needs the
corpus of launch/quickstart.
"""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from statistics import median

import click
import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
RECIPE = ROOT / "recipes" / "mini" / "pretrain.yaml"
VARIANTS = ("blocks", "block-diagonal")
# part of a step -> what the names of its operators hold; the first match counts
PARTS = {
    "losses and output layers": ("CrossEntropyLoss", "output_layer"),
    "core attention": ("core_attention", "SoftmaxBackward"),
    "attention projections and norms": ("self_attention", "layernorm"),
    "routed experts": ("GroupedExperts", "experts-"),
    "router": ("router",),
    "AdamW and gradient norm": ("optimizer", "ClipGradNorm"),
    "embedding": ("embedding",),
    "matmul gradients (no module named)": ("Grad_MatMul", "Grad_BatchMatMul"),
    "sums, means, divisions (no module named)": ("Expand/",),
}


def block_diagonal_experts():
    """Return a class of `GroupedExperts` that multiplies every token by the weights of all experts."""
    import mindspore as ms
    from mindspore import Tensor, ops

    from plugins.cpu_backend import layers as experts

    class BlockDiagonalExperts(experts.GroupedExperts):
        def experts_forward(self, permuted_local_hidden_states, tokens_per_expert, w1, w2):
            x = ops.reshape(permuted_local_hidden_states, (-1, self.hidden_size))
            count = w1.shape[0]
            position = Tensor(np.arange(x.shape[0]).reshape(-1, 1), ms.int32)
            after = ops.cast(position >= ops.reshape(tokens_per_expert, (1, -1)), ms.float32)
            expert = ops.cast(ops.reduce_sum(after, 1), ms.int32)
            one_hot = ops.one_hot(expert, count, Tensor(1.0, ms.float32), Tensor(0.0, ms.float32))
            select = ops.expand_dims(one_hot, -1)
            wide = ops.reshape(select * ops.expand_dims(x, 1), (x.shape[0], -1))
            gate, up = ops.chunk(ops.matmul(wide, ops.reshape(w1, (-1, w1.shape[2]))), 2, -1)
            hidden = gate * ops.sigmoid(gate) * up
            wide = ops.reshape(select * ops.expand_dims(hidden, 1), (x.shape[0], -1))
            return ops.matmul(wide, ops.reshape(w2, (-1, w2.shape[2])))

    return BlockDiagonalExperts


def train_variant(variant: str, steps: int, run_dir: Path, profile: bool) -> None:
    """Train one run of a variant in this process."""
    from launch.train import build_config, train

    samples = f"train_dataset.data_loader.sizes.0={steps * 8}"
    recipe = build_config(RECIPE, (samples, "checkpoint.save_interleaved_steps=100000"), run_dir, None)
    recipe["plugins"] = {}
    if variant == "block-diagonal":
        from plugins.cpu_backend import adapter as compat

        compat.before_mindformers(distributed=False)
        from plugins.cpu_backend import model

        model.GroupedExperts = block_diagonal_experts()
    if not profile:
        train(recipe)
        return
    import mindspore as ms

    ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
    profiler = ms.Profiler(output_path=str(run_dir / "profile"))
    train(recipe)
    profiler.analyse()


def run(variant: str, steps: int) -> tuple[float, float, float]:
    """Return the seconds of the first step, the median seconds of the later steps and the final loss of one run in a
    separate process.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--worker", variant, "--steps", str(steps), "--run-dir", folder]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            raise click.ClickException(f"{variant}: {(done.stdout + done.stderr)[-1500:]}")
        lines = (Path(folder) / "metrics" / "rank_0.jsonl").read_text().splitlines()
    records = [record for record in map(json.loads, lines) if "step" in record]
    return records[0]["seconds"], median(r["seconds"] for r in records[2:]), records[-1]["loss"]


def where_the_time_goes(steps: int) -> dict[str, float]:
    """Return part of the model -> its share of all operator time, by MindSpore's profiler in a separate run."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--worker", "blocks", "--profile", "--steps", str(steps)]
        subprocess.run([*command, "--run-dir", folder], cwd=ROOT, capture_output=True, check=True)
        (table,) = Path(folder).glob("profile/**/cpu_op_detail_info_0.csv")
        rows = list(csv.DictReader(table.read_text().splitlines()))
    shares: Counter[str] = Counter()
    for row in rows:
        name = row["full_op_name"]
        part = next((part for part, marks in PARTS.items() if any(mark in name for mark in marks)), "all else")
        shares[part] += float(row["op_total_time(ms)"])
    total = sum(shares.values())
    return {part: time / total for part, time in shares.most_common()}


@click.command()
@click.option("--steps", default=40, show_default=True, help="Train this many steps in each run.")
@click.option("--pairs", default=2, show_default=True, help="Run both variants this many times.")
@click.option("--worker", type=click.Choice(VARIANTS), hidden=True)
@click.option("--profile", is_flag=True, hidden=True)
@click.option("--run-dir", type=click.Path(path_type=Path), hidden=True)
def main(steps: int, pairs: int, worker: str | None, profile: bool, run_dir: Path) -> None:
    """Print times, their ratio, and where a step's time goes."""
    if worker:
        train_variant(worker, steps, run_dir, profile)
        return
    if not (ROOT / "output/data/stdlib.idx").exists():
        raise click.ClickException("the corpus is missing: tc3 data prepare --input stdlib --output output/data/stdlib")
    results: dict[str, list[tuple[float, float, float]]] = {name: [] for name in VARIANTS}
    for pair in range(pairs):
        for name in VARIANTS:
            click.echo(f"run {pair + 1} of {pairs}: {name}", err=True)
            results[name].append(run(name, steps))
    for name, runs in results.items():
        first, step, loss = (median(column) for column in zip(*runs, strict=True))
        click.echo(
            f"{name:15} first step (compiles) {first:5.1f} s, then {1 / step:5.2f} steps/s, final loss {loss:.4f}"
        )
    ratios = [slow[1] / fast[1] for fast, slow in zip(*results.values(), strict=True)]
    click.echo(f"block-diagonal / blocks, time of a step, pair by pair: {', '.join(f'{r:.2f}' for r in ratios)}")
    click.echo("operator time of a step with blocks (profiled run):")
    for part, share in where_the_time_goes(steps).items():
        click.echo(f"  {part:42} {share:5.1%}")


if __name__ == "__main__":
    main()
