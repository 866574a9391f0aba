"""For each stage a fault that only this stage names rightly, and the laws that hold one run against an independent
reference.
"""

import json
import math
import subprocess
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from plugins.step_record.plan import END, START, apart, record_file, sketch_of
from tests.tools.accuracy.diagnose.simulated import ROUTER, SHAPES, TINY, Run, but
from tests.zoo.run import PAGE, RESULTS, page
from tools.accuracy.align.sides import reference_sizes
from tools.accuracy.cli import accuracy
from tools.accuracy.diagnose import cli
from tools.accuracy.diagnose.differences import diagnose
from tools.accuracy.diagnose.evidence import read_side
from tools.accuracy.diagnose.laws import STAGES, VERSIONS
from tools.accuracy.diagnose.reference import built_of, outputs_of
from tools.accuracy.reference import forward
from tools.accuracy.reference.forward import Forward
from tools.accuracy.reference.start import initial_weights
from tools.recipe.dump import dump_recipe
from tools.weights.hugging_face_names import to_hugging_face, to_mindformers

EMBEDDING, DENSE, NORM = SHAPES
BUILT = {"optimizer.beta1": 0.9, "optimizer.beta2": 0.95, "model.rotary_base": 10000.0}


class Recorded(Run):
    """Also records what was built and the outputs of two modules; a fault changes what `edit` gets of each line."""

    def line(self, rank, kind, line):
        output = np.random.default_rng(line["step"]).normal(0, 1, (2, 4, 6))
        line = {**line, "effective": dict(BUILT)}
        if kind == "step":
            line["modules"] = {"layers.0.attention": sketch_of(output), "layers.0.mlp": sketch_of(output + 1)}
        self.edit(kind, line)
        super().line(rank, kind, line)

    def edit(self, kind, line):
        pass


class Built(Recorded):
    def edit(self, kind, line):
        line["effective"]["model.rotary_base"] = 500.0


class Started(Recorded):
    """The start is recorded before weights are loaded over it."""

    def edit(self, kind, line):
        if kind == "start":
            line["state"][DENSE][0] = "0" * 16


class Attended(Recorded):
    """A later step's attention differs by half a percent, which the loss of that step does not show."""

    def edit(self, kind, line):
        if line["step"] == 2 and kind == "step":
            output = np.random.default_rng(2).normal(0, 1, (2, 4, 6))
            line["modules"]["layers.0.attention"] = sketch_of(output * 1.005)


Sampled = but(Recorded, batch=lambda made, step: [each[:: -1 if step == 2 else 1] for each in made])
Lost = but(Recorded, loss=lambda loss, step: loss + 1e-3 * (step == 3))
Steep = but(Recorded, gradient=lambda made, *given: made * np.float32(2 if given == (2, DENSE) else 1))
Normed = but(Recorded, norm=lambda norm, _: 1.5 * norm)
Decayed = but(Recorded, decay=lambda *_: 0.1)
Routed = but(Recorded, move=lambda move, _: -move)

# stage -> (fault, whether both runs go on from step 2, step and module that are named, stages in which it also shows)
FAULTS = {
    "configuration": (Built, {}, 0, "configuration", set()),
    "start": (Started, {}, 0, "layers.0.mlp", set()),
    "resume": (Started, {"resumed_from": 2}, 2, "layers.0.mlp", set()),
    "samples": (Sampled, {}, 2, "data", set()),
    "forward": (Attended, {}, 2, "layers.0.attention", set()),
    "gradients": (Steep, {}, 2, "layers.0.mlp", {"norm and clipping", "update"}),
    "norm and clipping": (Normed, {}, 1, "global norm", {"update"}),
    "update": (Decayed, {}, 2, "layers.0.norms", set()),
    "routers": (Routed, {}, 1, "layers.1.router", set()),
}


def test_every_stage_has_its_fault():
    assert {*FAULTS, VERSIONS} == {*STAGES}


