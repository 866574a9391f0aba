"""This module notes in which cases MindFormers' results for a recipe differ from the results that a user may expect.
The module writes only notes and no errors, because the recipe can be trained nevertheless. If a plugin gives the
results that a user may expect, the note names this plugin.

Each difference was shown by comparing the sharded graph on CPU processes with one process; docs/stock-differences.md
has the numbers.
"""

from __future__ import annotations

from plugins.hierarchical_ep.settings import DEFAULT_DISPATCHER, DISPATCHER_OF
from plugins.mtp_documents import plan as mtp_documents
from tools.recipe.catalogue import why_modelled
from tools.recipe.findings import Findings
from tools.recipe.load import KeyPath, Recipe
from tools.recipe.view import LOADER, MODEL, View
from tools.schema.converter import Built
from tools.schema.stages import runs_back

_PAGE = "docs/stock-differences.md"
_MTP_DOCUMENTS = ("plugins", "mtp_documents")


def modelled(recipe: Recipe) -> str:
    """Return the reason why a `card.yaml` says that the recipe, or a base of it, is not meant for training; return ""
    if no `card.yaml` says so.
    """
    why = why_modelled({recipe.source, *(mark.file for mark in recipe.marks.values())} - {""})
    return f"this recipe is only for searches, estimates and checks, not for training: {why}" if why else ""


def check_differences(view: View, built: Built, found: Findings) -> None:
    """Note every known case in which MindFormers' results for this recipe differ from the results that a user may
    expect.
    """
    if said := modelled(view.recipe):  # what would be trained is another model, or nothing
        found.note(("model",), said, "see the card.yaml beside the recipe")
    _shared_embedding(view, built, found)
    _auxiliary_loss(view, built, found)
    _rounded_probabilities(view, built, found)
    _rounded_queries(view, built, found)
    _masked_means(view, built, found)
    _dealt_samples(view, built, found)
    _documents_of_mtp(view, built, found)
    _groups_of_experts(view, built, found)


def _shared_embedding(view: View, built: Built, found: Findings) -> None:
    """Note that MTP's share of the embedding's gradient counts twice in the global norm if both are on different
    stages. Where the optimizer is sharded over copies of the embedding, the last stage's own copy gets no gradient.
    """
    clips = view.flag(("runner_wrapper", "use_clip_grad"), True)
    sharded = view.flag(("parallel", "enable_parallel_optimizer")) and view.dp * view.cp > 1
    apart = view.parallel and view.pp > 1 and not runs_back(view) and not sharded
    if built.number("mtp_num_layers") and clips and apart:
        wrong = (
            "the last stage counts MTP's share of the embedding's gradient a second time in the global norm, so that "
            "clipping is a little stronger than without a pipeline"
        )
        found.note((*MODEL, "num_nextn_predict_layers"), wrong, f"see {_PAGE}", rule="mtp_stage")


def _auxiliary_loss(view: View, built: Built, found: Findings) -> None:
    """Note that MindFormers computes the auxiliary loss over a rank's tokens, whatever their sequences are."""
    if not built.number("num_moe_experts") or not built.fields.get("moe_aux_loss_coeff"):
        return
    if view.on_cpu and not view.parallel:
        return  # plugins.cpu_backend takes it sample by sample
    if view.get(("plugins", "group_aux_loss")) not in (None, False):
        return  # asked for: it is taken over the EP group's tokens
    kind = built.fields.get("moe_router_load_balancing_type")
    if kind == "gbs_aux_loss":
        return  # its shares of experts are those of all ranks
    parts = []
    if view.batch > 1:
        parts.append(f"all {view.batch} samples of a micro-batch (runner_config.batch_size)")
    cut = (view.cp if view.parallel else 1) * (view.tp if view.parallel and kind != "seq_aux_loss" else 1)
    if cut > 1:
        parts.append(f"each of the {cut} parts into which ranks cut a sequence")
    if parts:
        over = " and ".join(parts)
        wrong = (
            f"MindFormers computes {kind} not for each sequence, but over {over}, so that the loss depends on "
            "the layout"
        )
        found.note((*MODEL, "moe_router_load_balancing_type"), wrong, f"see {_PAGE}", rule="auxiliary_loss")


def _rounded_probabilities(view: View, built: Built, found: Findings) -> None:
    """Note that one dispatcher rounds the router's probabilities to bfloat16 in float32 models, too."""
    dispatcher, dtype = (built.fields.get(key) for key in ("moe_token_dispatcher_type", "compute_dtype"))
    rounds = dispatcher == DISPATCHER_OF["hierarchical"] and str(dtype).lower() not in ("bfloat16", "bf16")
    if built.number("num_moe_experts") and rounds and not view.cpu_classes:
        wrong = f"{dispatcher} rounds the router's probabilities and their gradients to bfloat16 with any compute_dtype"
        right = f"{DEFAULT_DISPATCHER} and plugins.hierarchical_ep keep {dtype}, see {_PAGE}"
        found.note((*MODEL, "moe_token_dispatcher_type"), wrong, right, rule="rounded_probabilities")


