"""The graph of the rank that is the last one along every axis shows whether constants grow evenly along the axes."""

import re
from types import SimpleNamespace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.planted_spreads import copied, root
from tests.tools.prove.renew import HERE, read
from tests.tools.prove.test_typing import T48, node
from tools.dryrun.graph_text import GraphText, Node, read_graph
from tools.dryrun.plan import plan_jobs
from tools.prove import cli
from tools.prove.mesh import FAR, Peers, mesh_of
from tools.prove.report import prove_rank, typing_of
from tools.prove.spread import Spread
from tools.recipe.load import load_recipe

T24 = "<Tensor[Float32], (2, 4)>"
meshes = st.lists(st.sampled_from([2, 3, 4, 5, 6, 8]), min_size=1, max_size=3).map(
    lambda sizes: mesh_of([(f"a{number}", size) for number, size in enumerate(sizes)], [])
)


@given(meshes, st.data())
def test_the_last_rank_is_as_far_away_as_possible_along_every_axis(mesh, data):
    rank = data.draw(st.integers(0, mesh.devices - 1))
    own, found = mesh.places(rank), mesh.neighbours(rank)
    assert rank == sum(mesh.strides[axis] * place for axis, place in own.items())
    for axis in mesh.sizes:
        beside = mesh.places(found.pop(axis))
        assert [each for each in own if own[each] != beside[each]] == [axis] and abs(own[axis] - beside[axis]) == 1
    one_of_two = len(mesh.sizes) == 1 and mesh.devices == 2
    assert set(found) == (set() if one_of_two or not has_other_end(mesh, own) else {FAR})
    for axis, place in mesh.places(found.get(FAR, rank)).items() if found else ():
        assert place == (0 if own[axis] == mesh.sizes[axis] - 1 else mesh.sizes[axis] - 1)


def has_other_end(mesh, own):
    """Whether the other end is no neighbour: it differs along several axes, or by more than one place along one."""
    (size, place) = next((mesh.sizes[axis], own[axis]) for axis in mesh.sizes)
    return len(mesh.sizes) > 1 or (size - 1 - place if place < size - 1 else size - 1) > 1


def test_an_axis_is_divided_into_axes_of_a_prime_number_of_ranks():
    mesh = mesh_of([("tp", 8), ("cp", 6), ("dp", 9)], [])
    assert mesh.refined(()) == mesh == mesh.refined(("cp",)), "the order of 2 and 3 is unknown"
    found = mesh.refined(("tp", "dp"))
    assert found.sizes == {"tp.1": 2, "tp.2": 2, "tp.3": 2, "cp": 6, "dp.1": 3, "dp.2": 3}
    assert found.strides == {"tp.1": 1, "tp.2": 2, "tp.3": 4, "cp": 8, "dp.1": 48, "dp.2": 144}
    assert not found.is_finest and mesh_of([("tp", 2), ("dp", 3)], []).is_finest


def slices(start):
    """The graph of a rank whose slice starts at `start`."""
    begin = ", ".join(f"I64({at})" for at in start)
    return GraphText("step", {"step": [Node("StridedSlice", f"StridedSlice(%para1_x, ({begin}))", "", [])]})


@settings(max_examples=60)
@given(meshes, st.data())
def test_a_constant_that_does_not_grow_evenly_is_found(mesh, data):
    """The rank may be any rank; the constants are those of a sum over axes, on the last rank perhaps with a fault."""
    steps = np.array(data.draw(st.lists(st.lists(st.integers(-9, 9), min_size=2, max_size=2),
                                        min_size=len(mesh.sizes), max_size=len(mesh.sizes))))  # fmt: skip
    rank, wrong = data.draw(st.integers(0, mesh.devices - 1)), data.draw(st.sampled_from([0, 0, 1, -4]))

    def start(at):
        return 100 + np.array(list(mesh.places(at).values())) @ steps

    graphs = {key: slices(start(at) + [wrong * (key == FAR), 0]) for key, at in mesh.neighbours(rank).items()}
    found = Peers(slices(start(rank)), graphs, mesh, rank).unevenness("step", 0)
    assert bool(found) == (wrong != 0 and FAR in graphs)
    if found:
        far = mesh.neighbours(rank)[FAR]
        assert f"{start(far)[0] + wrong} on rank {far}, but {start(far)[0]}" in found.says and found.counts
        assert found.over == {axis for axis, step in zip(mesh.sizes, steps, strict=True) if step[0]}


STEP = read("dense")


def with_fault(op, change, where=""):
    """Return the operator of a kind that is changed on the last rank of the dense step only, and what is proven then.

    Args:
        where: a pattern of the scope.
    """
    result, graph, mesh, peers = STEP
    last = copied(peers[FAR])
    number = next(
        number
        for number, each in enumerate(root(graph))
        if each.op == op and re.search(where, each.scope) and change(each.head) != each.head
    )
    head = root(last)[number].head
    root(last)[number].head = change(head)
    return f"{op} %{number}", prove_rank(result, typing_of(result, graph, mesh, {**peers, FAR: last}), {})


