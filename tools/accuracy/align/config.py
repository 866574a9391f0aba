"""This module is stage 1 of `tc3 accuracy align`: it compares two recipes key by key before any training runs, and
classifies the differences as section 3.2.1 of the TeleChat3-MoE report does.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from plugins.errors import DataError
from plugins.semi_auto_cpu.chosen import splits_model
from tools.data.index import read_blend
from tools.files.atomic import real_path
from tools.process.waiting import saying
from tools.recipe.diff import ABSENT, UNCLASSIFIED, Change, compare
from tools.recipe.load import Recipe
from tools.recipe.view import LOADER, View, look

MUST, UNKNOWN, LAYOUT, MAY = "must match", "unknown", "another layout", "may differ"

# the first pattern that a path matches tells the class; the report's list, in its words
CLASSES = (
    (r"(tokenizer|vocab_size|\.eod$|\.pad$|special)", "vocabulary"),
    (r"(dtype|dense_type|precision|loss_scale|fp32_|scale_sense)", "precision"),
    (r"(^seed$|determin|data_seed)", "determinism"),
    (r"^(train_dataset|eval_dataset|train_dataset_task)", "data"),
    (r"^(optimizer|lr_schedule|runner_wrapper|runner_config|callbacks|grouped_lr)", "hyper-parameters"),
    (r"^(parallel|parallel_config|recompute_config|context|use_parallel|micro_batch)", "layout"),
    (r"^model\.", "architecture"),
)
STAYS = "the global batch stays"  # micro-batches: another layout of the same step, which `align` compares
SUMS = ("document lengths", "tokenizers", "shares of the blend", "tokens")
PIECE = 16 << 20  # bytes read at a time; a corpus may have terabytes
_MEAN = ("parallel", "gradients_mean")
_PLACE = re.compile(r"train_dataset(_task\.dataset_config)?\.data_loader\.config\.data_path")


@dataclass(frozen=True)
class Setting:
    """A `Setting` is one key that has different values in two recipes."""

    path: str
    ours: str  # the value of the key as text
    theirs: str
    # the severity of the difference: MUST and UNKNOWN make the comparison fail; LAYOUT may change only rounding, which
    # the training runs have to show; MAY is any other difference
    kind: str
    group: str  # the class to which the report assigns the difference
    meaning: str


def differences(ours: Recipe, theirs: Recipe) -> list[Setting]:
    """Return every key whose values differ in two flat recipes; the keys whose values must be equal come first. Corpora
    are compared by their content; the corpus of a recipe for Ascend is compared by its path if it is not on this
    machine. Raise DataError if the corpus of a recipe for CPU does not exist.
    """
    found = [_setting(change) for change in compare(ours, theirs).changes]
    if _sums_gradients(ours) and _sums_gradients(theirs):
        found = [
            replace(each, kind=LAYOUT, meaning="as its parallel_mode wants it")
            if each.path == ".".join(_MEAN)
            else each
            for each in found
        ]
    if all(View(side).on_cpu or has_corpus(side) for side in (ours, theirs)):
        found = _by_content(found, ours, theirs)
    return sorted(found, key=lambda setting: (MUST, UNKNOWN, LAYOUT, MAY).index(setting.kind))


def _sums_gradients(recipe: Recipe) -> bool:
    """Return whether gradients add up to those of the step's mean loss: a sharded graph takes its mean over all ranks'
    tokens, so that their gradients are summed; in data parallel each rank has a mean of its own.
    """
    return look(recipe, _MEAN, False) is not splits_model(look(recipe, ("parallel", "parallel_mode"), 1))


def group_of(path: str) -> str:
    """Return the class to which the TeleChat3-MoE report assigns a key path, such as "precision" or "layout"."""
    return next((group for pattern, group in CLASSES if re.search(pattern, path)), "other")


def _setting(change: Change) -> Setting:
    group, phrase = change.meaning
    kind = {"numbers": MUST, "layout": LAYOUT}.get(group, MAY)
    if phrase.endswith(STAYS):
        kind = LAYOUT
    if phrase == UNCLASSIFIED:
        kind = UNKNOWN
    ours, theirs = ("absent" if value is ABSENT else repr(value) for value in (change.before, change.after))
    return Setting(change.path, ours, theirs, kind, group_of(change.path), phrase)


def _by_content(settings: list[Setting], ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[Setting]:
    """Compare corpora by their content. Tokens are read only if the rest of two corpora elsewhere is equal."""
    sums = [corpus_checksum(side) for side in (ours, theirs)]
    places = [[real_path(prefix) for prefix in _blend(side)[1]] for side in (ours, theirs)]
    if sums[0] == sums[1] and places[0] != places[1]:
        with saying("reading the tokens of both corpora"):
            sums = [(*told, tokens_checksum(side)) for told, side in zip(sums, (ours, theirs), strict=True)]
    if sums[0] == sums[1]:
        return [
            replace(setting, kind=MAY, meaning="another path to the same corpus")
            if _PLACE.match(setting.path)
            else setting
            for setting in settings
        ]
    return settings + [
        Setting("train_dataset (content)", one, other, MUST, "data", f"{what} differ")
        for what, one, other in zip(SUMS, *sums, strict=False)
        if one != other
    ]


def has_corpus(recipe: Mapping[str, Any]) -> bool:
    """Return whether this machine has all files of the corpus that a recipe names."""
    return all(Path(f"{prefix}{end}").is_file() for prefix in _blend(recipe)[1] for end in (".idx", ".bin"))


def corpus_checksum(recipe: Mapping[str, Any]) -> tuple[str, ...]:
    """Return texts that identify a Megatron corpus apart from its tokens: the CRC-32 of the index and of the tokenizer
    ("" without one), and the shares of the blend; raise DataError if a file does not exist.
    """
    weights, prefixes = _blend(recipe)
    index = tokenizer = 0
    for prefix in prefixes:
        index = _crc(Path(f"{prefix}.idx"), index)
        _find(Path(f"{prefix}.bin"))
        beside = Path(f"{prefix}_tokenizer") / "tokenizer.json"
        tokenizer = _crc(beside, tokenizer) if beside.is_file() else tokenizer
    shares = " ".join(f"{weight / (sum(weights) or 1):.6f}" for weight in weights)
    return f"{index:08x}", f"{tokenizer:08x}" if tokenizer else "", shares


def tokens_checksum(recipe: Mapping[str, Any]) -> str:
    """Return the CRC-32 of all tokens of a Megatron corpus, over all its path prefixes."""
    tokens = 0
    for prefix in _blend(recipe)[1]:
        tokens = _crc(Path(f"{prefix}.bin"), tokens)
    return f"{tokens:08x}"


def _blend(recipe: Mapping[str, Any]) -> tuple[list[float], list[str]]:
    """Return (weights, prefixes) of a `data_path`; without weights, Megatron uses the sizes of the corpora."""
    path = (*LOADER, "config", "data_path")
    if not (found := look(recipe, path, None)):
        return [], []
    try:
        blend = read_blend(found)
    except DataError as error:
        raise DataError(f"{'.'.join(path)}: {error}") from None
    return blend.weights or [], blend.prefixes


def _find(file: Path) -> None:
    if not file.is_file():
        raise DataError(
            f"train_dataset.data_loader.config.data_path: {file} was not found; "
            "make the dataset with `tc3 data prepare --input stdlib --output output/data/stdlib`, or give --data"
        )


def _crc(file: Path, start: int) -> int:
    _find(file)
    try:
        with file.open("rb") as stream:
            while piece := stream.read(PIECE):
                start = zlib.crc32(piece, start)
    except OSError as error:
        raise DataError(
            f"train_dataset.data_loader.config.data_path: {file} cannot be read ({error.strerror}); name another "
            "corpus with --data"
        ) from None
    return start
