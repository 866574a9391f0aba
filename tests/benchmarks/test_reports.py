"""The one process that a mini with its parallel strategy is compared with.

The table of proofs: which recipes are in it, and what a line says.

The committed table of the report's sections 4.3 and 4.4.

The modelled curve of the report's example: a longhand sum at one point, and where it must go.

The comparison of dispatch buffers: tokens routed by hand, told as workers tell it, against the estimator.
"""

import json

import numpy as np
import pytest
from click.testing import CliRunner

from benchmarks import proofs_of_recipes
from benchmarks.fusion.curve import REPORTED, ROWS, crossing, point
from benchmarks.memory.dispatch import RECIPE, Call, by_layer, calls_of, expert_seconds, measured, predicted
from benchmarks.parallel_mini import in_float32, main, one_process, sharded
from benchmarks.proofs_of_recipes import main as proofs_of_recipes_main
from benchmarks.proofs_of_recipes import row_of, shipped
from benchmarks.report_case import DEGREES, MODELS, cases, markdown
from benchmarks.report_case import main as report_case_main
from plugins.expert_balance.record import Record
from tests.tools.layout.test_advise import sent_forward
from tests.tools.recipe.test_mini import ROOT, large_family
from tools.check.check import check_recipe
from tools.estimate.efficiency import DeviceTimes, cluster
from tools.estimate.from_recipe import from_recipe
from tools.hardware import load_hardware
from tools.layout.resolve import resolve
from tools.recipe.diff import compare
from tools.recipe.load import Recipe, load_recipe
from tools.recipe.mini import load_mini
from tools.recipe.view import View


