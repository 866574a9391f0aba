"""Muon in MindSpore's sharded graph: its steps are those of a NumPy reference, a killed run goes on to the same bits,
and other layouts go on with its state.

`tc3 accuracy equivalence tests/training/tiny_muon.yaml` compares further layouts (docs/muon.md).
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from plugins.sealed_checkpoint.router_state import orthogonal
from plugins.step_record.plan import record_file
from tests.tools.accuracy.reference.muon import Muon, Parts, adamw, clip_logits, update
from tests.training import forked, runs
from tests.training.conftest import shared
from tests.training.test_other_layout import saved
from tools.accuracy.diagnose.differences import diagnose
from tools.accuracy.diagnose.evidence import read_side
from tools.accuracy.diagnose.laws import module_of
from tools.accuracy.equivalence.sharding import UNROUNDED_MUON
from tools.checkpoint.stored import moments_of, read_whole
from tools.recipe.dump import dump_recipe
from tools.recipe.load import load_recipe

pytestmark = pytest.mark.slow
RECIPE = runs.HERE / "sharded_muon.yaml"
LOGITS = "self_attention.core_attention.max_logits_val"


@pytest.fixture(scope="session")
def one_process(corpus, tmp_path_factory):
    """Six steps on one process, killed in the save of the last and gone on with from the third with the graph that it
    had compiled: all that is compared with it holds of a resumed run. What it had computed and saved before the kill,
    and what its resume printed, is beside it.
    """

    def make(folder):
        run_dir, graph = folder / "run", runs.compiled_once(folder / "graph")
        recorded = "--set", "plugins.step_record.steps=6"
        hook = runs.dying(TC3_TEST_KILL="0:12") | graph  # the last file of the last checkpoint: two files each
        (folder / "killed.txt").write_text(runs.train(RECIPE, run_dir, corpus, *recorded, expect=1, **hook))
        (folder / "killed.json").write_text(json.dumps(list(runs.steps(run_dir).values())))
        for step in (4, 5):
            later = Path(saved(run_dir, step))
            shutil.move(later, folder / "killed" / later.relative_to(run_dir))
        text = runs.train(RECIPE, run_dir, corpus, *recorded, "--resume", "auto", **graph)
        (folder / "resumed.txt").write_text(text)

    return shared(tmp_path_factory, "sharded_muon", make) / "run"


def state(run_dir, step):
    return read_whole(run_dir / "checkpoint" / f"iteration_{step:08d}").arrays


def expected(name, before, after, step, rate, parts, muon):
    """A weight after a step, by the reference: from the state before it and the gradient that the moments tell."""
    held = moments_of({"type": "Muon"}, name, before[name].ndim)
    old, new = ([side[each] for each in held] for side in (before, after))
    if not orthogonal(name, before[name].ndim):
        return adamw(before[name], old, (new[0] - muon.adamw_betas[0] * old[0]) / (1 - muon.adamw_betas[0]), rate,
                     step, muon)[0]  # fmt: skip
    found, moment = update(name, before[name], old[0], new[0] - np.float32(muon.momentum) * old[0], rate, parts, muon)
    np.testing.assert_allclose(moment, new[0], atol=1e-7)
    layer = name.split(".self_attention.")[0]
    return clip_logits(name, found, after[f"{layer}.{LOGITS}"], parts, 0.1) if ".self_attention." in name else found


def errors(name, got, want, before, parts):
    """Error of a step relative to it; of experts the one of each, as each is made orthogonal by itself."""
    wrong, moved = got - want, got - before
    if ".experts." in name:
        wrong, moved = (each.reshape(parts.experts, -1) for each in (wrong, moved))
        return np.linalg.norm(wrong, axis=1) / np.linalg.norm(moved, axis=1)
    return np.array([np.linalg.norm(wrong) / np.linalg.norm(moved)])


def test_each_step_is_the_references(one_process):
    """A gradient that is told by two moments errs in its last bits. Where that turns the rounding of a number to
    bfloat16, Newton-Schulz makes a matrix's step differ, here by up to 24 %; a matrix without such a number is exact.
    """
    recipe, rates = load_recipe(RECIPE), {step: each["learning_rate"] for step, each in runs.steps(one_process).items()}
    parts, muon = Parts.of(recipe["model"]["model_config"]), Muon(adamw_betas=(0.9, 0.95))
    found, clipped = {}, 0
    for step in range(2, 7):
        before, after = state(one_process, step - 1), state(one_process, step)
        for name in (name for name in before if f"muon_m.{name}" in before):
            want = expected(name, before, after, step, rates[step], parts, muon)
            found.setdefault(name, []).extend(errors(name, after[name], want, before[name], parts))
        clipped += sum(int((after[each] >= 0.1).sum()) for each in after if each.endswith(LOGITS))
    assert len(found) > 20 and clipped > 5
    for name, each in found.items():
        assert min(each) < 1e-3 and max(each) < (0.35 if orthogonal(name, before[name].ndim) else 1e-3), (name, each)


def test_a_diagnosis_knows_its_gradients_and_finds_a_wrong_one(one_process, tmp_path):
    """The global norm is that of the gradients which Muon's and AdamW's moments tell."""
    found = diagnose(read_side(one_process))
    assert not found.findings and {"gradients", "norm and clipping", "update"} <= set(found.compared), found
    spoilt = tmp_path / "run"
    shutil.copytree(one_process, spoilt, ignore=shutil.ignore_patterns("checkpoint"))
    file = record_file(spoilt, 0)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    weights = lines[3]["weights"]
    one, two, *_ = sorted(name for name in weights if orthogonal(name, weights[name]["dimensions"]))
    weights[one]["gradient"], weights[two]["gradient"] = weights[two]["gradient"], weights[one]["gradient"]
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    first = diagnose(read_side(one_process), read_side(spoilt)).findings[0]
    assert (first.step, first.stage, first.module) == (3, "gradients", module_of(one)) and one in first.detail, first
    weights[one]["gradient"], weights[two]["gradient"] = weights[two]["gradient"], weights[one]["gradient"]
    weights[one]["square"] *= 4
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    first = diagnose(read_side(one_process), read_side(spoilt)).findings[0]
    assert (first.stage, first.module) == ("update", module_of(one)) and "2 times" in first.detail, first
    weights[one]["gradient"] *= 4
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert diagnose(read_side(spoilt)).findings[0].stage == "norm and clipping"


def test_killed_in_a_save_it_comes_to_the_same_state_to_the_bit(one_process):
    """SIGKILL while the state of Muon of step 6 is written; the run goes on from step 3."""
    folder = one_process.parent
    assert "worker 0 was killed (SIGKILL)" in (folder / "killed.txt").read_text()
    resumed = (folder / "resumed.txt").read_text()
    assert "going on from step 3" in resumed and "compile cache: loads" in resumed
    before, after = json.loads((folder / "killed.json").read_text()), runs.steps(one_process)
    assert sorted(after) == [1, 2, 3, 4, 5, 6] and {4, 5} <= {record["step"] for record in before}
    for record in before:
        found, step = after[record["step"]], record["step"]
        assert (found["loss"], found["global_norm"]) == (record["loss"], record["global_norm"])
        assert step <= 3 or found["seconds"] != record["seconds"], f"step {step} is of the run before"
    for step in (4, 5):
        known, found = state(folder / "killed", step), state(one_process, step)
        assert known.keys() == found.keys()
        assert [name for name in known if known[name].tobytes() != found[name].tobytes()] == []


def test_two_stages_go_on_with_muons_state(one_process, workers, corpus, tmp_path):
    """The moment after a step is known to the rounding of a gradient, and a weight to that of bfloat16."""
    recipe = runs.HERE / "sharded_muon_pp2.yaml"
    forked.train(workers, recipe, tmp_path / "run", corpus, resume=saved(one_process, 3))
    before, after = runs.steps(one_process), runs.steps(tmp_path / "run", 1)
    assert sorted(after) == [4, 5, 6]
    for step, each in after.items():  # one step is the rounding of float32 away, then bfloat16 has its part
        assert each["loss"] == pytest.approx(before[step]["loss"], rel=1e-6 if step == 4 else 5e-4), step
    known, start, found = state(one_process, 4), state(one_process, 3), state(tmp_path / "run", 4)
    for name in _same_moments(known, found):
        moved = np.linalg.norm(known[name] - start[name])
        assert np.linalg.norm(found[name] - known[name]) < 0.35 * moved, name


def test_without_bfloat16_matrices_that_are_cut_over_two_axes_move_as_whole_ones(
    one_process, workers, corpus, tmp_path
):
    """Newton-Schulz in float32 on four ranks, against float64 in NumPy on whole matrices (docs/muon.md)."""
    recipe = load_recipe(runs.HERE / "sharded_muon_zero_tp2.yaml")
    recipe["callbacks"].append(dict(UNROUNDED_MUON))
    dump_recipe(recipe, tmp_path / "recipe.yaml")
    forked.train(workers, tmp_path / "recipe.yaml", tmp_path / "run", corpus, steps=4, resume=saved(one_process, 3),
                 REGISTER_PATH=str(runs.ROOT / "launch" / "workers"))  # fmt: skip
    (each,), rate = runs.steps(tmp_path / "run").values(), runs.steps(one_process)[4]["learning_rate"]
    assert each["loss"] == pytest.approx(runs.steps(one_process)[4]["loss"], rel=1e-6)
    known, start, found = state(one_process, 4), state(one_process, 3), state(tmp_path / "run", 4)
    found |= {name: known[name] for name in known if name.endswith(LOGITS)}  # of the same forward pass
    parts = Parts.of(recipe["model"]["model_config"])
    muon = Muon(adamw_betas=(0.9, 0.95), exact=True)
    for name in _same_moments(known, found):
        want = expected(name, start, found, 4, rate, parts, muon)
        assert max(errors(name, found[name], want, start[name], parts)) < 1e-3, name


def _same_moments(known, found):
    """The names of the weights, of which both sides have the same moments."""
    names = [name for name in found if f"muon_m.{name}" in found or f"adam_m.{name}" in found]
    for name in names:
        for each in moments_of({"type": "Muon"}, name, known[name].ndim):
            assert found[each] == pytest.approx(known[each], abs=2e-5 * np.abs(known[each]).max()), each
    return names
