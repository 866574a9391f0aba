"""Whether a run that goes on with another recipe, or for more steps, still sees its data in the same order.

A resumed run skips what it has trained by count, so another order repeats samples and leaves others out. MindFormers'
GPTDataset shuffles all epochs of the corpus that the wanted samples need at once: more samples keep the order as long
as they need as many epochs (and, of several, as long as the last is shuffled apart from the others, or is not).
"""

from __future__ import annotations

import copy
import filecmp
import math
import os
import re
from bisect import bisect_left
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from launch.resume.skipped import SKIPPED, left_out
from plugins.attention_balance.plan import COST
from plugins.errors import DataError
from plugins.spike_guard.ledger import reached, same_until
from tools.data.index import map_lengths, read_blend
from tools.recipe.load import Recipe
from tools.recipe.override import dotted
from tools.recipe.view import LOADER, RUNNER, View

CONFIG = (*LOADER, "config")
SIZES = (*LOADER, "sizes")
_BALANCE = ("plugins", "attention_balance")
_MARGIN = 1.005  # a weighted corpus is asked for this much more (_get_size_per_split_per_dataset)
_WHOLE_EPOCH = 0.80  # GPTDataset shuffles the last epoch apart when less of it is used
_MEGATRON_KEYS = (  # with MindFormers' defaults
    ((*LOADER, "datasets_type"), "GPTDataset"),
    ((*CONFIG, "seed"), 1234),
    ((*CONFIG, "seq_length"), None),
    ((*CONFIG, "split"), None),
    ((*CONFIG, "train_data_path"), None),
    ((*CONFIG, "add_extra_token_to_sequence"), True),
)
_OTHER_KEYS = ((("train_dataset", "shuffle"), None), (("seed",), None))
_FILES = (*LOADER, "data_files")


class Shuffle(NamedTuple):
    """What of the wanted samples the order of one corpus depends on."""

    epochs: int
    last_apart: bool


