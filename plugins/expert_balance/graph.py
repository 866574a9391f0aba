"""This module moves experts in a sharded graph, on Ascend and on CPU.

`CollectiveRanks` exchanges data between ranks when experts move, by MindSpore's own AlltoAllV, because these runs have
no TCP mesh. Each group of ranks has its own graph for this exchange, which is separate from the graph of the train step
and is compiled once: all data are sent as int32 words, and sizes are counted in words.

`PlacedGroupedGEMM` and `PlacedDispatch` are the routed experts with a parameter that holds the slot of each expert. As
in `placed.py`, one Gather replaces the numbers of the experts to which tokens were routed by the numbers of their
slots, before the dispatch. MindSpore splits this Gather as it splits the tokens, so that the Gather needs no
communication; every rank has the whole placement, 4 x E bytes.

`ShardedExpertBalance` records the loads and moves experts. MindSpore averages the loads that a router counts over the
ranks of a pipeline stage, so that each rank has the loads of all ranks of its stage. A rank receives the loads of the
other stages from the ranks at the same position in those stages, so that all ranks of all stages compute the same plan.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate

import mindspore as ms
import numpy as np
from mindformers.parallel_core.training_graph.transformer.moe.ffn import FFNGroupedGEMM
from mindformers.parallel_core.training_graph.transformer.moe.utils import get_group
from mindformers.parallel_core.utils.spec_utils import ModuleSpec
from mindformers.tools.register import MindFormerModuleType, MindFormerRegister
from mindformers.tools.utils import get_real_group_size, get_real_rank
from mindspore import Parameter, Tensor, nn, ops
from mindspore.communication import GlobalComm

from plugins import telechat3_moe
from plugins.expert_balance.callback import Alone, ExpertBalance
from plugins.expert_balance.executor import Layer, Slice, from_first, holders, total
from plugins.expert_balance.settings import KEY
from plugins.hierarchical_ep.experts import RoutedExperts
from plugins.private_hooks import relies_on
from plugins.sealed_checkpoint.router_state import weight_of

# axis 0 of the experts' weights is cut over the EP group, and no other axis is
relies_on(FFNGroupedGEMM.shard, "layout(inner_dp, mp0),  # w1")
_WORD = 4  # bytes
CALLBACK = "ShardedExpertBalance"


@contextmanager
def apart() -> Iterator[None]:
    """Within the `with` block, compile every graph for this rank only, without semi-auto parallel and without the
    compile cache.

    In semi-auto parallel mode MindSpore would treat the inputs of these graphs as parts of a batch. The compile cache
    identifies a graph only by its number, and the next start may compile these graphs in another order, so they must
    not be numbered among the cached graphs.
    """
    mode, cached = ms.get_auto_parallel_context("parallel_mode"), ms.get_context("enable_compile_cache")
    if cached is None:
        cached = os.environ.get("MS_COMPILER_CACHE_ENABLE") == "1"
    ms.set_auto_parallel_context(parallel_mode="stand_alone")
    ms.set_context(enable_compile_cache=False)
    try:
        yield
    finally:
        ms.set_auto_parallel_context(parallel_mode=mode)
        ms.set_context(enable_compile_cache=cached)


class Exchange(nn.Cell):
    """An `Exchange` is an All-to-All operator that sends int32 words to the ranks of a group; `send` holds the number
    of words for each rank.
    """

    def __init__(self, group):
        super().__init__(auto_prefix=False)
        self.move = ops.AlltoAllV(group=group, block_size=1)
        self.to_host = ops.MoveTo()

    def construct(self, words, send, receive):
        """Return the received words int32 [sum(receive)] for the sent words int32 [sum(send)]; send and receive are
        int64 [ranks].
        """
        return self.move(words, self.to_host(send, "CPU", True), self.to_host(receive, "CPU", True))


class CollectiveRanks:
    """A `CollectiveRanks` is the class `plugins.expert_balance.executor.Ranks` for a subset of a run's ranks, in any
    order.

    Args:
        members: global ranks, this one among them; more than one.
        rank: this global rank.
        exchange: a cell as `Exchange`, of the members in ascending order; by default of MindSpore's group of them.
    """

    def __init__(self, members: Sequence[int], rank: int, exchange=None):
        self.rank, self.size = list(members).index(rank), len(members)
        self.ascending = np.argsort(members)  # places among the members
        self.exchange = exchange or Exchange(_group(sorted(members)))
        counts = Tensor(shape=[self.size], dtype=ms.int64)
        self.exchange.set_inputs(Tensor(shape=[None], dtype=ms.int32), counts, counts)

    def all_to_all_v(
        self, group: Sequence[int], tag: int, parts: Sequence[np.ndarray], rows: Sequence[int] | None = None
    ) -> list[np.ndarray]:
        """Send each rank its part of the list `parts`, whose entries [rows, ...] differ only in their number of rows;
        return the parts that the ranks sent to this rank.

        Args:
            group: all members.
            tag: not used, because collectives run in the order of their calls.
            rows: the number of rows that arrive from each member; without it, the ranks first exchange these numbers.
        """
        shape, dtype = parts[0].shape[1:], parts[0].dtype
        if rows is None:
            told = self._swap([np.array([len(part)], np.int32) for part in parts], [1] * self.size)
            rows = [int(count[0]) for count in told]
        each = -(-int(np.prod(shape)) * dtype.itemsize // _WORD)
        arrived = self._swap([_words(part, each) for part in parts], [each * count for count in rows])
        return [_rows(part, count, shape, dtype) for part, count in zip(arrived, rows, strict=True)]

    def _swap(self, parts: list[np.ndarray], due: list[int]) -> list[np.ndarray]:
        """Send to each rank its words, and return the words from each rank. The words of this rank for itself are not
        sent; one word takes their place, because AlltoAllV returns no array for zero words.
        """
        own = parts[self.rank]
        sent = [np.zeros(1, np.int32) if place == self.rank else parts[place] for place in self.ascending]
        come = [1 if place == self.rank else due[place] for place in self.ascending]
        counts = [Tensor(list(each), ms.int64) for each in ([part.size for part in sent], come)]
        with apart():
            arrived = self.exchange(Tensor(np.concatenate(sent)), *counts).asnumpy()
        found = dict(zip(self.ascending, np.split(arrived, list(accumulate(come))[:-1]), strict=True))
        return [own if place == self.rank else found[place] for place in range(self.size)]


def _group(members: list[int]) -> str:
    """Return the communication group of ranks; create the group if it does not exist. All members call this function at
    the same time.
    """
    return GlobalComm.WORLD_COMM_GROUP if len(members) == get_real_group_size() else get_group(members)


def _words(part: np.ndarray, each: int) -> np.ndarray:
    """Return an array [rows, ...] of any type as int32 words [rows x each], in which each row is filled up with
    zeros.
    """
    octets = (
        np.ascontiguousarray(part).view(np.uint8).reshape(len(part), -1) if part.size else np.zeros((0, 0), np.uint8)
    )
    filled = np.zeros((len(part), each * _WORD), np.uint8)
    filled[:, : octets.shape[1]] = octets
    return filled.view(np.int32).reshape(-1)


def _rows(words: np.ndarray, count: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return the array [count, *shape] from which `_words` made its words."""
    size = int(np.prod(shape)) * dtype.itemsize
    octets = np.ascontiguousarray(words).view(np.uint8).reshape(count, -1)[:, :size] if count else np.zeros(0, np.uint8)
    return np.ascontiguousarray(octets).reshape(-1).view(dtype).reshape(count, *shape)


