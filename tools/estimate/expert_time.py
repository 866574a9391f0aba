"""Seconds that a device waits for expert-parallel communication in one MoE layer and micro-batch.

Bytes are the planner's expected ones (`plugins.hierarchical_ep.traffic`). Every step of dispatch and combine takes a
launch, a latency and its bytes over the slower of its links. Where `plugins.ep_overlap` cuts the layer, its own plan
says what of that is hidden, from the seconds of a chunk's steps that stand here; of published runs of others, which
have no such plan, the share `Efficiency.hidden_ep` is taken as hidden.

A layer that is recomputed sends its tokens again. MindFormers' graphs then repeat dispatch and the part of combine
inside a node (found by compiling); an eager framework repeats all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

from plugins.ep_overlap.plan import Choice, Chunks, Layer, Passes, Stage, choose
from plugins.hierarchical_ep.plan import MODES
from plugins.hierarchical_ep.topology import Topology
from plugins.hierarchical_ep.traffic import Step, backward, expected_steps, hit_probability
from tools.estimate.configuration import Configuration
from tools.estimate.device_time import DeviceTimes
from tools.estimate.layer_model import Part, routed_part, shared_part

SPARSE = ("deepep", "hybridep")  # a row goes once to each rank, not once to each expert
_BACKWARD = 2  # gradients of inputs and of weights


@dataclass(frozen=True)
class Exposed:
    """Seconds of one MoE layer and micro-batch.

    Args:
        waited: nothing is computed, for communication is not there yet.
        cutting: computation takes longer in chunks.
    """

    waited: Passes[float]
    cutting: Passes[float]


NOTHING = Exposed(Passes(0.0, 0.0, 0.0), Passes(0.0, 0.0, 0.0))


class ExpertTimes(DeviceTimes):
    """Dispatch, experts and combine on one cluster."""

    def dispatched(self, config: Configuration) -> Configuration:
        """The run as its tokens travel here: inside a node every mode is the same All-to-All."""
        alone = config.ep * (config.tp if config.expert_tp else 1) <= self.hardware.devices_per_node
        return replace(config, ep_mode="global") if alone and config.ep_mode in MODES[1:] else config

    def exchanges(self, config: Configuration) -> tuple[Step, ...]:
        """The steps of dispatch and combine forward, with the bytes of the busiest rank."""
        node, model = self.hardware.devices_per_node, config.model
        span = config.ep * (config.tp if config.expert_tp else 1)
        nodes = max(1, -(-span // node))
        while config.ep % nodes:
            nodes += 1
        mode = "deduplicated" if config.ep_mode in SPARSE else config.ep_mode
        tokens = routed_part(config).copies / model.top_k
        item = 4 if config.dtype == "fp32" else 2
        sizes = (model.experts, tokens, model.top_k, model.hidden, item, config.skew)
        outside, inside = _limited(config, nodes), 1.0
        if config.ep_mode in SPARSE:
            # a row goes once to each rank that holds one of its experts
            inside = config.ep * hit_probability(model.experts, model.experts // config.ep, model.top_k) / model.top_k
        return _steps(mode if nodes > 1 else "global", nodes, config.ep // nodes, *sizes, outside, inside)

    def repeated(self, config: Configuration) -> tuple[Step, ...]:
        """The steps that a recomputed layer runs again."""
        return _recomputed(self.exchanges(config), config.keep_gathered)

    def exposed(self, config: Configuration) -> Exposed:
        """What expert-parallel communication costs an MoE layer."""
        if config.ep == 1 or not config.model.experts:
            return NOTHING
        if config.ep_cut or config.shared_beside:
            chunks, stride = config.ep_cut or ((1, 1), 1)
            choice = self.plan(config, [chunks] if chunks else [], stride)
            return Exposed(choice.waited_after, choice.cutting)
        if config.overlap_ep and config.schedule == "zero_bubble_v":
            return NOTHING  # forward and backward of two micro-batches run as a pair (DualPipe) and hide it all
        sent = self._sent(config)
        seen = 1 - self.reached.hidden_ep * config.overlap_ep
        forward, back, recomputed = (seen * sum(stage.seconds(1.0) for stage in stages) for stages in sent)
        return Exposed(Passes(forward, back, back + recomputed), NOTHING.cutting)

    def plan(self, config: Configuration, cuts: Sequence[Chunks] = (), stride: int | None = None) -> Choice:
        """An MoE layer uncut and in the best of some chunks, as `plugins.ep_overlap` runs it.

        Args:
            cuts: (b, s) to choose from; all that fit where none are given. stride: of the order; None: the best.

        Raises:
            RecipeError: more chunks than samples or tokens.
        """
        return choose(self.expert_layer(config), config.batch, config.rank_sequence, cuts, stride)

    def expert_layer(self, config: Configuration) -> Layer:
        """What a chunk goes through, with the seconds of each step."""
        config = self.dispatched(config)
        forward, back, recomputed = self._sent(config)
        shared = self._part(config, shared_part(config)) + self.hardware.launch_s if config.model.shared_ffn else 0.0
        return Layer(
            self._chain(config, forward, "experts"),
            self._chain(config, back, "experts.backward", _BACKWARD),
            self._chain(config, recomputed, "experts.replay"),
            shared=(shared, _BACKWARD * shared),
            shared_beside=config.shared_beside,
        )

    def _chain(self, config: Configuration, sent: Sequence[Stage], name: str, times: int = 1) -> tuple[Stage, ...]:
        """Communication around the experts; the replay's ends where combine's rows are back."""
        first = [stage for stage in sent if stage.name.startswith("dispatch") != (times == _BACKWARD)]
        rest = [stage for stage in sent if stage not in first]
        return (*first, Stage(name, "compute", partial(self._routed, config, times)), *rest)

    def _routed(self, config: Configuration, times: int, share: float) -> float:
        """Seconds of the routed experts on a chunk: matmuls, no faster than their weights are read, and sorting."""
        return self.hardware.launch_s + times * self._part(config, routed_part(config, share))

    def _part(self, config: Configuration, part: Part) -> float:
        return sum(self._matmul(config, matmul) for matmul in part.matmuls) + self._moved(config, part.elementwise)

    def _sent(self, config: Configuration) -> tuple[list[Stage], list[Stage], list[Stage]]:
        """Communication forward, backward, and what a recomputed layer repeats."""
        forward = self.exchanges(config)
        sent = [self._stages(steps) for steps in (forward, _back(forward), self.repeated(config))]
        return sent[0], sent[1], sent[2]

    def _stages(self, steps: Sequence[Step]) -> list[Stage]:
        """Steps in which a rank has a peer."""
        return [
            Stage(step.name, step.stream, partial(self._step, step))
            for step in steps
            if step.inter_peers or step.intra_peers
        ]

    def _step(self, step: Step, share: float) -> float:
        """Seconds of a step for a chunk; what goes to one rank leaves through one port."""
        inter, intra = self.hardware.inter_node, self.hardware.intra_node
        port = self._speed(inter) / inter.ports
        outside = share * step.inter_bytes / port + (inter.latency_s if step.inter_peers else 0.0)
        inside = share * step.intra_bytes / self._speed(intra) + (intra.latency_s if step.intra_peers else 0.0)
        return max(outside, inside) + self.hardware.launch_s


def _limited(config: Configuration, nodes: int) -> float:
    """Share of the expected traffic between nodes that is left where routing visits few nodes for a token."""
    limit, model = config.model.node_limit, config.model
    if not limit or nodes <= limit:
        return 1.0
    expected = nodes * hit_probability(model.experts, model.experts // nodes, model.top_k)
    return min(1.0, limit / expected)


_back = lru_cache(maxsize=65536)(backward)


@lru_cache(maxsize=65536)
def _recomputed(forward: tuple[Step, ...], graph: bool) -> tuple[Step, ...]:
    """What runs again; in a graph nothing reads the rows that come back from other nodes."""
    steps = (step for step in forward if not (graph and step.name.startswith("combine.inter")))
    return tuple(replace(step, name=f"{step.name}.replay") for step in steps)


@lru_cache(maxsize=65536)
def _steps(
    mode: str,
    nodes: int,
    width: int,
    experts: int,
    tokens: float,
    top_k: int,
    hidden: int,
    item: int,
    skew: float,
    outside: float,
    inside: float,
) -> tuple[Step, ...]:
    """Expected steps whose bytes between nodes and inside one are reduced to a share."""
    steps = expected_steps(mode, Topology(nodes, width, experts), tokens, top_k, hidden, item, skew)
    return tuple(
        replace(
            step,
            inter_bytes=outside * step.inter_bytes,
            intra_bytes=inside * step.intra_bytes,
            inter_forward_only=outside * step.inter_forward_only,
            intra_forward_only=inside * step.intra_forward_only,
        )
        for step in steps
    )
