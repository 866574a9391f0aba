"""This program kills a run whose batch grows from 8 to 16 to 32 samples at random moments, resumes it, and checks that
each sample is trained once, with bit-identical results.

    python -m benchmarks.ramp_kills [--kills 10] [--seed 0] [--work FOLDER]

The program trains 60 steps of tests/training/tiny_ramp.yaml on one CPU process, 20 steps with each batch size, and
saves after each second step. All processes get SIGKILL at a random moment after each of the drawn steps, possibly
within a save; `tc3 train --resume auto` then continues the run. What the killed run has recorded is compared with a run
that nobody kills, and with three runs of one batch each, which are joined by hand. pytest
tests/training/test_batch_ramp.py does the same with one kill.
"""

from __future__ import annotations

import json
import random
import tempfile
import time
from pathlib import Path

import click

from plugins.batch_ramp import reference
from plugins.sealed_checkpoint.plan import write_seal
from tests.forks import Forks, start_server
from tests.training import forked, runs
from tests.training.conftest import prepare
from tests.training.test_batch_ramp import RAMP, lines
from tools.recipe.dump import dump_recipe
from tools.recipe.load import load_recipe

BATCHES, EACH = (8, 16, 32), 20  # samples of a step; steps of each batch
STEPS = EACH * len(BATCHES)
STAGES = [(EACH * number, batch) for number, batch in enumerate(BATCHES[:-1], 1)]  # last step, batch
SAMPLES = EACH * sum(BATCHES)


def recipe_of(folder: Path, batch: int, samples: int, ramp: bool) -> Path:
    """Write a recipe that trains `samples` samples, and return its file; `batch` is its global batch, with `ramp` only
    after the last stage.
    """
    flat = load_recipe(RAMP)
    flat["plugins"]["batch_ramp"] = {"stages": [list(stage) for stage in STAGES]} if ramp else False
    flat["runner_config"]["batch_size"] = flat["model"]["model_config"]["batch_size"] = batch
    flat["train_dataset"]["data_loader"]["sizes"] = [samples, 0, 0]
    flat["lr_schedule"]["total_steps"] = STEPS
    file = folder / f"{'ramp' if ramp else batch}.yaml"
    dump_recipe(flat, file)
    return file


def joined(folder: Path, corpus: Path) -> list[dict]:
    """Train each batch size in a separate run that continues from the checkpoint of the run before; return the records
    of all steps.

    The checkpoint is told that all samples so far were trained with the next batch, so that MindFormers skips them and
    does not scale the optimizer's steps.
    """
    records, done = [], 0
    end = start_server()
    workers = Forks(folder, first="")
    for stage, batch in enumerate(BATCHES):
        recipe, run, resume = recipe_of(folder, batch, done + EACH * batch, ramp=False), folder / f"{batch}", None
        if stage:
            before, last = BATCHES[stage - 1], done // BATCHES[stage - 1]
            resume = folder / f"{before}" / "checkpoint" / f"iteration_{last:08d}"
            common = json.loads((resume / "common.json").read_text())
            common |= {"global_batch_size": batch, "step_num": done // batch, "global_step": stage * EACH}
            (resume / "common.json").write_text(json.dumps(common))
            write_seal(resume, 0, world_size=1, step=last)
        forked.train(workers, recipe, run, corpus, resume=resume)
        records += lines(run)
        done += EACH * batch
    workers.close()
    end()
    return records


def killed(recipe: Path, run_dir: Path, corpus: Path, kills: list[int], rng: random.Random, **graph: str) -> list[str]:
    """Train a run that is killed after each step of `kills`, and return the steps from which its restarts continued, as
    the logs state them.
    """
    from_steps, resume = [], ()
    for step in kills:
        run = runs.start(recipe, run_dir, corpus, *resume, **graph)
        runs.wait_for_step(run, run_dir, step)
        time.sleep(rng.random() * 0.5)
        runs.kill_all(run_dir)
        text, _ = run.communicate(timeout=60)
        from_steps.append(_resumed(text))
        resume = ("--resume", "auto")
        print(
            f"killed behind step {step}; last whole checkpoint: step {(runs.checkpoints(run_dir) or [0])[-1]}",
            flush=True,
        )
    from_steps.append(_resumed(runs.train(recipe, run_dir, corpus, *resume, **graph)))
    return from_steps[1:]


def _resumed(text: str) -> str:
    """Return the step from which a run was resumed, by its log; unknown if the run was killed before it wrote this
    line.
    """
    words = text.partition("going on from step ")[2].split()
    return words[0].strip(".,:;") if words else "unknown (killed before it said so)"


def compare(found: list[dict], wanted: list[dict]) -> None:
    """Compare the records of two runs bit by bit in all values that training computes.

    Raises:
        AssertionError: they differ.
    """
    assert len(found) == len(wanted) == STEPS, (len(found), len(wanted))
    for number, (one, other) in enumerate(zip(found, wanted, strict=True), 1):
        runs.same(one, {**other, "step": number})
        assert one["samples"] == other["samples"] and one["learning_rate"] == other["learning_rate"], number


@click.command()
@click.option("--kills", default=10, show_default=True, help="Kill all processes this many times.")
@click.option("--seed", default=0, show_default=True, help="Draw the moments of the kills with this seed.")
@click.option("--work", type=click.Path(path_type=Path, file_okay=False), help="Keep the runs in this folder.")
def main(kills: int, seed: int, work: Path | None) -> None:
    """Compare the killed run with the others."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as temporary:
        folder = work or Path(temporary)
        (folder / "corpus").mkdir(parents=True)
        prepare(folder / "corpus", 1000)  # documents, for one epoch
        corpus, graph = folder / "corpus" / "tiny", runs.compiled_once(folder / "graph")
        recipe = recipe_of(folder, BATCHES[-1], SAMPLES, ramp=True)
        runs.train(recipe, folder / "whole", corpus, **graph)
        whole = [record for _, record in sorted(runs.steps(folder / "whole").items())]
        went_on = killed(recipe, folder / "killed", corpus, sorted(rng.sample(range(1, STEPS), kills)), rng, **graph)
        found = [record for _, record in sorted(runs.steps(folder / "killed").items())]
        compare(found, whole)
        compare(found, joined(folder, corpus))
        seen = [sample for record in found for sample in record["samples"]["input_ids"]]
        assert len(seen) == len(set(seen)) == SAMPLES, "each sample once"
        assert [len(record["samples"]["input_ids"]) for record in found] == [
            len(step) for step in reference.batches(STAGES, BATCHES[-1], SAMPLES)
        ]
    print(f"{kills} kills, seed {seed}: it went on from the steps {', '.join(went_on)}")
    print(f"{STEPS} steps and {SAMPLES:,} samples as without a kill, and as three runs joined by hand, to the bit")


if __name__ == "__main__":
    main()
