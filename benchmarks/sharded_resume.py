"""This program kills sharded runs on CPU and resumes them, checks that the results are bit-identical, and continues
from one layout's checkpoint with another layout.

    python benchmarks/sharded_resume.py [LAYOUT ...]

LAYOUT: tp2, pp2, zero, ep2 (tests/training/sharded_LAYOUT.yaml), or moves (sharded_pp2_ep2.yaml, whose experts change
places after every second step), and what goes on from them; by default all, and from one process. All processes get
SIGKILL after step 4 of 6; the last checkpoint is that of step 3. Losses and norms of each step and each rank, and every
tensor of the last checkpoint, must be bit-identical. Checkpoints of one layout that go on as another (ACROSS) must
follow that layout's own run, losses to 1e-5 and global norms to 5e-5 relative; laid out anew by `tc3 weights reshard`
first, they must give the same bits as without (OFFLINE). With experts put back in order by `tc3 experts restore-order`,
they must follow a run whose experts never move (IN_ORDER). tests/training/test_sharded.py kills and resumes only tensor
parallelism.
"""

from __future__ import annotations

import sys
import tempfile
from functools import partial
from pathlib import Path

import click
import numpy as np
import yaml
from safetensors.numpy import load_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.training import runs
from tests.training.conftest import prepare
from tools.experts.restore import restore_order, target_of
from tools.recipe.load import load_recipe
from tools.weights.reshard import folder_in, reshard
from tools.weights.reshard_plan import plan_stored
from tools.weights.source import open_source

ALONE = "one"
MOVING, STAYING = "moves", "stays"  # with expert_balance: experts change places, or stay where they are found
LAYOUTS = ("tp2", "pp2", "zero", "ep2", MOVING)
FILES = {ALONE: "sharded", MOVING: "sharded_pp2_ep2", STAYING: "sharded_ep2"}
BALANCE = {MOVING: {"every": 2, "method": "random"}, STAYING: {"every": 0}}
# saved by, goes on as
ACROSS = ((ALONE, "tp2"), ("tp2", ALONE), ("pp2", "tp2"), ("zero", "pp2"), (MOVING, STAYING))
IN_ORDER = ((MOVING, ALONE), (MOVING, "pp2"))
OFFLINE = (("tp2", "pp2"),)
STEPS, KILL, SAVED = 6, 4, 3
LOSS, NORM = 1e-5, 5e-5  # absolute; relative


def compare(whole: Path, resumed: Path, first: int = 1, last: int = STEPS) -> tuple[int, int]:
    """Return how many records and tensors of two runs are bit-identical, from step `first` to step `last`.

    Raises:
        AssertionError: one does not, or is not there.
    """
    ranks = sorted(path.stem for path in (whole / "metrics").glob("rank_*.jsonl"))
    records = 0
    for rank in (int(name.removeprefix("rank_")) for name in ranks):
        expected, found = runs.steps(whole, rank), runs.steps(resumed, rank)
        assert sorted(expected) == sorted(found) == list(range(first, last + 1)), f"rank {rank}: steps {sorted(found)}"
        for step, record in expected.items():
            runs.same(found[step], record)
            records += 1
    tensors = 0
    files = sorted((whole / "checkpoint" / f"iteration_{last:08d}").glob("*.safetensors"))
    assert files, "no checkpoint of the last step"
    for file in files:
        one, other = load_file(file), load_file(resumed / file.relative_to(whole))
        assert one.keys() == other.keys(), f"{file.name}: only one has {sorted(one.keys() ^ other.keys())}"
        for name in one:
            assert np.array_equal(one[name], other[name]), f"{file.name}: {name} differs"
            tensors += 1
    return records, tensors


