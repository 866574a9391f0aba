"""The dispatcher with Ascend's operations: a rank to which nobody sends, and what 16 virtual devices would call.

MindSpore's AlltoAllV of no rows returns a scalar, and no reshape makes rows of that: Ascend's row operations, whose
shapes follow the data, run on a simulated group. The slow tests compile the dispatcher in MindFormers' semi-auto path
(see tests/tools/dryrun) and hold what each rank would call, and in which order, against the planner's programs.
"""

import functools
import json
from collections import Counter

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops
from mindspore.ops import operations as P

from plugins.ep_overlap.plan import issue_order
from plugins.hierarchical_ep import ascend
from plugins.hierarchical_ep.dispatcher import Dispatcher, first_turn, pack
from plugins.hierarchical_ep.plan import make_plan
from plugins.hierarchical_ep.programs import programs_of
from plugins.hierarchical_ep.topology import Topology
from tests.tools.dryrun.test_rank import EP, INNER, OUTER, RANK, compile_rank

TOKENS, TOP_K, HIDDEN, EXPERTS = 5, 2, 3, 8
TWO_NODES = Topology(2, 2, EXPERTS)


class Rows(ascend.Rows):
    """Ascend's, from operators that a CPU has."""

    def __init__(self):
        super().__init__()
        self.ascending = P.Sort(axis=0)
        self.select = lambda values, axis, index: ops.gather(values, index, axis)
        self.cumsum = ops.cumsum


