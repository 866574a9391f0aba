"""Rules about the `plugins:` section, and the static check of collective programs with faults put in."""

import pytest
import yaml

from plugins import ADAPTERS
from plugins.errors import ClusterError
from tests.tools.check.test_data_files import write
from tools.check import plugins
from tools.check.check import check_recipe
from tools.recipe.load import load_recipe
from tools.recipe.override import apply_overrides
from tools.recipe.view import View

OVERLAP = "recipes/mini/pretrain_ep4_overlap.yaml"
FULL = "recipes/telechat3_438b/pretrain_4k_ep_overlap.yaml"


def errors(recipe, *changes):
    """key -> what is wrong."""
    found = check_recipe(apply_overrides(load_recipe(recipe), changes)).errors
    return {finding.key: f"{finding.wrong}; {finding.right}" for finding in found}


@pytest.mark.parametrize("recipe", [OVERLAP, FULL])
def test_shipped_recipes_pass(recipe):
    assert errors(recipe) == {}


@pytest.mark.parametrize("name", ADAPTERS)
@pytest.mark.parametrize("settings", [{"no_such": 1}, 3])
def test_what_is_no_setting_of_a_plugin_is_named(name, settings):
    """A setting that a plugin does not have is reported under the plugin's name; tests of wrong values are those of
    the plugin and tests/inputs.
    """
    recipe = load_recipe("recipes/mini/pretrain.yaml")
    recipe["plugins"][name] = settings
    keys = [finding.key for finding in check_recipe(recipe).errors]
    assert any(key.startswith(f"plugins.{name}") for key in keys), keys