class Runs:
    """A `Runs` holds runs that are not killed; the run of each layout is trained only once.

    Args:
        folder: the folder for the runs and for their corpus.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        prepare(folder)
        self.corpus = folder / "tiny"

    def recipe(self, layout: str) -> Path:
        """Return the recipe file of a layout; the layout ALONE is one process."""
        file = runs.HERE / f"{FILES.get(layout, f'sharded_{layout}')}.yaml"
        if layout not in BALANCE:
            return file
        recipe = self.folder / f"{layout}.yaml"
        plugins = {"expert_balance": BALANCE[layout]}
        recipe.write_text(yaml.safe_dump({"base_config": str(file), "plugins": plugins}))
        return recipe

    def whole(self, layout: str) -> Path:
        """Return the folder of a layout's run that is trained to its end without a kill."""
        folder = self.folder / layout
        if not folder.exists():
            runs.train(self.recipe(layout), folder, self.corpus)
        return folder

    def killed(self, layout: str) -> str:
        """Return a text that says how many records and tensors of a killed and resumed run equal those of the
        uninterrupted run.
        """
        whole, folder = self.whole(layout), self.folder / f"{layout}_killed"
        runs.train_and_kill(self.recipe(layout), folder, self.corpus, step=KILL)
        self._resume(layout, folder, "auto")
        records, tensors = compare(whole, folder)
        return f"{records} records of steps and {tensors} tensors are the same bits"

    def across(self, saved: str, layout: str) -> str:
        """Return a text that says how far a run that continues from another layout's checkpoint is from this layout's
        own run.
        """
        return self._follows(layout, f"{saved}_as_{layout}", self._saved(saved))

    def in_order(self, saved: str, layout: str) -> str:
        """Return a text that says how far a run is from this layout's own run if it continues from another layout's
        checkpoint whose experts were put back in order.
        """
        restored = target_of(self._saved(saved))
        if not restored.exists():
            restore_order(self._saved(saved), restored)
        return self._follows(layout, f"{saved}_in_order_as_{layout}", restored)

    def _saved(self, layout: str) -> Path:
        return self.whole(layout) / "checkpoint" / f"iteration_{SAVED:08d}"

    def _follows(self, layout: str, name: str, checkpoint: Path) -> str:
        folder = self.folder / name
        self._resume(layout, folder, str(checkpoint))
        rank = int(layout == "pp2")  # of a pipeline, the last stage knows the loss
        expected, found = runs.steps(self.whole(layout), rank), runs.steps(folder, rank)
        assert sorted(found) == list(range(SAVED + 1, STEPS + 1)), f"steps {sorted(found)}"
        loss = max(abs(record["loss"] - expected[step]["loss"]) for step, record in found.items())
        norm = max(abs(record["global_norm"] / expected[step]["global_norm"] - 1) for step, record in found.items())
        assert loss <= LOSS and norm <= NORM, f"loss {loss:.1e}, global norm {norm:.1e}"
        return f"loss {loss:.1e}, global norm {norm:.1e} (relative)"

    def offline(self, saved: str, layout: str) -> str:
        """Return a text that compares two runs that continue from another layout's checkpoint: one loads it directly,
        the other after `tc3 weights reshard`.
        """
        online, folder = self.folder / f"{saved}_as_{layout}", self.folder / f"{saved}_to_{layout}"
        checkpoint = self._saved(saved)
        if not online.exists():
            self._resume(layout, online, str(checkpoint))
        source = open_source(checkpoint)
        reshard(source, folder, plan_stored(source, load_recipe(self.recipe(layout))).plan)
        again = folder.with_name(f"{folder.name}_run")
        self._resume(layout, again, str(folder_in(folder, source)))
        records, tensors = compare(online, again, SAVED + 1)
        return f"{records} records of steps and {tensors} tensors are the same bits"

    def _resume(self, layout: str, folder: Path, checkpoint: str) -> None:
        runs.train(self.recipe(layout), folder, self.corpus, "--resume", checkpoint)


@click.command()
@click.argument("layouts", nargs=-1, type=click.Choice(LAYOUTS))
@click.option("--across/--no-across", default=True, help="Also resume checkpoints of one layout in another layout.")
def main(layouts: tuple[str, ...], across: bool) -> None:
    """Print what agrees, row by row; the exit code is 1 where something does not."""
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        every = Runs(Path(folder))
        rows = [(f"{name}: killed after step {KILL}", partial(every.killed, name)) for name in layouts or LAYOUTS]
        others = (
            (ACROSS, "gone on as", every.across),
            (IN_ORDER, "in order, gone on as", every.in_order),
            (OFFLINE, "laid out anew for", every.offline),
        )
        for pairs, words, follow in others if across else ():
            chosen = [(saved, name) for saved, name in pairs if not layouts or saved in layouts]
            rows += [(f"{saved}, {words} {name}", partial(follow, saved, name)) for saved, name in chosen]
        for name, try_it in rows:
            try:
                told = try_it()
            except AssertionError as error:
                told, wrong = f"DIFFERS: {error}", 1
            click.echo(f"{name}, resumed from step {SAVED}: {told}")
    raise SystemExit(wrong)


if __name__ == "__main__":
    main()
