"""Executed runs: what is read from their checkpoints, and the gates, on a run that the test writes itself."""

import json
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import save_file

from plugins.errors import CheckpointError, DataError
from plugins.step_record.plan import Adam
from tests.tools.checkpoint.saved import Saved
from tools.accuracy.equivalence import executed, matrix
from tools.accuracy.equivalence.executed import compare_executed
from tools.accuracy.equivalence.matrix import as_html
from tools.accuracy.equivalence.runs import RunFailedError, read_samples
from tools.accuracy.equivalence.sharding import Sharding
from tools.accuracy.equivalence.strategies import CASES
from tools.accuracy.equivalence.trained import finding_text

EMBEDDING, HEAD, ROUTER = "embedding.word_embeddings.weight", "output_layer.weight", "decoder.layers.1.mlp.router"
STEPS, WORKERS = 3, 2
TP2, MTP_PP2 = Sharding(tp=2, sp=True), next(case.sharding for case in CASES if case.sharding and case.sharding.known)
RECIPE = {
    "use_parallel": True,
    "parallel": {"parallel_mode": 1},
    "optimizer": {"betas": [0.9, 0.95]},
    "parallel_config": {"data_parallel": 1, "model_parallel": 2, "context_parallel": 1, "pipeline_stage": 1},
}
ALONE = {**RECIPE, "parallel_config": {**RECIPE["parallel_config"], "model_parallel": 1}}


def tensors(step):
    """Weights and moments after a step; the first step's learning rate is 0."""
    found, squares = {}, 0.0
    for seed, name in enumerate((EMBEDDING, HEAD, f"{ROUTER}.weight")):
        rng = np.random.default_rng(seed)
        weight = rng.standard_normal((8, 4)).astype(np.float32)
        first, second = np.zeros_like(weight), np.zeros_like(weight)
        for number in range(step):
            gradient = rng.standard_normal((8, 4)).astype(np.float32) / 100
            first = np.float32(0.9) * first + np.float32(0.1) * gradient
            second = np.float32(0.95) * second + np.float32(0.05) * gradient**2
            weight = weight - np.float32(0.01 * bool(number)) * first
        squares += float(np.square(gradient).sum())
        found |= {name: weight, f"adam_m.{name}": first, f"adam_v.{name}": second}
    return found, squares**0.5


