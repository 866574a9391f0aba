"""This module reads the settings of a recipe that determine the balance of its data, and computes the work of each
device in some steps of a run.

The functions of `plugins/attention_balance` read the samples, the layout, the cost of a sample and the separation of
documents from the recipe, so that the prediction describes what the plugin would do. The module computes each step
without and with the plugin's plan. The plan is made with the cost of the whole model, as in training, and is evaluated
twice: by the cost of attention only, and by the cost of attention and of the work that is linear in tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from plugins.attention_balance import plan as plugin
from plugins.attention_balance.assign import unscheduled
from plugins.attention_balance.context_parallel import balanced, contiguous
from plugins.attention_balance.plan import Balance, Layout, balance, epoch_plan
from plugins.attention_balance.samples import Cost, GPTIndex, causal_pairs, check_apart, padding_under, segments_of
from plugins.errors import DataError, RecipeError
from plugins.spike_guard import plan as spike_guard
from plugins.spike_guard.ledger import Ranges, count
from tools.data.blend import asked_of
from tools.data.index import Blend, read_blend, training_share
from tools.data.outputs import read_sidecar
from tools.layout.resolve import sample_cost
from tools.process.waiting import Reporter
from tools.recipe.findings import refusal
from tools.recipe.load import Recipe, dotted
from tools.recipe.view import LOADER, MODEL, View, require_resolved

CONFIG = (*LOADER, "config")
_PLUGIN, _GUARD = ("plugins", "attention_balance"), ("plugins", "spike_guard")


@dataclass(frozen=True)
class Setting:
    """A `Setting` holds the values that `tc3 data imbalance` needs from a recipe in which tokens attend only to their
    own document.

    Args:
        sequence_length: the number of tokens of a sample.
        seed: the seed of the dataset's shuffling.
        training_share: the part of the documents, from the first on, that is trained on.
        wanted: the number of samples that the run requests from the dataset.
        steps: the number of steps of the run.
        layout, cost: the layout and the cost in the form that the planner reads.
        context_parallel: the number of context-parallel ranks that take consecutive parts of each sample; 1 if samples
            are not cut.
        room: the number of documents per sample that the attention mask can hold; None for a mask without such a limit.
        padding: the number of entries of the mask after these documents that must stay padding.
        skipped: the samples that `plugins.spike_guard` leaves out of the training, as sorted ranges (first, stop).
        notes: sentences about the limits of the measurement, which the reader of the results must know.
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
    padding: int
    skipped: Ranges
    notes: tuple[str, ...]


