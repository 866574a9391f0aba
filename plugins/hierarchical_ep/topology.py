"""This module decides which rank owns which expert, and which ranks are on the same node, inside one expert-parallel
(EP) group. The module needs only NumPy.

The ranks of an EP group are numbered 0 .. ep - 1, node after node, as MindFormers orders them: rank = node *
devices_per_node + local. MindFormers calls the number of nodes `oep` (outer expert parallel) and the ranks of a node
`iep` (inner).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from plugins.errors import RecipeError

DEVICES_PER_NODE = 8  # where a recipe has no `npu_nums_per_device`, as in MindFormers' TransformerConfig


@dataclass(frozen=True)
class Topology:
    """A `Topology` describes one EP group: its ranks, their nodes and their experts.

    Attributes:
        nodes: the number of nodes of the group (oep).
        devices_per_node: the number of ranks of the group on each node (iep).
        experts: the number of routed experts of the model.

    Raises RecipeError where one of them is below 1.
    """

    nodes: int
    devices_per_node: int
    experts: int

    def __post_init__(self) -> None:
        for name in ("nodes", "devices_per_node", "experts"):
            if getattr(self, name) < 1:
                raise RecipeError(f"hierarchical_ep: {name} is {getattr(self, name)}; it must be 1 or more")

    @property
    def ep(self) -> int:
        """Return the number of ranks of the EP group (`expert_parallel`)."""
        return self.nodes * self.devices_per_node

    @property
    def expert_bounds(self) -> np.ndarray:
        """Return the bounds [ep + 1] of each rank's experts: rank r owns experts bounds[r] to bounds[r + 1] - 1.

        The experts of a rank are contiguous. The first `experts % ep` ranks own one more expert than the others; with
        fewer experts than ranks the last ranks own none.
        """
        counts = np.full(self.ep, self.experts // self.ep)
        counts[: self.experts % self.ep] += 1
        return np.concatenate([[0], np.cumsum(counts)])

    @property
    def experts_per_rank(self) -> np.ndarray:
        """Return the number of experts that each rank owns, [ep]."""
        return np.diff(self.expert_bounds)

    @property
    def experts_per_node(self) -> np.ndarray:
        """Return the number of experts that each node owns, [nodes]."""
        return self.experts_per_rank.reshape(self.nodes, -1).sum(1)

    def owner(self, experts: np.ndarray) -> np.ndarray:
        """Return the rank that owns each expert id, in the shape of `experts`."""
        return np.searchsorted(self.expert_bounds, experts, side="right") - 1

    def node_of(self, ranks: np.ndarray | int) -> np.ndarray:
        """Return the number of the node on which each rank lies."""
        return np.asarray(ranks) // self.devices_per_node

    def local_of(self, ranks: np.ndarray | int) -> np.ndarray:
        """Return the index of each rank on its node."""
        return np.asarray(ranks) % self.devices_per_node

    def inter_group(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that have the same local index as `rank` on every node, in the order of the nodes
        (MindFormers' oep group).
        """
        return tuple(range(rank % self.devices_per_node, self.ep, self.devices_per_node))

    def intra_group(self, rank: int) -> tuple[int, ...]:
        """Return the ranks on the same node as `rank` (MindFormers' iep group)."""
        first = rank // self.devices_per_node * self.devices_per_node
        return tuple(range(first, first + self.devices_per_node))

    @property
    def ep_group(self) -> tuple[int, ...]:
        """Return all ranks of the EP group."""
        return tuple(range(self.ep))

    @property
    def inter_groups(self) -> tuple[tuple[int, ...], ...]:
        """Return all inter-node groups, in the order of the local index of their ranks."""
        return tuple(self.inter_group(local) for local in range(self.devices_per_node))

    @property
    def intra_groups(self) -> tuple[tuple[int, ...], ...]:
        """Return all intra-node groups, in the order of the nodes."""
        return tuple(self.intra_group(node * self.devices_per_node) for node in range(self.nodes))

    def experts_of_node(self, node: int) -> tuple[int, int]:
        """Return (first, end): the node owns the experts from `first` to `end` - 1."""
        bounds = self.expert_bounds
        return int(bounds[node * self.devices_per_node]), int(bounds[(node + 1) * self.devices_per_node])

    @property
    def same_node(self) -> np.ndarray:
        """Return for each pair of ranks whether both are on the same node, [ep, ep]."""
        node = self.node_of(np.arange(self.ep))
        return node[:, None] == node[None, :]


def of_mesh(ep: int, devices_per_node: int, experts: int, ranks: int = 0) -> Topology:
    """Return the topology of an EP group of `ep` consecutive ranks on nodes of `devices_per_node` devices.

    Args:
        ep: ranks of the EP group (`expert_parallel`).
        devices_per_node: the number of devices of a node, including those of other EP groups.
        experts: routed experts of the model.
        ranks: the number of ranks that share experts, which other degrees must divide; 0: it is unknown.

    Raises RecipeError where EP groups would not cover whole machines, or would straddle two of them.
    """
    for name, value in (("expert_parallel", ep), ("devices_per_node", devices_per_node)):
        if value < 1:
            raise RecipeError(f"hierarchical_ep: {name} is {value}; it must be 1 or more")
    if ep % devices_per_node and devices_per_node % ep:
        wrong = (
            f"is not a multiple of the {devices_per_node} devices of a node"
            if ep > devices_per_node
            else f"does not divide the {devices_per_node} devices of a node, so some EP groups would lie on two nodes"
        )
        near = nearest(ep, degrees_of(devices_per_node, experts, ranks))
        other = f"fits {experts} experts" + f" and {ranks} ranks (data_parallel x model_parallel)" * bool(ranks)
        right = f"write {near}" if near else f"no degree above 1 {other} on such nodes: change one of them"
        raise RecipeError(f"{ep} {wrong}; {right}", "parallel_config.expert_parallel")
    if ep > devices_per_node:
        return Topology(ep // devices_per_node, devices_per_node, experts)
    return Topology(1, ep, experts)


def degrees_of(devices_per_node: int, experts: int, ranks: int = 0) -> list[int]:
    """Return the possible EP degrees above 1. A possible degree divides the number of experts, and also the number of
    ranks that share the experts, if `ranks` gives this number; its EP groups cover whole nodes or divide a node evenly.
    """
    divisors = [ep for ep in range(2, experts + 1) if experts % ep == 0 and ranks % ep == 0]
    return [ep for ep in divisors if ep % devices_per_node == 0 or devices_per_node % ep == 0]


def nearest(ep: int, degrees: Sequence[int]) -> str:
    """Return the two degrees that are nearest to `ep` as text, such as ``8 or 16``; return "" if there are none."""
    return " or ".join(map(str, sorted(sorted(degrees, key=lambda degree: abs(degree - ep))[:2])))