@pytest.mark.parametrize("stage", FAULTS)
def test_only_its_stage_names_a_fault_rightly(stage, tmp_path):
    fault, more, step, module, also = FAULTS[stage]
    a, b = Recorded(tmp_path / "a").write(), fault(tmp_path / "b", **more).write()
    verdict = diagnose(read_side(a), read_side(b))
    first = verdict.first[0]
    assert (first.step, first.stage, first.module) == (step, stage, module)
    assert {each.stage for each in verdict.findings if not each.rounding} - {stage} == also


def test_a_loss_alone_names_no_module(tmp_path):
    a, b = Recorded(tmp_path / "a").write(), Lost(tmp_path / "b").write()
    first = diagnose(read_side(a), read_side(b)).first[0]
    assert (first.step, first.stage, first.module) == (3, "forward", "model")


def test_another_version_is_told_and_excuses_rounding_only(tmp_path):
    newer = but(Recorded, software=lambda made: {**made, "mindspore": "2.10.0"}, loss=lambda loss, _: loss + 1e-7)
    wrong = but(newer, loss=lambda loss, _: loss + 1e-3)
    a, b, c = (kind(tmp_path / name).write() for name, kind in (("a", Recorded), ("b", newer), ("c", wrong)))
    verdict = diagnose(read_side(a), read_side(b))
    assert verdict.software == (("mindspore", "2.9.0", "2.10.0"),) and not verdict.findings
    assert diagnose(read_side(a), read_side(c)).first[0].stage == "forward"


@pytest.mark.parametrize("error", [1e-6, 1e-3, 0.1])
def test_sketches_tell_how_far_two_outputs_are_apart(error):
    rng = np.random.default_rng(1)
    one, other = rng.normal(0, 1, (4, 64, 32)), rng.normal(0, 1, (4, 64, 32))
    assert error / 3 < apart(sketch_of(one), sketch_of(one + error * other)) < 3 * error
    assert apart(sketch_of(one), sketch_of(one[::-1])) > 0.5, "what changed places has the same norm"


# one run against the reference


def aligned(folder, forward_pass, ids, keys=None, end=None, kind=Run):
    """A folder whose first step has the outputs that `forward_pass` computes, and whose end has those of `end`."""
    run = kind(folder, keys=keys).write()
    sizes = reference_sizes(TINY)
    file = record_file(run, 0)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for computed, kept_in, step in ((forward_pass, START, 1), (end, END, 3)):
        if computed is None:
            continue
        weights = initial_weights(sizes, step)
        made = computed(sizes, weights).run(ids)
        stored = {f"weight/{name}": value for name, value in to_mindformers(weights, sizes).items()}
        np.savez(run / "metrics" / kept_in, step=step, **stored, **{"batch/input_ids": ids})
        modules = {name: sketch_of(value.astype(np.float32)) for name, value in made.items()}
        if kept_in == START:
            lines[1]["modules"] = modules
        else:
            lines.append({"step": step, "end": True, "state": {}, "modules": modules})
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return read_side(run)


@pytest.fixture
def ids():
    return np.random.default_rng(5).integers(0, 512, (2, 16))


def test_a_right_forward_pass_has_no_finding(tmp_path, ids):
    side = aligned(tmp_path / "run", Forward, ids)
    verdict = diagnose(side)
    assert not verdict.findings and not side.notes and "forward" in verdict.compared
    assert len(outputs_of(side)[1]) > 20


Scaled = but(Forward, scale=lambda scale: 1.2 * scale)
Unscaled = but(Forward, route=lambda made, *_: made / reference_sizes(TINY).hf["routed_scaling_factor"])


@pytest.mark.parametrize(("wrong", "module"), [(Scaled, "layers.0.attention.context"), (Unscaled, "layers.1.router")])
def test_one_run_alone_names_the_module_that_is_not_the_reference(tmp_path, ids, wrong, module):
    first = diagnose(aligned(tmp_path / "run", wrong, ids)).first[0]
    assert (first.step, first.stage, first.module) == (1, "forward", module)


