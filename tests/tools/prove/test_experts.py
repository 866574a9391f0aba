"""The rules of routing: against NumPy on simulated ranks, and on a compiled step with experts (dp2 x tp2 x ep2)."""

from collections import Counter
from random import Random

import numpy as np
import pytest

from benchmarks.blind_spreads import Compiled, experts_over_tensor
from benchmarks.planted_spreads import ELSEWHERE, NAMED, copied, examine, faults, root
from tests.tools.prove.renew import read
from tests.tools.prove.test_spread import RANKS, SIZES, along, anything, check, describes, hold, some_spread, whole_of
from tests.tools.prove.test_typing import HALF, T48, node, typing
from tools.dryrun.collectives import attributes_of, generated_groups
from tools.dryrun.graph_text import Node, read_graph
from tools.prove import moves, tokens
from tools.prove.call import Call, Order, is_only_averaged
from tools.prove.moves import reduce_mean
from tools.prove.report import prove_rank, ranks_of, type_stages, typing_of
from tools.prove.rules import RULES
from tools.prove.spread import Alike, Contradiction, NotKnown, Rows, Spread, plain

STEP = read("experts")


def result(op, *values, of=(), axes=(), number=0, scope=""):
    """Return what the rule of an operator gives; the operator's output has the shape `of`."""
    types = ("()", f"(<Tensor[Float32], ({', '.join(map(str, of))})>)")
    head = f"{op}(%0, Tensor(shape=[1], dtype=Float32, value=[...]))"
    return RULES[op].of(Call(Node(op, head, head, [], scope=scope, types=types), number, values, SIZES, axes=axes))


def test_every_weight_of_a_step_with_experts_is_proven():
    found = prove_rank(STEP[0], typing_of(*STEP), {})
    assert not found.contradictions and not found.missing and found.typed == found.asked > 3000
    assert Counter(weight.verdict for weight in found.weights) == {"proven": 60}
    spreads = {weight.kind: weight.spread for weight in found.weights}
    assert spreads["decoder.layers.*.mlp.experts.weight1"] == "[tp*1024, 128]"
    assert spreads["decoder.layers.*.mlp.router.weight"] == "[16, 128]"


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in faults(STEP[1], STEP[3]) if kind.startswith("rows ")])
def test_faults_of_the_dispatch_are_found(kind, monkeypatch):
    places, plant = faults(STEP[1], STEP[3])[kind]
    monkeypatch.setattr("benchmarks.planted_spreads.faults", lambda *_: {kind: (places, plant)})
    (told,) = examine(*STEP, 1)[kind]
    assert told in (NAMED, ELSEWHERE)


SENT, GOT = Order(("counts", 1)), Order(("counts", 1, ("b",)))
EMPTY = (None,) * 5


def dispatched(given: Spread) -> Spread:
    """Tokens that were grouped, sorted by expert and exchanged over b."""
    start = Spread((("a", "b", Rows((given.dims[0],), (("group",),), given.shape[0])), *given.dims[1:]))
    flat = result("IndexSelect", start, 0, Order(("sort", 7)), of=given.shape)
    return result("AlltoAllV", flat, SENT, GOT, axes=("b",))


