"""A compiled dense step (dp2 x tp2, two layers) is proven, and faults that are planted in it are found.

Faults by an author who had not read the rules are planted in the compiled steps that the tests keep.
"""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from benchmarks.blind_spreads import FAULTS, Compiled, Steps, load_undivided, said
from benchmarks.planted_spreads import (
    DOUBTED,
    ELSEWHERE,
    NAMED,
    SILENT,
    copied,
    examine,
    faults,
    handed_on,
    of_one_weight,
    root,
)
from tests.tools.prove.renew import HERE, read
from tests.tools.prove.test_spread import SIZES
from tools.dryrun import cli as dryrun
from tools.dryrun import report
from tools.dryrun.collectives import generated_groups
from tools.dryrun.graph_text import Node
from tools.prove import cli
from tools.prove.call import Call, literal
from tools.prove.mesh import Mesh, Peers
from tools.prove.report import EXPLAINED, _ask, _by_spread, against, prove_rank, ranks_of, typing_of
from tools.prove.rules import RULES
from tools.prove.spread import Certain, NotKnown, Spread, Zeros, plain

RESULT, GRAPH, MESH, PEERS = read()
FOUND = {"pieces joined along another dimension": DOUBTED}  # what is said at the first place; the others are named


def proven(graph=GRAPH, peers=PEERS):
    return prove_rank(RESULT, typing_of(RESULT, graph, MESH, peers), {})


def test_every_weight_of_the_sound_step_is_proven():
    stage = proven()
    assert not stage.contradictions and not stage.missing
    assert stage.typed == stage.asked > 1000
    assert [weight.name for weight in stage.weights if weight.verdict != "proven"] == []
    assert len(stage.weights) == 25
    spreads = {weight.kind: weight.spread for weight in stage.weights}
    assert spreads["decoder.layers.*.self_attention.linear_proj.weight"] == "[128, tp*64]"
    assert spreads["decoder.final_layernorm.weight"] == "[128]"


@pytest.mark.parametrize("kind", [kind for kind, (places, _) in faults(GRAPH, PEERS).items() if places])
def test_planted_faults_are_found(kind, monkeypatch):
    places, plant = faults(GRAPH, PEERS)[kind]
    monkeypatch.setattr("benchmarks.planted_spreads.faults", lambda *_: {kind: (places, plant)})
    told = examine(RESULT, GRAPH, MESH, PEERS, 1)[kind]
    assert told == {FOUND.get(kind, NAMED): 1}


def known_groups(group):
    return ranks_of(RESULT, MESH.devices)(group) or generated_groups(GRAPH).get(group)