class Silent:
    """The net of the last rank of a group whose other members send nothing and return zeros."""

    def all_to_all_v(self, group, width, small=False):
        """Own rows, behind zeros for what the others return."""

        def move(rows, send, receive, room):
            assert rows.shape[0] > 0, "AlltoAllV of nothing to send"
            assert sum(receive) > 0, "AlltoAllV that brings nothing has shape ()"
            own = rows[rows.shape[0] - int(send[-1]) :]
            return ops.concat((ops.zeros((int(sum(receive[:-1])), width), rows.dtype), own))

        return move

    def exchange_counts(self, group):
        """Only the own counts arrive."""

        def exchange(counts):
            send = counts.asnumpy().sum(1)
            receive = np.zeros_like(send)
            receive[-1] = send[-1]
            return send, receive, ops.cast(counts[-1], ms.float32)

        return exchange

    def all_gather(self, group, small=False):
        """Rows of zeros from the others."""
        return lambda rows: ops.concat((ops.zeros(((len(group) - 1) * rows.shape[0], *rows.shape[1:])), rows))

    def reduce_scatter(self, group):
        """The own part."""
        return lambda rows: rows[-(rows.shape[0] // len(group)) :]


class ThereAndBack(nn.Cell):
    """Dispatch and combine with experts that change nothing."""

    def __init__(self, mode, topology, pad):
        super().__init__(auto_prefix=False)
        self.dispatcher = Dispatcher(mode, topology, topology.ep - 1, HIDDEN, TOP_K, Silent(), Rows(), pad)

    def construct(self, tokens, probs, ids):
        rows, meta, first, turn = self.dispatcher.to_nodes(tokens, pack(probs, ids), first_turn(tokens))
        copies, ends, second, turn = self.dispatcher.to_experts(rows, meta, turn)
        sums, turn = self.dispatcher.from_experts(copies, second, turn)
        return self.dispatcher.from_nodes(sums, first, turn)[0], ends


@pytest.mark.parametrize("pad", [False, True])
@pytest.mark.parametrize(
    ("mode", "topology"),
    [("global", Topology(1, 4, EXPERTS)), ("hierarchical", TWO_NODES), ("deduplicated", TWO_NODES)],
)
@pytest.mark.parametrize("chosen", ["first", "own"])
def test_a_rank_without_rows_finishes_and_adds_nothing(mode, topology, pad, chosen):
    ms.set_context(mode=ms.PYNATIVE_MODE)
    rng = np.random.default_rng(1)
    values = rng.standard_normal((TOKENS, HIDDEN)).astype(np.float32)
    weights = rng.random((TOKENS, TOP_K)).astype(np.float32)
    first = 0 if chosen == "first" else EXPERTS - TOP_K
    ids = Tensor(np.tile(np.arange(first, first + TOP_K, dtype=np.int32), (TOKENS, 1)))
    cell = ThereAndBack(mode, topology, pad)

    def total(tokens, probs):
        out, ends = cell(tokens, probs, ids)
        return ops.reduce_sum(out), out, ends

    step = ms.value_and_grad(total, (0, 1), has_aux=True)
    (_, out, ends), gradients = step(Tensor(values), Tensor(weights))
    here = chosen == "own"
    # one row more than arrived, for the first own expert, and a row for each where padded
    counts = np.array([TOKENS * here + 1, TOKENS * here]) + pad
    np.testing.assert_array_equal(ends.asnumpy(), np.cumsum(counts))
    np.testing.assert_allclose(out.asnumpy(), here * values * weights.sum(1, keepdims=True), rtol=1e-6)
    scale = here * weights.sum(1, keepdims=True)
    np.testing.assert_allclose(gradients[0].asnumpy(), np.broadcast_to(scale, values.shape), rtol=1e-6)
    expected = here * np.broadcast_to(values.sum(1, keepdims=True), weights.shape)
    np.testing.assert_allclose(gradients[1].asnumpy(), expected, rtol=1e-5, atol=1e-6)


TOPOLOGY = Topology(nodes=2, devices_per_node=4, experts=16)
OPS = {"all_to_all": "AlltoAll", "all_to_all_v": "AlltoAllV", "all_gather": "AllGather"}
OPS["reduce_scatter"] = "ReduceScatter"


@pytest.fixture(scope="module")
def compiled(forks, tmp_path_factory):
    """(mode, chunks) -> the worker's report, compiled once."""

    @functools.cache
    def compiled_once(mode, chunks):
        # the map of plugins.expert_balance renames experts on their way here: it adds no collective
        plugins = {"hierarchical_ep": {"mode": mode}, "expert_balance": {"every": 0}}
        if chunks != (1, 1):
            plugins["ep_overlap"] = {"chunks": list(chunks)}
        folder = tmp_path_factory.mktemp("compiled")
        return compile_rank(forks, folder, "--plugins", json.dumps(plugins))

    return compiled_once


def planned(mode, parts):
    """(operator, ranks) of each forward call of rank RANK, in order."""
    routing = [np.arange(8).reshape(2, 4) for _ in range(TOPOLOGY.ep)]
    plan = make_plan(mode, TOPOLOGY, routing)
    names = [step.step for step in plan.forward]
    names = names if len(names) == 4 else ["dispatch.intra", "combine.intra"]
    order = [(chunk, names.index(step)) for chunk, step in issue_order(parts) if step in names]
    calls = programs_of(*[plan] * parts, order=order)[EP.index(RANK)]
    calls = [call for call in calls if "backward" not in call.tag]
    return [(OPS[call.op], tuple(EP[member] for member in call.group)) for call in calls]


def on(report, ranks, role):
    """The collectives of one role over `ranks`, as the compiler orders them."""
    found = [place for place, item in enumerate(report["collectives"]) if item["role"] == role]
    found = [place for place in found if report["collectives"][place]["ranks"] == ranks]
    return [(place, report["collectives"][place]) for place in found]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "chunks"),
    [("hierarchical", (1, 1)), ("global", (1, 2)), ("deduplicated", (2, 2))],
)
def test_collectives_and_their_order_are_the_planned_ones(compiled, mode, chunks):
    report = compiled(mode, chunks)
    forward = planned(mode, chunks[0] * chunks[1])
    for ranks in (OUTER, INNER, EP):
        wanted = [op for op, group in forward if group == tuple(ranks)]
        calls = on(report, ranks, "forward")
        # each waits for all before it, so the backend cannot swap them
        waits = {place: {*item["after"], *item["after_depend"]} for place, item in calls}
        ordered = sorted(waits, key=lambda place: len(waits[place] & waits.keys()))
        assert [len(waits[place] & waits.keys()) for place in ordered] == list(range(len(ordered)))
        assert [report["collectives"][place]["op"] for place in ordered] == wanted, ranks


@pytest.mark.slow
def test_backward_is_the_adjoint_and_only_rows_are_sent_again(compiled):
    report = compiled("hierarchical", (1, 1))
    gradient = Counter(
        (item["op"], tuple(ranks)) for ranks in (OUTER, INNER) for _, item in on(report, ranks, "gradient")
    )
    assert gradient == {
        ("AllGather", tuple(OUTER)): 1,
        ("ReduceScatter", tuple(OUTER)): 2,
        ("AlltoAllV", tuple(INNER)): 3,
    }
    again = [
        (item["op"], item["attributes"].get("block_size"))
        for ranks in (OUTER, INNER)
        for _, item in on(report, ranks, "recompute")
    ]
    # the second All-to-All brings outputs back: MindSpore asks them for a shape that only they have
    assert again == [("AllGather", None), ("AlltoAllV", 128), ("AlltoAllV", 128)]