class PlacedGroupedGEMM(FFNGroupedGEMM):
    """This is MindFormers' `FFNGroupedGEMM` with MindFormers' dispatch, and with a `placement` parameter that holds the
    slot of each expert.
    """

    def __init__(self, config):
        super().__init__(config)
        place(self, config)

    def construct(self, tokens, probs, routing_map):
        """Return the experts' outputs [ranks, N, h] for tokens [ranks, N, h], probs [ranks, N, k] and routing_map int32
        [ranks, N, k].
        """
        return super().construct(tokens, probs, self.slot_of(self.placement, routing_map, 0))


class PlacedDispatch(RoutedExperts):
    """A `PlacedDispatch` adds a `placement` parameter, which holds the slot of each expert, to the routed experts and
    the dispatch of `plugins.hierarchical_ep`.
    """

    def __init__(self, config, settings, net, rows, streams):
        super().__init__(config, settings, net, rows, streams)
        place(self, config)

    def construct(self, tokens, probs, routing_map):
        """Return the experts' outputs [ranks, N, h] for tokens [ranks, N, h], probs [ranks, N, k] and routing_map int32
        [ranks, N, k].
        """
        return super().construct(tokens, probs, self.slot_of(self.placement, routing_map, 0))


def place(cell, config) -> None:
    """Add to `cell` the parameter `placement` and a Gather that looks up the slots of experts in it; the Gather is
    split over the ranks of a stage.
    """
    identity = Tensor(np.arange(config.num_moe_experts), ms.int32)
    cell.placement = Parameter(identity, name="placement", requires_grad=False, parallel_optimizer=False)
    ranks = config.data_parallel_size * config.tensor_model_parallel_size * config.context_parallel_size
    cell.slot_of = ops.Gather()
    cell.slot_of.shard(((1,), (ranks, 1, 1)))


