"""Kill sharded runs on CPU, resume them, and compare what they compute to the last bit with runs that nobody killed.

    python benchmarks/sharded_resume.py [LAYOUT ...]

LAYOUT: tp2, pp2, zero, ep2 (tests/training/sharded_LAYOUT.yaml), by default all. Every process gets SIGKILL at once
after step 4 of 6; a checkpoint stands at step 3. Losses and norms of each step and each rank must be the same bits, and
so must every tensor of the last checkpoint. tests/training/test_sharded.py does this for tensor parallelism alone.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import click
import numpy as np
from safetensors.numpy import load_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.training import runs
from tests.training.conftest import prepare

LAYOUTS, STEPS, KILL = ("tp2", "pp2", "zero", "ep2"), 6, 4


def compare(whole: Path, resumed: Path) -> tuple[int, int]:
    """(records, tensors) that agree to the bit.

    Raises:
        AssertionError: one does not, or is not there.
    """
    ranks = sorted(path.stem for path in (whole / "metrics").glob("rank_*.jsonl"))
    records = 0
    for rank in (int(name.removeprefix("rank_")) for name in ranks):
        expected, found = runs.steps(whole, rank), runs.steps(resumed, rank)
        assert sorted(expected) == sorted(found) == list(range(1, STEPS + 1)), f"rank {rank}: steps {sorted(found)}"
        for step, record in expected.items():
            runs.same(found[step], record)
            records += 1
    tensors = 0
    files = sorted((whole / "checkpoint" / f"iteration_{STEPS:08d}").glob("*.safetensors"))
    assert files, "no checkpoint of the last step"
    for file in files:
        first, second = load_file(file), load_file(resumed / file.relative_to(whole))
        assert first.keys() == second.keys(), f"{file.name}: other tensors"
        for name in first:
            assert np.array_equal(first[name], second[name]), f"{file.name}: {name} differs"
            tensors += 1
    return records, tensors


@click.command()
@click.argument("layouts", nargs=-1, type=click.Choice(LAYOUTS))
def main(layouts: tuple[str, ...]) -> None:
    """Print what agrees, layout by layout; the exit code is 1 where something does not."""
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder))
        corpus = Path(folder) / "tiny"
        for layout in layouts or LAYOUTS:
            began = time.monotonic()
            recipe, whole, killed = (
                runs.HERE / f"sharded_{layout}.yaml",
                Path(folder, layout),
                Path(folder, f"{layout}_killed"),
            )
            runs.train(recipe, whole, corpus)
            runs.train_and_kill(recipe, killed, corpus, step=KILL)
            text = runs.train(recipe, killed, corpus, "--resume", "auto")
            assert "going on from step 3" in text, text[-1000:]
            try:
                records, tensors = compare(whole, killed)
                what = f"{records} records of steps and {tensors} tensors are the same bits"
            except AssertionError as error:
                what, wrong = f"DIFFERS: {error}", 1
            click.echo(
                f"{layout}: killed after step {KILL}, resumed from step 3: {what} ({time.monotonic() - began:.0f} s)"
            )
    raise SystemExit(wrong)


if __name__ == "__main__":
    main()
