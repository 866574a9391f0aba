"""Advice: sizes from the recipes, facts that hold whatever the assumed numbers are, and refusals."""

import itertools
import re
from dataclasses import replace

import pytest

from plugins.errors import RecipeError
from plugins.hierarchical_ep.plan import MODES
from plugins.hierarchical_ep.topology import Topology
from plugins.hierarchical_ep.traffic import expected_steps
from tests.tools.check.test_mutations import ROOT
from tools.estimate.from_recipe import from_recipe
from tools.estimate.layer_time import most_nodes
from tools.estimate.loads import EVEN, uniform
from tools.estimate.time_model import TimeModel
from tools.experts.cost import content
from tools.hardware import load_hardware
from tools.layout.advise import advise, check, choices
from tools.layout.resolve import resolve
from tools.recipe.load import load_recipe
from tools.recipe.override import apply_overrides

A2 = load_hardware("atlas_800t_a2")


def recipe(model="438b", *overrides):
    return apply_overrides(load_recipe(ROOT / "recipes" / f"telechat3_{model}" / "pretrain_4k.yaml"), overrides)


def ep(degree):
    return f"parallel_config.expert_parallel={degree}"


TP1 = ("parallel_config.model_parallel=1",)
ON = ("plugins={hierarchical_ep: {mode: global}}",)
ONE = ("model.model_config.n_routed_experts=1", "model.model_config.num_experts_per_tok=1")


def test_the_run_of_438b():
    """A device routes its sequence-parallel part of the micro-batch."""
    config = advise(recipe()).config
    assert (config.batch, config.rank_sequence, config.micro_batches, config.devices) == (1, 2048, 64, 4096)
    assert (config.model.hidden, config.model.experts, config.model.top_k, config.skew) == (5120, 256, 8, 1.0)


def test_bytes_are_those_of_the_planner():
    advice = advise(recipe(), A2, uniform(1.3))
    forward = expected_steps("hierarchical", Topology(2, 8, 256), 2048, 8, 5120, 2, skew=1.3)
    ids = sum(step.inter_forward_only for step in forward)
    dispatch = sum(step.inter_bytes for step in forward if step.name.startswith("dispatch"))
    # forward, backward; of what is recomputed only dispatch crosses nodes again
    expected = 2 * sum(step.inter_bytes for step in forward) - ids + dispatch
    assert advice.modes["hierarchical"].inter_bytes == pytest.approx(expected)


@pytest.mark.parametrize("model", ["105b", "438b", "1119b"])
def test_ep16_moves_nodes_over_top_k_of_the_bytes(model):
    """Report section 4.3: 2 nodes, so the AllGather moves 2 / k of the All-to-All, within the ids and probabilities."""
    advice = advise(recipe(model, ep(16), "recompute_config.recompute=False"), A2, EVEN)
    ratio = advice.modes["hierarchical"].inter_bytes / advice.modes["global"].inter_bytes
    assert ratio == pytest.approx(2 / advice.config.model.top_k, rel=0.02)
    assert ratio == pytest.approx(advice.break_even.hierarchical_over_global, rel=0.01)
    assert advice.modes["deduplicated"].inter_bytes < advice.modes["hierarchical"].inter_bytes
    assert f"{advice.break_even.hierarchical_over_global:.2f}" in advice.why


def sent_forward(advice, mode):
    """Bytes between nodes without backward and what recomputation repeats, which differs by mode."""
    return sum(step.inter_bytes for step in TimeModel(A2).exchanges(replace(advice.config, ep_mode=mode)))


@pytest.mark.parametrize("degree", [16, 32, 64, 128])
def test_what_holds_for_every_degree(degree):
    advice = advise(recipe("438b", ep(degree)), A2)
    for report in advice.modes.values():
        assert report.exposed[1] <= report.exposed[0] == pytest.approx(report.ep_seconds)
        assert report.step[1] <= report.step[0]
        assert all(0 <= share <= 1 for share in (*report.share_of_step, *report.share_of_communication))
        assert sum(report.cut.by_part.values()) == pytest.approx(report.step[1])
    forward = {mode: sent_forward(advice, mode) for mode in MODES}
    assert (forward["hierarchical"] < forward["global"]) == (advice.break_even.hierarchical_over_global < 1)
    assert advice.best.step[1] == min(report.step[1] for report in advice.modes.values())
    assert advice.settings["hierarchical_ep"] == {"mode": advice.mode}
    b, s = advice.settings["ep_overlap"]["chunks"]
    assert 1 <= b <= advice.config.batch and 1 < s <= advice.config.rank_sequence


