"""Attention heads: widths, and how tensor and context parallelism divide them.

Of context parallelism by exchanging heads (`ulysses_degree_in_cp`) dry runs found that MindFormers 1.9.0 does not tell
flash attention of the degree: keys and values are gathered over the whole of context parallelism all the same, with the
exchange of heads on top; and most models do not compile.
"""

from __future__ import annotations

from tools.estimate.from_recipe import DEGREE, not_compiled
from tools.model.architecture import Model, model_of
from tools.recipe.findings import Findings
from tools.recipe.view import MODEL, PARALLEL, View
from tools.schema.converter import Built

_ALGORITHM = (*PARALLEL, "context_parallel_algo")


def check_heads(view: View, built: Built, found: Findings) -> None:
    """Every rule about heads."""
    heads, hidden = built.number("num_attention_heads"), built.number("hidden_size")
    tp = view.tp if view.parallel else 1
    ulysses = view.number(DEGREE, 1) if view.parallel else 1
    if heads % tp:
        wrong = f"{heads} heads cannot be divided over {tp} tensor-parallel ranks"
        found.error((*PARALLEL, "model_parallel"), wrong, rule="heads_tp")
    elif heads % (tp * ulysses):
        wrong = f"{heads} heads cannot be divided over model_parallel x ulysses_degree_in_cp = {tp} x {ulysses}"
        found.error(DEGREE, wrong, "fewer", rule="heads_cp")
    if view.parallel and view.cp % max(ulysses, 1):
        found.error(DEGREE, f"{ulysses} does not divide context_parallel {view.cp}", rule="heads_cp")
    _ulysses(view, _model(built), found)
    if "qk_pos_emb_head_dim" in built.fields:
        query = built.number("qk_head_dim") + built.number("qk_pos_emb_head_dim")
        if built.number("v_head_dim") > query:
            wrong = f"larger than qk_head_dim + qk_pos_emb_head_dim = {query}"
            found.error((*MODEL, "v_head_dim"), wrong, rule="v_head_dim")
        if built.number("qk_pos_emb_head_dim") % 2:
            found.error((*MODEL, "qk_pos_emb_head_dim"), "RoPE turns pairs: an even number is needed")
    else:
        groups = built.number("num_query_groups")
        if groups and heads % groups:
            found.error((*MODEL, "num_key_value_heads"), f"{groups} do not divide {heads} heads")
        if groups and groups % tp:
            found.error((*PARALLEL, "model_parallel"), f"{groups} key-value heads cannot be divided over {tp} ranks")
        if heads and hidden % heads:  # even where head_dim is given
            found.error((*MODEL, "num_attention_heads"), f"{heads} do not divide hidden_size {hidden}")


def _model(built: Built) -> Model | None:
    """The model, as far as its sizes make one."""
    try:
        return model_of(built.fields)
    except (KeyError, TypeError, ValueError):
        return None


def _ulysses(view: View, model: Model | None, found: Findings) -> None:
    """Warn of a setting that brings nothing; refuse one that does not compile."""
    degree = view.number(DEGREE, 1) if view.parallel else 1
    if view.get(_ALGORITHM) == "ulysses_cp" and view.parallel and degree == 1 < view.cp:
        wrong = "alone changes nothing: MindFormers reads ulysses_degree_in_cp, and gathers keys and values at 1"
        found.warning(_ALGORITHM, wrong, "colossalai_cp, which says what it does", rule="heads_cp")
    if degree <= 1 or view.cp % degree or (model and model.heads % (view.tp * degree)):
        return  # nothing, or said already
    refused = not_compiled(model) if model else None
    if refused:
        found.error(DEGREE, refused[0], "1", rule=refused[1])
    else:
        wrong = "keys and values are gathered over the whole of cp all the same, and heads are exchanged on top"
        found.warning(DEGREE, wrong, "1")
