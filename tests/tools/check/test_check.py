"""MindFormers' own public 105B recipe is refused, with the lines where it goes wrong.

Numbers that no training can mean are refused wherever they stand.
"""

import importlib.util
import re
from pathlib import Path

import pytest

from plugins.errors import RecipeError
from tests.tools.check.mutations import LOADER, MODEL, PARALLEL, leaves, put
from tests.tools.check.test_rules import MINI, SEMI, findings
from tools.check.check import check_recipe, new_errors
from tools.ranges import RECIPE
from tools.recipe.load import bad_numbers, load_recipe, read_recipe
from tools.recipe.override import apply_overrides, dotted, get_path
from tools.schema import values
from tools.schema.schema import FILE, SCHEMA_FILE

SITE = Path(importlib.util.find_spec("mindformers").origin).parent.parent
SHIPPED = SITE / "configs" / "telechat3_moe" / "pretrain_telechat3_105b_a4b_4k.yaml"


@pytest.fixture(scope="module")
def report():
    return check_recipe(SHIPPED)


def line_of(text):
    lines = SHIPPED.read_text(encoding="utf-8").splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


@pytest.mark.parametrize(
    ("key", "text", "severity", "word"),
    [
        ("model.model_config.offset", "offset: 0", "error", "45 layers on 8 stages leave 5 over"),
        ("context.ascend_config.parallel_speed_up_json_path", "parallel_speed_up_4M.json", "error", "there is no file"),
        ("model.model_config.qk_rope_head_dim", "qk_rope_head_dim: 64", "warning", "qk_pos_emb_head_dim"),
        ("model.model_config.qk_nope_head_dim", "qk_nope_head_dim: 128", "warning", "qk_head_dim"),
        ("context.affinity_cpu_list", "affinity_cpu_list:", "warning", "a mapping"),
    ],
)
def test_its_faults_are_reported_where_they_stand(report, key, text, severity, word, tmp_path, monkeypatch):
    finding = next(finding for finding in report.findings if finding.key == key)
    assert (finding.severity, finding.line) == (severity, line_of(text))
    assert Path(finding.file) == SHIPPED
    assert word in finding.wrong
    assert finding.source.startswith("mindformers/")


def test_the_named_line_of_mindformers_is_the_one_that_fails(report):
    finding = next(finding for finding in report.findings if finding.key.endswith("offset"))
    file, _, number = finding.source.rpartition(":")
    assert "self.offset.sum() != remainder_layers" in (SITE / file).read_text("utf-8").splitlines()[int(number) - 1]
    assert "[1, 1, 1, 1, 1, 0, 0, 0]" in finding.right


def test_its_sizes_are_counted_all_the_same(report):
    assert report.table["parameters_total"] == 104_576_167_936
    assert report.table["stage_layers"] is None


@pytest.mark.parametrize("file", sorted((SITE / "configs").glob("*/*.yaml")), ids=lambda path: path.stem)
def test_no_shipped_recipe_ends_in_a_traceback(file):
    assert isinstance(check_recipe(file).findings, list)


NUMBERS = [
    path
    for path in leaves(SEMI)
    if isinstance(get_path(SEMI, path), int | float) and not isinstance(get_path(SEMI, path), bool)
]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("path", NUMBERS, ids=dotted)
def test_no_number_of_a_recipe_may_be_infinite_or_none(path, value):
    assert dotted(path) in findings(put(SEMI, path, value))