def test_more_nodes_and_more_skew_never_move_fewer_bytes():
    by_degree = [advise(recipe("438b", ep(degree)), A2).modes for degree in (16, 32, 64, 128)]
    by_skew = [advise(recipe(), A2, uniform(skew)).modes for skew in (1.0, 1.2, 2.0)]
    for series in (by_degree, by_skew):
        for mode in MODES:
            inter = [modes[mode].inter_bytes for modes in series]
            assert inter == sorted(inter)


def test_a_slower_link_between_nodes_favours_fewer_bytes():
    slow = replace(A2, inter_node=replace(A2.inter_node, efficiency=A2.inter_node.efficiency / 4))
    gains = []
    for hardware in (A2, slow):
        modes = advise(recipe(), hardware).modes
        gains.append(modes["global"].step[0] / modes["hierarchical"].step[0])
    assert 1 < gains[0] < gains[1]


def test_inside_a_node_there_is_nothing_to_choose():
    advice = advise(recipe("105b"), A2)  # EP 8
    assert advice.topology.nodes == 1 and advice.mode == "global"
    assert {report.inter_bytes for report in advice.modes.values()} == {0}
    assert len({report.step for report in advice.modes.values()}) == 1
    assert "one node" in advice.why


def test_an_order_other_than_the_wavefront_is_written_down():
    advice = advise(recipe("105b", ep(64), "parallel_config.data_parallel=8"), A2, modes=["hierarchical"])
    assert advice.stride != 1  # inter-node links are the bottleneck: a later dispatch waits for an earlier combine
    assert advice.settings["ep_overlap"] == {"chunks": list(advice.chunks), "stride": advice.stride}
    assert "stride" not in advise(recipe(), A2).settings["ep_overlap"]


def test_a_fixed_mode_and_no_overlap():
    advice = advise(recipe(), A2, modes=["global"], cuts=[(1, 1)])
    assert advice.settings == {"hierarchical_ep": {"mode": "global"}}
    assert advice.best.step[0] == advice.best.step[1]
    assert "launches" not in advise(recipe(), A2).why


def test_the_recipe_as_it_is_written_is_among_the_answers():
    """MindFormers' own dispatcher, a mode and chunks that are written, and what is left to `auto`."""
    plain = advise(recipe())
    assert (plain.written.mode, plain.written.chunks) == ("hierarchical", (1, 1))
    assert plain.written.step.total == plain.modes["hierarchical"].step[0]
    own = recipe()
    own["plugins"] = {"hierarchical_ep": {"mode": "global"}, "ep_overlap": {"chunks": [1, 2]}}
    cut = advise(own, cuts=[(1, 2)], stride=1)
    assert cut.written.step.total == cut.modes["global"].step[1] and "chunks [1, 2]" in cut.written.words
    own["plugins"] = {"hierarchical_ep": {"mode": "auto"}, "ep_overlap": {"chunks": "auto"}}
    free = advise(own)
    assert (free.written.mode, free.written.chunks) == (free.mode, free.chunks)
    assert free.written.step.total == free.best.step[1] == plain.best.step[1]


