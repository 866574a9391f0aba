"""Stages put together from parts, and `tc3 fusion` on a graph that is on disk."""

import gzip
import json

import pytest
from click.testing import CliRunner

from launch.cli import tc3
from plugins.operator_fusion.plan import Fusion
from tests.tools.fusion.small_graphs import node, text_of
from tests.tools.fusion.test_tally import grouped
from tools.dryrun.plan import plan_jobs
from tools.dryrun.quick import quick_plan
from tools.estimate.efficiency import DeviceTimes, cluster
from tools.fusion import cli
from tools.fusion.render import _alike
from tools.fusion.report import Pieces, quick_pieces, stage_pieces
from tools.fusion.tally import Tally
from tools.recipe.load import load_recipe
from tools.recipe.view import View

RECIPE = "recipes/telechat3_438b/pretrain_4k.yaml"
FULL, HALF = ("Float32", (1024, 1024)), ("BFloat16", (1024, 1024))
LAYER = "Default/model-GPTModel/decoder-TransformerBlock/layers-CellList/{}-TransformerLayer/x-op"


def layer(number):
    """Cast, then Exp and Cast: 2 + 4 + 4 + 4 + 4 + 2 MiB one by one, 4 as one kernel."""
    path = LAYER.format(number)
    return [("Cast", HALF, FULL, path), ("Exp", FULL, FULL, path), ("Cast", FULL, HALF, path)]


def graph(folder, *numbers):
    """Layers that take from the batch, packed."""
    nodes = []
    for number in numbers:
        taken = "x"
        for op, takes, gives, path in layer(number):
            nodes.append(node(op, [taken], [takes], gives, path))
            taken = len(nodes) - 1
        nodes.append(node("Cos", [taken], [HALF], HALF, LAYER.format(number)))
    file = folder / f"{'_'.join(map(str, numbers))}.ir.gz"
    file.write_bytes(gzip.compress(text_of(nodes).encode()))
    return file


MIB = 2**20


def test_a_stage_is_the_sum_of_its_layers(tmp_path):
    """Layers 0 (dense), 1 and 2 of the 438B; without a pipeline's passes all of it is once a step."""
    pieces = stage_pieces(load_recipe(RECIPE), graph(tmp_path, 0, 1, 2), Fusion("vector"), 0)
    assert pieces.stages == {0: {"dense": 1, "moe": 2}}
    for part in ("dense", "moe"):
        one = pieces.tallies[part]["step"]
        assert (one.operators, one.kernels, one.before, one.after) == (3, 1, 20 * MIB, 4 * MIB)
    assert pieces.step(0).before == 3 * 20 * MIB
    assert pieces.step(0).beside == 3 * 4 * MIB


def test_quick_stages_have_as_many_layers_as_the_model(tmp_path):
    recipe = load_recipe(RECIPE)
    texts = [graph(tmp_path, 0, 1), graph(tmp_path, 2)]
    assert len(quick_plan(recipe).jobs) == len(texts)
    pieces = quick_pieces(recipe, texts, Fusion("vector"))
    assert sum(pieces.stages[0].values()) == 7
    assert sum(sum(has.values()) for has in pieces.stages.values()) == 54
    assert pieces.step(3).before == 7 * 20 * MIB
    assert pieces.quick


def test_micro_batches_count_for_passes_and_not_for_the_optimizer():
    each, once = Tally(operators=2, kernels=1, before=10, after=4), Tally(operators=3, kernels=3, before=7, after=7)
    pieces = Pieces(8, {"moe": {"forward": each, "gradient": each, "step": once}}, {0: {"moe": 5}})
    step = pieces.step(0)
    assert (step.operators, step.before, step.after) == (5 * (8 * 4 + 3), 5 * (8 * 20 + 7), 5 * (8 * 8 + 7))
    assert step.launches == 5 * 8 * 2


def run(*words):
    return CliRunner().invoke(tc3, ["fusion", RECIPE, *map(str, words)], catch_exceptions=False)


def test_the_command_counts_a_graph_on_disk(tmp_path):
    file = graph(tmp_path, 0, 1)
    done = run("--graph", file, "--json", "--picture", tmp_path / "x.png")
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert (report["level"], report["micro_batches"]) == ("vector", View(load_recipe(RECIPE)).micro_batches)
    (stage,) = report["stages"]
    assert (stage["bytes_before"], stage["bytes_after"]) == (40 * MIB, 8 * MIB)
    times = DeviceTimes(cluster("atlas_800t_a2"))
    assert stage["seconds_saved"] == pytest.approx(32 * MIB / (1.6e12 * times.reached.memory))
    assert stage["launch_seconds_saved"] == pytest.approx(4 * times.hardware.launch_s)
    assert {row["pattern"] for row in report["patterns"]} == {"Cast-Exp-Cast"}
    assert "unknown" in report["error"]
    assert any("Ascend" in line for line in report["not_known"])
    assert (tmp_path / "x.png").stat().st_size > 1000


def test_the_command_says_what_it_cannot_know(tmp_path):
    file = graph(tmp_path, 0, 1)
    words = " ".join(run("--graph", file).stdout.split())
    assert "but not with kernels on Ascend" in words
    assert "level cube" not in words and "from one layer of each kind" not in words
    assert "is not modelled" in " ".join(run("--graph", file, "--level", "cube").stdout.split())


@pytest.mark.parametrize("between", [["Reshape"], []])
def test_the_command_names_the_plugin_for_a_gradient_that_no_pass_matches(tmp_path, between):
    file = tmp_path / "graph.ir"
    file.write_text(text_of(grouped(between)).replace("%9", "%para1_ends"))
    assert ("plugins.grouped_gradient makes one operator" in run("--graph", file).stdout) == bool(between)


def test_level_off_saves_nothing_and_says_so(tmp_path):
    file = graph(tmp_path, 0, 1)
    for words in (("--level", "off"), ("--set", "context.jit_config.jit_level=O0")):
        report = json.loads(run("--graph", file, "--json", *words).stdout)
        assert report["level"] == "off"
        assert report["stages"][0]["launches_saved"] == 0
        assert report["stages"][0]["bytes_before"] == report["stages"][0]["bytes_after"]
        assert report["patterns"] == []
    assert "O0" in report["why"]


def test_graphs_are_kept_and_compiled_once(tmp_path, monkeypatch):
    """The texts of a plan's graphs lie in the cache; those that are missing are compiled, and no others."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    recipe = load_recipe(RECIPE)
    (job,) = plan_jobs(recipe, (0,)).jobs
    asked = []

    def compile_all(plan, at_once, use_cache, texts):
        asked.append([job.rank for job in plan.jobs])
        file = cli.text_of(job)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(graph(tmp_path, 0, 1).read_bytes())
        return [{"rank": 0, "stage": 0}]

    monkeypatch.setattr(cli, "compile_all", compile_all)
    done = run("--stage", 0, "--json")
    assert done.exit_code == 0, done.output
    assert asked == [[0]]
    assert json.loads(done.stdout)["stages"][0]["stage"] == 0


def test_stages_alike_are_one_row():
    rows = [{"stage": stage, "parts": {"moe": count}} for stage, count in enumerate((2, 4, 4, 4, 1))]
    assert [name for name, _ in _alike(rows)] == ["0", "1-3, each", "4"]