def test_a_number_that_no_table_knows_must_be_finite_too():
    recipe = put(MINI, ("output_dir",), {"anything": [1, float("nan")]})
    assert "not a finite number" in findings(recipe)["output_dir.anything.1"].wrong


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("optimizer", "eps"), 0.0),
        (("optimizer", "eps"), 10.0),
        (("optimizer", "betas"), [0.9, 1.5]),
        (("optimizer", "weight_decay"), 1e6),
        (("lr_schedule", "learning_rate"), 3000.0),
        (("lr_schedule", "learning_rate"), -1e-4),
        (("lr_schedule", "warmup_steps"), 10**12),
        (("lr_schedule", "warmup_ratio"), 3.0),
        (("runner_wrapper", "max_grad_norm"), 1e20),
        (("checkpoint", "save_interleaved_steps"), 10**12),
        (("checkpoint", "save_max"), 0),
        (("seed",), -1),
        (("seed",), 2**40),
        (("runner_config", "batch_size"), 10**9),
        (("runner_config", "epochs"), 10**12),
        ((*MODEL, "num_hidden_layers"), 10**9),
        ((*MODEL, "vocab_size"), 99_999_999_999),
        ((*MODEL, "num_attention_heads"), 10**9),
        ((*MODEL, "n_routed_experts"), 10**9),
        ((*MODEL, "hidden_size"), 10**12),
        ((*MODEL, "seq_length"), 10**15),
        ((*MODEL, "offset"), [[10**9]]),
        ((*MODEL, "rope_theta"), 0.0),
        ((*MODEL, "rope_theta"), 1e300),
        ((*MODEL, "hidden_dropout"), 1.0),
        ((*MODEL, "moe_aux_loss_coeff"), 1e9),
        ((*MODEL, "rotary_scaling_factor"), -2),
        ((*MODEL, "rope_scaling"), {"type": "yarn", "factor": 1e9}),
        ((*LOADER, "config", "eod"), 2**62),
        ((*LOADER, "sizes"), [10**20, 0, 0]),
        (("context", "max_device_memory"), "999999999GB"),
        (("context", "max_device_memory"), "0GB"),
        ((*PARALLEL, "data_parallel"), 99_999_999_999),
        ((*PARALLEL, "pipeline_stage"), 10**9),
        (("plugins", "held_out_loss"), {"data_path": "x", "samples": 10**15, "every": 1}),
        (("plugins", "attention_balance"), {"window": 10**9}),
    ],
)
def test_out_of_range(path, value):
    found = findings(put(SEMI, path, value))  # who counted so far would never end
    assert any(key.startswith(dotted(path)) for key in found), found


@pytest.mark.parametrize(
    ("schedule", "key"),
    [
        ({"warmup_steps": 301, "total_steps": 900}, "lr_schedule.warmup_steps"),  # of 300 steps that are trained
        ({"warmup_steps": 301, "total_steps": 900, "warmup_ratio": 0.01}, None),  # MindFormers takes the ratio
        ({"warmup_steps": 300, "total_steps": 900}, None),
    ],
)
def test_a_run_that_ends_within_its_warm_up(schedule, key):
    found = check_recipe(put(MINI, ("lr_schedule",), {**MINI["lr_schedule"], **schedule})).findings
    assert next((each.key for each in found if "warm-up" in each.wrong), None) == key


def test_degrees_that_multiply_to_no_cluster():
    recipe = put(put(SEMI, (*PARALLEL, "data_parallel"), 100_000), (*PARALLEL, "model_parallel"), 100_000)
    assert "out of range" in findings(recipe)["parallel_config"].wrong


@pytest.mark.parametrize(
    ("text", "right"), [("1e-8", "1.0e-8"), ("2E12", "2.0e+12"), (".5e-3", ".5e-3"), ("1e400", "finite"), ("16", "16")]
)
def test_a_number_that_yaml_reads_as_text(text, right, tmp_path):
    spoilt = tmp_path / "x.yaml"
    spoilt.write_text(f"optimizer:\n  type: AdamW\n  eps: '{text}'\n", "utf-8")
    found = {finding.key: finding for finding in check_recipe(spoilt).findings}["optimizer.eps"]
    assert right in str(found) and found.line == 3


def test_infinity_by_overflow(tmp_path):
    spoilt = tmp_path / "x.yaml"
    spoilt.write_text("optimizer: {type: AdamW, eps: 1.0e+400, betas: [.nan, 0.95]}\n", "utf-8")
    keys = {finding.key for finding in check_recipe(spoilt).findings if "finite" in finding.wrong}
    assert keys == {"optimizer.eps", "optimizer.betas.0"}


def test_every_tool_but_check_stops_at_the_first_of_them(tmp_path):
    spoilt = tmp_path / "x.yaml"
    spoilt.write_text("model:\n  model_config:\n    num_hidden_layers: 1000000000\n", "utf-8")
    with pytest.raises(RecipeError, match=r"x\.yaml:3: model\.model_config\.num_hidden_layers: .* from 1 to 10,000"):
        load_recipe(spoilt)


@pytest.mark.parametrize(
    "override",
    [
        "optimizer.eps=.nan",
        "optimizer.eps=.inf",
        "optimizer.eps=1e400",
        "optimizer.eps=nan",
        "optimizer.betas=[0.9, .nan]",
        "lr_schedule={learning_rate: .inf}",
        "model.model_config.num_hidden_layers=1000000000",
        "parallel_config.data_parallel=99999999999",
        "model.model_config.offset=[99999999999]",
    ],
)
def test_overrides_take_the_same_path(override):
    with pytest.raises(RecipeError) as refused:
        apply_overrides(SEMI, [override])
    assert override.split("=")[0] in str(refused.value) and "\n" not in str(refused.value)


def test_two_overrides_that_make_no_cluster():
    with pytest.raises(RecipeError, match="devices are out of range"):
        apply_overrides(SEMI, ["parallel_config.data_parallel=90000", "parallel_config.model_parallel=90000"])


