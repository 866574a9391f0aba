"""Rung 1: two configurations by full path, in the report's classes, before anything runs (section 3.2.1)."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from plugins.errors import DataError
from tools.check.view import LOADER, look
from tools.recipe.diff import ABSENT, Change, compare
from tools.recipe.load import Recipe
from tools.recipe.meaning import UNCLASSIFIED

MUST, MAY, UNKNOWN = "must match", "may differ", "unknown"

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
STAYS = "the global batch stays"  # micro-batches: another layout of the same step, which the ladder compares
HEAD = 64 << 20  # bytes of a corpus that the checksum reads; a corpus may have terabytes


@dataclass(frozen=True)
class Setting:
    """One difference. ours, theirs: as text. kind: MUST, MAY or UNKNOWN."""

    path: str
    ours: str
    theirs: str
    kind: str
    group: str
    meaning: str


def differences(ours: Recipe, theirs: Recipe) -> list[Setting]:
    """Every difference of two flat recipes, what must match first."""
    found = [_setting(change) for change in compare(ours, theirs).changes]
    found += _data(ours, theirs)
    return sorted(found, key=lambda setting: (MUST, UNKNOWN, MAY).index(setting.kind))


def group_of(path: str) -> str:
    """The report's class of a key path."""
    return next((group for pattern, group in CLASSES if re.search(pattern, path)), "other")


def _setting(change: Change) -> Setting:
    kind = MUST if change.meaning.group == "numbers" and not change.meaning.phrase.endswith(STAYS) else MAY
    if change.meaning.phrase == UNCLASSIFIED:
        kind = UNKNOWN
    ours, theirs = ("absent" if value is ABSENT else repr(value) for value in (change.before, change.after))
    return Setting(change.path, ours, theirs, kind, group_of(change.path), change.meaning.phrase)


def _data(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[Setting]:
    """Corpora by content: two paths may hold one corpus, and one path in two places two."""
    sums = [corpus_checksum(side) for side in (ours, theirs)]
    if sums[0] == sums[1]:
        return []
    return [
        Setting("train_dataset (content)", str(one), str(other), MUST, "data", f"{what} differ")
        for what, one, other in zip(("document lengths", "first tokens", "tokenizers"), *sums, strict=True)
        if one != other
    ]


def same_content(settings: list[Setting], ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[Setting]:
    """`settings` with a data path that leads to the same corpus as something that may differ."""
    if corpus_checksum(ours) != corpus_checksum(theirs):
        return settings
    place = "train_dataset.data_loader.config.data_path"
    return [
        replace(setting, kind=MAY, meaning="another path to the same corpus")
        if setting.path.startswith(place)
        else setting
        for setting in settings
    ]


def corpus_checksum(recipe: Mapping[str, Any]) -> tuple[str, str, str]:
    """CRC-32 of a Megatron corpus's index, of its first 64 MiB of tokens, and of its tokenizer; of all its prefixes.

    With equal sums and equal `seed`, `sizes`, `split` and `seq_length` the samples come in the same order; the ladder
    compares the batches themselves later. The tokenizer's sum is empty where `tc3 data prepare` left none beside.

    Raises:
        DataError: there is no such corpus.
    """
    prefixes = look(recipe, (*LOADER, "config", "data_path"), []) or []
    index = tokens = tokenizer = 0
    for prefix in [word for word in prefixes if not re.fullmatch(r"[\d.]+", str(word))]:
        index = _crc(Path(f"{prefix}.idx"), index)
        tokens = _crc(Path(f"{prefix}.bin"), tokens)
        beside = Path(f"{prefix}_tokenizer") / "tokenizer.json"
        tokenizer = _crc(beside, tokenizer) if beside.is_file() else tokenizer
    return f"{index:08x}", f"{tokens:08x}", f"{tokenizer:08x}" if tokenizer else ""


def _crc(file: Path, start: int) -> int:
    if not file.is_file():
        raise DataError(
            f"train_dataset.data_loader.config.data_path: {file} not found; "
            "make the dataset with `tc3 data prepare --input stdlib --output output/data/stdlib`, or give --data"
        )
    with file.open("rb") as stream:
        return zlib.crc32(stream.read(HEAD), start)