def write(folder, workers, spoil=None):
    """A run of one process, or of two that split the embedding and copy the rest; `spoil(step, saved, metrics)`."""
    metrics = []
    for step in range(1, STEPS + 1):
        arrays, norm = tensors(step)
        bias = np.float32([0.001, -0.001, 0.001, 0]) * step
        metrics.append(
            {"step": step, "loss": 7.0 - step, "lm_loss": 6.0, "load_balancing_loss": None, "mtp_loss": None}
        )
        metrics[-1] |= {"tokens": 64, "learning_rate": 0.01 * (step > 1), "global_norm": 5 * norm}
        saved = Saved(folder / "checkpoint" / f"iteration_{step:08d}", workers)
        for name, array in arrays.items():
            kind = "opt" if name.startswith("adam") else "model"
            cuts, ranks = ((2, 1), [[0], [1]]) if workers == 2 and EMBEDDING in name else ((1, 1), [range(workers)])
            saved.put(name, array, cuts, [list(each) for each in ranks], kind)
        for rank in range(workers):
            saved.held[saved.file("model", rank)][f"{ROUTER}.expert_bias"] = bias.copy()
        if spoil:
            spoil(step, saved, metrics)
        if workers == 1:  # as one process writes it
            for name, each in saved.held.items():
                save_file(each, saved.folder / name)
        else:
            saved.write()
    (folder / "metrics").mkdir(parents=True)
    lines = [{"total_steps": STEPS}, *({**line, "samples": {"input_ids": [f"{line['step']}"]}} for line in metrics)]
    for rank in range(workers):
        (folder / f"metrics/rank_{rank}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.fixture
def alone(tmp_path):
    return executed.read_executed(write(tmp_path / "alone", 1), ALONE)


def run_with(tmp_path, spoil=None):
    return executed.read_executed(write(tmp_path / "two", WORKERS, spoil), RECIPE)


def test_two_processes_are_read_as_one(alone, tmp_path):
    run = run_with(tmp_path)
    assert run.workers == 2 and alone.workers == 1 and run.differing == alone.differing == {}
    assert run.state.keys() == alone.state.keys() and run.norms == alone.norms
    for name, value in alone.state.items():
        np.testing.assert_array_equal(run.state[name], value)
    np.testing.assert_array_equal(run.state[f"start.{EMBEDDING}"], tensors(1)[0][EMBEDDING])
    gradient = np.sqrt(sum(norm**2 for norm in run.norms[2].values()))
    assert gradient == pytest.approx(tensors(3)[1], rel=1e-5)
    comparison = compare_executed(run, alone, TP2)
    assert comparison.findings == comparison.known == () and comparison.tensors > 20 and comparison.used == 0


def metric(name, other):
    """Each step's metrics have another number."""

    def spoil(step, saved, metrics):
        metrics[-1][name] = other(metrics[-1][name])

    return spoil


undivided = metric("global_norm", lambda norm: 2 * norm)  # clipping hides it from each gradient
never_clipped = metric("global_norm", lambda norm: norm / 5)


def change(name, rank, factor):
    """On one rank, or on both."""

    def spoil(step, saved, metrics):
        kind = "opt" if name.startswith("adam") else "model"
        for each in range(WORKERS) if rank is None else [rank]:
            saved.held[saved.file(kind, each)][name] *= np.float32(factor)

    return spoil


FROZEN, AVERAGE = "decoder.layers.0.mlp.linear_fc1.weight", f"pma_weight_sma.{HEAD}"


def with_more(spoiled=""):
    """A frozen weight, which has no moments, and an average; one of them has other values after the last step."""

    def spoil(step, saved, metrics):
        for name, kind in ((FROZEN, "model"), (AVERAGE, "opt")):
            value = 1.01 if step == STEPS and name == spoiled else 1.0
            array = np.full((8, 4), value, np.float32)
            saved.put(name, array, (1, 1), [list(range(saved.world_size))], kind)

    return spoil


@pytest.mark.parametrize("spoiled", [FROZEN, AVERAGE])
def test_frozen_weights_and_averages_are_compared(tmp_path, spoiled):
    alone = executed.read_executed(write(tmp_path / "alone", 1, with_more()), ALONE)
    assert compare_executed(run_with(tmp_path, with_more()), alone, TP2).findings == ()
    run = executed.read_executed(write(tmp_path / "other", WORKERS, with_more(spoiled)), RECIPE)
    (found,) = compare_executed(run, alone, TP2).findings
    assert (found.phase, found.step) == ("optimizer", STEPS) and spoiled in found.tensor


def biases(step, saved, metrics):
    for rank in range(WORKERS):
        saved.held[saved.file("model", rank)][f"{ROUTER}.expert_bias"] *= np.float32(-1)


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (metric("loss", lambda x: x + 2e-5), "forward of step 1, loss: loss, all ranks: error 2e-05, allowed 1e-05"),
        (metric("loss", lambda _: float("nan")), "forward of step 1, loss: loss, all ranks: error inf"),
        (
            metric("global_norm", lambda norm: norm * (1 + 1e-4)),
            "backward of step 1, gradients: global norm, all ranks: error 0.0001, allowed 5e-05",
        ),
        (undivided, "backward of step 1, loss: gradient of the loss, all ranks: error 1, allowed 5e-05; global norm"),
        (undivided, "Usually: loss scaling: the seed is not divided by the ranks that share it"),
        (
            change(f"adam_m.{HEAD}", None, 1.001),
            f"backward of step 1, head: gradient of {HEAD}, all ranks: error 0.001",
        ),
        (change(f"adam_m.{HEAD}", None, -1), f"backward of step 1, head: gradient of {HEAD}, all ranks: error 2, all"),
        (change(f"adam_v.{HEAD}", None, 1.01), f"optimizer of step 3, head: adam_v.{HEAD}, all ranks"),
        (change(f"adam_m.{EMBEDDING}", 1, 1.01), f"backward of step 1, embedding: gradient of {EMBEDDING}"),
        (
            change(HEAD, 1, 1.001),
            f"optimizer of step 3, head: {HEAD}, rank 1 (tp 1): error inf, allowed 0; copies differ",
        ),
        (change(f"{ROUTER}.expert_bias", 1, 2), "rank 1 (tp 1): error inf, allowed 0; copies differ"),
        (biases, "layers.1.router: moves of the bias, all ranks: error 0.75, allowed 0.05"),
    ],
)
def test_each_difference_is_found_and_named(alone, tmp_path, spoil, text):
    comparison = compare_executed(run_with(tmp_path, spoil), alone, TP2)
    assert text in finding_text(comparison.findings[0], TP2), comparison.findings[:3]