def further(head):
    """Let a slice of a matrix start two rows further on."""
    return re.sub(r"\(I64\((\d+)\), I64\(0\)\)", lambda found: f"(I64({int(found[1]) + 2}), I64(0))", head, count=1)


def test_a_slice_that_only_the_last_rank_takes_at_another_place_is_a_violation():
    operator, stage = with_fault("StridedSlice", further, "preprocess_labels|PreprocessLabels")
    assert any(each.startswith(operator) and "on rank 3, but" in each for each in stage.contradictions)


def test_indices_that_only_the_last_rank_counts_from_another_word_are_a_violation():
    operator, stage = with_fault("Sub", lambda head: re.sub(r"value=\s*\[?\s*(0|1024)\b", "value=512", head))
    assert any(each.startswith(operator) and "its constant is 512 on rank 3" in each for each in stage.contradictions)


def test_a_number_that_no_rule_takes_makes_weights_unknown():
    operator, stage = with_fault("AddExt", lambda head: head.replace("1e-05", "1e-06"))
    assert stage.missing == {"AddExt": 1} and not stage.contradictions
    assert any(operator in weight.why and "on rank 3, but" in weight.why for weight in stage.weights)


def test_a_collective_that_the_last_rank_does_not_have_makes_weights_unknown():
    result, graph, mesh, peers = STEP
    last = copied(peers[FAR])
    next(each for each in root(last) if each.op == "ReduceScatter").op = "TensorMove"
    stage = prove_rank(result, typing_of(result, graph, mesh, {**peers, FAR: last}), {})
    assert not stage.contradictions and "ReduceScatter" in stage.missing
    assert any("the last rank along every axis has 0 such operators instead of 1" in each.why for each in stage.weights)


def test_an_axis_of_which_each_half_cuts_another_dimension_is_divided(tmp_path):
    """Of four ranks, the second of each pair starts at row 2, and the second pair at column 4."""

    def graph(rank):
        row, column = 2 * (rank % 2), 4 * (rank // 2)
        end = f"(I64({row + 2}), I64({column + 4})), (I64(1), I64(1))"
        text = f"StridedSlice(%para1_x, (I64({row}), I64({column})), {end})"
        file = tmp_path / f"{rank}.ir"
        head = "# IR entry: @0_Step\nsubgraph @0_Step(%para1_x) {\n"
        file.write_text(f"{head}{node(0, text, T48, T24)}}}\n", encoding="utf-8")
        return read_graph(file)

    def typed(mesh):
        peers = {key: graph(rank) for key, rank in mesh.neighbours(0).items()}
        layouts = {"x": {"mesh": [4], "map": [-1, -1], "slice": [4, 8], "group": ""}}
        return typing_of({"rank": 0, "groups": [], "layouts": layouts}, graph(0), mesh, peers)

    coarse = typed(mesh_of([("tp", 4)], []))
    failure = coarse.of(0)
    assert not failure.contradicts and "its constant is 2 on rank 3, but 6 by the next ranks along tp" in failure.why
    assert coarse.divided == {"tp"}
    fine = typed(coarse.mesh.refined(coarse.divided))
    assert fine.of(0) == Spread((("tp.1", 2), ("tp.2", 4))) and not fine.divided


def test_the_command_compiles_only_ranks_that_it_has_not_compiled(monkeypatch):
    compiled = []

    def typing_of(result, graph, mesh, peers):
        assert peers == mesh.neighbours(0)
        return SimpleNamespace(mesh=mesh, divided=frozenset({"tp"}))

    monkeypatch.setattr(cli, "text_of", lambda job: job.rank)
    monkeypatch.setattr(cli, "read_graph", lambda rank: rank)
    monkeypatch.setattr(cli, "mesh_for", lambda *_: mesh_of([("tp", 8)], []))
    monkeypatch.setattr(cli, "_compiled", lambda _, plan, *__: compiled.append([job.rank for job in plan.jobs]))
    monkeypatch.setattr(cli, "typing_of", typing_of)
    monkeypatch.setattr(cli, "type_stages", lambda make: ([each() for each in make], []))
    monkeypatch.setattr(cli, "scale_faults", lambda *_: {0: {}})
    monkeypatch.setattr(cli, "prove_rank", lambda _, typing, __: typing.mesh.sizes)
    monkeypatch.setattr(cli, "report_of", lambda recipe, results, stages, *_: stages)
    recipe = load_recipe(HERE / "dense.yaml")
    stages = cli.proof_of(recipe, plan_jobs(recipe, (0,)), [{"rank": 0}], 1)
    assert stages == [{"tp.1": 2, "tp.2": 2, "tp.3": 2}]
    assert compiled == [[1, 7], [2, 4]]
