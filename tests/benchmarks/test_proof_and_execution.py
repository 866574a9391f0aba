"""Faults of executed runs are planted at the same call of the compiled graph that tests/tools/prove keeps."""

import json
import math
import os
from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from benchmarks import drawn_proofs
from benchmarks.drawn_proofs import DOUBTED, VIOLATION, Drawn, Kind, kind_of, main, words_of
from benchmarks.executed_faults import FAULTS, Fault
from benchmarks.planted_spreads import ELSEWHERE, NAMED, SILENT, copied, outcome, ranks_at, root, scoped
from benchmarks.proof_and_execution import (
    LAYOUTS,
    LINKS,
    POSITIONS,
    UNDIVIDED,
    Draw,
    Proofs,
    draws,
    leave_out,
    place_of,
)
from plugins.semi_auto_cpu.collectives import VARIABLE, CallRecord
from tests.tools.prove.renew import read
from tools.accuracy.equivalence.sharding import Sharding
from tools.dryrun.collectives import generated_groups
from tools.dryrun.executed import calls_file
from tools.prove.cli import Compiled
from tools.prove.report import ranks_of

RESULT, GRAPH, MESH, PEERS = STEP = read()
GROUPS = generated_groups(GRAPH)
TP2 = "executed_tp2_sp"


@pytest.fixture
def proofs(monkeypatch):
    monkeypatch.setattr("benchmarks.proof_and_execution.compiled_step", lambda recipe: STEP)
    monkeypatch.setattr("benchmarks.proof_and_execution.without_files", lambda recipe: recipe)
    return Proofs(SimpleNamespace(recipe=lambda sharding: None, sharding=lambda name: None))


def known(group):
    return ranks_of(RESULT, MESH.devices)(group) or GROUPS.get(group)


def executed(op):
    """The calls of an operator as a run would record them, last ones first: a backend may change their order."""
    nodes = [root(GRAPH)[place] for place in scoped(GRAPH, op, "")]
    return [CallRecord(op, ranks_at(node, known), 0, node.inputs[0].shape, "float32") for node in nodes][::-1]


@pytest.mark.parametrize("op", ["AllReduce", "ReduceScatter"])
def test_a_call_is_found_by_its_ranks_shape_and_occurrence(op):
    calls = executed(op)
    numbers = [number for number, call in enumerate(calls) if math.prod(call.shape) > 1]
    places = [place_of(GRAPH, Draw(TP2, op, number), calls, known) for number in numbers]
    assert sorted(places) == [
        place for place in scoped(GRAPH, op, "") if math.prod(root(GRAPH)[place].inputs[0].shape) > 1
    ]
    for call, place in zip((calls[number] for number in numbers), places, strict=True):
        assert (call.ranks, call.shape) == (ranks_at(root(GRAPH)[place], known), root(GRAPH)[place].inputs[0].shape)


def test_which_sum_of_one_number_was_left_out_is_not_known():
    """Those of the loss and of the global norm look alike, and only one of them changes the training."""
    calls = executed("AllReduce")
    (number,) = (number for number, call in enumerate(calls) if math.prod(call.shape) == 1)
    draw, graph = Draw(TP2, "AllReduce", number), copied(GRAPH)
    place = place_of(graph, draw, calls, known)
    root(graph).append(replace(root(graph)[place]))
    with pytest.raises(LookupError):
        place_of(graph, draw, calls, known)


def test_a_global_norm_that_is_not_summed_is_said(proofs):
    """No gradient changes by it, only the factor of clipping."""
    place = next(place for place in scoped(GRAPH, "AllReduce", "") if "ClipGradNorm" in root(GRAPH)[place].scope)
    graph = copied(GRAPH)
    leave_out(root(graph)[place])
    assert outcome(RESULT, graph, MESH, PEERS, place) == ELSEWHERE