@pytest.mark.parametrize("path", list(large_family()), ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_it_takes_the_same_samples_in_the_same_small_steps(path):
    mini = load_mini(path, workers=8)
    in_float32(mini)
    one = Recipe(one_process(mini))
    assert View(one).devices == 1 and View(one).sharded_on_cpu
    assert [str(error) for error in check_recipe(one).errors if "data_path" not in str(error)] == []
    sides = compare(resolve(mini), resolve(one))
    assert sides.before.samples == sides.after.samples
    together = View(mini).dp if mini.get("plugins", {}).get("group_aux_loss") else 1
    assert one["runner_config"]["batch_size"] == mini["runner_config"]["batch_size"] * together
    for key in ("num_hidden_layers", "hidden_size", "compute_dtype", "n_routed_experts", "moe_aux_loss_coeff"):
        assert one["model"]["model_config"][key] == mini["model"]["model_config"][key]


@pytest.mark.parametrize("name", ["telechat3_438b/pretrain_4k", "mini/pretrain_report"])
def test_both_sides_read_the_one_corpus_that_there_is(name):
    """Neither the recipe's own text nor a held-out part of it needs to be there."""
    mini = sharded(ROOT / "recipes" / f"{name}.yaml", "made/up", 3, 4)
    assert mini["train_dataset"]["data_loader"]["config"]["data_path"] == ["1", "made/up"]
    assert mini["plugins"]["held_out_loss"]["data_path"] == "made/up"
    assert "held_out_loss" not in one_process(mini)["plugins"]


@pytest.mark.parametrize("words", ["5", "x", "5:", "5:a", "-1:3"])
def test_a_kill_that_names_no_tensor_is_refused_before_a_training(words):
    result = CliRunner().invoke(main, ["recipes/mini/pretrain_report.yaml", f"--kill={words}"])
    assert result.exit_code == 2 and "is not RANK:TENSOR" in result.output


LARGE = ROOT / "recipes" / "telechat3_36b" / "context_32k.yaml"
REPORT = {"weights": 21, "proven": 19, "wrong": 0, "unknown": 2, "problems": [], "missing": {"A": 3, "B": 1},
          "stages": [{"operators": 900}, {"operators": 600}]}  # fmt: skip


def test_parts_cards_and_small_recipes_are_left_out():
    found = shipped()
    assert LARGE in found and len(found) > 30
    assert not [path for path in found if path.parent.name in ("base", "mini") or path.name == "card.yaml"]


def test_a_line_tells_the_layout_and_where_the_proof_ends():
    line = row_of(LARGE, REPORT)
    assert line == (
        "| `telechat3_36b/context_32k.yaml` | tp8 cp4 pp2 (64 devices) | 1,500 | 19 of 21 | 0 | 2 | 0 | `A` 3, `B` 1 |"
    )
    many = {**REPORT, "missing": dict.fromkeys("ABCDE", 1)}
    assert row_of(LARGE, many).endswith("`D` 1 and more |")


def test_a_violation_and_a_refusal_end_with_1(monkeypatch):
    told = {0: (0, json.dumps(REPORT), ""), 1: (1, json.dumps({**REPORT, "problems": ["x"]}), ""), 2: (2, "", "a\nno.")}
    told[3] = 1, json.dumps({"problems": ["no."]}), ""  # a rank does not compile
    for number, code in ((0, 0), (1, 1), (2, 1), (3, 1)):
        monkeypatch.setattr(proofs_of_recipes, "proof_of", lambda _, number=number: told[number])
        result = CliRunner().invoke(proofs_of_recipes_main, [str(LARGE)])
        assert result.exit_code == code
        assert ("refused" in result.output and "no." in result.output) == (number > 1)


def test_the_case_of_the_report():
    rows = cases(load_hardware("atlas_800t_a2"), skew=1.0)
    assert [(row.model, row.ep) for row in rows] == [(model, ep) for model in MODELS for ep in DEGREES]
    assert [(row.model, row.ep) for row in rows if row.refused] == [("105b", 128)]
    for row in rows:
        if not row.advice:
            continue
        modes, model = row.advice.modes, row.advice.config.model
        # the closed form of section 4.3: nodes / top-k, within the metadata
        sent = [sent_forward(row.advice, mode) for mode in ("hierarchical", "global")]
        ratio = sent[0] / sent[1]
        assert ratio == pytest.approx(row.advice.topology.nodes / model.top_k, rel=0.02)
        assert modes["deduplicated"].inter_bytes <= modes["hierarchical"].inter_bytes
        before, after = row.hierarchical.share_of_communication
        assert after <= before * (1 + 1e-12)
        if row.ep == 16:
            assert row.gain("hierarchical") > 0
    grown = {row.ep: row.mesh for row in rows if row.model == "105b"}
    assert grown[16] == "dp4 tp8 pp8" and grown[64] == "dp8* tp8 pp8"


def test_the_table_is_markdown_and_says_what_it_is():
    result = CliRunner().invoke(report_case_main, [])
    table = [line for line in result.stdout.splitlines() if line.startswith("|")]
    assert len(table) == 2 + len(MODELS) * len(DEGREES)
    assert len({line.count("|") for line in table}) == 1
    for word in ("modelled", "the report says about 15%", "30% -> 5%", "assumed in", "does not divide 192 experts"):
        assert word in result.stdout
    assert markdown(cases(load_hardware("atlas_800t_a2"))) == result.stdout


def test_the_committed_table_is_current():
    file = ROOT / "benchmarks" / "report_case.md"
    made = CliRunner().invoke(report_case_main, []).stdout
    assert file.read_text() == made, "python -m benchmarks.report_case > benchmarks/report_case.md"


TIMES = DeviceTimes(cluster("atlas_800t_a2"))
CONFIG = from_recipe(load_recipe("recipes/telechat3_438b/pretrain_4k.yaml"))


def test_a_point_is_the_sum_written_out():
    """16,384 rows: 819.2 an expert; the product is bound by the cube units."""
    found = point(TIMES, CONFIG, 16384)
    reached, depth = TIMES.reached, 16384 / 20
    share = reached.matmul * depth / (depth + reached.half_size)
    product = 2 * 16384 * 5120 * 3072 / (294.9e12 * share)
    cast = 6 * 20 * 5120 * 3072 / (1.6e12 * reached.memory)
    assert found.unfused == pytest.approx(product + cast)
    assert found.fused == pytest.approx(product)


def test_fused_is_never_slower_and_gains_less_where_the_product_is_long():
    points = [point(TIMES, CONFIG, rows) for rows in ROWS]
    assert all(each.fused <= each.overlap <= each.unfused for each in points)
    assert points[-1].faster < 0.1
    rows = crossing(TIMES, CONFIG)
    assert point(TIMES, CONFIG, rows).faster >= REPORTED > point(TIMES, CONFIG, rows + 64).faster


STEPS, LAYERS = 2, 3


@pytest.fixture(scope="module")
def config():
    return from_recipe(load_recipe(RECIPE))


def routed(config):
    """Records, and the calls of each worker: all tokens choose experts by a skew of their layer."""
    rng, records, workers = np.random.default_rng(0), [], [[] for _ in range(config.ep)]
    experts, each = config.model.experts, config.model.experts // config.ep
    row, own = config.model.hidden * config.item, config.rank_tokens * config.model.top_k
    for step in range(1, STEPS + 1):
        weights = np.exp(rng.normal(0, 1, (LAYERS, experts)))
        tokens = np.array([rng.multinomial(config.ep * own, one / one.sum()) for one in weights])
        got = tokens.reshape(LAYERS, config.ep, each).sum(2)
        for worker, calls in enumerate(workers):
            for layer in [*range(LAYERS), *reversed(range(LAYERS))]:
                there, back = own * row, int(got[layer, worker]) * row
                seconds = 10.0 * step + layer
                calls += [Call(config.model.hidden, there, back, seconds)]
                calls += [Call(config.model.hidden, back, there, seconds + 0.25)]
        slots = np.tile(np.arange(experts), (LAYERS, 1))
        records.append(Record(step, config.ep, (1, 2, 3), tokens, slots, (None,) * LAYERS))
    return records, workers


def test_bytes_of_every_worker_layer_and_step_are_those_predicted(config):
    records, workers = routed(config)
    found, expected = measured(workers, STEPS, LAYERS), predicted(config, records)
    assert found.shape == (STEPS, LAYERS, config.ep) and found.min() < found.max()
    assert np.array_equal(found, expected)


def test_one_row_more_is_seen_where_it_is(config):
    records, workers = routed(config)
    late = 2 * LAYERS * 2 + 3  # the second step's second layer, on its way back
    more = workers[1][late]
    workers[1][late] = Call(more.row, more.read, more.filled + config.model.hidden * config.item, more.processor)
    apart = np.argwhere(measured(workers, STEPS, LAYERS) != predicted(config, records))
    assert apart.tolist() == [[1, 1, 1]]


def test_backward_runs_through_the_layers_in_reverse(config):
    _, workers = routed(config)
    calls = by_layer(workers[0], STEPS, LAYERS)
    assert calls.shape == (STEPS, LAYERS, 4)
    assert all(call.processor - 10 * (step + 1) - layer < 1 for (step, layer, _), call in np.ndenumerate(calls))
    assert np.allclose(expert_seconds(workers[0], STEPS, LAYERS), 0.25)


def test_a_missing_exchange_is_refused(config):
    _, workers = routed(config)
    with pytest.raises(ValueError, match="23 exchanges of rows, but 2 steps of 3 layers make 4 each"):
        measured([workers[0][:-1]], STEPS, LAYERS)


def test_exchanges_of_numbers_are_left_out(config, tmp_path):
    lines = [{"row": row, "read": 8, "filled": 8, "processor": 0.5} for row in (1, config.model.hidden)]
    (tmp_path / "0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert calls_of(tmp_path / "0.jsonl", config.model.hidden) == [Call(config.model.hidden, 8, 8, 0.5)]
