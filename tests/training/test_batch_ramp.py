"""A batch that grows within a run, killed and resumed, against runs of one batch each that are joined by hand."""

import json

import pytest

from plugins.batch_ramp import reference
from plugins.sealed_checkpoint.plan import write_seal
from tests.training import forked, runs
from tools.recipe.dump import dump_recipe
from tools.recipe.load import load_recipe
from tools.runs.goodput import ledger
from tools.runs.readings import load_run

pytestmark = pytest.mark.slow
RAMP = runs.HERE / "tiny_ramp.yaml"
STAGES, FULL, SAMPLES = [(4, 2)], 4, 24


def lines(run_dir):
    """The steps in the order in which they were written, without their numbers, which a hand-made start mixes up."""
    written = map(json.loads, (run_dir / "metrics" / "rank_0.jsonl").read_text().splitlines())
    return [record for record in written if "step" in record]


def of_one_batch(workers, folder, corpus, batch, samples, skip=0, resume=None):
    """The steps of a run whose batch does not grow, from a checkpoint of a run of another batch.

    The checkpoint is told that its batch was this one, so that MindFormers does not scale the optimizer's steps; its
    own key `data_skip_steps` then skips the samples that were trained.
    """
    flat = load_recipe(RAMP)
    flat["plugins"]["batch_ramp"] = False
    flat["runner_config"]["batch_size"] = flat["model"]["model_config"]["batch_size"] = batch
    flat["train_dataset"]["data_loader"]["sizes"] = [samples, 0, 0]
    if skip:
        flat["data_skip_steps"] = skip
    dump_recipe(flat, folder / f"batch_{batch}.yaml")
    if resume:
        common = resume / "common.json"
        common.write_text(json.dumps({**json.loads(common.read_text()), "global_batch_size": batch}))
        write_seal(resume, 0, world_size=1, step=4)
    forked.train(workers, folder / f"batch_{batch}.yaml", folder / f"run_{batch}", corpus, resume=resume)
    return lines(folder / f"run_{batch}")


def test_a_killed_ramp_equals_runs_joined_by_hand(workers, corpus, tmp_path):
    """Killed in the save of its last step, it goes on within its second stage."""
    grown = tmp_path / "run"
    text = runs.train(RAMP, grown, corpus, "--restarts", "1", **runs.dying(TC3_TEST_KILL="0:8"))
    assert "attempt 1 goes on from step 6" in text
    steps = [record for _, record in sorted(runs.steps(grown).items())]
    first = of_one_batch(workers, tmp_path, corpus, 2, 8)
    saved = tmp_path / "run_2" / "checkpoint" / "iteration_00000004"
    by_hand = first + of_one_batch(workers, tmp_path, corpus, FULL, SAMPLES, skip=2, resume=saved)
    assert len(steps) == len(by_hand) == 8
    for number, (one, other) in enumerate(zip(steps, by_hand, strict=True), 1):
        runs.same(one, {**other, "step": number})
        assert one["samples"] == other["samples"] and one["learning_rate"] == other["learning_rate"]

    plan = reference.batches(STAGES, FULL, SAMPLES)
    assert [record["tokens"] for record in steps] == [64 * len(step) for step in plan]
    seen = [sample for record in steps for sample in record["samples"]["input_ids"]]
    assert len(seen) == len(set(seen)) == SAMPLES, "each sample once"
    parts = [(part.start_step, len(part)) for part in load_run(grown).parts]
    assert parts == [(0, 4), (4, 4), (6, 2)], "each stage is a part, because its first step compiles"
    found = ledger(load_run(grown))
    assert (found.kept_steps, found.lost_steps) == (8, 2)
