"""Groups of a layer's operators that MindFormers recomputes by pattern: `recompute_config.select_recompute`.

Which operators a pattern must name for memory to be freed was found by compiling (`tc3 dryrun --quick` of the 105B,
MindFormers 1.9.0). A cell's name recomputes what is inside of it and keeps its result, so that a projection's own name
frees nothing; operators are named one by one, the last one whose result attention or activation keeps included. An
operator that two patterns name, or that MindFormers recomputes anyway (`reshape` of linear layers), ends the build with
"'bool' object is not callable".

`Recompute.select` with "norms" is a group of its own; the groups here come beside it. An option that a layer has is
the names that apply to it, joined: "select+attention".
"""

from __future__ import annotations

from collections.abc import Iterable

from tools.estimate.configuration import Configuration

ATTENTION, MLP, EXPERTS = "attention", "mlp", "experts"
NORMS = "select"
PATTERNS = {
    # queries, keys and values from what MLA compresses; flash attention and its result are not repeated
    ATTENTION: (
        r"self_attention\.linear_(q_up_proj|kv_up_proj|qb|kvb)\.(cast|matmul)",
        r"self_attention\.apply_rotary_emb2?\.(add|mul|mul_mscale|neg|cast|rope)",
        r"self_attention\.apply_rotary_emb2?\.(split|cat|stack|slice|strideslice|reshape)",
        r"self_attention\.(split|pe_concat|tile_kv|reshape|expand_dims|cast)",
        r"self_attention\.core_attention\.(bnsd_transpose|bsh_transpose)",
    ),
    # the first product of a dense MLP and of the shared expert, and what the second takes; SwiGLU repeats itself anyway
    MLP: (
        r"mlp\.linear_fc1\.(cast|matmul)",
        r"mlp\.transpose",
        r"mlp\.linear_fc2\.cast",
        r"mlp\.shared_experts\.linear_fc1\.(cast|matmul)",
        r"mlp\.shared_experts\.transpose",
        r"mlp\.shared_experts\.linear_fc2\.cast",
    ),
    # dispatch, routed experts and combine, their communication included
    EXPERTS: (r"mlp\.experts",),
}


def offered(config: Configuration) -> tuple[str, ...]:
    """The groups whose bytes are known for a run.

    None outside of MindFormers' training_graph. Attention's are those of MLA without context parallelism, which keeps
    keys and values as gathered; the MLP's those of gated ones; experts' those that `plugins.ep_overlap` does not cut.
    """
    model = config.model
    if not config.training_graph:
        return ()
    known = {
        ATTENTION: model.latent is not None and config.cp == 1,
        MLP: model.gated,
        EXPERTS: bool(model.experts) and config.ep_cut is None,
    }
    return tuple(name for name, fits in known.items() if fits)


def joined(names: Iterable[str]) -> str:
    """The option of a layer that has several."""
    return "+".join(names) or "none"


def parts_of(option: str) -> tuple[str, ...]:
    """The names that an option joins; () of "none"."""
    return () if option == "none" else tuple(option.split("+"))