def turning(at, experts=(), wrong=STEPS):
    """Biases of many experts that all rise, but those of `experts` do not from the step `at` on; after the step `wrong`
    the losses differ.
    """

    def spoil(step, saved, metrics):
        bias = np.full(48, step, np.float32)
        bias[list(experts)] = min(step, at - 1)
        for held in saved.held.values():
            if f"{ROUTER}.expert_bias" in held:
                held[f"{ROUTER}.expert_bias"] = bias / np.float32(1000)
        metrics[-1]["loss"] += 1e-3 * (step > wrong)

    return spoil


def held_out(run, losses):
    return replace(run, held_out=dict(enumerate(losses)))


def test_what_a_turned_bias_changes_is_named_and_not_judged(tmp_path):
    """The bias of step 2 turns: the held-out loss after this step has it, and all of step 3."""
    alone = held_out(executed.read_executed(write(tmp_path / "alone", 1, turning(4)), ALONE), [6, 6, 6, 6])
    run = held_out(run_with(tmp_path / "one", turning(2, [7], 2)), [6, 6, 6.0001, 6])
    found = compare_executed(run, alone, TP2)
    assert found.findings == () and "may have decided how the bias of an expert at its share" in found.reason
    assert "counted load of one or two experts would look the same" in found.reason
    assert [(each.step, each.tensor) for each in found.known] == [
        (2, "turn of the bias"), (3, "loss"), (2, "held-out loss")
    ]  # fmt: skip
    text = finding_text(found.known[0], TP2)
    assert "layers.1.router: turn of the bias, all ranks: of experts [7] it is [0.001" in text and "one process" in text
    whole = compare_executed(held_out(run_with(tmp_path / "whole", turning(4)), [6, 6, 6, 6]), alone, TP2)
    assert whole.known == () and whole.reason == "" and whole.tensors > found.tensors
    early = held_out(run_with(tmp_path / "early", turning(2, [7], 1)), [6, 6.0001, 6, 6])
    found = compare_executed(early, alone, TP2).findings
    assert [(each.step, each.tensor) for each in found] == [(2, "loss"), (1, "held-out loss")], "the loss is before it"
    several = held_out(run_with(tmp_path / "several", turning(3, [7, 8, 9], 2)), [6, 6, 6, 6])
    found = compare_executed(several, alone, TP2)
    assert [each.tensor for each in found.findings] == ["loss"] and found.known == (), (
        "rounding does not turn three at once"
    )


def test_runs_that_were_never_clipped_prove_too_little(tmp_path):
    alone = executed.read_executed(write(tmp_path / "alone", 1, never_clipped), ALONE)
    (finding,) = compare_executed(run_with(tmp_path, never_clipped), alone, TP2).findings
    assert finding.tensor == "clipping" and "no step was clipped" in finding.detail


def given_to(folder, ranks):
    for rank, samples in enumerate(ranks):
        lines = [json.dumps({"step": step, "samples": {"input_ids": samples}}) for step in range(1, STEPS + 1)]
        (folder / f"metrics/rank_{rank}.jsonl").write_text("\n".join(lines) + "\n")


def test_samples_are_those_of_all_ranks_whatever_their_order_and_copies(tmp_path):
    (tmp_path / "metrics").mkdir()
    given_to(tmp_path, [["b", "a"], ["a", "c"]])
    assert read_samples(tmp_path, WORKERS, STEPS) == [["a", "b", "c"]] * STEPS


def test_a_rank_that_did_not_record_its_samples_is_refused(tmp_path):
    folder = write(tmp_path / "run", WORKERS)
    assert executed.read_executed(folder, RECIPE).samples == [["1"], ["2"], ["3"]]
    with pytest.raises(DataError, match=r"rank_2.jsonl: the file is missing"):
        read_samples(folder, WORKERS + 1, STEPS)
    for ranks in ([["b"], []], [["b"], None]):
        given_to(folder, ranks)
        with pytest.raises(DataError, match=r"rank_1.jsonl: the file has the samples of 0 steps instead of 3"):
            read_samples(folder, WORKERS, STEPS)