@pytest.mark.parametrize(
    ("recipe", "change", "key", "words"),
    [
        (OVERLAP, "parallel_config.expert_parallel=2", "parallel_config.expert_parallel", "all workers"),
        (OVERLAP, "plugins.ep_overlap.chunks=[3,1]", "plugins.ep_overlap.chunks", "write 1 to 2"),
        (OVERLAP, "plugins.ep_overlap.chunks=[1]", "plugins.ep_overlap.chunks", "neither auto"),
        (OVERLAP, "plugins.hierarchical_ep.mode=fast", "plugins.hierarchical_ep.mode", "fast"),
        (OVERLAP, "model.model_config.npu_nums_per_device=3", "plugins.hierarchical_ep", "no degree above 1 fits"),
        (FULL, "parallel_config.expert_parallel=1", "plugins.hierarchical_ep", "nothing to dispatch"),
        (FULL, "model.model_config.moe_token_dispatcher_type=alltoall_deredundency",
         "model.model_config.moe_token_dispatcher_type", "sets this key itself"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_named(recipe, change, key, words):
    found = errors(recipe, change)
    assert key in found and words in found[key], found


@pytest.mark.parametrize("written", [[["TeleChat3MoeForCausalLM"]], {"name": "TeleChat3MoeForCausalLM"}, [None]])
def test_architectures_that_are_no_names_are_refused(written):
    """`tc3 check` ended with a TypeError."""
    recipe = load_recipe(FULL)
    recipe["model"]["model_config"]["architectures"] = written
    found = {finding.key: finding.wrong for finding in check_recipe(recipe).errors}
    assert "plugins.hierarchical_ep supports only" in found["model.model_config.architectures"]


def test_overlap_needs_the_dispatch_that_it_cuts():
    recipe = load_recipe(OVERLAP)
    recipe["plugins"]["hierarchical_ep"] = False
    found = {finding.key: finding.wrong for finding in check_recipe(recipe).errors}
    assert "which is off" in found["plugins.ep_overlap"]
    assert "no kernels" in found["parallel_config.expert_parallel"]


def test_a_full_size_recipe_can_have_a_held_out_loss_whose_step_tells_the_losses_apart():
    recipe = load_recipe(FULL)
    recipe["plugins"]["held_out_loss"] = {"data_path": "x", "samples": 32768, "every": 5}
    assert not check_recipe(recipe).errors
    recipe["print_separate_loss"] = False
    found = {finding.key: finding.wrong for finding in check_recipe(recipe).errors}
    assert list(found) == ["print_separate_loss"] and "language model's loss" in found["print_separate_loss"]


def test_a_step_of_held_out_samples_is_read_whole():
    recipe = load_recipe("recipes/mini/pretrain.yaml")
    batch = View(recipe).global_batch
    for samples in (batch - 1, batch):
        recipe["plugins"]["held_out_loss"] = {"data_path": "x", "samples": samples, "every": 5}
        found = {finding.key: finding.wrong for finding in check_recipe(recipe).errors}
        assert list(found) == ["plugins.held_out_loss.samples"] * (samples < batch)


def test_one_checkpoint_kept_is_enough():
    """It is removed once the next one is sealed."""
    recipe = load_recipe("recipes/mini/pretrain.yaml")
    recipe["checkpoint"]["save_max"] = 1
    assert "checkpoint.save_max" not in {item.key for item in check_recipe(recipe).findings}


@pytest.mark.parametrize(
    ("settings", "key", "words"),
    [
        (None, "", ""),
        (False, "", ""),
        ({"stop_after": 5}, "", ""),
        ({"stop_after": 0}, "plugins.finite_loss.stop_after", "a number of steps from 1 on"),
    ],
)
def test_after_how_many_steps_that_are_not_finite_a_run_stops(settings, key, words):
    recipe = load_recipe("recipes/mini/pretrain.yaml")
    if settings is not None:
        recipe["plugins"]["finite_loss"] = settings
    found = {finding.key: f"{finding.wrong}; {finding.right}" for finding in check_recipe(recipe).errors}
    assert words in found[key] if key else found == {}, found


def test_a_run_that_ends_before_its_batch_has_grown_is_warned_of():
    recipe = load_recipe("recipes/mini/pretrain_ramp.yaml")
    found = check_recipe(recipe)
    assert not [item for item in found.findings if item.key == "plugins.batch_ramp.stages"]
    recipe["train_dataset"]["data_loader"]["sizes"] = [600, 0, 0]
    (item,) = [item for item in check_recipe(recipe).findings if item.key == "plugins.batch_ramp.stages"]
    assert item not in check_recipe(recipe).errors
    assert (
        item.wrong
        == "the ramp lasts until step 150, but the run ends with step 150, so that no step trains the full 8 samples"
    )
    assert "at least 608 samples" in item.right


@pytest.mark.parametrize(
    ("settings", "key", "words"),
    [
        ({}, "", ""),
        (False, "", ""),
        ({"every": 20, "work": 2}, "", ""),
        ({"work": 1.5}, "plugins.straggler_probe.work", "a number of pieces of work, from 1 on"),
    ],
)
def test_how_often_ranks_are_probed(settings, key, words):
    recipe = load_recipe("recipes/mini/pretrain.yaml")
    recipe["plugins"]["straggler_probe"] = settings
    found = {finding.key: f"{finding.wrong}; {finding.right}" for finding in check_recipe(recipe).errors}
    assert words in found[key] if key else found == {}, found


@pytest.mark.parametrize(
    ("recipe", "changes", "key", "words"),
    [
        (OVERLAP, [], "", ""),
        (FULL, [], "", ""),
        (OVERLAP, ["model.model_config.moe_aux_loss_coeff=0.0"], "model.model_config.moe_aux_loss_coeff", "above 0"),
        (OVERLAP, ["model.model_config.moe_router_load_balancing_type=gbs_aux_loss"],
         "model.model_config.moe_router_load_balancing_type", "'seq_aux_loss'"),
        (FULL, ["parallel_config.expert_parallel=1", "plugins.hierarchical_ep=False", "plugins.ep_overlap=False"],
         "parallel_config.expert_parallel", "share"),
    ],
)  # fmt: skip
def test_the_auxiliary_loss_of_a_group_needs_one_to_widen(recipe, changes, key, words):
    recipe = apply_overrides(load_recipe(recipe), changes)
    recipe["plugins"]["group_aux_loss"] = True
    report = check_recipe(recipe)
    found = {finding.key: f"{finding.wrong}; {finding.right}" for finding in report.errors}
    assert words in found[key] if key else found == {}, found


@pytest.mark.parametrize(
    ("changes", "key", "words"),
    [
        ([], "", ""),
        (["plugins.finite_loss={stop_after: 3}"], "plugins.spike_guard", "has no effect"),
        (
            ["runner_config.epochs=2"],
            "plugins.spike_guard",
            "runner_config.epochs: if plugins.spike_guard leaves samples out of the first epoch",
        ),
        (["train_dataset.data_loader.shuffle=True"], "plugins.spike_guard", "which samples a step reads"),
    ],
)
def test_what_the_spike_guard_needs(changes, key, words):
    recipe = load_recipe("recipes/mini/pretrain.yaml")
    recipe["plugins"].update(
        spike_guard={"window": 64, "threshold": 16.0, "skip": 1, "rollbacks": 3, "skipped": []}, finite_loss={}
    )
    for change in changes:
        where, _, value = change.partition("=")
        *path, last = where.split(".")
        section = recipe
        for name in path:
            section = section[name]
        section[last] = yaml.safe_load(value)
    found = {finding.key: f"{finding.wrong}; {finding.right}" for finding in check_recipe(recipe).errors}
    assert words in found.get(key, "") if key else found == {}, found


def test_labels_of_packed_conversations_are_those_of_the_next_token():
    for name in ("mini/finetune", *(f"telechat3_{size}/finetune_4k" for size in ("105b", "438b", "1119b"))):
        recipe = load_recipe(f"recipes/{name}.yaml")
        assert {finding.key for finding in check_recipe(recipe).errors} == set(), name
        recipe["plugins"]["packed_labels"] = False
        (finding,) = check_recipe(recipe).errors
        assert finding.key == "train_dataset.data_loader.handler.1"
        assert "the token after the next" in finding.wrong and "plugins.packed_labels: {}" in finding.right
        assert "packing_handler.py:" in finding.source


def test_what_the_plugin_for_labels_cannot_mend_is_named():
    packing = "train_dataset.data_loader.handler.1"
    found = errors("recipes/mini/finetune.yaml", f"{packing}.pack_strategy=truncate")
    assert "lengths of conversations, but the loader reads these numbers as" in found["plugins.packed_labels"]
    on = load_recipe("recipes/mini/pretrain.yaml")
    on["plugins"]["packed_labels"] = {}
    assert "of an HFDataLoader" in {each.key: each.wrong for each in check_recipe(on).errors}["plugins.packed_labels"]


PLAIN, CPU = "recipes/telechat3_438b/pretrain_4k.yaml", "recipes/mini/pretrain.yaml"


def of_fusion(recipe, settings, *changes):
    recipe = apply_overrides(load_recipe(recipe), changes)
    recipe["plugins"] = {**(recipe.get("plugins") or {}), "operator_fusion": settings}
    found = check_recipe(recipe).findings
    return {item.key: (item.severity, f"{item.wrong}; {item.right}") for item in found if "fusion" in str(item)}


@pytest.mark.parametrize(
    ("settings", "key", "severity", "words"),
    [
        ({"level": "vector"}, "", "", ""),
        ({"level": False}, "", "", ""),
        (False, "", "", ""),
        ({"level": "vector", "disable": ["Exp", "SiLU"]}, "", "", ""),
        ({"level": "cube"}, "plugins.operator_fusion.level", "warning", "experimental"),
        ({"level": "vector", "disable": ["Matmul"]}, "plugins.operator_fusion.disable", "error", "'MatMul'"),
    ],
)
def test_what_the_section_says(settings, key, severity, words):
    found = of_fusion(PLAIN, settings)
    if not key:
        assert found == {}
        return
    assert found[key][0] == severity and words in found[key][1], found


def test_it_needs_the_jit_level_that_fuses():
    found = of_fusion(PLAIN, {"level": "vector"}, "context.jit_config.jit_level=O0")
    severity, words = found["context.jit_config.jit_level"]
    assert severity == "error" and "only the level 'O1' fuses" in words


def test_on_a_cpu_it_does_nothing_and_that_is_said():
    assert of_fusion(CPU, {"level": "vector"})["plugins.operator_fusion"][0] == "note"
    assert of_fusion(CPU, {"level": "off"}) == {}


def of_gradient(recipe, settings, *changes):
    recipe = apply_overrides(load_recipe(recipe), changes)
    recipe["plugins"] = {**(recipe.get("plugins") or {}), "grouped_gradient": settings}
    found = check_recipe(recipe).findings
    return {item.key: (item.severity, f"{item.wrong}; {item.right}") for item in found if "grouped_g" in str(item)}


@pytest.mark.parametrize(
    ("recipe", "settings", "change", "key", "severity", "words"),
    [
        (PLAIN, {}, "seed=1", "plugins.grouped_gradient", "warning", "we have not run it on an NPU"),
        (CPU, {}, "seed=1", "plugins.grouped_gradient", "note", "a CPU does not have this operator"),
        (PLAIN, {}, "context.jit_config.jit_level=O2", "context.jit_config.jit_level", "error", "not with O2"),
    ],
)
def test_what_is_said(recipe, settings, change, key, severity, words):
    found = of_gradient(recipe, settings, change)
    assert found[key][0] == severity and words in found[key][1], found


def test_nothing_is_said_where_it_is_off():
    assert of_gradient(PLAIN, False) == {}


BALANCED, ONE, FULL_BALANCE = (
    "recipes/mini/pretrain_ep4_balanced.yaml",
    "recipes/mini/pretrain.yaml",
    "recipes/telechat3_438b/pretrain_4k.yaml",
)
KEY = "plugins.expert_balance"


def test_the_shipped_recipe_passes():
    assert errors(BALANCED) == {}


@pytest.mark.parametrize(
    ("changes", "key", "words"),
    [
        ([f"{KEY}.method=swap"], f"{KEY}.method", "did you mean 'swaps'"),
        (["optimizer.type=PmaAdamW"], f"{KEY}.every", "can move with an expert"),
        (["parallel_config.expert_parallel=1", "plugins.hierarchical_ep=False"], f"{KEY}.every", "experts cannot move"),
        (["model.model_config.moe_router_enable_expert_bias=False"], KEY, "counts the tokens of each expert only if"),
        ([f"{KEY}.spare=13"], f"{KEY}.spare", "write 12 at most"),
    ],
)
def test_what_cannot_move_or_be_counted_is_refused(changes, key, words):
    found = errors(BALANCED, *changes)
    assert key in found and words in found[key], found


@pytest.mark.parametrize("path", [FULL_BALANCE, "tests/training/sharded_ep2.yaml"])
def test_copies_of_experts_are_refused_in_sharded_graphs(path):
    recipe = load_recipe(path)
    recipe.setdefault("plugins", {})["expert_balance"] = {"every": 5, "spare": 1}
    (found,) = [error for error in check_recipe(recipe).errors if error.key.startswith(KEY)]
    assert found.key == f"{KEY}.spare" and "data-parallel CPU workers only" in str(found)


def test_copies_of_experts_pass_on_data_parallel_workers():
    assert errors(BALANCED, f"{KEY}.spare=12") == {}


def test_one_worker_records_and_moves_nothing():
    recipe = load_recipe(ONE)
    recipe["plugins"]["expert_balance"] = {"every": 0}
    assert check_recipe(recipe).errors == []
    recipe["plugins"]["expert_balance"] = {"every": 5}
    assert [error.key for error in check_recipe(recipe).errors] == [f"{KEY}.every"]


SHARDED_EP2 = "tests/training/sharded_ep2.yaml"


@pytest.mark.parametrize(
    ("path", "changes"),
    [
        (FULL_BALANCE, []),  # a pipeline with model chunks, EP groups that share an optimizer, bfloat16
        (SHARDED_EP2, []),
        (SHARDED_EP2, ["parallel_config.data_parallel=4"]),
        (SHARDED_EP2, ["model.model_config.params_dtype=bfloat16"]),
    ],
)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_experts_move_in_any_layout_that_shares_them(path, changes, accumulation):
    recipe = apply_overrides(load_recipe(path), changes)
    recipe["runner_config"]["gradient_accumulation_steps"] = accumulation
    if path == SHARDED_EP2:
        recipe["parallel"]["dataset_strategy"] = [[recipe["parallel_config"]["data_parallel"], 1]] * 4
    recipe.setdefault("plugins", {})["expert_balance"] = {"every": 5}
    assert [error for error in check_recipe(recipe).errors if error.key.startswith(KEY)] == []


EP4, OVERLAP_PATH = "recipes/mini/pretrain_ep4.yaml", "recipes/mini/pretrain_ep4_overlap.yaml"


@pytest.mark.parametrize("mode", ["global", "hierarchical", "deduplicated"])
@pytest.mark.parametrize("stride", [0, 1, 2, 5])
def test_shipped_orders_come_to_an_end(mode, stride):
    recipe = load_recipe(OVERLAP_PATH)
    recipe["plugins"]["hierarchical_ep"]["mode"] = mode
    recipe["plugins"]["ep_overlap"]["stride"] = stride
    plugins.check_dispatch(recipe)


def test_recipes_without_the_plugin_have_nothing_to_check(monkeypatch):
    monkeypatch.setattr(plugins, "make_plan", None)
    plugins.check_dispatch(load_recipe("recipes/mini/pretrain_dp2.yaml"))


def test_a_rank_that_creates_its_groups_in_another_order_is_named(monkeypatch):
    right = plugins.creation_orders

    def wrong(topology):
        orders = right(topology)
        orders[2] = orders[2][::-1]
        return orders

    monkeypatch.setattr(plugins, "creation_orders", wrong)
    with pytest.raises(ClusterError, match="rank"):
        plugins.check_dispatch(load_recipe(EP4))


def test_a_wrong_split_list_is_named(monkeypatch):
    right = plugins.programs_of

    def wrong(*plans, order):
        programs = right(*plans, order=order)
        index = next(i for i, call in enumerate(programs[1]) if call.op == "all_to_all_v")
        call = programs[1][index]
        programs[1][index] = type(call)(call.op, call.group, (call.send[0] + 1, *call.send[1:]), call.recv, call.tag)
        return programs

    monkeypatch.setattr(plugins, "programs_of", wrong)
    with pytest.raises(ClusterError, match="rank 1"):
        plugins.check_dispatch(load_recipe(EP4))


def test_a_rank_with_another_order_of_chunks_is_named(monkeypatch):
    right = plugins.programs_of

    def wrong(*plans, order):
        programs = right(*plans, order=order)
        programs[3] = right(*plans, order=[(1 - chunk, step) for chunk, step in order])[3]
        return programs

    recipe = load_recipe(OVERLAP_PATH)
    recipe["plugins"]["ep_overlap"]["chunks"] = [2, 1]
    monkeypatch.setattr(plugins, "programs_of", wrong)
    with pytest.raises(ClusterError, match="chunk"):
        plugins.check_dispatch(recipe)


def test_documents_without_the_end_that_the_balance_of_attention_reads(tmp_path):
    """The plugin ends the run; without it only masks are wrong."""
    prefix = write(tmp_path / "data", [400] * 40)
    (tmp_path / "data.json").unlink()
    recipe = load_recipe("recipes/mini/pretrain_eod_balanced.yaml")
    recipe["train_dataset"]["data_loader"]["config"].update(data_path=["1", prefix], eod=0, pad=-1)
    key = "train_dataset.data_loader.config.eod"
    for settings, severity in (({"window": 1}, "error"), (False, "warning")):
        recipe["plugins"]["attention_balance"] = settings
        assert [each.severity for each in check_recipe(recipe).findings if each.key == key] == [severity]
