"""This program compares the buffers of routed tokens under a skewed router, as predicted from recorded loads, with
those measured in four workers.

    python benchmarks/memory/dispatch.py [--steps 6] [--bias 0.1]

Trains recipes/mini/pretrain_ep4.yaml through MindSpore's sharded graph on four CPU workers, with MindFormers' own
`alltoall` dispatch, twice: with even loads (`moe_router_force_expert_balance`), and with a router whose biases prefer
the experts of worker 0 from the first step on. Every AlltoAllV of the graph notes the arrays that its kernel reads and
fills (`dispatch_recorder`). On this path a kernel's arrays have as many rows as tokens that travel, no more.

The program compares for every step, MoE layer and worker the bytes of both arrays with those that
`tools.estimate.memory.activations.buffers` gives for the worker's recorded load, byte for byte. Padding is off
(`use_pad_tokens`): the estimator does not count MindFormers' padding, n_routed_experts x num_experts_per_tok rows in
each array.

Then the program prints the ratio of seconds with skewed loads to seconds with even loads, beside the ratio of loads
from which it follows. If four workers share two cores, no worker waits for the fullest worker, because it can use the
cores of the other workers. The program therefore measures processor time: that of the experts of the fullest worker
between its dispatch and its combine. The estimator's own ratio is for the default cluster, where a mini is bound by
launches; nothing here measures that.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import numpy as np
import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from plugins.expert_balance.plan import device_loads  # noqa: E402
from plugins.expert_balance.record import Record, load_file, read  # noqa: E402
from tests.training import runs  # noqa: E402
from tests.training.conftest import prepare  # noqa: E402
from tools.estimate.configuration import Configuration  # noqa: E402
from tools.estimate.efficiency import cluster  # noqa: E402
from tools.estimate.from_recipe import from_recipe  # noqa: E402
from tools.estimate.loads import Loads  # noqa: E402
from tools.estimate.memory.activations import buffers  # noqa: E402
from tools.estimate.time_model import TimeModel  # noqa: E402
from tools.hardware import DEFAULT_HARDWARE  # noqa: E402
from tools.recipe.load import load_recipe  # noqa: E402

RECIPE = ROOT / "recipes" / "mini" / "pretrain_ep4.yaml"
SHARDED: dict[str, Any] = {
    "base_config": str(RECIPE),
    "context": {"dataset_broadcast_opt_level": 0},
    "parallel": {"parallel_mode": 1, "gradients_mean": False},
    "plugins": {"hierarchical_ep": False, "held_out_loss": False, "expert_balance": {"every": 0}},
}
BIASES = "callbacks.1.topk_bias_update_rate=0.0"  # the callback's copy of the recipe's rate
FORWARD = BACKWARD = 2  # exchanges of rows in a layer's pass: dispatch and combine
WARM = 2  # steps that are left out of the seconds


@dataclass(frozen=True)
class Call:
    """A `Call` is one execution of AlltoAllV: elements of a row, bytes that its kernel reads and fills, and the
    worker's processor seconds at its end.
    """

    row: int
    read: int
    filled: int
    processor: float


def calls_of(file: Path, hidden: int) -> list[Call]:
    """Return the exchanges of token rows in a file, in order, without the exchanges of row counts."""
    found = (Call(**json.loads(line)) for line in file.read_text("utf-8").splitlines())
    return [call for call in found if call.row == hidden]


def by_layer(calls: Sequence[Call], steps: int, layers: int) -> np.ndarray:
    """Return the calls of a worker as objects [steps, layers, 4]: dispatch and combine forward, then both backward.

    Layers run in their order forward and in the reverse order backward.

    Raises:
        ValueError: there are not as many calls as the layers and steps make.
    """
    each = FORWARD + BACKWARD
    if len(calls) != steps * layers * each:
        raise ValueError(f"{len(calls)} exchanges of rows, but {steps} steps of {layers} layers make {each} each")
    found = np.empty(len(calls), object)
    found[:] = calls
    forward, backward = np.split(found.reshape(steps, -1), [FORWARD * layers], axis=1)
    there, back = forward.reshape(steps, layers, FORWARD), backward.reshape(steps, layers, BACKWARD)[:, ::-1]
    return np.concatenate([there, back], axis=2)


def measured(workers: Sequence[Sequence[Call]], steps: int, layers: int) -> np.ndarray:
    """Return the bytes that the largest exchange of each worker reads and fills, int64 [steps, layers, workers]."""
    size = np.vectorize(lambda call: call.read + call.filled, otypes=[np.int64])
    return np.stack([size(by_layer(calls, steps, layers)).max(axis=2) for calls in workers], axis=2)


def shares(records: Sequence[Record]) -> np.ndarray:
    """Return [steps, layers, devices], the recorded loads of the devices over their mean."""
    on = np.stack([device_loads(record.tokens, record.slots, record.devices) for record in records])
    return on / on.mean(axis=-1, keepdims=True)


def predicted(config: Configuration, records: Sequence[Record]) -> np.ndarray:
    """Return int64 [steps, layers, devices], the bytes that the estimator gives for the recorded loads."""
    of = np.vectorize(lambda share: round(buffers(replace(config, skew=float(share)), "moe")), otypes=[np.int64])
    return of(shares(records))


def expert_seconds(calls: Sequence[Call], steps: int, layers: int) -> np.ndarray:
    """Return [steps, layers] processor seconds of a worker from the end of its dispatch to that of its combine."""
    at = np.vectorize(lambda call: call.processor, otypes=[float])(by_layer(calls, steps, layers))
    return at[:, :, 1] - at[:, :, 0]


def train(folder: Path, name: str, steps: int, bias: float | None) -> tuple[Configuration, list[Record], list]:
    """Train a run; return the configuration that the estimator reads from its recipe, the records of its loads, and the
    exchanges of each worker.
    """
    recipe = json.loads(json.dumps(SHARDED))
    recipe["model"] = {"model_config": {"use_pad_tokens": False, "moe_router_bias_update_rate": 0.0}}
    recipe["model"]["model_config"]["moe_router_force_expert_balance"] = bias is None
    file, told = folder / f"{name}.yaml", folder / f"{name}_calls"
    file.write_text(yaml.safe_dump(recipe))
    told.mkdir()
    config = from_recipe(load_recipe(file))
    hook = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent / "dispatch_recorder"), str(ROOT)])}
    hook["TC3_BENCH_DISPATCH"] = str(told)
    if bias is not None:
        hook["TC3_BENCH_BIAS"] = f"{config.model.experts // config.ep}:{bias}"
    more = ("--steps", str(steps), "--set", BIASES)
    runs.train(file, folder / name, str(folder / "tiny"), *more, within=3600, **hook)
    files = [told / f"{rank}.jsonl" for rank in range(config.ep)]
    return config, read(load_file(folder / name)), [calls_of(one, config.model.hidden) for one in files]


def step_seconds(run: Path, workers: int) -> float:
    """Return the median over steps of the seconds of the slowest worker."""
    ranks = [runs.steps(run, rank) for rank in range(workers)]
    return float(np.median([max(each[step]["seconds"] for each in ranks) for step in sorted(ranks[0])[WARM:]]))


@click.command()
@click.option("--steps", default=6, type=click.IntRange(min=WARM + 1), show_default=True)
@click.option(
    "--bias",
    default=0.1,
    show_default=True,
    help="Set the router biases of the experts of worker 0 to this when training begins.",
)
def main(steps: int, bias: float) -> None:
    """Print bytes of both runs, then seconds."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        prepare(folder)
        seconds, experts, loads = {}, {}, {}
        click.echo("| loads | max/mean, mean and worst | exchanges | apart | fullest, measured | predicted |")
        click.echo("|---|---|---|---|---|---|")
        for name, skewed in (("even", None), ("skewed", bias)):
            config, records, workers = train(folder, name, steps, skewed)
            layers = len(records[0].layers)
            got, expected, on = measured(workers, steps, layers), predicted(config, records), shares(records)
            ratios, apart = on.max(axis=2), int((got != expected).sum())
            text = f"{ratios.mean():.3f}, {ratios.max():.3f} | {4 * got.size} | {apart} of {got.size}"
            click.echo(f"| {name} | {text} | {got.max():,} | {expected.max():,} |")
            seconds[name] = step_seconds(folder / name, config.ep)
            spent = np.stack([expert_seconds(calls, steps, layers) for calls in workers], axis=2)
            experts[name] = float(np.median(np.take_along_axis(spent, on.argmax(axis=2)[..., None], axis=2)[WARM:]))
            loads[name] = Loads(on[:, None], tuple(record.step for record in records), name)
    times = TimeModel(cluster(DEFAULT_HARDWARE))
    model = times.under(config, loads["skewed"]).total / times.under(config, loads["even"]).total
    ratio = loads["skewed"].ratios[WARM:].mean() / loads["even"].ratios[WARM:].mean()
    click.echo(f"\nstep, skewed over even: {seconds['skewed'] / seconds['even']:.3f} in seconds of four workers here")
    click.echo(f"predicted by the time model on {DEFAULT_HARDWARE}, whose step of a mini is launches: {model:.3f}")
    told = f"{experts['skewed'] / experts['even']:.2f} in processor time, {ratio:.2f} by max/mean"
    click.echo(f"experts of the fullest worker, forward, skewed over even: {told}")


if __name__ == "__main__":
    main()