def _rounded_queries(view: View, built: Built, found: Findings) -> None:
    """Note that attention without latent compression rounds float32 to float16 before its kernel."""
    fields = built.fields
    rounds = str(fields.get("compute_dtype")).lower() in ("float32", "fp32") and fields.get("use_flash_attention")
    if rounds and not fields.get("multi_latent_attention") and not view.cpu_classes:
        wrong = "grouped-query attention still rounds queries, keys, values and their gradients to float16"
        found.note((*MODEL, "compute_dtype"), wrong, f"see {_PAGE}", rule="rounded_queries")


def _unequal_counts(view: View, built: Built) -> list[tuple[KeyPath, str]]:
    """Return (key path, loss) of each setting that leaves tokens out of a loss, if a step averages the mean losses of
    several micro-batches: these then have different numbers of tokens that count.
    """
    if view.micro_batches * view.accumulation == 1 or view.flag(("calculate_per_token_loss",)):
        return []
    found: list[tuple[KeyPath, str]] = []
    path = (*LOADER, "config", "eod_mask_loss") if view.megatron else (*LOADER, "type")
    if view.flag(path) if view.megatron else view.get(path) == "HFDataLoader":
        found.append((path, "the loss"))
    if built.number("mtp_num_layers") and view.get(_MTP_DOCUMENTS) not in (None, False):
        found.append((_MTP_DOCUMENTS, "the MTP loss"))
    return found


def _masked_means(view: View, built: Built, found: Findings) -> None:
    """Note that micro-batches weigh alike if their numbers of tokens that count in the loss differ."""
    for path, loss in _unequal_counts(view, built):
        wrong = (
            f"micro-batches have different numbers of tokens that count in {loss}, but MindFormers averages their "
            "mean losses, so that the loss depends on which samples share a micro-batch"
        )
        found.note(path, wrong, f"see {_PAGE}", rule="masked_mean")


def _dealt_samples(view: View, built: Built, found: Findings) -> None:
    """Report losses that depend on which samples `plugins.attention_balance` puts together."""
    if view.get(("plugins", "attention_balance")) in (None, False):
        return
    reasons = [
        f"with {path[-1]} micro-batches have different numbers of tokens that count in {loss}, but their mean losses "
        "are averaged"
        for path, loss in _unequal_counts(view, built)
    ]
    if built.number("num_moe_experts") and built.fields.get("moe_aux_loss_coeff"):
        reasons += _taken_together(view, str(built.fields.get("moe_router_load_balancing_type")))
    if reasons:
        wrong = f"losses differ from those without this plugin by more than rounding: {'; '.join(reasons)}"
        found.note(("plugins", "attention_balance"), wrong, "see docs/attention-balance.md", rule="masked_mean")


def _taken_together(view: View, kind: str) -> list[str]:
    """Say why the auxiliary loss depends on which samples share a micro-batch or rank; empty where it does not."""
    if view.get(("plugins", "group_aux_loss")) not in (None, False):
        return ["group_aux_loss computes the auxiliary loss over the samples that an EP group has at the same time"]
    if kind == "gbs_aux_loss":
        return ["gbs_aux_loss counts the chosen experts of all micro-batches of the step so far"]
    if view.batch > 1 and not view.cpu_classes:
        return [
            f"MindFormers computes {kind} over all {view.batch} samples of a micro-batch (runner_config.batch_size)"
        ]
    return []


def _documents_of_mtp(view: View, built: Built, found: Findings) -> None:
    """Note that MTP shifts whole samples, even if attention keeps their documents apart."""
    config = view.get((*LOADER, "config"))
    if not view.megatron or view.get(_MTP_DOCUMENTS) not in (None, False):
        return
    data = config if isinstance(config, dict) else {}
    if mtp_documents.crosses(data, built.fields, built.number("mtp_num_layers")):
        wrong = "at the end of a document MTP predicts tokens of the next document, which attention cannot see"
        right = f"{mtp_documents.KEY}: {{}} leaves these predictions out, see {_PAGE}"
        found.note((*MODEL, "num_nextn_predict_layers"), wrong, right, rule="mtp_documents")


def _groups_of_experts(view: View, built: Built, found: Findings) -> None:
    """Note that a masked group of experts has the score 0, which is above those of experts with a low bias."""
    groups, chosen = built.number("moe_router_num_groups"), built.number("moe_router_group_topk")
    limits = bool(built.number("num_moe_experts")) and groups > 1 and chosen < groups
    if limits and built.fields.get("moe_router_enable_expert_bias"):
        wrong = (
            f"experts outside the {chosen} of {groups} groups that a token chooses get the score 0; the router chooses "
            "them all the same if the trained bias makes the scores of the allowed experts negative"
        )
        path = built.origin.get("moe_router_num_groups", (*MODEL, "n_group"))
        found.note(path, wrong, f"n_group: 1 routes without groups, see {_PAGE}", rule="masked_groups")
