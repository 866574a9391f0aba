"""What a recipe says about the balance of its data: samples, layout, cost of a sample, separation of documents.

Layout, cost and mask are read by the plugin's own readers, so that what is predicted is what the plugin would do.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path

from plugins.attention_balance import settings as plugin
from plugins.attention_balance.plan import Layout
from plugins.attention_balance.samples.cost import Cost
from plugins.attention_balance.samples.eod import check_apart
from plugins.errors import DataError, RecipeError
from tools.data.index import Blend, read_blend
from tools.data.outputs import read_sidecar
from tools.layout.resolve import sample_cost
from tools.recipe.findings import refusal
from tools.recipe.load import KeyPath, Recipe
from tools.recipe.override import dotted
from tools.recipe.unresolved import require_resolved
from tools.recipe.view import LOADER, MODEL, View

CONFIG = (*LOADER, "config")
_PLUGIN = ("plugins", "attention_balance")
_MARGIN = 1.005  # a blend, even of one corpus, asks each for this much more (_get_size_per_split_per_dataset)


@dataclass(frozen=True)
class Setting:
    """One recipe that keeps documents apart.

    Args:
        sequence_length: tokens of a sample. seed: of the dataset's shuffling.
        training_share: the part of the documents, from the first on, that is trained on.
        wanted: samples that the dataset is asked for.
        steps: of the run.
        layout, cost: as the planner wants them.
        context_parallel: ranks that take consecutive parts of each sample; 1 where none do.
        room: documents of a sample that the mask holds; None for a mask without such a limit.
        notes: what to know before believing the numbers.
    """

    sequence_length: int
    seed: int
    training_share: float
    wanted: int
    steps: int
    layout: Layout
    cost: Cost
    context_parallel: int
    room: int | None
    notes: tuple[str, ...]


def equal_costs(recipe: Recipe) -> str:
    """Why every sample of this recipe costs the same, or an empty string.

    Raises:
        RecipeError: it trains on no Megatron corpus.
    """
    view = View(recipe)
    if not view.megatron:
        raise refusal(recipe, (*LOADER, "type"), f"{view.get((*LOADER, 'type'))!r} reads no Megatron corpus")
    try:
        check_apart(view.get(CONFIG, {}), view.get(MODEL, {}))
    except RecipeError as error:
        return str(error)
    return ""


def setting_of(recipe: Recipe, prefix: str | Path, window: int | None) -> Setting:
    """Read a recipe that trains on PREFIX alone.

    Args:
        window: global batches whose samples may change places; None: what the recipe's plugin section says, or 1.

    Raises:
        RecipeError: it is not resolved, lacks a size, its sizes do not fit each other, or its plugin section is wrong.
    """
    require_resolved(recipe)
    view, settings = View(recipe), plugin.read(View(recipe).get(_PLUGIN) or {})
    if not view.flag((*CONFIG, "add_extra_token_to_sequence"), True):
        raise refusal(recipe, (*CONFIG, "add_extra_token_to_sequence"), "False is not supported here; leave it out")
    layout = plugin.layout_of(recipe, settings.window if window is None else window)
    samples, blend = _samples(view, layout), _blend(view)
    if layout.window > layout.steps(samples):
        raise RecipeError(f"--window {layout.window}: the run has {layout.steps(samples):,} steps")
    algorithm = view.get(("parallel_config", "context_parallel_algo"), "colossalai_cp")
    return Setting(
        sequence_length=_number(view, (*CONFIG, "seq_length")),
        seed=view.get((*CONFIG, "seed"), 1234),
        training_share=_training_share(view),
        wanted=math.ceil(samples * _MARGIN) if blend and blend.weights else samples,
        steps=layout.steps(samples),
        layout=layout,
        cost=settings.cost or sample_cost(recipe),
        context_parallel=view.cp if view.parallel and algorithm == "colossalai_cp" else 1,
        room=_room(view),
        notes=tuple(_notes(view, prefix)),
    )


def _notes(view: View, prefix: str | Path) -> list[str]:
    notes = []
    compressed = view.flag((*CONFIG, "create_compressed_eod_mask"))
    resets = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
    if compressed and not any(view.flag((*CONFIG, key)) for key in resets):
        notes.append(
            "with this recipe MindFormers serves the first sample's mask to all samples; these numbers are for right "
            f"masks, which {dotted((*CONFIG, 'reset_position_ids'))}: True gives"
        )
    if not compressed and not view.on_cpu:
        notes.append(
            "a full mask is read: whether time follows the documents is up to the attention kernel; these numbers are "
            f"for one that skips what is masked, as with {dotted((*CONFIG, 'create_compressed_eod_mask'))}: True"
        )
    if view.parallel and view.pp > 1:
        notes.append("the pipeline is modelled as 1F1B with equal stages; other schedules have other bubbles")
    blend = _blend(view)
    if blend and len(blend.prefixes) > 1:
        notes.append(
            f"the recipe blends {len(blend.prefixes)} corpora{_shares(blend)}; these numbers are as if it trained on "
            "PREFIX alone"
        )
    written, found = view.get((*CONFIG, "eod")), _end_of_document(prefix)
    if found is not None and written != found:
        notes.append(
            f"{dotted((*CONFIG, 'eod'))} is {written}, but documents of {prefix} end with {found}: without that id "
            "masks would not end where documents do"
        )
    return notes


def _shares(blend: Blend) -> str:
    """The samples that each corpus gives, where weights say it."""
    if not blend.weights:
        return ""
    whole = sum(blend.weights)
    parts = [
        f"{100 * weight / whole:.3g} % of the samples from {name}"
        for name, weight in zip(blend.prefixes, blend.weights, strict=True)
    ]
    return f" ({', '.join(parts)})"


def _end_of_document(prefix: str | Path) -> int | None:
    """What `tc3 data prepare` noted; None for corpora of others."""
    try:
        return read_sidecar(prefix).get("eod_id")
    except DataError:
        return None


def _samples(view: View, layout: Layout) -> int:
    """Samples of the run."""
    path = (*LOADER, "sizes")
    sizes = view.get(path)
    if not isinstance(sizes, list) or not sizes or type(sizes[0]) is not int:
        raise refusal(view.recipe, path, f"{sizes!r}; write [samples of the run, 0, 0]")
    if sizes[0] < layout.batch:
        raise refusal(view.recipe, path, f"{sizes[0]:,} samples fill no step of {layout.batch:,}")
    return sizes[0]


def _blend(view: View) -> Blend | None:
    """The recipe's own corpora, for PREFIX takes their place; None where it names none.

    Raises:
        RecipeError: MindFormers could not read its `data_path`.
    """
    path = (*CONFIG, "data_path")
    try:
        return read_blend(view.get(path)) if view.get(path) else None
    except DataError as error:
        raise refusal(view.recipe, path, str(error)) from None


def _training_share(view: View) -> float:
    """The first of `split`'s shares, normalised as MindFormers does."""
    shares = [float(text) for text in re.findall(r"[.0-9]+", str(view.get((*CONFIG, "split"), "1")))]
    if not shares or not shares[0]:
        raise refusal(view.recipe, (*CONFIG, "split"), "trains on no document; write '1, 0, 0'")
    return shares[0] / sum(shares)


def _room(view: View) -> int | None:
    if not view.flag((*CONFIG, "create_compressed_eod_mask")):
        return None
    return view.mask_documents


def _number(view: View, path: KeyPath) -> int:
    value = view.get(path)
    if type(value) is not int or value < 1:
        raise refusal(view.recipe, path, f"{value!r}; write the tokens of a sample")
    return value