@anything
def test_tokens_that_experts_on_other_ranks_compute(random: Random) -> None:
    """Rows go by the steps of the rules to the ranks of their experts and back; b cuts the experts, a their tokens."""
    tokens, width, own = 4, 2, 2  # of a rank, of a token, experts of a rank
    spread = Spread((("a", "b", tokens), (width,)))
    weights = Spread((("b", own), (width,), (width,)))
    x, w, dy = (whole_of(each, random, place) for place, each in enumerate((spread, weights, spread)))
    wanted = np.random.default_rng(random.randrange(2**32)).integers(0, 3 * own, 6 * tokens)
    routed = hold(Spread((("a", "b", tokens),)), wanted, random)
    order = [np.argsort(each, kind="stable") for each in routed]
    held, back, w_held = (hold(s, v, random) for s, v in ((spread, x), (spread, dy), (weights, w)))
    after, gradients = [None] * 6, []
    for number, place in enumerate(RANKS):  # what comes to a rank: of all ranks along b, sorted by expert
        arrived = [(at, row) for at in along("b", place) for row in order[at] if routed[at][row] // own == place["b"]]
        arrived.sort(key=lambda item: routed[item[0]][item[1]])
        local = [routed[at][row] % own for at, row in arrived]
        total = np.zeros((own, width, width))
        for (at, row), expert in zip(arrived, local, strict=True):
            after[at] = np.zeros((tokens, width)) if after[at] is None else after[at]
            after[at][row] = held[at][row] @ w_held[number][expert]
            total[expert] += np.outer(held[at][row], back[at][row])
        gradients.append(total)
    there = dispatched(spread)
    made = result("GroupedMatmul", [there], [weights], *EMPTY, GOT, 3, 0, of=(-1, width))[0]
    home = result("AlltoAllV", made, GOT, SENT, axes=("b",))
    home = result("IndexSelect", home, 0, Order(("unsort", 7)), of=(tokens, width))
    assert home.dims[0] == ("a", "b", Rows(((("a", "b", tokens)),), (("group",),), tokens))
    assert describes(spread, np.array([x[n] @ w[wanted[n]] for n in range(len(x))]), after)
    turned = moves.transpose(there, (1, 0))
    found = result("GroupedMatmul", [turned], [dispatched(spread)], *EMPTY, GOT, 3, 2, of=(own, width, width))[0]
    whole = np.zeros((3 * own, width, width))
    for n, expert in enumerate(wanted):
        whole[expert] += np.outer(x[n], dy[n])
    assert found == Spread((("b", own), (width,), (width,)), frozenset("a"))
    assert describes(found, whole, gradients)


def test_a_dispatch_that_is_not_undone_is_refused():
    there = dispatched(Spread((("a", "b", 4), (2,))))
    weights = Spread((("b", 2), (2,), (2,)))
    made = result("GroupedMatmul", [there], [weights], *EMPTY, GOT, 3, 0, of=(-1, 2))[0]
    with pytest.raises(Contradiction, match="experts are cut over a"):
        result("GroupedMatmul", [there], [Spread((("a", 2), (2,), (2,)))], *EMPTY, GOT, 3, 0)
    with pytest.raises(Contradiction, match="and the numbers of rows of the groups over no ranks"):
        result("GroupedMatmul", [there], [weights], *EMPTY, SENT, 3, 0)
    with pytest.raises(Contradiction, match="another sort"):
        result("IndexSelect", made, 0, Order(("unsort", 8)), of=(4, 2))
    with pytest.raises(Contradiction, match="not the counts that the other ranks send"):
        result("AlltoAllV", made, SENT, SENT, axes=("b",))
    with pytest.raises(Contradiction, match="over which they are the same"):
        result("AlltoAllV", made, GOT, SENT, axes=("c",))


@anything
def test_the_largest_and_what_lies_at_their_places(random: Random) -> None:
    given = some_spread(random, [random.choice([1, 2]), 4], partial=False, powers=False)
    check(lambda x: result("TopkExt", x, 2, -1, True, True)[0], lambda x: -np.sort(-x, -1)[..., :2], [given], random)
    if given.dims[-1] != (4,):
        return
    x = Spread(given.dims, frozenset(axis for axis in SIZES if axis not in given.holes and random.random() < 0.5))
    places = Spread((given.dims[0], (2,)))

    def gathered(x: np.ndarray, by: np.ndarray) -> np.ndarray:
        return np.take_along_axis(x, np.argsort(by, -1)[..., :2], -1)

    def spread_out(gradient: np.ndarray, by: np.ndarray) -> np.ndarray:
        out = np.zeros((*by.shape[:-1], 4))
        np.put_along_axis(out, np.argsort(by, -1)[..., :2], gradient, -1)
        return out

    assert check(lambda x, _: result("GatherD", x, -1, places), gathered, [x, given], random) == "found"
    rule = lambda g, _: result("GatherDGradV2", given, -1, places, g)  # noqa: E731
    gradient = Spread((x.dims[0], (2,)), x.partial)
    assert check(rule, spread_out, [gradient, given], random) == "found"


def test_tokens_are_grouped_by_rank_and_come_back():
    given = Spread((("a", 4), ("b", 2), (5,)))
    found = tokens.grouped(given, (1, 8, 5))
    assert found.dims == (("a", "b"), (Rows(given.dims[:2], (("group",),), 8),), (5,))
    assert reduce_mean(found, (1,), False) == Spread((("a", "b"), (5,))), "each rank's mean is of its own group"
    assert tokens.ungrouped(found, (4, 2, 5)) == given
    assert tokens.ungrouped(found, (2, 4, 5)) is None and tokens.grouped(given, (8, 1, 5)) is None
    more = tokens.padded([plain((1, 3, 5)), found], 1)
    assert more.shape == (1, 11, 5)
    assert tokens.unpadded(more, (0, 3, 0), (1, 8, 5)) == found
    assert tokens.unpadded(found, (0, 0, 0), (1, 8, 5)) is None
    assert tokens.padded_back(found, (0, 3, 0), (1, 11, 5)) == more
    with pytest.raises(Contradiction, match="the removed rows"):
        tokens.unpadded(more, (0, 2, 0), (1, 9, 5))
    with pytest.raises(NotKnown, match="unknown rows"):
        tokens.unpadded(found, (0, 2, 0), (1, 6, 5))


def test_what_has_no_order_of_rows_is_unknown():
    x = Spread((("a", 4), (2,)))
    for op, values in (("IndexSelect", (x, 0, plain((4,)))), ("SortExt", (x, -1)), ("FmodScalar", (x, 4)),
                       ("AlltoAll", (x,)), ("InplaceScatterSrc", (x, -1, x, x))):  # fmt: skip
        with pytest.raises(NotKnown):
            result(op, *values)


@anything
def test_pieces_that_each_rank_stacks(random: Random) -> None:
    given = some_spread(random, [2, 3])
    axis = random.choice([0, 1])
    check(lambda *x: moves.concat(x, axis), lambda *x: np.concatenate(x, axis), [given, given], random)


def test_gathered_pieces_may_belong_to_the_dimension_beside():
    loose = Spread(((4,), (), ("a", 2), (3,)), loose=frozenset("a"))
    found = moves.all_gather_loose(loose, ("a",), SIZES)
    assert moves.rejoin(found, 0, 2, 1).dims == ((4,), (2,), (2,), (3,))
    assert moves.rejoin(found, 0, 2, 2).dims == ((4,), (), (4,), (3,))


def test_equal_elements_fit_every_cut():
    x = Spread((("a", 4), (2,)))
    assert moves.concat([x, Alike(((4,), ()))], 1).dims == (("a", 4), (3,))


@pytest.mark.slow
def test_the_order_of_ranks_matters_unless_their_pieces_are_only_averaged():
    """The router gathers each rank's share of tokens by expert, and takes the mean over the ranks."""
    result, graph, mesh, peers = STEP
    own, made = ranks_of(result, mesh.devices), generated_groups(graph)
    tried = Counter()
    for number, each in enumerate(root(graph)):
        averaged = each.op == "AllGather" and is_only_averaged(root(graph), number)
        if each.op != "AllGather" or tried[averaged] == 4:
            continue
        tried[averaged] += 1
        name = str(attributes_of(each.text)["group"])
        ranks = own(name) or made[name]
        faulty = copied(graph)
        root(faulty)[number].text = each.text.replace(f'"{name}"', '"reversed"')
        other = {**result, "groups": [*result["groups"], ("reversed", ranks[::-1])]}
        stage = prove_rank(other, typing_of(other, faulty, mesh, peers), {})
        assert bool(stage.contradictions) != averaged, each.scope
        assert not averaged or {weight.verdict for weight in stage.weights} == {"proven"}
    assert tried == {True: 3, False: 4}


def told_of(plant):
    """Return the operators that are refused in the step with a fault, and why."""
    result, graph, mesh, peers = STEP
    faulty, *others = (copied(each) for each in (graph, *peers.values()))
    plant([faulty, *others], Compiled(*STEP).known)
    return prove_rank(result, typing_of(result, faulty, mesh, dict(zip(peers, others, strict=True))), {}).contradictions


def test_values_that_are_scaled_differently_are_said_to_be_too_large_also_if_both_are_partial_sums():
    """The embedding's gradients by its two uses: that of the loss without the division by the devices is too large."""
    places, plant = faults(STEP[1], STEP[3])["the division by the devices left out"]
    told = told_of(lambda graphs, known: plant(graphs, places[0], known))
    told = [each for each in told if "are scaled differently" in each]
    assert told and all("an argument is too large since ReduceScatter " in each for each in told), told


def test_a_sum_over_other_ranks_is_not_said_to_be_missing_where_pieces_are_added():
    """The gradient of the experts, which are cut over tp, is rightly a partial sum over dp in front of the fault."""
    told = told_of(experts_over_tensor)
    assert any("adds different pieces; an argument comes from GroupedMatmul " in each for each in told), told
    assert not any("is a partial sum" in each for each in told)


ONE = "<Tensor[Float32], ()>"
BALANCE = "Gradients/Default/Router/Grad_AllReduce"


def of_balancing_losses(tmp_path, starts, divided, other="TensorMove(%1)"):
    """Return what is proven of the backward pass of a sum of balancing losses in a graph that the step calls.

    Args:
        starts: how the step makes the gradient.
        divided: where the losses' mean divides by the ranks.
        other: what is added to the gradient.
    """
    half, kept = "PrimFunc_RealDiv({}, Tensor(shape=[], dtype=Float32, value=2))", "TensorMove({})"
    scope = "Gradients/Default/Router/Grad_RealDiv"
    root = [
        node(0, starts, ONE, ONE, "Gradients/Default/Grad__VirtualDiv"),
        node(1, (half if divided == "caller" else kept).format("%0"), ONE, ONE, scope),
        node(2, other, ONE, ONE, "Gradients/Default"),
        node(3, "call @2_Outer(%1, %2)", f"{ONE}, {ONE}", ONE),
    ]
    outer = [node(0, "call @1_Back(%para21_dout, %para22_other)", f"{ONE}, {ONE}", ONE)]
    back = [
        node(0, (half if divided == "here" else kept).format("%para11_dout"), ONE, ONE, scope),
        node(1, (half if divided == "here" else kept).format("%para12_other"), ONE, ONE, "Gradients/Default/Other"),
        node(2, "Add(%0, %1)", f"{ONE}, {ONE}", ONE),
        node(3, 'AllReduce(%2) primitive_attrs: {group: "dp", op: "sum"}', ONE, ONE, BALANCE),
    ]
    text = f"# IR entry: @0_Step\nsubgraph @1_Back(%para11_dout, %para12_other) {{\n{''.join(back)}}}\n"
    text += f"subgraph @2_Outer(%para21_dout, %para22_other) {{\n{''.join(outer)}}}\n"
    text += f"subgraph @0_Step(%para1_inputs0) {{\n{''.join(root)}}}\n"
    file = tmp_path / "balance.ir"
    file.write_text(text, encoding="utf-8")
    own = typing(read_graph(file), {("backward", ()): Spread((), powers=(("dp", -1),))})
    return own.of(3)


DEVICES = "PrimFunc_RealDiv(%para1_scale, Tensor(shape=[], dtype=Float32, value=2))"
RECEIVED = "Receive(%para1_scale)"


def test_a_sum_of_balancing_losses_is_a_mean_also_where_a_graph_is_called(tmp_path):
    assert of_balancing_losses(tmp_path, DEVICES, "caller") == plain(())
    for other in ("TensorMove(%1)", "TensorMove(%0)"):  # the second gradient is not divided
        wrong = of_balancing_losses(tmp_path, DEVICES, "nowhere" if other.endswith("1)") else "caller", other)
        assert wrong.contradicts
        assert wrong.why.endswith("balancing losses of 2 ranks are summed, but not divided by 2")
    for starts, divided, other in (
        (RECEIVED, "nowhere", "TensorMove(%1)"),
        ("TensorMove(%para1_scale)", "nowhere", "TensorMove(%1)"),
        (DEVICES, "caller", RECEIVED),
    ):
        unknown = of_balancing_losses(tmp_path, starts, divided, other)
        assert not unknown.contradicts and "nothing here divides the losses of 2 ranks" in unknown.why


TWO_ONES = "<Tuple[Tensor[Float32]*2], TupleShape((), ())>"


def balance_stage(tmp_path, name, starts, divided, called=False):
    """Return a stage that sends a gradient of one number back, and sums it over the ranks as a router does.

    Args:
        starts: how the stage gets the gradient.
        divided: whether it divides what it sends and sums, as a router does.
        called: whether the number that is sent is a member of the tuple that a called graph returns, which returns
            beside it a number that the graph divides.
    """
    over = "Gradients/Default/Router/Grad_RealDiv"
    root = [
        node(0, starts, ONE, ONE, "Gradients/Default/Grad__VirtualDiv"),
        node(1, HALF.format("%0") if divided else "TensorMove(%0)", ONE, ONE, over),
        node(2, "call @1_Back(%1)", ONE, TWO_ONES),
        node(3, "TupleGetItem(%2, I64(0))" if called else "TensorMove(%1)", TWO_ONES if called else ONE, ONE),
        node(4, "Send(%3)", ONE, ONE, "Gradients/Default/Send"),
        node(5, 'AllReduce(%1) primitive_attrs: {group: "dp", op: "sum"}', ONE, ONE, BALANCE),
    ]
    back = [
        node(0, HALF.format("%para11_dout"), ONE, ONE, over),
        node(1, "MakeTuple(%para11_dout, %0)", f"{ONE}, {ONE}", TWO_ONES),
    ]
    text = f"# IR entry: @0_Step\nsubgraph @1_Back(%para11_dout) {{\n{''.join(back)}}}\n"
    text += f"subgraph @0_Step(%para1_inputs0) {{\n{''.join(root)}}}\n"
    file = tmp_path / f"{name}.ir"
    file.write_text(text, encoding="utf-8")
    return read_graph(file)


@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("middle", [False, True])
@pytest.mark.parametrize("sends_divided", [False, True])
@pytest.mark.parametrize("divided", [False, True])
def test_a_stage_knows_whether_the_next_one_has_divided_the_gradient_of_the_balancing_losses(
    tmp_path, called, middle, sends_divided, divided
):
    last = balance_stage(tmp_path, "last", DEVICES, sends_divided, called)
    between = [balance_stage(tmp_path, "middle", RECEIVED, False, called)] if middle else []
    first = balance_stage(tmp_path, "first", RECEIVED, divided, called)
    make = [lambda received, read=read: typing(read, received) for read in (first, *between, last)]
    found = type_stages(make)[0][0].of(5)
    if divided:
        assert found == plain(())
    else:
        assert found.contradicts == (not sends_divided)
        assert "losses of 2 ranks" in found.why


@pytest.mark.parametrize("passes", ["forward", "backward"])
def test_a_received_activation_or_its_gradient_is_no_undivided_gradient_of_the_balancing_losses(tmp_path, passes):
    """A stage multiplies the divided gradient by a number that it computes from an activation; the graph is right."""
    way = "Default" if passes == "forward" else "Gradients/Default"
    sends = [node(0, "Load(%para1_inputs0, UMonad[U])", T48, T48), node(1, "Send(%0)", T48, T48, way)]
    sums = [
        node(0, "Receive(%para1_inputs0)", T48, T48, way),
        node(1, "PrimFunc_SumExt(%0, None, Bool(0), None)", T48, ONE),
        node(2, 'AllReduce(%1) primitive_attrs: {group: "dp", op: "sum"}', ONE, ONE),
        node(3, DEVICES, ONE, ONE, "Gradients/Default/Grad__VirtualDiv"),
        node(4, HALF.format("%3"), ONE, ONE, "Gradients/Default/Router/Grad_RealDiv"),
        node(5, "PrimFunc_Mul(%4, %2)", f"{ONE}, {ONE}", ONE, "Gradients/Default/Router/Grad_Mul"),
        node(6, 'AllReduce(%5) primitive_attrs: {group: "dp", op: "sum"}', ONE, ONE, BALANCE),
    ]
    read = []
    for lines in (sends, sums):
        text = f"# IR entry: @0_Step\nsubgraph @0_Step(%para1_inputs0) {{\n{''.join(lines)}}}\n"
        (tmp_path / "step.ir").write_text(text, encoding="utf-8")
        read.append(read_graph(tmp_path / "step.ir"))
    make = [lambda received, each=each: typing(each, received) for each in read]
    last = type_stages(make)[0][1].of(6)
    assert not last.contradicts and "nothing here divides the losses of 2 ranks" in last.why