@MindFormerRegister.register(MindFormerModuleType.CALLBACK)
class ShardedExpertBalance(ExpertBalance):
    """This is the callback `ExpertBalance` for a sharded graph, in which each rank already has the token counts of all
    ranks of its pipeline stage. The field `copies` of this callback holds the number of (token, expert) pairs in a
    micro-batch of all data-parallel ranks.
    """

    def connect(self):
        """Return the object through which all ranks of the run communicate by MindSpore's collectives."""
        self.rank, devices = get_real_rank(), get_real_group_size()
        each = devices // ms.get_auto_parallel_context("pipeline_stages")
        self.first = self.rank // each * each  # rank of this stage
        self.groups: dict[tuple[int, ...], Alone | CollectiveRanks] = {}
        self.stage = self._among(range(self.first, self.first + each))
        self.pipeline = self._among(range(self.rank - self.first, devices, each))
        return self._among(range(devices))

    def of_all(self, shares, slots):
        """Return the experts' loads summed over all ranks, as `ExpertBalance.of_all` does. The token counts of all EP
        groups of a stage are added up.
        """
        batches = np.rint(shares.sum(1)) * (self.stage.size // self.devices)
        own = np.column_stack([np.rint(shares * self.copies), slots, batches]).astype(np.int64)
        held = [self._holds(layer) for layer in self.layers]
        tokens, slots, batches = np.split(
            total(self.pipeline, own * np.array(held)[:, None]), [slots.shape[1], -1], axis=1
        )
        return tokens, slots, batches[:, 0]

    def hand_out(self, own):
        """Broadcast rank 0's array to all ranks, and return it; the array is sent through the first rank of each
        pipeline stage.
        """
        return from_first(self.stage, from_first(self.pipeline, own))

    def movable(self):
        """Return for each MoE layer of this rank's pipeline stage the tensors that move with an expert; these tensors
        are split over the ranks as the weights are.
        """
        return [
            Layer(row, layer.number, layer.placement, [self._slice(tensor) for tensor in layer.tensors])
            for row, layer in enumerate(self.layers)
            if self._holds(layer)
        ]

    def _holds(self, layer):
        return layer.tensors[0].name in self.compiled.parameter_layout_dict

    def _slice(self, tensor):
        """Return the slice of a tensor that this rank holds; a moment is cut as its weight is, or
        more finely.
        """
        mesh, cuts, *_, whole = self.compiled.parameter_layout_dict[weight_of(tensor.name)][:7]
        first = cuts[0] if isinstance(cuts[0], (list, tuple)) else cuts[:1]
        sets = self.first + holders(mesh, first, whole[0] // tensor.shape[0])
        return Slice(tensor, self._among(next(each for each in sets.tolist() if self.rank in each)))

    def _among(self, members):
        """Return the object that connects the ranks `members`; each group is created once, in the same order on all
        its ranks.
        """
        key = tuple(members)
        if key not in self.groups:
            self.groups[key] = CollectiveRanks(key, self.rank) if len(key) > 1 else Alone()
        return self.groups[key]


def use_placed_experts(config) -> None:
    """Give models that are built later a `placement` parameter; call this function after
    `plugins.hierarchical_ep.adapter.enable`.
    """
    telechat3_moe.use_edited_model(config, KEY)
    if (config.get("plugins") or {}).get("hierarchical_ep"):
        telechat3_moe.use_experts(ModuleSpec(PlacedDispatch, params=telechat3_moe.experts().params))
    else:
        telechat3_moe.use_experts(PlacedGroupedGEMM)