def shuffle_of(tokens: int, samples: int, sequence_length: int) -> Shuffle:
    """How GPTDataset shuffles a corpus of `tokens` tokens that is asked for `samples` samples (and a last label)."""
    epochs = max(1, -(-(samples * sequence_length + 1) // tokens))
    if epochs == 1:
        return Shuffle(1, False)
    without_last = ((epochs - 1) * tokens - 1) // sequence_length
    return Shuffle(epochs, samples - without_last < int(_WHOLE_EPOCH * ((tokens - 1) // sequence_length)))


def shuffles(recipe: Recipe, samples: int) -> list[Shuffle]:
    """The shuffle of each corpus of a recipe's `data_path` when the recipe is asked for `samples` samples.

    Corpora without weights are read once, whatever is asked for; one alone is asked for the samples exactly.

    Raises:
        DataError: an index is missing or broken.
    """
    view = View(recipe)
    prefixes, weights = read_blend(view.get((*CONFIG, "data_path")))
    if weights is None:
        wanted = [samples] if len(prefixes) == 1 else []
    else:
        wanted = [math.ceil(samples * (weight / sum(weights)) * _MARGIN) for weight in weights]
    length = view.number((*CONFIG, "seq_length"), 1)
    share = _training_share(str(view.get((*CONFIG, "split"), "1")))
    return [shuffle_of(_tokens(prefix, share), count, length) for prefix, count in zip(prefixes, wanted, strict=False)]


def _training_share(split: str) -> float:
    """The first of `split`'s shares, normalised as MindFormers does."""
    shares = [float(text) for text in re.findall(r"[.0-9]+", split)] or [1.0]
    return shares[0] / sum(shares)


@lru_cache
def _tokens(prefix: str, share: float) -> int:
    """Tokens of the training documents, which are the first ones of a corpus."""
    lengths = map_lengths(prefix)
    return int(np.sum(lengths[: round(share * len(lengths))], dtype=np.int64))


def differences(before: Recipe, after: Recipe, step: int) -> list[str]:
    """What makes the data's order of `after` another one than that of `before`, of which `step` steps are trained.

    Each difference says what it was and what it would be; none means that the run can go on.
    """
    found = list(_changed_keys(View(before), View(after)))
    return found or [
        *_cut_steps(View(before), View(after), step),
        *_changed_windows(View(before), View(after), step),
        *_changed_skips(before, after, step),
        *_changed_samples(before, after, step),
    ]


def _changed_keys(before: View, after: View) -> Iterator[str]:
    """Keys that order depends on, whatever the number of samples."""
    if before.get((*LOADER, "type")) != after.get((*LOADER, "type")):
        yield _difference((*LOADER, "type"), before.get((*LOADER, "type")), after.get((*LOADER, "type")))
        return
    for path, default in _MEGATRON_KEYS if after.megatron else _OTHER_KEYS:
        old, new = before.get(path, default), after.get(path, default)
        if old != new:
            yield _difference(path, old, new)
    if not after.megatron:
        yield from _changed_loader(before, after)
    else:
        path = (*CONFIG, "data_path")
        old, new = before.get(path), after.get(path)
        if not _same_corpora(old, new):
            yield _difference(path, old, new)


def _changed_loader(before: View, after: View) -> Iterator[str]:
    """Loaders of other kinds must stay as they are; of files that have moved, and of more samples, the order stays."""
    if _order_of(before) != _order_of(after):
        yield _difference(LOADER, before.get(LOADER), after.get(LOADER))
    old, new = before.instruction_files, after.instruction_files
    moved = zip(old, new, strict=False)
    if len(old) != len(new) or not all(_same_corpus(Path(one), Path(two)) for one, two in moved):
        yield _difference(_FILES, before.get(_FILES), after.get(_FILES))


def _order_of(view: View) -> Any:
    """A loader's section without the number of samples, and without files, which are compared by what they hold."""
    loader = copy.deepcopy(view.get(LOADER))
    if view.instruction_files:
        loader.pop("data_files")
    if view.samples:
        loader["handler"][-1].pop("n")
    return loader


def _difference(path: tuple[str, ...], old: Any, new: Any) -> str:
    if isinstance(old, dict) or isinstance(new, dict):
        return f"{dotted(path)} has changed"
    return f"{dotted(path)} was {old!r}, would be {new!r}"


def _same_corpora(old: Any, new: Any) -> bool:
    """Whether two `data_path` have the same weights and corpora; one that has moved is told by its index."""
    if old == new or not (isinstance(old, list) and isinstance(new, list)):
        return bool(old == new)
    before, after = read_blend(old), read_blend(new)
    if before.weights != after.weights or len(before.prefixes) != len(after.prefixes):
        return False
    pairs = zip(before.prefixes, after.prefixes, strict=True)
    return all(_same_corpus(Path(f"{one}.idx"), Path(f"{two}.idx")) for one, two in pairs)


def _same_corpus(old: Path, new: Path) -> bool:
    """Same file or same content; what is gone was moved, and where to, the user says."""
    if os.path.abspath(old) == os.path.abspath(new) or not old.exists():
        return True
    return new.exists() and filecmp.cmp(old, new, shallow=False)


def _cut_steps(before: View, after: View, step: int) -> Iterator[str]:
    """MindFormers skips whole steps of the new size, and repeats what is over."""
    done = step * before.global_batch
    if done % after.global_batch:
        batches = f"the samples of a step were {before.global_batch}, would be {after.global_batch}"
        yield f"{batches}, of which the {done:,} trained are no whole number of steps"


def _changed_windows(before: View, after: View, step: int) -> Iterator[str]:
    """Samples that attention_balance moves within a window of steps: one that is begun must be finished as it was."""
    *section, _ = path = (*_BALANCE, "window")
    windows = [view.number(path, 1) for view in (before, after)]
    blocks = [window * view.global_batch for window, view in zip(windows, (before, after), strict=True)]
    done = reached(step * before.global_batch, left_out(before.recipe))
    if max(windows) == 1 or not any(done % block for block in blocks):
        return
    sizes = {before.samples, after.samples}
    weights = [((*section, name), before.get((*section, name)), after.get((*section, name))) for name in COST]
    other = [weight for weight in weights if weight[1] not in (None, weight[2])]
    if windows[0] != windows[1]:
        yield f"{dotted(path)} was {windows[0]}, would be {windows[1]}"
    elif other:
        yield from (_difference(*weight) for weight in other)
    elif blocks[0] != blocks[1]:
        batches = f"the samples of a step were {before.global_batch}, would be {after.global_batch}"
        yield f"{batches}, with {dotted(path)} {windows[0]}"
    elif len(sizes) > 1 and done > min(sizes) // blocks[0] * blocks[0]:
        yield f"step {step} is within the last window ({dotted(path)} {windows[0]}), which more samples would change"


def _changed_skips(before: Recipe, after: Recipe, step: int) -> Iterator[str]:
    """Samples that plugins.spike_guard leaves out: of those that are trained, the same ones."""
    done = step * View(before).global_batch
    old, new = left_out(before), left_out(after)
    if not same_until(done, old, new):
        was, would = ([list(pair) for pair in pairs] or "none" for pairs in (old, new))
        yield f"{dotted(SKIPPED)} was {was}, would be {would} (RUN/skipped.json says what is left out)"
    elif (old or new) and View(after).get(_BALANCE) and View(before).global_batch != View(after).global_batch:
        batches = f"the samples of a step were {View(before).global_batch}, would be {View(after).global_batch}"
        yield f"{batches}, in whose order {dotted(SKIPPED)} counts"


def _changed_samples(before: Recipe, after: Recipe, step: int) -> Iterator[str]:
    """The number of samples, where it changes how they are shuffled, or where a pass over them ends."""
    views = View(before), View(after)
    passes = [view.number((*RUNNER, "epochs"), 1) for view in views]
    old, new = (view.samples for view in views)
    whole = [count // view.global_batch * view.global_batch for count, view in zip((old, new), views, strict=True)]
    if max(passes) > 1 and whole[0] != whole[1] and step * views[0].global_batch > min(whole):
        yield f"{dotted((*RUNNER, 'epochs'))} {passes[0]} of {old:,} samples would be {passes[1]} of {new:,}"
    if old == new or not views[1].megatron:
        return
    if views[1].get((*CONFIG, "data_path")) is None:
        yield f"{dotted(SIZES)}.0 was {old:,}, would be {new:,}: which samples that shuffles anew is not known here"
        return
    try:
        orders = shuffles(after, old), shuffles(after, new)
    except DataError as error:
        yield f"{dotted(SIZES)}.0 was {old:,}, would be {new:,}, and whether that shuffles anew cannot be told: {error}"
        return
    for one, two in zip(*orders, strict=True):
        if one != two:
            was = f"{dotted(SIZES)}.0 was {old:,}, {_words(one)}"
            yield f"{was}, would be {new:,}, {_words(two)}: all are shuffled anew"
            return


def _words(shuffle: Shuffle) -> str:
    epochs = f"{shuffle.epochs} epoch{'s' * (shuffle.epochs > 1)} of the data"
    return epochs + " with the last one apart" * shuffle.last_apart


def all_steps(recipe: Recipe) -> int:
    """Steps that the recipe trains in all; 0 where it does not say."""
    view = View(recipe)
    return view.number((*RUNNER, "epochs"), 1) * (view.samples // view.global_batch)


def most_steps(recipe: Recipe, wanted: int) -> int | None:
    """How many of `wanted` steps the recipe can be trained for in the order that it has; None: it cannot be told."""
    view = View(recipe)
    own = view.samples // view.global_batch
    if wanted <= own or not view.megatron or view.number((*RUNNER, "epochs"), 1) > 1:
        return wanted if wanted <= own else None
    try:
        order = shuffles(recipe, view.samples)
        anew = bisect_left(
            range(own, wanted + 1), True, key=lambda steps: shuffles(recipe, steps * view.global_batch) != order
        )
    except DataError:
        return None
    return max(own, own + anew - 1)