@pytest.mark.slow
def test_what_is_said_of_the_graph(proofs):
    assert proofs.says(Draw(TP2), []) == SILENT
    scatter = executed("ReduceScatter")
    assert proofs.says(Draw(TP2, "ReduceScatter", 1), scatter) == NAMED
    assert proofs.says(Draw(TP2, kind=UNDIVIDED), []) == NAMED
    assert proofs.says_of_all(Fault("", TP2, "skip:AllReduce")) == NAMED
    assert proofs.says_of_all(Fault("", TP2, "reverse:AllGather")) == NAMED
    assert proofs.says(Draw(TP2), []) == SILENT, "the graph itself was not changed"


def test_draws_are_the_same_each_time_and_begin_without_faults(proofs):
    first, again = (list(draws(Random(0), 20, proofs)) for _ in range(2))
    assert first == again and [draw.layout for draw in first[: len(LAYOUTS)]] == list(LAYOUTS)
    assert all(draw.call < proofs.calls(draw.layout, draw.op) for draw in first if draw.op)
    assert {draw.op for draw in first} == {"", "AllReduce", "ReduceScatter"}
    drawn = Draw(TP2, "AllReduce", 3)
    assert drawn.fault.words == "skip:AllReduce:3" and str(drawn) == "AllReduce 3 left out"
    assert Draw(TP2, kind=UNDIVIDED).fault.kind == UNDIVIDED and not Draw(TP2).fault.words


def test_rotary_positions_of_cut_sequences(monkeypatch):
    ring = read("ring")
    monkeypatch.setattr("benchmarks.proof_and_execution.compiled_step", lambda recipe: ring)
    monkeypatch.setattr("benchmarks.proof_and_execution.without_files", lambda recipe: recipe)
    proofs = Proofs(SimpleNamespace(recipe=lambda sharding: None, sharding=lambda name: None))
    draw = Draw("executed_cp2", kind=POSITIONS)
    assert draw.fault.kind == FAULTS["rope_offset"].kind and draw.layout == FAULTS["rope_offset"].strategy
    assert proofs.says(draw, []) == NAMED
    assert proofs.says_of_all(FAULTS["rope_offset"]) == NAMED
    assert proofs.says(Draw("executed_cp2"), []) == SILENT
    assert any(each.kind == POSITIONS for each in draws(Random(0), 40, proofs, ("executed_cp2",)))


@pytest.fixture
def drawn():
    return Drawn([RESULT], Compiled(MESH, [GRAPH], [PEERS], [], [], 1))


def kinds(op):
    """The kinds of an operator's collectives over several ranks in the compiled graph."""
    larger = {"AllGather": "outputs"}.get(op, "inputs")
    nodes = [root(GRAPH)[place] for place in scoped(GRAPH, op, "")]
    return {kind_of(op, ranks_at(node, known), getattr(node, larger)[0].shape) for node in nodes}


@pytest.mark.slow
def test_a_drawn_layout_is_judged_without_a_fault_and_with_all_collectives_of_a_kind_changed(drawn):
    assert drawn.says() == SILENT
    said = {kind: drawn.says(0, kind) for op in ("AllReduce", "ReduceScatter", "AllGather") for kind in kinds(op)}
    assert len(said) > 5 and {said[kind] for kind in said if kind.op == "ReduceScatter"} == {VIOLATION}
    assert set(said.values()) <= {VIOLATION, DOUBTED, SILENT}
    assert drawn.says() == SILENT, "the graphs themselves were not changed"
    with pytest.raises(LookupError):
        drawn.says(0, Kind("AllReduce", (0, 1), (7,)))


def test_a_fault_of_a_kind_counts_the_calls_of_each_rank(tmp_path):
    orders = [[(2, 8), (2, 4), (3,)], [(3,), (2, 4), (2, 8)]]  # a backend may change the order of calls
    for rank, shapes in enumerate(orders):
        file = calls_file(tmp_path, rank)
        file.parent.mkdir(exist_ok=True)
        calls = [["AllReduce", [rank, rank + 2], 0, shape, "float32"] for shape in shapes]
        file.write_text(json.dumps({"calls": [["AllGather", [rank, rank + 2], 0, (3,), "float32"], *calls]}))
    assert words_of(tmp_path, Kind("AllReduce", (0, 2), (3,)), (0, 1)) == "skip:AllReduce:2@0 skip:AllReduce:0@1"
    twice = words_of(tmp_path, Kind("AllGather", (0, 2), (3,)), (1,), steps=2)
    assert twice == "reverse:AllGather:0@1 reverse:AllGather:1@1"
    assert words_of(tmp_path, Kind("AllReduce", (0, 2), (3,)), (1,), 2) == "skip:AllReduce:0@1 skip:AllReduce:3@1"
    assert not words_of(tmp_path, Kind("AllReduce", (0, 1), (3,)), (0, 1))


