"""Random EP groups and routings, the awkward ones among them."""

import numpy as np
from hypothesis import strategies as st

from plugins.hierarchical_ep.topology import Topology

ROUTINGS = ("uniform", "skewed", "all-to-one", "one-node")


def route(topology, top_k, tokens, kind, rng):
    """Expert ids of each rank, [N_r, k], distinct in a row: the top k of random scores."""
    bias = np.zeros(topology.experts)
    if kind == "skewed":
        bias = 2.0 * rng.standard_normal(topology.experts)
    elif kind == "all-to-one":  # every token takes the same k experts
        bias = 1e6 * rng.permutation(topology.experts)
    elif kind == "one-node":
        first, last = topology.experts_of_node(rng.integers(topology.nodes))
        bias[first:last] = 1e6
    scores = [bias + rng.gumbel(size=(count, topology.experts)) for count in tokens]
    return [np.argsort(-score, axis=1)[:, :top_k] for score in scores]


@st.composite
def cases(draw):
    """(topology, routing, rng): 1 to 4 nodes of 1 to 4 ranks, any number of experts, ranks without tokens."""
    topology = Topology(draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.integers(1, 20)))
    top_k = draw(st.integers(1, min(6, topology.experts)))
    tokens = draw(st.lists(st.sampled_from([0, 1, 3, 7]), min_size=topology.ep, max_size=topology.ep))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    return topology, route(topology, top_k, tokens, draw(st.sampled_from(ROUTINGS)), rng), rng