def test_other_samples_explain_everything(alone, tmp_path):
    run = replace(run_with(tmp_path, change(HEAD, 1, 1.001)), samples=[["a"], ["b"], ["d"]])
    found = compare_executed(run, replace(alone, samples=[["a"], ["b"], ["c"]]), TP2).findings
    assert (found[0].step, found[0].module, found[0].tensor) == (3, "data", "samples") and len(found) > 1
    split = compare_executed(run, replace(alone, samples=[["a"], ["b"], ["c"]]), replace(TP2, cp=2)).findings
    assert all(each.module != "data" for each in split), "each rank's part of a sample has a digest of its own"


def test_a_run_of_fewer_steps_or_another_start_is_found(alone, tmp_path):
    run = run_with(tmp_path)
    short = executed.Trained(2, run.steps[:2], [], run.norms[:2], run.state, {})
    assert "the number of steps is 2, but must be 3" in finding_text(
        compare_executed(short, alone, TP2).findings[0], TP2
    )
    del run.state[f"adam_m.{HEAD}"]
    (finding, *_) = compare_executed(run, alone, TP2).findings
    assert finding.detail == "no checkpoint of the run holds it"
    other = run_with(tmp_path / "other", change(HEAD, None, 1.001))
    assert any(f.tensor == f"start of {HEAD}" for f in compare_executed(other, alone, TP2).findings)


def mtp_in_a_pipeline(step, saved, metrics):
    """The ranks of the last stage have noted their own gradients of the embedding, which count once more."""
    noted = saved.folder.parents[1] / "equivalence"
    noted.mkdir(exist_ok=True)
    for rank, own in enumerate((0.016, 0.012)):
        (noted / f"gradient_rank_{rank}.json").write_text(json.dumps([own] * step))
    metrics[-1]["global_norm"] = float(np.hypot(metrics[-1]["global_norm"], 0.02))
    metrics[-1]["load_balancing_loss"] = float("nan")  # 0/0: plugins/finite_loss/plan.py


def test_a_known_difference_of_mindformers_is_judged_by_its_formula_and_nothing_else_is_excused(alone, tmp_path):
    case = next(case for case in CASES if case.sharding == MTP_PP2)
    run = run_with(tmp_path, mtp_in_a_pipeline)
    found = compare_executed(run, alone, MTP_PP2)
    assert found.findings == () and found.used < 1e-2, found
    assert [finding.tensor for finding in found.known] == ["global norm"] * STEPS
    assert "with the share 0.02 of the last stage" in found.known[0].detail
    row = matrix._row(case, "", iter(()), lambda: found)
    assert row.status == matrix.KNOWN and "stock-differences" in row.reason
    page = matrix.Matrix("recipe", 3, [row])
    assert page.passed and "1 but for a known difference, 0 fail" in page.summary()
    assert "global norm" in as_html(page, [])
    run.differing.update({HEAD: (1,)})
    found = compare_executed(run, alone, MTP_PP2)
    assert [finding.tensor for finding in found.findings] == [HEAD]
    run.steps[1]["global_norm"] *= 1 + 1e-4
    (finding, _) = compare_executed(run, alone, MTP_PP2).findings
    assert (finding.step, finding.tensor) == (2, "global norm") and finding.error == pytest.approx(1e-4, rel=1e-3)
    undefined = compare_executed(run, alone, TP2).findings[0]
    assert undefined.tensor == "load_balancing_loss", "defined without a pipeline"
    accumulated = compare_executed(run, alone, replace(TP2, accumulate=2)).findings
    assert "load_balancing_loss" not in [finding.tensor for finding in accumulated], "0/0 in that wrapper, too"


def test_a_run_without_a_whole_record_is_refused(tmp_path):
    folder = write(tmp_path / "two", WORKERS)
    (folder / "checkpoint/iteration_00000002").rename(folder / "checkpoint/iteration_00000009")
    with pytest.raises(CheckpointError, match="one checkpoint for each of 3 steps, but does not"):
        executed.read_executed(folder, RECIPE)
    metrics = folder / "metrics/rank_0.jsonl"
    metrics.write_text(metrics.read_text().replace('"learning_rate": 0.0', '"learning_rate": 0.1'))
    with pytest.raises(DataError, match="learning rate of the first step is not 0"):
        executed.read_executed(folder, RECIPE)
    metrics.unlink()
    with pytest.raises(DataError, match="did not finish a step"):
        executed.read_executed(folder, RECIPE)