def test_a_fault_is_executed_without_evaluations_and_against_a_run_without_them(tmp_path, monkeypatch):
    asked = []

    class Runs:
        work, steps, base, corpus = tmp_path, 3, None, staticmethod(lambda sample: "")

        def trained(self, name, sharding):
            assert VARIABLE not in os.environ, "the run of one process has no fault"
            asked.append((name, sharding.held_out))

        def compare(self, name, sharding):
            faults = os.environ.get(VARIABLE, "")
            asked.append((name, sharding.held_out, sharding.against, Path(faults[1:]).read_text() if faults else ""))
            return SimpleNamespace(findings=[])

    for rank in range(2):
        file = calls_file(tmp_path / "draw", rank)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"calls": [["AllReduce", [0, 1], 0, (3,), "float32"]]}))
    monkeypatch.setattr(drawn_proofs, "derive_sharded", lambda *given: None)
    layout = SimpleNamespace(says=lambda *fault: VIOLATION if fault else SILENT, per=2)
    monkeypatch.setattr(drawn_proofs, "compiled", lambda recipe, sharding: layout)
    sharding = Sharding(tp=2, held_out=True)
    found = list(drawn_proofs.lines(drawn_proofs.Bench(Runs()), "draw", sharding, Random(0)))
    assert found == [
        ("no fault", drawn_proofs.SAME, SILENT),
        ("AllReduce of 3 over ranks +0, +1 left out", drawn_proofs.SAME, VIOLATION),
    ]
    words = " ".join(f"skip:AllReduce:{step}@{rank}" for rank in range(2) for step in range(3))
    with_it, without = sharding.against, replace(sharding, held_out=False).against
    assert with_it != without and VARIABLE not in os.environ
    assert asked == [(with_it, True), ("draw", True, with_it, ""),
                     (without, False), ("draw_fault", False, without, words)]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "said"),
    [("--draws 0", "--draws"), ("--most 1", "--most"), ("--draws 2 --only draw_0_9", "no layout draw_0_9")],
)
def test_a_benchmark_that_would_execute_nothing_is_refused(words, said):
    ended = CliRunner().invoke(main, words.split())
    assert ended.exit_code == 2 and said in ended.output and "|" not in ended.output


def test_a_send_or_receive_that_is_left_out_is_named_on_its_rank(monkeypatch):
    def moved(op, peer):
        return {"op": op, "peer": peer, "shape": (4, 8), "dtype": "Float32", "tag": 0, "micro": 0, "chunk": 0}

    results = [
        {"rank": 0, "graph": {"collectives": [moved("Send", 1), moved("Receive", 1)]}},
        {"rank": 1, "graph": {"collectives": [moved("Receive", 0), moved("Send", 0)]}},
    ]
    plan = SimpleNamespace(job_of=[0, 1], stages=[0, 1])
    monkeypatch.setattr("benchmarks.proof_and_execution.plan_jobs", lambda recipe, ranks: plan)
    monkeypatch.setattr("benchmarks.proof_and_execution.without_files", lambda recipe: recipe)
    monkeypatch.setattr("benchmarks.proof_and_execution.compile_all", lambda *_: results)
    proofs = Proofs(SimpleNamespace(recipe=lambda sharding: {}, sharding=lambda strategy: None))
    for name in LINKS:
        assert proofs.says_of_link(FAULTS[name]) == NAMED
    assert len(results[0]["graph"]["collectives"]) == len(results[1]["graph"]["collectives"]) == 2, "a copy is changed"