@pytest.mark.parametrize(
    ("model", "overrides", "words"),
    [
        ("438b", [ep(1)], ["expert_parallel", "no token", "--ep 16"]),
        ("105b", [ep(128), "parallel_config.data_parallel=16"], ["expert_parallel: 128", "192 experts", "32 or 64"]),
        ("105b", [ep(5), "parallel_config.data_parallel=1", *TP1], ["192 experts", "1 x 1; give more ranks"]),
        (
            "105b",
            [ep(1), "parallel_config.data_parallel=1", *TP1],
            ["no token", "no degree above 1", "1 x 1; give more"],
        ),
        ("105b", [ep(1), "parallel_config.data_parallel=3", *TP1], ["no degree above 1 fits 192 experts"]),
        ("105b", [ep(2), *ONE], ["2 does not divide 1 experts", "more ranks or experts"]),
        ("105b", [ep(64)], ["expert_parallel: 64", "4 x 8", "data_parallel: 8"]),
        ("105b", [ep(12), *ON], ["12 is not a multiple of the 8 devices of a node; write 8 or 16"]),
        (
            "105b",
            [ep(12)],
            ["12 does not divide data_parallel x model_parallel = 4 x 8; use 8 or 16, or data_par"],
        ),
        ("105b", [ep(24)], ["24 does not divide data_parallel x model_parallel = 4 x 8; use 16 or 32, or data_par"]),
        ("105b", [ep(24), "parallel_config.data_parallel=9"], []),
        ("438b", ["use_parallel=False"], ["use_parallel"]),
        ("438b", ["model.model_config.n_routed_experts=0"], ["n_routed_experts", "no routed experts"]),
        ("438b", ["model.model_config.npu_nums_per_device=16"], ["npu_nums_per_device: 16", "atlas_800t_a2", "8"]),
    ],
)
def test_refusals(model, overrides, words):
    if not words:
        assert advise(recipe(model, *overrides), A2).topology.nodes == 3
        return
    with pytest.raises(RecipeError) as caught:
        advise(recipe(model, *overrides), A2)
    for word in ["recipes", *words]:
        assert word in str(caught.value)


@pytest.mark.parametrize("tp1", [[], TP1], ids=["tp 8", "tp 1"])
@pytest.mark.parametrize("experts", [3, 6, 9, 40, 48, 192])
def test_a_degree_that_a_refusal_names_is_not_refused(experts, tp1):
    """A group of 12 devices divides 24 experts, but lies on one node and a half."""
    dp = "parallel_config.data_parallel"
    for degree, ranks in itertools.product((1, 3, 5, 12, 20, 24, 64), (1, 3, 6, 10, 16)):
        own = recipe("105b", f"model.model_config.n_routed_experts={experts}", f"{dp}={ranks}", *tp1)
        try:
            check(apply_overrides(own, [ep(degree)]), A2)
        except RecipeError as error:
            right = str(error).rsplit("; ", 1)[1].split("no degree above 1")[0]
            for of_dp, number in re.findall(r"(data_parallel: )?\b(\d+)", right):
                check(apply_overrides(own, [f"{dp}={number}", ep(degree)] if of_dp else [ep(number)]), A2)


@pytest.mark.parametrize(("degree", "nodes"), [(3, 3), (6, 2), (12, 2), (24, 3)])
def test_groups_across_nodes_are_reported_as_search_predicts_them(degree, nodes):
    """`tc3 search` writes such degrees, which the report refused, and took 3 ranks for ranks of one node."""
    own = recipe("105b", ep(degree), "parallel_config.data_parallel=24", *TP1)
    advice = advise(own, A2, EVEN, *choices(own, A2))
    assert advice.topology.nodes == nodes and advice.topology.ep == degree
    step = TimeModel(A2).step(from_recipe(own), simulated=True)
    assert advice.written.step.total == step.total
    if degree % 8:
        assert advice.overlay == {} and advice.best.step == (step.total, step.total) and advice.best.inter_bytes
        assert "only the global All-to-All is possible; expert_parallel: " in advice.why