def test_of_a_resumed_run_the_last_part_is_compared(tmp_path, ids):
    """Weights and batch are those of step 2, where it went on; step 1 had others, and so had an end of another step."""
    metrics = aligned(tmp_path / "run", Forward, ids, end=Forward).folder
    file = record_file(metrics.parent, 0)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    other = {
        name: [digest, norm, [-each for each in rest]] for name, (digest, norm, rest) in lines[1]["modules"].items()
    }
    lines[2]["modules"], lines[1]["modules"] = lines[1]["modules"], other
    lines[-1] |= {"step": 1, "modules": other}
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert diagnose(read_side(metrics.parent)).findings
    with np.load(metrics / START) as stored:
        kept = dict(stored)
    np.savez(metrics / START, **{**kept, "step": 2})
    verdict = diagnose(read_side(metrics.parent))
    assert not verdict.findings and "forward" in verdict.compared


def test_a_module_that_is_wrong_only_when_biases_have_moved(tmp_path, ids):
    side = aligned(tmp_path / "run", Forward, ids, end=Unscaled)
    (found,) = diagnose(side).findings
    assert (found.step, found.stage, found.module, found.late) == (3, "forward", "layers.1.router", True)
    assert "in the first step it is right" in found.detail
    assert not diagnose(aligned(tmp_path / "right", Forward, ids, end=Forward)).findings
    later = aligned(tmp_path / "later", Forward, ids, end=Unscaled)
    steep = aligned(tmp_path / "steep", Forward, ids)
    steep.steps[2]["lm_loss"] += 1e-3
    first = diagnose(steep, later).first[0]
    assert (first.step, first.stage) == (2, "forward"), "it is told at the first step that differs"


def test_layers_behind_the_decoder_are_the_mtp_layers(tmp_path, ids):
    class Rolled(Forward):
        def mtp(self, number, ids, hidden):
            return super().mtp(number, np.roll(ids, 1, axis=1), hidden)

    assert diagnose(aligned(tmp_path / "run", Rolled, ids)).first[0].module == "mtp.layers.0.input_norm"


@pytest.mark.parametrize(("tie", "findings"), [(1.0, 0), (0.0, 1)])
def test_a_token_at_a_tie_is_no_finding(tmp_path, ids, monkeypatch, tie, findings):
    monkeypatch.setattr(forward, "TIE", tie)

    class Tie(Forward):
        def route(self, layer, x):
            weights = super().route(layer, x)
            chosen = np.flatnonzero(weights[0, 0])
            weights[0, 0, [chosen[0], np.flatnonzero(weights[0, 0] == 0)[0]]] = 0, weights[0, 0, chosen[0]]
            return weights

    assert len(diagnose(aligned(tmp_path / "run", Tie, ids)).findings) == findings