SAYS = {  # kind of fault -> what the report says; the number is that of the operator at which the fault is planted
    "the division by the devices left out": "nothing in the backward pass, which begins with ",
    "the factor of the loss's ranks left out": "it was not yet summed when its ranks took parts of it at Mul ",
    "backward: each rank keeps its own part instead of the sum": "ranks took parts of it at StridedSlice %{}",
    "forward: pieces gathered over another group": "it is the same on the ranks along tp since AllGather %{}",
    "every rank takes the same slice": "along dp take the same part at StridedSlice %{}",
    "the vocabulary starts at 0 on every rank": "an argument comes from Sub %{}",
    "the mask of the vocabulary left out": "an argument comes from Embedding ",
    "forward: each rank keeps its own part instead of the sum": "is a partial sum since ",
    "a gradient's sum taken twice": "it is too large since AllReduce ",
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", SAYS)
def test_a_violation_names_the_operators_behind_it(kind):
    places, plant = faults(GRAPH, PEERS)[kind]
    sound = typing_of(RESULT, GRAPH, MESH, PEERS)
    prove_rank(RESULT, sound, {})
    place = next(place for place in places if (GRAPH.root, place) in sound.asked)
    faulty, *others = (copied(each) for each in (GRAPH, *PEERS.values()))
    plant([faulty, *others], place, known_groups)
    stage = proven(faulty, dict(zip(PEERS, others, strict=True)))
    told = [*stage.contradictions, *(weight.why for weight in stage.weights if weight.verdict == "wrong")]
    assert any(SAYS[kind].format(place) in each for each in told), told


def test_of_many_wrong_weights_only_the_first_are_explained(monkeypatch):
    """Each explanation walks the whole step: for 256 weights of a step of 20,000 operators this took minutes."""
    faulty, calls = copied(GRAPH), []
    handed_on([faulty], next(n for n, node in enumerate(root(GRAPH)) if "VirtualDiv" in node.scope), known_groups)
    monkeypatch.setattr("tools.prove.report.since", lambda *given: calls.append(given) or "; told")
    stage = proven(faulty)
    assert all(weight.verdict == "wrong" for weight in stage.weights) and len(stage.weights) > EXPLAINED
    assert [weight.why.endswith("; told") for weight in stage.weights].count(True) == len(calls) == EXPLAINED
    _ask(typing_of(RESULT, faulty, MESH, PEERS), [weight.name for weight in stage.weights])
    assert len(calls) == EXPLAINED, "where only places of pieces are tried, nobody reads the text"


def test_a_missing_sum_is_named_with_its_weight_and_the_axes():
    place = next(
        n for n, node in enumerate(root(GRAPH)) if "linear_q_down_proj" in node.scope and "Mirror" in node.scope
    )
    faulty = copied(GRAPH)
    handed_on([faulty], place, lambda _: None)
    wrong = [weight for weight in proven(faulty).weights if weight.verdict == "wrong"]
    assert len(wrong) == 1 and "linear_q_down_proj" in wrong[0].name
    assert "it must still be summed over dp, tp" in wrong[0].why


def test_an_operator_without_a_rule_makes_weights_unknown_and_nothing_wrong():
    faulty = copied(GRAPH)
    place = next(number for number, node in enumerate(root(faulty)) if node.op == "SiLU")
    root(faulty)[place] = replace(root(faulty)[place], op="NeverHeardOf")
    stage = proven(faulty)
    assert stage.missing == {"NeverHeardOf": 1} and not stage.contradictions
    assert {weight.verdict for weight in stage.weights} == {"unknown"}, "all gradients need the first layer"
    behind = next(weight for weight in stage.weights if weight.name == "output_layer.weight")
    assert behind.verdict == "unknown" and "there is no rule for this operator" in behind.why


def test_constants_that_differ_where_no_rule_takes_them_are_unknown():
    peers = {axis: copied(peer) for axis, peer in PEERS.items()}
    place = next(n for n, node in enumerate(root(GRAPH)) if node.op == "AddExt" and "value=1e-05" in node.head)
    root(peers["tp"])[place].head = root(GRAPH)[place].head.replace("1e-05", "1e-06")
    stage = proven(peers=peers)
    assert stage.missing == {"AddExt": 1} and not stage.contradictions


def test_the_strategy_behind_an_operator_is_no_argument():
    """As MindSpore writes it behind what the loss does to its labels under context parallelism."""
    graph, peers = copied(GRAPH), {axis: copied(peer) for axis, peer in PEERS.items()}
    for each in (graph, *peers.values()):
        for node in (node for node in root(each) if node.op in ("Sub", "Mul", "MatMul")):
            node.head += " {in_strategy: ((4, 8), (), ())}"
    stage = proven(graph, peers)
    assert not stage.missing and {weight.verdict for weight in stage.weights} == {"proven"}


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (plain((4,)), ""),
        (Spread(((4,),), partial=frozenset({"dp"})), "it must still be summed over dp"),
        (Spread(((4,),), powers=(("dp", 1),)), "one sum over dp is too many"),
        (Spread(((4,),), powers=(("tp", -1),)), "a sum over tp is missing"),
        (Spread((("tp", 4),)), "the weight itself is [4]"),
        (Spread(((4,),), shifted=frozenset({"tp"})), "the ranks along tp hold different values"),
    ],
)
def test_what_is_wrong_with_a_gradient(found, said):
    why = against(found, plain((4,)))
    assert why.endswith(said) and bool(why) == bool(said)


def test_a_gradient_without_a_sum_is_compared_in_the_shape_of_its_weight():
    """If each rank has different experts, the walk ends at GroupedMatmul, before a reshape."""

    def verdict(weight):
        typing = SimpleNamespace(
            graph=SimpleNamespace(root="step"),
            name_of=lambda graph, number: "GroupedMatmul",
            of=lambda number: Spread((("dp", 8), (4,), (2,))),
            parameter=lambda name: weight,
        )
        return _by_spread(typing, "weight1", [("step", 0)]).verdict

    assert verdict(Spread((("dp", 32), (2,)))) == "proven"
    assert verdict(Spread((("tp", 32), (2,)))) == "wrong"
    assert verdict(plain((33, 2))) == "unknown"


def test_arguments_that_are_written_out():
    assert literal("(I64(0), I64(-1))") == (0, -1)
    assert literal("Bool(1)") is True and literal("F32(0.5)") == 0.5 and literal("None") is None
    assert literal("Tensor(shape=[2, 3], dtype=Float32, value=[...])") == plain((2, 3))
    assert isinstance(literal("Tensor(shape=[], dtype=Float32, value=0)"), Zeros)
    assert not isinstance(literal("Tensor(shape=[], dtype=Float32, value=0.5)"), Zeros)


