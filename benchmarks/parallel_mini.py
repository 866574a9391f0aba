"""This program compares `tc3 train RECIPE --mini --parallel` with one process of the same graph.

    python benchmarks/parallel_mini.py RECIPE [--float32] [--steps 3] [--workers 4]
    python benchmarks/parallel_mini.py recipes/mini/pretrain_report.yaml --steps 20   # sharded for CPU: as it is
    python benchmarks/parallel_mini.py recipes/mini/pretrain_report.yaml --steps 12 --kill 5:30   # and once more

Both runs start from the same weights and take the same samples. One process has no pipeline and takes each micro-batch
of each data-parallel rank as a step of gradient accumulation, so that the auxiliary loss of experts, which MindFormers
takes by rank and micro-batch, is the same; with `plugins.group_aux_loss` a micro-batch of all ranks is one of these
steps. In one process nothing is recomputed, and plugins that dispatch, move experts or deal samples are off.
`--float32` computes in float32 on both sides, and dispatches with `alltoall`, because `alltoall_deredundency` rounds
the router's probabilities to bfloat16 (docs/stock-differences.md).

The program prints a line for each step: both losses and their difference, both global norms and their relative
difference. Then it prints how far apart the last checkpoints are: relative differences of weights and moments by L2
norm.

`--kill RANK:TENSOR` trains the several processes once more. All of these runs save in the middle and at the end. One
rank gets SIGKILL in a move of experts, before it writes its TENSOR-th tensor (7 a layer: two weights, two moments of
each, the placement). The run goes on with `--resume auto`: every step of every rank and every tensor of the last
checkpoint must have the bits of the run that nobody killed.
"""

from __future__ import annotations

import copy
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.sharded_resume import compare
from tests.training import runs
from tests.training.conftest import prepare
from tools.data.index import read_whole
from tools.experts.restore import restore_order
from tools.recipe.dump import dump_recipe
from tools.recipe.load import Recipe, load_recipe
from tools.recipe.mini import load_mini
from tools.recipe.view import View

# plugins that send tokens between ranks, move experts, deal samples, or only watch
OFF = (
    *("hierarchical_ep", "ep_overlap", "expert_balance", "attention_balance", "grouped_gradient"),
    *("held_out_loss", "spike_guard", "straggler_probe"),
)


def one_process(mini: dict[str, Any]) -> dict[str, Any]:
    """Return the recipe of one process that trains the same samples and steps as `mini`, a mini recipe with its
    parallel strategy.
    """
    one, view = copy.deepcopy(dict(mini)), View(Recipe(mini))
    together = view.dp if one.get("plugins", {}).get("group_aux_loss") else 1  # ranks whose samples are one batch here
    micro_steps = view.dp * one["parallel_config"]["micro_batch_num"] // together
    degrees = ("data_parallel", "model_parallel", "pipeline_stage", "context_parallel", "expert_parallel")
    one["parallel_config"].update(dict.fromkeys((*degrees, "micro_batch_num"), 1), use_seq_parallel=False)
    one["runner_config"].update(gradient_accumulation_steps=micro_steps, batch_size=view.batch * together)
    one["parallel"].update(enable_parallel_optimizer=False, enable_alltoall=False)
    one["parallel"]["dataset_strategy"] = [[1] * len(axes) for axes in one["parallel"]["dataset_strategy"]]
    for name in ("pipeline_config", "parallel_optimizer_config"):
        one["parallel"].pop(name, None)
    model = one["model"]["model_config"]
    model.update(pp_interleave_num=1, offset=0, npu_nums_per_device=1, batch_size=view.batch * together)
    one["recompute_config"].update(recompute=False, select_recompute=False)
    for name in OFF:
        one.get("plugins", {}).pop(name, None)
    for callback in one["callbacks"]:
        if "micro_batch_num" in callback:
            callback.update(micro_batch_num=1, gradient_accumulation_steps=micro_steps)
    return one


def sharded(recipe: Path, corpus: str, steps: int, workers: int) -> dict[str, Any]:
    """Return the recipe that several processes train: a sharded recipe for CPU itself, else the mini of `recipe`."""
    found: Recipe = load_recipe(recipe)
    if View(found).sharded_on_cpu:
        loader = found["train_dataset"]["data_loader"]
        loader["sizes"] = [steps * View(found).global_batch, 0, 0]
        read_whole(loader["config"], corpus)
    else:
        found = load_mini(recipe, corpus, steps, workers)
    if found.get("plugins", {}).get("held_out_loss"):  # it may well be the same text here
        found["plugins"]["held_out_loss"].update(data_path=corpus, every=steps)
    return dict(found)