@pytest.mark.parametrize("node", [1, 2, 3, 8])
def test_a_group_lies_on_as_many_nodes_as_its_ranks_are_on(node):
    for span, devices in itertools.product(range(1, 30), (24, 48, 96)):
        groups = [range(first, first + span) for first in range(0, devices - span + 1, span)]
        most = max((len({rank // node for rank in group}) for group in groups), default=-(-span // node))
        assert most_nodes(span, node, devices) == most


def test_a_slowest_stage_without_experts_exposes_nothing():
    layers = "model.model_config.first_k_dense_replace=40", "model.model_config.offset=[34,-4,-4,-4,-4,-4,-4,-4]"
    chunks = "parallel.pipeline_config.pipeline_interleave=False", "model.model_config.pp_interleave_num=1"
    advice = advise(recipe("438b", *layers, *chunks), A2, cuts=[(1, 2)])
    assert advice.best.exposed == (0, 0) and advice.chunks == (1, 2)
    assert advice.why.endswith("the slowest stage has no experts, so 2 chunks do not shorten the step.")
    (report,) = content([advice], "recipe.yaml")["reports"]
    assert report["modes"]["global"]["exposed_fraction"] == [0, 0]


def test_the_suggested_mesh_is_accepted():
    advice = advise(recipe("105b", ep(64), "parallel_config.data_parallel=8"), A2)
    assert (advice.topology.nodes, advice.config.devices) == (8, 512)


def test_a_schedule_that_cannot_be_simulated_is_compared_as_1f1b_and_says_so():
    own = recipe("438b", ep(16))
    own["parallel_config"]["micro_batch_num"] = 1
    advice = advise(own)
    assert "micro-batches" in advice.as_1f1b and advice.mode == advise(recipe()).mode
    assert advise(recipe()).as_1f1b == ""


def test_wrong_arguments():
    with pytest.raises(RecipeError, match="did you mean 'hierarchical'"):
        advise(recipe(), A2, modes=["hierachical"])
    with pytest.raises(RecipeError, match="no such file"):
        advise(recipe(), "atlas")
    with pytest.raises(RecipeError, match="skew"):
        advise(recipe(), A2, uniform(0.5))
    with pytest.raises(RecipeError, match=r"chunks\[0\]"):
        advise(recipe(), A2, cuts=[(2, 1)])


RECIPE = "recipes/telechat3_438b/pretrain_4k_ep_overlap.yaml"


def resolved(**plugins):
    """The recipe with these plugins, resolved, and what was said."""
    recipe, said = load_recipe(RECIPE), []
    recipe["plugins"] = plugins
    return resolve(recipe, said.append), said


def test_auto_becomes_what_the_report_recommends():
    recipe, said = resolved(hierarchical_ep={"mode": "auto"}, ep_overlap={"chunks": "auto"})
    advice = advise(load_recipe(RECIPE))
    assert recipe["plugins"]["hierarchical_ep"]["mode"] == advice.mode
    assert recipe["plugins"]["ep_overlap"] == {"chunks": list(advice.chunks), "stride": advice.stride}
    assert len(said) == 2 and advice.mode in said[0] and str(list(advice.chunks)) in said[1]
    assert resolve(recipe, said.append) == recipe and len(said) == 2, "resolved is resolved"


def test_what_is_written_stays():
    recipe, said = resolved(hierarchical_ep={"mode": "global"}, ep_overlap={"chunks": [1, 2]})
    assert said == [] and recipe["plugins"]["hierarchical_ep"] == {"mode": "global"}
    recipe, _ = resolved(hierarchical_ep={"mode": "deduplicated"}, ep_overlap={"chunks": "auto"})
    assert recipe["plugins"]["hierarchical_ep"]["mode"] == "deduplicated"
    recipe, _ = resolved(hierarchical_ep={"mode": "auto"}, ep_overlap={"chunks": [1, 2], "stride": 3})
    assert recipe["plugins"]["ep_overlap"] == {"chunks": [1, 2], "stride": 3}
    assert recipe["plugins"]["hierarchical_ep"]["mode"] in MODES


def test_nothing_to_resolve_without_the_plugin():
    assert resolved(held_out_loss=False)[1] == []
    assert resolved(hierarchical_ep=False, ep_overlap={"chunks": [1, 2]})[1] == []


def test_chunks_of_nothing_are_refused():
    """They stayed `auto`, and the launch failed later, in the plugin."""
    with pytest.raises(
        RecipeError, match=r"ep_overlap.yaml: plugins.ep_overlap: this plugin divides the .*hierarchical_ep"
    ):
        resolved(hierarchical_ep=False, ep_overlap={"chunks": "auto"})


def test_errors_name_the_file():
    with pytest.raises(RecipeError, match=r"_4k_ep_overlap.yaml: plugins.hierarchical_ep.mode: 'atuo' is none of auto"):
        resolved(hierarchical_ep={"mode": "atuo"})
    with pytest.raises(RecipeError, match="atlas"):
        resolved(hierarchical_ep={"mode": "auto", "hardware": "atlas_800t_a3"})