@pytest.fixture
def compiled(monkeypatch):
    """`tc3 prove` finds the kept graphs instead of compiling."""
    graphs = dict(zip((0, 1, 2, 3), (GRAPH, *PEERS.values()), strict=True))
    monkeypatch.setattr(cli, "_compiled", lambda *_, **__: [RESULT])
    monkeypatch.setattr(cli, "text_of", lambda job: job.rank)
    monkeypatch.setattr(cli, "read_graph", graphs.__getitem__)
    return graphs


def test_the_command_says_what_is_proven(compiled):
    ended = CliRunner().invoke(cli.prove, [str(HERE / "dense.yaml")])
    assert ended.exit_code == 0, ended.output
    assert "proven for 25 of 25 weights\n" in ended.output
    assert "mesh tp 2, dp 2: " in ended.output and "violation" not in ended.output
    assert "summed over the right ranks 25 of 25, divided right 25 of 25" in ended.output


def test_the_command_names_violations(compiled):
    faulty = compiled[0] = copied(GRAPH)
    handed_on([faulty], next(n for n, node in enumerate(root(GRAPH)) if "Mirror" in node.scope), lambda _: None)
    ended = CliRunner().invoke(cli.prove, [str(HERE / "dense.yaml"), "--json"])
    assert ended.exit_code == 1, ended.output
    report = json.loads(ended.stdout)
    assert report["proven"] == 24 and report["wrong"] == 1
    assert any("it must still be summed over dp" in problem for problem in report["problems"])


def test_a_weight_that_the_walk_finds_wrong_is_counted_as_wrong(compiled, monkeypatch):
    """By its spread it is proven; the report counted a wrong divisor as unknown, and a copy's wrong sum as proven."""
    name, other = [*RESULT["gradients"]][:2]
    twice = {**RESULT["gradients"][name], "scales": [[2.0, 0, ""]]}
    wrong = {**RESULT, "gradients": {**RESULT["gradients"], name: twice}}
    monkeypatch.setattr(cli, "_compiled", lambda *_, **__: [wrong])
    monkeypatch.setattr(
        report, "_sums_of_copies", lambda results: [f"{other}: the gradient of its copy is summed twice"]
    )
    ended = CliRunner().invoke(cli.prove, [str(HERE / "dense.yaml"), "--json"])
    assert ended.exit_code == 1, ended.output
    found = json.loads(ended.stdout)
    assert (found["proven"], found["wrong"], found["unknown"], len(found["problems"])) == (23, 2, 0, 2)
    assert {each["name"] for each in found["stages"][0]["weights"] if each["verdict"] == "wrong"} == {name, other}


def test_a_rank_that_does_not_compile_is_told_as_json_too(monkeypatch):
    refused = {"rank": 0, "stage": 0, "error": {"type": "ValueError", "message": "The sum of offset 6"}}
    monkeypatch.setattr(cli, "compile_all", lambda *_, **__: [refused])
    ended = CliRunner().invoke(cli.prove, [str(HERE / "dense.yaml"), "--json"])
    assert ended.exit_code == 1, ended.output
    assert "rank 0: model.model_config.offset: " in json.loads(ended.stdout)["problems"][0]
    ended = CliRunner().invoke(cli.prove, [str(HERE / "dense.yaml")])
    assert ended.exit_code == 1 and ended.stdout.startswith("rank 0: model.model_config.offset: ")


@pytest.mark.parametrize("as_json", [(), ("--json",)])
def test_the_dry_run_says_the_same_with_prove(compiled, monkeypatch, as_json):
    """Of the dry run's own report, which its tests cover, only the problems are used here."""
    monkeypatch.setattr(dryrun, "compile_all", lambda *_, texts: [RESULT] if texts else [])
    monkeypatch.setattr(dryrun, "report_of", lambda *_: {"problems": [], "stages": []})
    monkeypatch.setattr(dryrun, "render", lambda report, console: console.print("memory of a device"))
    command = [str(HERE / "dense.yaml"), "--prove", *as_json]
    sound = CliRunner().invoke(dryrun.dryrun, command)
    assert sound.exit_code == 0, sound.output
    if as_json:
        assert json.loads(sound.stdout)["proof"]["proven"] == 25
    else:
        assert sound.stdout.index("memory of a device") < sound.stdout.index("proven for 25 of 25 weights\n")
    faulty = compiled[0] = copied(GRAPH)
    handed_on([faulty], next(n for n, node in enumerate(root(GRAPH)) if "Mirror" in node.scope), lambda _: None)
    found = CliRunner().invoke(dryrun.dryrun, command)
    assert found.exit_code == 1 and "it must still be summed over dp" in found.stdout.replace("\n", " ")


