"""The compiled stage's line: its peak is the reported total, and its bytes are those of the report's parts."""

from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from tools.dryrun.graph.activations import activations_of, curve_of, peak_bytes
from tools.dryrun.graph.by_layer import curves_of, put_together
from tools.dryrun.graph.passes import Pass, passes_of
from tools.dryrun.graph.text import read_graph
from tools.dryrun.graph.time_line import line_of
from tools.dryrun.layout import ACCUMULATED, STATE, WEIGHT, Held
from tools.dryrun.memory import memory_of
from tools.estimate.memory.time_line import KEPT, Owner
from tools.pipeline.schedules import operations

GRAPH = Path(__file__).with_name("pipeline.ir")
HELD = [
    Held("decoder.layers.0.mlp.experts.weight1", WEIGHT, "Float32", (8, 4), (4, 4), 2),
    Held("adam_m.decoder.layers.0.self_attention.linear_q.weight", STATE, "Float32", (8, 4), (4, 4), 2),
    Held("accu_grads.output_layer.weight", ACCUMULATED, "Float32", (8, 4), (8, 4), 1),
]
SIZES = st.integers(0, 50)


@st.composite
def chunks(draw, count):
    found = []
    for _ in range(count):
        curves = {kind: draw(st.lists(SIZES, min_size=1, max_size=4)) for kind in "FB"}
        modules = draw(st.dictionaries(st.sampled_from(["experts", "norms", "dispatch"]), SIZES, min_size=1))
        most = {"forward": max(curves["F"]), "backward": max(curves["B"])}
        found.append({"saved": sum(modules.values()), **most, "modules": modules, "curves": curves})
    return found


@given(data=st.data(), stages=st.integers(2, 4), rounds=st.integers(2, 3), cut=st.booleans())
@settings(max_examples=100)
def test_the_peak_is_the_total_of_the_report(data, stages, rounds, cut):
    count = 2 if cut else 1
    graph = {"kept": {"decoder.layers.0.mlp.experts.weight1": 100}, "activations": data.draw(chunks(count))}
    stage, name = data.draw(st.integers(0, stages - 1)), "zero_bubble_v" if cut else "1f1b"
    passes = [Pass(op.kind, op.micro_batch, op.chunk) for op in operations(name, stage, stages, count, stages * rounds)]
    line, memory = line_of(HELD, graph, passes), memory_of(HELD, graph, passes, limit=0)
    assert line.peak == memory.total
    assert line.total[0] == line.total[-1] == memory.exact
    assert (line.live >= 0).all() and line.unit == "passes" and line.edges[-1] == len(passes)


def test_owners_are_modules_of_the_model():
    graph = {"kept": {"embedding.word_embeddings.weight": 7}, "activations": []}
    line = line_of(HELD, graph, [])
    found = dict(line.at_peak())
    assert found == {
        Owner("weights", "experts"): 32,
        Owner("state", "attention"): 32,
        Owner("accumulated", "head and logits"): 128,
        Owner("gathered", "embedding"): 7,
    }


def test_a_compiled_graphs_line_has_its_totals_and_its_modules():
    graph = read_graph(GRAPH)
    found = activations_of(graph, rows=64)
    passes = passes_of(graph)
    line = line_of([], {"kept": {}, "activations": found}, passes)
    assert line.peak == memory_of([], {"kept": {}, "activations": found}, passes, 0).total > 0
    for chunk in found:
        assert sum(chunk["modules"].values()) == chunk["saved"]
        assert max(chunk["curves"]["F"]) == chunk["forward"] and max(chunk["curves"]["B"]) == chunk["backward"]
        for part in chunk["parts"].values():
            assert sum(part["modules"].values()) == part["saved"]
    assert any(owner.part == KEPT for owner in line.owners)


def test_a_curve_has_the_peak_however_short_the_pass():
    for nodes in read_graph(GRAPH).graphs.values():
        assert max(curve_of(nodes[:3], 8), default=0) == peak_bytes(nodes[:3], 8)
        assert max(curve_of(nodes, 8), default=0) == peak_bytes(nodes, 8)


def test_curves_put_together_have_the_peaks_put_together():
    parts = [{"saved": 10, "forward": 18, "backward": 7}, {"saved": 1, "forward": 30, "backward": 9}]
    curves, whole = curves_of(parts), put_together(parts)
    assert curves == {"F": [18, 40], "B": [9, 7]}
    assert (max(curves["F"]), max(curves["B"])) == (whole["forward"], whole["backward"])