def test_a_baseline_that_fails_is_run_once(monkeypatch, tmp_path):
    from tests.training.runs import ROOT

    seen = []

    def launch(recipe, run_dir):
        seen.append(run_dir.name)
        raise RunFailedError("no compiler")

    monkeypatch.setattr(executed, "launch", launch)
    names = ("executed_tp2_sp", "executed_cp2")
    found = matrix.equivalence(str(ROOT / "recipes/mini/pretrain.yaml"), names, 2, tmp_path)
    assert seen == ["one_process"] and [row.status for row in found.rows] == [matrix.FAIL, matrix.FAIL]
    assert found.rows[0].reason == "the run of one_process failed: no compiler"


def test_checkpoints_are_deleted_when_they_were_read(monkeypatch, tmp_path):
    def launch(recipe, run_dir):
        write(run_dir, WORKERS)

    monkeypatch.setattr(executed, "launch", launch)
    run = executed.execute(RECIPE, tmp_path / "two")
    assert len(run.steps) == 3 and not (tmp_path / "two/checkpoint").exists()


def test_the_last_stage_notes_a_gradient_that_no_checkpoint_has(monkeypatch, tmp_path):
    def launch(recipe, run_dir):
        write(run_dir, WORKERS, mtp_in_a_pipeline if "callbacks" in seen else None)
        seen.update(recipe)

    seen = {}
    monkeypatch.setattr(executed, "launch", launch)
    with pytest.raises(DataError, match="a rank of the last stage did not record the gradient of embedding"):
        executed.execute(RECIPE | {"callbacks": []}, tmp_path / "none", EMBEDDING)
    (callback,) = seen["callbacks"]
    assert callback["auto_register"] == "own_gradient.OwnGradient" and callback["weight"] == EMBEDDING
    assert executed.execute(RECIPE | {"callbacks": []}, tmp_path / "two", EMBEDDING).shares == pytest.approx([0.02] * 3)


def test_each_rank_of_the_last_stage_adds_its_own_gradient_to_the_global_norm(monkeypatch, tmp_path):
    """Executed with dp2 pp2: the global norm of step 1 was 1.05223238, and that of one process 1.04910016."""
    own = {2: 0.05752956246186909, 3: 0.057203334240520896}

    def launch(recipe, run_dir):
        write(run_dir, 4)
        (run_dir / "equivalence").mkdir()
        for rank in range(4):
            file = run_dir / f"equivalence/gradient_rank_{rank}.json"
            file.write_text(json.dumps([own.get(rank, 0.6155)] * 3))

    monkeypatch.setattr(executed, "launch", launch)
    recipe = RECIPE | {"callbacks": [], "parallel_config": {"data_parallel": 2, "pipeline_stage": 2}}
    (share, *_) = executed.execute(recipe, tmp_path / "four", EMBEDDING).shares
    assert np.hypot(1.0491001605987549, share) == pytest.approx(1.0522323846817017, rel=5e-6)


def test_a_gradient_of_muon_is_read_off_its_moment():
    """Matrices of layers have Muon's moment, and of AdamW's a number of no use; embedding and router's norm AdamW's."""
    matrix_name, vector = "decoder.layers.0.mlp.linear_fc2.weight", "decoder.final_layernorm.weight"
    rng, record, moments = np.random.default_rng(0), executed._Record(Adam(0.0, 0.9, 0.95, 1e-8, 0, 0.8)), {}
    for step in range(1, 4):
        gradients = {matrix_name: rng.standard_normal((4, 3)), vector: rng.standard_normal(4)}
        moments["matrix"] = 0.8 * moments.get("matrix", 0.0) + gradients[matrix_name]
        moments["vector"] = 0.9 * moments.get("vector", 0.0) + 0.1 * gradients[vector]
        arrays = {matrix_name: np.full((4, 3), step), vector: np.full(4, step)}
        arrays |= {f"muon_m.{matrix_name}": moments["matrix"], f"muon_m.{vector}": np.zeros(1)}
        arrays |= {f"{prefix}{matrix_name}": np.zeros(1) for prefix in ("adam_m.", "adam_v.")}
        arrays |= {f"adam_m.{vector}": moments["vector"], f"adam_v.{vector}": np.ones(4)}
        record.add(arrays, {"router": np.zeros(2)})
        want = {name: np.linalg.norm(value) for name, value in gradients.items()}
        assert record.norms[-1] == pytest.approx(want)
    state = record.state()
    assert set(state) >= {f"muon_m.{matrix_name}", f"start.{matrix_name}", f"first.{matrix_name}", f"least.{vector}"}
    assert not {f"muon_m.{vector}", f"adam_m.{matrix_name}", f"least.{matrix_name}"} & set(state)
