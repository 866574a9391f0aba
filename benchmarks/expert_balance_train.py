"""This program trains whole runs of `tc3 train` with experts that move (plugins.expert_balance), and checks that the
losses stay the same.

    python benchmarks/expert_balance_train.py same [--steps 50] [--case global] ... [--spare 2]
    python benchmarks/expert_balance_train.py kill
    python benchmarks/expert_balance_train.py topic [--steps 120]

same: tests/training/tiny_ep4.yaml (four workers, two nodes of two) for `--steps` steps, without the plugin and with
experts shuffled every third step, in each mode of dispatch, in chunks and with recomputation: largest relative
differences of losses and norms. With `--spare N`, N slots of each worker hold copies of random experts as well; the
control then trains the first case with the copies' gradients left out.

kill: tests/training/tiny_ep2_balanced.yaml, which moves experts after steps 3, 6, 9 and 12 and saves after step 6, is
killed (SIGKILL) in the move of step 9 before the first tensor is written, after three of them, before the placement,
before its worker has the new copies, and after that move (before the first tensor of the next), and goes on with
`--resume auto`: how many of the steps are those of a run without a kill, bit for bit. And the control: what
`Parameter.set_data` would have done.

topic: two workers on text whose topic changes in the middle: the vocabulary's halves are the topics. max/mean of the
workers' tokens around the change, measured with experts that stay and experts that move, and seconds of a step.

Absolute times depend on the machine. The mean includes steps with a move.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import click
import numpy as np
import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from plugins.attention_balance.samples import build_gpt_index  # noqa: E402
from plugins.expert_balance.copies import NOTHING  # noqa: E402
from plugins.expert_balance.record import Record, load_file, read  # noqa: E402
from tests.training import runs  # noqa: E402
from tests.training.conftest import prepare  # noqa: E402
from tools.data.index import IndexWriter  # noqa: E402

EP2, EP4 = runs.HERE / "tiny_ep2.yaml", runs.HERE / "tiny_ep4.yaml"
BALANCED = runs.HERE / "tiny_ep2_balanced.yaml"
TENSORS = 7  # that a move writes of the one MoE layer: two weights, two moments of each, the placement
CASES = {
    "global": {"plugins": {"hierarchical_ep": {"mode": "global"}}},
    "hierarchical": {"plugins": {"hierarchical_ep": {"mode": "hierarchical"}}},
    "deduplicated": {"plugins": {"hierarchical_ep": {"mode": "deduplicated"}}},
    "chunks": {"plugins": {"hierarchical_ep": {"mode": "hierarchical"}, "ep_overlap": {"chunks": [1, 2], "stride": 2}}},
    "recomputation": {
        "plugins": {"hierarchical_ep": {"mode": "deduplicated"}},
        "recompute_config": {"recompute": True},
    },
}
STAY = {"every": 0}
UNTAMED = ("moe_router_bias_update_rate=0.0", "moe_aux_loss_coeff=0.0")
SHUFFLED = {"every": 3, "method": "random"}
POINTS = {  # in the third plan: the tensor of rank 1, or the copies, before which it dies; it has some from the start
    "before": {"TC3_TEST_KILL_MOVE": f"1:{2 * TENSORS + 1}"},
    "inside": {"TC3_TEST_KILL_MOVE": f"1:{2 * TENSORS + 4}"},
    "but-placement": {"TC3_TEST_KILL_MOVE": f"1:{3 * TENSORS}"},
    "copies": {"TC3_TEST_KILL_COPIES": "1:4"},
    "after": {"TC3_TEST_KILL_MOVE": f"1:{3 * TENSORS + 1}"},
}
KEYS = ("loss", "lm_loss", "load_balancing_loss", "global_norm")
LENGTH, VOCABULARY, BATCH, SEED = 64, 512, 4, 1234  # of tests/training/tiny.yaml


def train(
    folder: Path, name: str, base: Path, corpus: Path, steps: int, changes: dict, *model: str, **environment: str
) -> Path:
    """Train a run of the recipe `base` with changes, and return the run's folder; `model` holds KEY=VALUE settings of
    the model.
    """
    recipe = folder / f"{name}.yaml"
    recipe.write_text(yaml.safe_dump({**changes, "base_config": str(base)}))
    more = [word for setting in model for word in ("--set", f"model.model_config.{setting}")]
    runs.train(recipe, folder / name, corpus, "--steps", str(steps), *more, within=3600, **environment)
    return folder / name


def moved(run_dir: Path) -> tuple[int, int, float]:
    """Return the number of moves in a run, the mean number of experts of a move, and the mean seconds of a move."""
    found = [record.moved for record in read(load_file(run_dir)) if record.moved]
    experts, seconds = ([each.experts for each in found], [each.plan_s + each.move_s for each in found])
    return len(found), int(np.mean(experts)) if found else 0, float(np.mean(seconds)) if found else 0.0


@click.group()
def main() -> None:
    """Measure plugins.expert_balance in training."""


@main.command()
@click.option("--steps", default=50, show_default=True)
@click.option("--case", "cases", multiple=True, type=click.Choice(list(CASES)), help="Run only these; by default all.")
@click.option("--spare", default=0, show_default=True, help="Give each worker this many slots for copies.")
def same(steps: int, cases: tuple[str, ...], spare: int) -> None:
    """Compare the losses of runs whose experts are shuffled with those of runs whose experts stay."""
    heads = "case | steps | moves | experts in a move | copies | steps whose loss is bit-identical | losses | norms"
    click.echo(f"| {heads} |\n{'|---' * 8}|")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        prepare(folder)
        for case in cases or CASES:
            changes = CASES[case]
            stay = runs.steps(train(folder, f"{case}_stay", EP4, folder / "tiny", steps, changes))
            plugins = {**changes["plugins"], "expert_balance": {**SHUFFLED, "spare": spare}}
            changed = {**changes, "plugins": plugins}
            run = train(folder, f"{case}_move", EP4, folder / "tiny", steps, changed)
            move = runs.steps(run)
            equal = sum(stay[step]["loss"] == move[step]["loss"] for step in stay)
            times, experts, _ = moved(run)
            copies = np.mean([(record.held != NOTHING).sum() for record in read(load_file(run))[SHUFFLED["every"] :]])
            apart = f"{worst(stay, move, KEYS[:3])} | {worst(stay, move, KEYS[3:])}"
            click.echo(f"| {case} | {len(stay)} | {times} | {experts} of 16 | {copies:.1f} | {equal} | {apart} |")
            if spare and case == (*cases, *CASES)[0]:
                hook = runs.dying(TC3_TEST_DROP_COPIES="1")
                run = train(folder, "control", EP4, folder / "tiny", steps, changed, **hook)
                click.echo(f"| {case}, copies' gradients left out | | | | | | {worst(stay, runs.steps(run))} | |")


def worst(one: dict, two: dict, keys: tuple[str, ...] = KEYS) -> str:
    """Return the largest relative difference between the metrics of two runs, with its key and step."""
    differences = {(abs(one[s][key] - two[s][key]) / max(abs(one[s][key]), 1e-9), key, s) for s in one for key in keys}
    most, key, step = max(differences)
    return f"{most:.1e} ({key}, step {step})"


@main.command()
@click.option(
    "--point", "points", multiple=True, type=click.Choice(list(POINTS)), help="Run only these; by default all."
)
def kill(points: tuple[str, ...]) -> None:
    """Kill before, inside and after a move, and resume."""
    click.echo("| killed | steps on record | saved | steps that equal those of a run without a kill |")
    click.echo("|---|---|---|---|")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        prepare(folder)
        corpus = folder / "tiny"
        runs.train(BALANCED, folder / "whole", corpus, within=3600)
        whole, records = runs.steps(folder / "whole"), read(load_file(folder / "whole"))
        for point in points or POINTS:
            run = folder / point
            runs.train(BALANCED, run, corpus, expect=1, within=3600, **runs.dying(**POINTS[point]))
            until, saved = max(runs.steps(run)), runs.checkpoints(run)
            runs.train(BALANCED, run, corpus, "--resume", "auto", within=3600)
            again = runs.steps(run)
            equal = sum(all(again[s][key] == whole[s][key] for key in KEYS) for s in whole)
            placed = all(map(same_placements, records, read(load_file(run))))
            told = f"{equal} of {len(whole)}, placements {'equal' if placed else 'DIFFER'}"
            click.echo(f"| {point} | {until} | {saved} | {told} |")
        runs.train(BALANCED, folder / "wrong", corpus, **runs.dying(TC3_TEST_SET_DATA="1"))
        wrong = worst(whole, runs.steps(folder / "wrong"))
        click.echo(f"\nwritten by Parameter.set_data instead (wrong), losses differ by up to {wrong}")


def same_placements(one: Record, two: Record) -> bool:
    """Return whether the experts of two runs, and their copies, were in the same slots in a step."""
    return one.step == two.step and np.array_equal(one.slots, two.slots) and np.array_equal(one.held, two.held)


@main.command()
@click.option("--steps", default=120, show_default=True)
@click.option("--every", default=5, show_default=True)
@click.option("--untamed", is_flag=True, help="Switch off the router's own balancing: no auxiliary loss, no biases.")
def topic(steps: int, every: int, untamed: bool) -> None:
    """Print max/mean and step time of runs in which the topic of the text changes in the middle."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        corpus = two_topics(folder, steps)
        settings = {"stay": STAY, "move": {"every": every}}
        runs_by_name = {}
        for name, chosen in settings.items():
            changes = {"plugins": {"expert_balance": chosen}}
            runs_by_name[name] = train(folder, name, EP2, corpus, steps, changes, *(UNTAMED if untamed else ()))
        windows = {
            "before the change": range(steps // 4, steps // 2),
            "the eighth after it": range(steps // 2 + 1, steps // 2 + steps // 8 + 1),
            "the rest": range(steps // 2 + steps // 8 + 1, steps + 1),
        }
        click.echo(f"| experts | {' | '.join(f'max/mean {name}' for name in windows)} | s/step | cpu s/step | moves |")
        click.echo("|---" * (len(windows) + 4) + "|")
        for name, run in runs_by_name.items():
            ratios = {record.step: ratio(record) for record in read(load_file(run))}
            means = " | ".join(f"{np.mean([ratios[step] for step in window]):.3f}" for window in windows.values())
            times, experts, seconds = moved(run)
            what = f"{times} plans, {experts} experts and {seconds:.3f} s each" if times else "none"
            click.echo(
                f"| {name} | {means} | {seconds_of(run, 'seconds')} | {seconds_of(run, 'cpu_seconds')} | {what} |"
            )
        stay, move = (runs.steps(run) for run in runs_by_name.values())
        click.echo(f"\nlosses differ by at most {worst(stay, move)}")


def ratio(record: Record) -> float:
    """Return the max/mean of the devices' loads in a step, averaged over layers."""
    return float(np.mean(record.on_devices.max(1) / record.on_devices.mean(1)))


def seconds_of(run_dir: Path, key: str) -> str:
    """Return the median over steps of the slower worker's seconds, without the first three steps."""
    ranks = [runs.steps(run_dir, rank) for rank in (0, 1)]
    return f"{np.median([max(each[step][key] for each in ranks) for step in sorted(ranks[0])[3:]]):.3f}"


def two_topics(folder: Path, steps: int) -> Path:
    """Write a corpus with one document for each sample: the samples of the first half of the steps have one topic, all
    other samples the other topic.

    Returns its prefix.
    """
    wanted = steps * BATCH
    lengths = np.full(wanted + 1, LENGTH, np.int32)
    index = build_gpt_index(lengths, LENGTH, wanted, SEED)
    read_at = np.full(len(lengths), wanted)
    read_at[index.document_index[index.shuffle_index[:wanted]]] = np.arange(wanted)
    random, half = np.random.default_rng(SEED), VOCABULARY // 2
    after = random.integers(0, half, (half, 4))  # each token has four that may follow
    writer = IndexWriter(folder / "topics.bin", "int32")
    for item in read_at:
        ids = [int(random.integers(half))]
        for choice in random.integers(0, 4, LENGTH - 1):
            ids.append(int(after[ids[-1], choice]))
        writer.add(np.array([LENGTH], np.int32), np.array(ids, np.int32) + half * (item >= wanted // 2))
    writer.finish(folder / "topics.idx")
    return folder / "topics"


if __name__ == "__main__":
    main()