def equal_costs(recipe: Recipe) -> str:
    """Return the reason why every sample of a recipe needs the same amount of computation, or an empty text if the
    amounts differ.

    Raises:
        RecipeError: the recipe does not train on a Megatron corpus.
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
    """Return the settings of a recipe that determine how evenly the work of attention is distributed over devices. The
    corpus PREFIX.bin/.idx is taken as the recipe's only corpus.

    Args:
        window: the number of consecutive global batches among which the plan may exchange samples; None for the value
            in the recipe's plugin section, or 1 if the section has none.

    Raises:
        RecipeError: the recipe is not resolved, lacks a size, has sizes that do not fit each other, or has a wrong
            section of one of the two plugins.
    """
    require_resolved(recipe)
    view, settings = View(recipe), plugin.read(View(recipe).get(_PLUGIN) or {})
    skipped = spike_guard.read(view.get(_GUARD) or {}).skipped
    if not view.flag((*CONFIG, "add_extra_token_to_sequence"), True):
        raise refusal(recipe, (*CONFIG, "add_extra_token_to_sequence"), "False is not supported here; leave it out")
    layout = plugin.layout_of(recipe, settings.window if window is None else window)
    samples, blend = _samples(view, layout), _blend(view)
    if layout.window > layout.steps(samples):
        raise RecipeError(
            f"--window {layout.window}: the window is longer than the run, which has {layout.steps(samples):,} steps; "
            "give a smaller window"
        )
    length = _length(view)
    algorithm = view.get(("parallel_config", "context_parallel_algo"), "colossalai_cp")
    ranks = view.cp if view.parallel and algorithm == "colossalai_cp" else 1
    padding = padding_under(view.cp if view.parallel else 1, algorithm)
    return Setting(
        sequence_length=length,
        seed=view.get((*CONFIG, "seed"), 1234),
        training_share=_training_share(view),
        wanted=asked_of(samples, 1.0) if blend and blend.weights else samples,
        steps=layout.steps(samples),
        layout=layout,
        cost=settings.cost or sample_cost(recipe),
        context_parallel=ranks,
        room=view.mask_documents - padding if view.flag((*CONFIG, "create_compressed_eod_mask")) else None,
        padding=padding,
        skipped=skipped,
        notes=(*_notes(view, prefix), *_notes_on_steps(view, layout, skipped)),
    )


def _length(view: View) -> int:
    """Return the number of tokens of a sample, which the model must read and context parallelism must divide."""
    path, cp = (*CONFIG, "seq_length"), view.cp if view.parallel else 1
    length = view.get(path)
    if type(length) is not int or length < 1:
        raise refusal(view.recipe, path, f"{length!r} is not a length; write the tokens of a sample")
    if (read := view.number((*MODEL, "seq_length"), length)) != length:
        raise refusal(view.recipe, path, f"the samples have {length} tokens, but the model reads {read}; write {read}")
    if length % cp:
        raise refusal(view.recipe, ("parallel_config", "context_parallel"), f"{cp} does not divide seq_length {length}")
    return length


def _notes(view: View, prefix: str | Path) -> list[str]:
    notes = []
    compressed = view.flag((*CONFIG, "create_compressed_eod_mask"))
    if compressed and view.masks_once:
        notes.append(
            "with this recipe MindFormers' loader fails at the second sample; these numbers are for a recipe with "
            f"{dotted((*CONFIG, 'reset_position_ids'))}: True"
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
            "only PREFIX"
        )
    written, found = view.get((*CONFIG, "eod")), _end_of_document(prefix)
    if found is not None and written != found:
        notes.append(
            f"{dotted((*CONFIG, 'eod'))} is {written}, but documents of {prefix} end with {found}: without that id "
            "masks would not end where documents do"
        )
    return notes


def _notes_on_steps(view: View, layout: Layout, skipped: Ranges) -> Iterator[str]:
    """Yield sentences about steps of the run that train on other samples than the steps that are measured here."""
    if skipped:
        note = f"the {count(skipped):,} samples in plugins.spike_guard.skipped are left out, as in training"
        if layout.window > 1 or any(end % layout.batch for pair in skipped for end in pair):
            note += (
                "; with plugins.attention_balance a run plans all samples and leaves out places of the planned order, "
                "so that some of its steps train on other samples than are measured here"
            )
        yield note
    if view.ramp.stages:
        yield (
            "the batch grows by plugins.batch_ramp; these numbers assume that every step trains on the full "
            f"{layout.batch:,} samples"
        )


def _shares(blend: Blend) -> str:
    """Return in words which share of the samples comes from each corpus; "" if the recipe gives no weights."""
    if not blend.weights:
        return ""
    whole = sum(blend.weights)
    parts = [
        f"{100 * weight / whole:.3g} % of the samples from {name}"
        for name, weight in zip(blend.prefixes, blend.weights, strict=True)
    ]
    return f" ({', '.join(parts)})"


def _end_of_document(prefix: str | Path) -> int | None:
    """Return the end-of-document id that `tc3 data prepare` recorded; None for a corpus that another program made."""
    try:
        return read_sidecar(prefix).get("eod_id")
    except DataError:
        return None


def _samples(view: View, layout: Layout) -> int:
    path = (*LOADER, "sizes")
    sizes = view.get(path)
    if not isinstance(sizes, list) or not sizes or type(sizes[0]) is not int:
        raise refusal(view.recipe, path, f"{sizes!r} gives no number of samples; write [samples of the run, 0, 0]")
    if sizes[0] < layout.batch:
        raise refusal(view.recipe, path, f"{sizes[0]:,} samples fill no step of {layout.batch:,}")
    return sizes[0]


def _blend(view: View) -> Blend | None:
    """Return the recipe's own corpora, in whose place PREFIX is measured; None if the recipe names none.

    Raises:
        RecipeError: MindFormers could not read its `data_path`.
    """
    path = (*CONFIG, "data_path")
    try:
        return read_blend(view.get(path)) if view.get(path) else None
    except DataError as error:
        raise refusal(view.recipe, path, str(error)) from None


def _training_share(view: View) -> float:
    try:
        return training_share(str(view.get((*CONFIG, "split"), "1")))
    except DataError as error:
        raise refusal(view.recipe, (*CONFIG, "split"), str(error)) from None


SHARES = (0.0, 0.5, 0.9, 0.99, 1.0)  # quantiles of loads
_CONTEXT_SAMPLES = 32


@dataclass(frozen=True)
class OneStep:
    """A `OneStep` holds the attention work of each rank's micro-batches in one step, without and with
    `plugins/attention_balance`. The arrays `before` and `after` are [ranks, micro-batches], and hold the work divided
    by the mean work.
    """

    number: int
    before: np.ndarray
    after: np.ndarray


@dataclass(frozen=True)
class Steps:
    """A `Steps` holds how evenly the devices are loaded in the examined steps of a run. A `Steps` holds most values as
    pairs (value without `plugins/attention_balance`, value with the plugin).

    Args:
        numbers: the numbers of the examined steps, int64 [steps].
        attention, model: the time of each step divided by the time of a step whose samples all cost the same, float64
            [steps]; `attention` counts only the work of attention, and `model` all work.
        micro_batch_loads, step_loads: the quantiles `SHARES` of the attention work of a rank's micro-batch, and of a
            rank's step, divided by the mean of the step: float64 [len(SHARES)], averaged over the steps.
        speed_up: the modelled computation time of these steps without the plan, divided by the time with the plan; both
            include waiting.
        attention_share: the share of attention in all work.
        of_one_document: the number of attending token pairs, divided by that number for samples of one document.
        one_step: the result of one step in the middle of the run.
        context: the number of attending token pairs of the slowest context-parallel rank divided by the mean over
            ranks, for samples that are cut into consecutive parts, and for samples that `context_parallel.balanced`
            cuts; None if no context parallelism cuts samples.
    """

    numbers: np.ndarray
    attention: Balance
    model: Balance
    micro_batch_loads: tuple[np.ndarray, np.ndarray]
    step_loads: tuple[np.ndarray, np.ndarray]
    speed_up: float
    attention_share: float
    of_one_document: float
    one_step: OneStep
    context: tuple[float, float] | None


@dataclass(frozen=True)
class _Window:
    """A `_Window` holds what remains of one window of consecutive steps.

    quantiles: [micro-batch or step, without or with, len(SHARES)]; times: without, with, in the cost's unit.
    """

    attention: Balance
    model: Balance
    quantiles: np.ndarray
    times: np.ndarray
    pairs: float


def measure_steps(index: GPTIndex, setting: Setting, starts: np.ndarray, reporter: Reporter) -> Steps:
    """Return how evenly the samples of a recipe load the devices, with and without the plans of
    `plugins.attention_balance`. Each number in `starts` (int64 [n], rising) is the first of the consecutive steps for
    which `plugins.attention_balance` makes one plan.
    """
    reporter.start("planning steps", len(starts))
    windows = []
    for number, start in enumerate(starts.tolist()):
        window, loads = _window(index, setting, start)
        windows.append(window)
        if number == len(starts) // 2:
            one_step = OneStep(start, loads[0][0], loads[1][0])
        reporter.advance(1)
    micro_batch, step = np.mean([window.quantiles for window in windows], 0)
    before, after = np.sum([window.times for window in windows], 0).tolist()
    layout, length, cost = setting.layout, setting.sequence_length, setting.cost
    samples = len(starts) * layout.window * layout.batch
    attention = cost.per_pair * sum(window.pairs for window in windows)
    return Steps(
        numbers=(starts[:, None] + np.arange(layout.window)).ravel(),
        attention=_joined([window.attention for window in windows]),
        model=_joined([window.model for window in windows]),
        micro_batch_loads=(micro_batch[0], micro_batch[1]),
        step_loads=(step[0], step[1]),
        speed_up=before / after,
        attention_share=attention / (attention + cost.per_token * length * samples),
        of_one_document=attention / (cost.per_pair * samples * length * (length + 1) / 2),
        one_step=one_step,
        context=_context(index, setting, int(starts[0]) * layout.batch) if setting.context_parallel > 1 else None,
    )


def _window(index: GPTIndex, setting: Setting, first: int) -> tuple[_Window, tuple[np.ndarray, np.ndarray]]:
    """Return the window that begins at step `first`, and the attention work [steps, ranks, micro-batches] without and
    with the plan, divided by the mean of each step.
    """
    layout = setting.layout
    pairs = np.concatenate([
        causal_pairs(segments_of(index, step * layout.batch, (step + 1) * layout.batch))
        for step in range(first, first + layout.window)
    ])  # fmt: skip
    attention = setting.cost.per_pair * pairs
    linear = setting.cost.per_token * setting.sequence_length
    # a window's plan follows only from its samples, so it is planned as if it were the whole run
    plan = epoch_plan(attention + linear, layout)
    natural = unscheduled(layout.ranks, layout.micro_batches, layout.slots)
    natural = natural + layout.batch * np.arange(layout.window)[:, None, None, None]
    loads = [attention[order].sum(-1) for order in (natural, plan)]
    times = [layout.objective.step_time(side + linear * layout.slots).sum() for side in loads]
    relative = [side / side.mean((1, 2), keepdims=True) for side in loads]
    quantiles = [
        [np.quantile(side, SHARES, axis=(1, 2)).mean(1) for side in relative],
        [np.quantile(side.mean(2), SHARES, axis=1).mean(1) for side in relative],
    ]
    by_attention, by_all = (balance(costs, plan, layout) for costs in (attention, attention + linear))
    window = _Window(by_attention, by_all, np.array(quantiles), np.array(times), float(pairs.sum()))
    return window, (relative[0], relative[1])


def _joined(parts: list[Balance]) -> Balance:
    return Balance(*(np.concatenate([getattr(part, name) for part in parts]) for name in ("before", "after", "bound")))


def _context(index: GPTIndex, setting: Setting, first: int) -> tuple[float, float]:
    """Return the mean imbalance of the context-parallel ranks with contiguous and with balanced parts, over some
    samples from item `first` on.
    """
    segments = segments_of(index, first, first + min(_CONTEXT_SAMPLES, setting.layout.batch))
    ranks = setting.context_parallel
    plans = [
        [split(segments[item], ranks).imbalance for split in (contiguous, balanced)] for item in range(len(segments))
    ]
    apart, even = np.mean(plans, 0).tolist()
    return apart, even