def in_float32(mini: dict[str, Any]) -> None:
    """Change a mini recipe in place so that it computes in float32 throughout."""
    model = mini["model"]["model_config"]
    types = ("compute_dtype", "params_dtype", "layernorm_compute_dtype", "softmax_compute_dtype", "rotary_dtype")
    model.update(dict.fromkeys((*types, "router_dense_type"), "float32"), moe_token_dispatcher_type="alltoall")


def train(recipe: dict[str, Any], folder: Path, name: str, kill: str = "") -> Path:
    """Train a run to its end and return its folder; with `kill` (RANK:TENSOR) the run is first killed in a move of
    experts and then resumed.
    """
    file, cache = folder / f"{name}.yaml", runs.compiled_once(folder / "graph")
    dump_recipe(Recipe(recipe), file)
    if kill:
        hook = runs.dying(TC3_TEST_KILL_MOVE=kill) | cache
        runs.train(file, folder / name, None, within=3600, expect=1, **hook)
        until, saved = max(runs.steps(folder / name)), runs.checkpoints(folder / name)
        click.echo(f"killed in a move after step {until}, {saved} saved; goes on with --resume auto")
    runs.train(file, folder / name, None, *(("--resume", "auto") if kill else ()), within=3600, **cache)
    return folder / name


def checked(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """Return the value of `--kill` if it has the form RANK:TENSOR; refuse it otherwise, because a worker would read it
    only in its first move.
    """
    if value is not None and not re.fullmatch(r"\d+:\d+", value):
        raise click.BadParameter(f"{value!r} is not RANK:TENSOR, two whole numbers such as 5:30")
    return value


@click.command()
@click.argument("recipe", type=click.Path(path_type=Path, exists=True))
@click.option("--float32", is_flag=True, help="Compute in float32, and dispatch by alltoall.")
@click.option("--steps", default=3, type=click.IntRange(min=2), show_default=True)
@click.option("--data", type=click.Path(), help="Train on this Megatron prefix instead of a small made-up corpus.")
@click.option("--workers", default=4, type=click.IntRange(min=2), show_default=True)
@click.option(
    "--kill",
    metavar="RANK:TENSOR",
    callback=checked,
    help="Train once more, with a kill in a move of experts and a resume.",
)
def main(recipe: Path, float32: bool, steps: int, data: str | None, workers: int, kill: str | None) -> None:
    """Train both, print what sets them apart."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        if data is None:
            prepare(folder)
        corpus = str(Path(data).absolute()) if data else str(folder / "tiny")
        mini: dict[str, Any] = sharded(recipe, corpus, steps, workers)
        if float32:
            in_float32(mini)
        if kill:
            mini["checkpoint"]["save_interleaved_steps"] = steps // 2
        one, many = (train(each, folder, name) for each, name in ((one_process(mini), "one"), (mini, "many")))
        expected, got = runs.steps(one), runs.steps(many, View(Recipe(mini)).devices - 1)  # the last stage has the loss
        click.echo(
            "| step | loss, one process | apart | of the language model | global norm | apart (relative) |\n"
            "|---|---|---|---|---|---|"
        )
        for step, record in expected.items():
            loss, norm = record["loss"], record["global_norm"]
            apart = abs(got[step]["loss"] - loss), abs(got[step]["global_norm"] / norm - 1)
            text = abs((got[step]["lm_loss"] or 0) - (record["lm_loss"] or 0))
            click.echo(f"| {step} | {loss:.7g} | {apart[0]:.1e} | {text:.1e} | {norm:.7g} | {apart[1]:.1e} |")
        if kill:
            records, tensors = compare(many, train(mini, folder, "killed", kill), last=steps)
            click.echo(f"{records} records of steps and {tensors} tensors of the resumed run are the same bits")
        ends = [run / "checkpoint" / f"iteration_{steps:08d}" for run in (one, many)]
        if mini["plugins"].get("expert_balance"):  # one process keeps every expert in its place
            moved, ends[1] = ends[1], folder / "in_order" / ends[1].name
            restore_order(moved, ends[1])
        click.echo("; ".join(f"{kind} {value:.1e}" for kind, value in runs.apart(*ends).items()))


if __name__ == "__main__":
    main()
