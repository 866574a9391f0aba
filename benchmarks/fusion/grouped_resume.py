"""This program kills a run with the pass of `plugins.grouped_gradient` and resumes it; it compares the results bit by
bit with an unkilled run, and also with a run without the pass.

    python benchmarks/fusion/grouped_resume.py [RECIPE]

The run is a pipeline of two stages on CPU (tests/training/sharded_pp2.yaml) in bfloat16 with six steps.
grouped_on_cpu/sitecustomize.py puts the pass into the workers, because the recipe's section does nothing on a CPU. All
processes get SIGKILL after step 4; the last checkpoint is that of step 3. Losses and norms of each step and rank, and
every tensor of the last checkpoint, must be bit-identical. Losses without the pass differ only by the rounding of each
micro-batch's gradient: if a sum were read too early or set to zero too late, the losses would be far apart.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.sharded_resume import KILL, SAVED, STEPS, compare
from tests.training import runs
from tests.training.conftest import prepare
from tools.recipe.dump import dump_recipe
from tools.recipe.load import load_recipe
from tools.recipe.override import apply_overrides

LOW = "model.model_config.compute_dtype=bfloat16"
HOOK = os.pathsep.join([str(Path(__file__).with_name("grouped_on_cpu")), str(runs.ROOT)])


class Folder:
    """A `Folder` holds runs of one recipe with one corpus."""

    def __init__(self, folder: Path, recipe: Path):
        self.folder, self.recipe = folder, folder / "recipe.yaml"
        prepare(folder)
        dump_recipe(apply_overrides(load_recipe(recipe), (LOW,)), self.recipe)

    def environment(self, name: str, **more: str) -> dict[str, str]:
        """Return the environment variables of a run's workers."""
        count = self.folder / f"{name}_count"
        count.mkdir(exist_ok=True)
        return {"PYTHONPATH": HOOK, "TC3_COUNT": str(count), **more}

    def train(self, name: str, *more: str, **environment: str) -> Path:
        """Train a run to its end, and return its folder."""
        variables = self.environment(name, **environment)
        runs.train(self.recipe, self.folder / name, self.folder / "tiny", *more, within=1500, **variables)
        return self.folder / name

    def kill(self, name: str) -> None:
        """Train a run until step KILL is recorded, and kill its processes."""
        variables = self.environment(name)
        runs.train_and_kill(self.recipe, self.folder / name, self.folder / "tiny", KILL, **variables)

    def added(self, name: str) -> int:
        """Return how often the operator InplaceGroupedMatmulAdd ran in a run, over all ranks."""
        return sum(file.stat().st_size for file in (self.folder / f"{name}_count").iterdir())


def apart(one: Path, other: Path, key: str) -> list[float]:
    """Return for each step the relative difference between two runs of one metric of the last rank."""
    last = max(int(path.stem.removeprefix("rank_")) for path in (one / "metrics").glob("rank_*.jsonl"))
    found, known = runs.steps(one, last), runs.steps(other, last)
    return [abs(found[step][key] / known[step][key] - 1) for step in range(1, STEPS + 1)]


@click.command()
@click.argument("recipe", default=runs.HERE / "sharded_pp2.yaml", type=click.Path(exists=True, path_type=Path))
def main(recipe: Path) -> None:
    """Print what agrees; the exit code is 1 where something does not."""
    with tempfile.TemporaryDirectory() as folder:
        all_runs = Folder(Path(folder), recipe)
        whole = all_runs.train("whole")
        added = all_runs.added("whole")
        click.echo(f"with the pass: InplaceGroupedMatmulAdd ran {added} times in {STEPS} steps")
        if not added:
            raise SystemExit(1)
        plain = all_runs.train("plain", TC3_WITHOUT_PASS="1")
        click.echo(f"without: {all_runs.added('plain')} times")
        for key in ("loss", "global_norm"):
            words = ", ".join(f"{each:.1e}" for each in apart(whole, plain, key))
            click.echo(f"{key} of each step, apart from the run without (relative): {words}")
        all_runs.kill("killed")
        killed = all_runs.train("killed", "--resume", "auto")
        try:
            records, tensors = compare(whole, killed)
        except AssertionError as error:
            click.echo(f"killed after step {KILL}, resumed from step {SAVED}: DIFFERS: {error}")
            raise SystemExit(1) from None
        words = f"{records} records of steps and {tensors} tensors are the same bits"
        click.echo(f"killed after step {KILL}, resumed from step {SAVED}: {words}")


if __name__ == "__main__":
    main()