def test_what_the_reference_cannot_compute_is_said(tmp_path, ids):
    side = aligned(tmp_path / "run", Forward, ids)
    whole = (side.folder / START).read_bytes()
    (side.folder / START).write_bytes(whole[: len(whole) // 2])
    assert "is damaged" in outputs_of(side)[-1] and not diagnose(side).findings
    (side.folder / START).unlink()
    assert "weights of one CPU process" in outputs_of(side)[-1]
    side = aligned(tmp_path / "packed", Forward, ids, {"train_dataset.data_loader.config.reset_attention_mask": True})
    assert "reset_attention_mask" in outputs_of(side)[-1] and not diagnose(side).findings


def test_routers_without_biases_choose_as_with_biases_of_0(tmp_path, ids):
    """A weight that is missing beside them is said, and does not end the command."""

    class Unbiased(Forward):
        def __init__(self, sizes, weights):
            zero = {name: 0 * each for name, each in weights.items() if name.endswith("e_score_correction_bias")}
            assert zero
            super().__init__(sizes, weights | zero)

    side = aligned(tmp_path / "run", Unbiased, ids)
    with np.load(side.folder / START) as stored:
        kept = {name: value for name, value in stored.items() if not name.endswith(".expert_bias")}
    np.savez(side.folder / START, **kept)
    verdict = diagnose(side)
    assert not verdict.findings and not side.notes and "forward" in verdict.compared
    np.savez(side.folder / START, **{name: value for name, value in kept.items() if "final_layernorm" not in name})
    side = read_side(side.folder.parent)
    verdict = diagnose(side)
    assert "final_layernorm" in outputs_of(side)[-1] and "forward" not in verdict.compared
    assert any("final_layernorm" in note for note in side.notes)


def test_an_output_that_is_not_a_number_is_never_right(tmp_path, ids):
    side = aligned(tmp_path / "run", but(Forward, dense=lambda made, *_: made * np.nan), ids)
    right = aligned(tmp_path / "right", Forward, ids)
    for verdict in (diagnose(side), diagnose(right, side)):
        assert (verdict.first[0].stage, verdict.first[0].module) == ("forward", "layers.0.mlp")


@pytest.mark.parametrize(("alpha", "found"), [(8, []), (9, ["layers.0.attention.query"])])
def test_adapters_belong_to_the_forward_pass_and_leave_the_biases(tmp_path, ids, alpha, found):
    """The run trained with alpha 8; a query of its first layer has an adapter of rank 2."""
    keys = {"plugins.lora": {"rank": 2, "alpha": alpha, "targets": ["self_attention.*"]}}
    layer, rng = "decoder.layers.0.self_attention.linear_q_up_proj", np.random.default_rng(3)
    sizes = reference_sizes(TINY)
    held = to_mindformers(initial_weights(sizes, 1), sizes)
    outputs, inputs = held[f"{layer}.weight"].shape
    a, b = (rng.normal(0, 0.3, shape).astype(np.float32) for shape in ((2, inputs), (outputs, 2)))

    class Adapted(Forward):
        def __init__(self, sizes, weights):
            whole = to_mindformers(weights, sizes)
            whole[f"{layer}.weight"] = whole[f"{layer}.weight"] + 4 * b @ a
            super().__init__(sizes, to_hugging_face(whole, sizes))

    side = aligned(tmp_path / "run", Adapted, ids, keys, kind=but(move=lambda move, _: 0 * move))
    with np.load(side.folder / START) as stored:
        adapters = {f"weight/{layer}.lora_A.weight": a, f"weight/{layer}.lora_B.weight": b}
        kept = {**stored, **adapters}
    np.savez(side.folder / START, **kept)
    side = read_side(side.folder.parent)
    assert [each.module for each in diagnose(side).findings] == found and side.held
    assert built_of(side.recipe)["model.moe_router_bias_update_rate"] == 0.0


def test_what_was_built_is_what_the_recipe_says(tmp_path):
    class Other(Recorded):
        def edit(self, kind, line):
            line["effective"] = {
                **built_of(TINY),
                "optimizer.beta2": 0.999,
                "model.moe_router_topk_scaling_factor": 1.0,
            }

    findings = diagnose(read_side(Other(tmp_path / "run").write())).findings
    told = [each.detail for each in findings]
    assert told == [
        "optimizer.beta2 was built as 0.999; the recipe says 0.95",
        "model.moe_router_topk_scaling_factor was built as 1.0; the recipe says 2.8",
    ]
    assert math.isinf(findings[0].error) and ROUTER not in told[0]


def test_the_page_of_the_zoo_is_made_of_its_results():
    assert PAGE.read_text() == page(json.loads(RESULTS.read_text()))


def test_a_recipe_that_the_command_trains_is_held_against_the_forward_pass(tmp_path, ids, monkeypatch):
    def train(recipe, run_dir, steps):
        aligned(run_dir, Scaled, ids)
        return run_dir

    monkeypatch.setattr(cli, "_train", train)
    recipe = tmp_path / "recipe.yaml"
    recipe.touch()
    done = CliRunner().invoke(accuracy, ["diagnose", str(recipe)])
    assert done.exit_code == 1 and "that of the forward pass in NumPy" in done.output
    assert "does not exist" not in done.output


def test_a_recipe_and_its_data_are_relative_to_the_folder_of_the_caller(tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path / "mine")
    dump_recipe(TINY, "my.yaml")
    found = []

    def run_child(command, cwd=".", **_):
        found.append(Path(cwd, command[2]).resolve())
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(cli.children, "run_child", run_child)
    cli._train(Path("my.yaml"), tmp_path / "run", 3)
    assert found == [tmp_path / "mine" / "my.yaml"]