def test_mindformers_own_recipes_pass():
    files = sorted((SITE / "configs").glob("**/*.yaml"))
    assert len(files) > 20
    assert {file: found for file in files if (found := list(bad_numbers(read_recipe(file))))} == {}


def test_mindformers_own_recipe_takes_its_model_type_from_a_folder():
    """MindFormers copies the folder into the section of the model, and reads the config.json in it."""
    report = check_recipe(SITE / "configs" / "qwen3" / "finetune_qwen3.yaml")
    assert report.errors and not [error for error in report.errors if "by which MindFormers finds" in error.wrong]


def test_each_missing_section_is_told():
    found = findings({key: value for key, value in MINI.items() if key not in ("context", "trainer")})
    assert {"context", "trainer"} <= found.keys()


def test_every_row_of_the_table_names_a_key_that_some_recipe_can_have():
    files = (FILE, SCHEMA_FILE, values.FILE)  # the second has the keys of plugins
    known = {word for file in files for word in re.findall(r"\w+", file.read_text("utf-8"))}
    assert [key for key in RECIPE if key.rsplit(".")[-1] not in known] == []


SIZES = [
    *((*PARALLEL, key) for key in ("data_parallel", "model_parallel", "pipeline_stage", "micro_batch_num")),
    *((*MODEL, key) for key in ("num_hidden_layers", "seq_length", "num_attention_heads", "vocab_size")),
]


@pytest.mark.parametrize("value", [8.0, True, None])
@pytest.mark.parametrize("path", SIZES, ids=dotted)
def test_a_size_that_is_no_whole_number_is_the_only_finding(path, value):
    """Other rules would calculate with the default in its place, and give advice for that: `write 1 as the first number
    of every entry` of a dataset_strategy that was right.
    """
    assert type(get_path(SEMI, path)) is int
    found = check_recipe(put(SEMI, path, value))
    assert [finding.key for finding in found.errors] == [dotted(path)] and found.table is None
    assert "must be an integer" in found.errors[0].wrong


def with_shared(count, width):
    """The findings on a recipe with so many shared experts of this width together; routed experts are 64 wide."""
    recipe = put(put(MINI, (*MODEL, "n_shared_experts"), count), (*MODEL, "moe_shared_expert_intermediate_size"), width)
    return [one for one in check_recipe(recipe).findings if one.key == dotted((*MODEL, "n_shared_experts"))]


def test_no_shared_experts_beside_their_width_are_refused():
    """MindFormers logs a warning, and builds them."""
    (found,) = with_shared(0, 64)
    assert found.severity == "error" and "moe_shared_expert_intermediate_size is 64" in found.wrong
    assert "write moe_shared_expert_intermediate_size: null" in found.right
    file, _, number = found.source.rpartition(":")
    assert "if self.shared_expert_num == 0" in (SITE / file).read_text("utf-8").splitlines()[int(number) - 1]
    assert with_shared(0, None) == []


def test_shared_experts_of_another_width_than_their_number_says_are_warned_of():
    (found,) = with_shared(2, 64)
    assert found.severity == "warning" and "2 experts of moe_intermediate_size 64 are 128 wide together" in found.wrong
    assert with_shared(2, 128) == with_shared(2, None) == with_shared(1, 64) == []


@pytest.mark.parametrize(("key", "degree"), [("expert_parallel", 3), ("expert_parallel", 6), ("expert_parallel", 32),
                                             ("expert_parallel", 128), ("model_parallel", 3), ("model_parallel", 8),
                                             ("model_parallel", 6)])  # fmt: skip
def test_the_advice_for_a_degree_leads_to_no_second_error(key, degree):
    recipe = put(put(SEMI, (*MODEL, "n_routed_experts"), 24), (*PARALLEL, "expert_parallel"), 2)
    path = (*PARALLEL, key)
    advice = re.fullmatch("write ([0-9]+)", findings(put(recipe, path, degree))[dotted(path)].right)
    assert dotted(path) not in findings(put(recipe, path, int(advice[1])))


def test_only_what_a_change_makes_wrong_is_new(monkeypatch):
    """A proposal of a change checks the recipe that it changes only if the changed one has an error."""
    checked: list = []
    before, other = MINI, put(MINI, (*PARALLEL, "data_parallel"), 0)
    monkeypatch.setattr("tools.check.check.check_recipe", lambda recipe: checked.append(recipe) or check_recipe(recipe))
    assert new_errors(before, before) == [] and len(checked) == 1
    assert new_errors(other, other) == []
    assert [one.split(": ")[0] for one in new_errors(before, other)] == ["parallel_config.data_parallel"]
