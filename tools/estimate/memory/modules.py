"""The modules to which memory belongs: the same names for the model's bytes and for those of a compiled graph."""

from __future__ import annotations

import re

ATTENTION, MLP, EXPERTS, SHARED, ROUTER = "attention", "dense MLP", "experts", "shared experts", "router"
DISPATCH, NORMS, EMBEDDING, HEAD, MTP = "dispatch", "norms", "embedding", "head and logits", "MTP"
LAYER_INPUT, SPARE, OTHER = "inputs of recomputed layers", "spare gradients", "other"
MODULES = (ATTENTION, MLP, EXPERTS, SHARED, ROUTER, DISPATCH, NORMS, EMBEDDING, HEAD, MTP, LAYER_INPUT, SPARE, OTHER)

_WEIGHTS = (  # of `tools.model.weights`, first match
    (r"expert", EXPERTS),
    (r"shared", SHARED),
    (r"router", ROUTER),
    (r"final_norm|output", HEAD),
    (r"mtp_norm|projection", MTP),
    (r"norm", NORMS),
    (r"embedding", EMBEDDING),
    (r"mlp", MLP),
)
_PARAMETERS = (  # of MindFormers' names of parameters and paths of cells, first match
    (r"shared_expert", SHARED),
    (r"router", ROUTER),
    (r"token_dispatcher", DISPATCH),
    (r"\bexperts\b|experts-", EXPERTS),
    (r"self_attention|core_attention", ATTENTION),
    (r"\bmtp\b|mtp[-.]|eh_proj|enorm|hnorm", MTP),
    (r"final_layernorm|output_layer|loss", HEAD),
    (r"layernorm", NORMS),
    (r"embedding", EMBEDDING),
    (r"\bmlp\b|mlp-", MLP),
)


def of_weight(name: str) -> str:
    """The module of a weight of `tools.model.weights`; what no pattern names is attention's."""
    return next((module for pattern, module in _WEIGHTS if re.search(pattern, name)), ATTENTION)


def of_path(path: str) -> str:
    """The module of a parameter's name, or of an operator's path of cells, in MindFormers."""
    return next((module for pattern, module in _PARAMETERS if re.search(pattern, path)), OTHER)