def test_the_page_has_every_rule():
    page = (HERE.parents[2] / "docs" / "prove.md").read_text("utf-8")
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| `")]
    told = {name.strip("`, "): row[1].removesuffix(" |") for row in rows for name in row[0].strip("| ").split(", ")}
    assert {name: each.says for name, each in RULES.items()} == {name: told.get(name) for name in RULES}


STEPS = {name: Steps([Compiled(*read(name))], 1) for name in ("dense", "experts", "ring")}
SAID = {  # what is said of a fault, where it is not named
    "balance_not_summed_back": ELSEWHERE,  # where the gradient of the loads meets another one
    "load_undivided": SILENT,  # it decides the experts' bias and changes no gradient
}
PLACES = {"dense": 14, "experts": 9, "ring": 8}  # faults for which a step has a place


@pytest.mark.slow
@pytest.mark.parametrize("step", STEPS)
def test_faults_by_somebody_who_did_not_know_the_rules(step):
    assert STEPS[step].report()["problems"] == []
    found = {}
    for fault in FAULTS:
        if step == "experts" and next(STEPS["dense"].faulty(fault), None):  # planted there
            continue
        for operators, faulty in STEPS[step].faulty(fault):
            found[fault.__name__] = said(faulty.report(), operators)
    assert found == {name: SAID.get(name, NAMED) for name in found}
    assert len(found) == PLACES[step]


def test_only_a_fault_without_a_gradient_is_silent():
    assert [name for name, word in SAID.items() if word == SILENT] == [load_undivided.__name__]


def call_of(first, steps):
    """An operator whose constant (1, 0) differs along axes a (outer, 2 ranks) and b (3 ranks)."""
    node = Node("Sub", "Sub(%0, I64(0))", "", [], types=("()", "()"))
    return Call(node, 0, (), SIZES, {(1, 0): frozenset(steps)}, offsets={(1, 0): (first, steps)})


def test_a_rank_starts_where_its_own_piece_starts():
    """Of six pieces of four elements, for every order of the ranks: only their own is right."""
    assert call_of(0, {"a": 12, "b": 4}).own_pieces((1, 0), 4) == ("a", "b")
    assert call_of(0, {"b": 8, "a": 4}).own_pieces((1, 0), 4) == ("b", "a")
    assert call_of(0, {"b": 4}).own_pieces((1, 0)) == ("b",)
    for first, steps in ((4, {"b": -4}), (0, {"b": 8}), (4, {"b": 4}), (0, {"a": 4, "b": 4}), (0, {"a": 8, "b": 4})):
        with pytest.raises(Certain, match="its own piece"):
            call_of(first, steps).own_pieces((1, 0), 4)
    with pytest.raises(NotKnown, match="no pieces of 4"):
        call_of(1, {"b": 4}).own_pieces((1, 0), 4)
    with pytest.raises(NotKnown, match="not whole numbers"):
        call_of(0, {"b": 4}).own_pieces((2, 0), 4)


def test_a_shift_of_indices_follows_the_order_of_the_ranks():
    """Only the axes of a shifted index are kept, so that pieces in another order than the ranks are not known."""
    assert call_of(0, {"a": 12, "b": 4}).pieces_in_rank_order((1, 0), 4) == {"a", "b"}
    with pytest.raises(NotKnown, match="not the order of the ranks"):
        call_of(0, {"b": 8, "a": 4}).pieces_in_rank_order((1, 0), 4)


def test_where_the_compiled_rank_lies_is_taken_off():
    """The second rank along tp has 1024 and the third 2048: the first one has 0."""
    _, graph, _, peers = read("dense")
    graph, peers = copied(graph), {"tp": copied(peers["tp"])}
    number = next(n for n, node in enumerate(graph.graphs[graph.root]) if node.op == "Sub")
    third = peers["tp"].graphs[graph.root][number]
    graph.graphs[graph.root][number].head, third.head = third.head, third.head.replace("1024", "2048")
    at_second = Peers(graph, {"tp": peers["tp"]}, Mesh({"tp": 1}, {"tp": 4}), 1)
    assert at_second.offsets(graph.root, number) == {(1, 0): (0, {"tp": 1024})}


def test_a_report_on_one_weight_names_it():
    texts = ["rank 0 (stage 0): a.weight: its gradient", "a.weight: its copy"]
    assert of_one_weight(texts, ["a.weight", "a.weight"])
    assert not of_one_weight(texts, ["a.weight", "b.weight"]) and not of_one_weight(texts, [])
    assert not of_one_weight([*texts, "SiLU %3 (layers.py:1): the operator is not linear"], ["a.weight"])
