"""This module checks the files that a recipe names: whether they exist, and whether the dataset's index fits the model.

A full-size recipe is checked on machines that do not hold its data: missing data and checkpoints are warnings, and
errors only with `here` (the run starts on this machine). A file on which the compilation depends must always exist.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from plugins.attention_balance.samples import padding_under
from plugins.errors import CheckpointError, DataError
from tools.checkpoint.stored import refuse_moved
from tools.data.index import IndexReader, map_lengths, read_blend, training_share
from tools.data.outputs import read_sidecar
from tools.recipe.findings import Findings
from tools.recipe.view import LOADER, PARALLEL, View
from tools.schema.converter import Built

_CONFIG = (*LOADER, "config")
_PATH = (*_CONFIG, "data_path")
_SPEED_UP = ("context", "ascend_config", "parallel_speed_up_json_path")
_CHECKPOINTS = (("checkpoint", "load_path"), ("load_checkpoint",), ("model", "model_config", "checkpoint_name_or_path"))


def check_files(view: View, built: Built, found: Findings, here: bool = False) -> None:
    """Check every path in a recipe; relative paths start at the working folder, as in MindFormers."""
    _speed_up(view, found)
    missing = found.error if here else found.warning
    for path in _CHECKPOINTS:
        value = view.get(path)
        if isinstance(value, str) and value and not Path(value).exists():
            missing(path, f"there is no file or folder {value} on this machine")
    value = view.get(_CHECKPOINTS[0])
    try:  # weights to begin with, whose experts may stand in an order that this recipe does not know
        if isinstance(value, str) and value and Path(value).is_dir():
            refuse_moved(Path(value), view.keeps_placements)
    except CheckpointError as error:
        found.error(_CHECKPOINTS[0], str(error))
    folder = view.get(("pretrained_model_dir",))
    if isinstance(folder, str) and folder and not Path(folder).is_dir():
        missing(("pretrained_model_dir",), f"there is no folder {folder} on this machine")
    for name in view.instruction_files:
        if "://" not in name and not any(letter in name for letter in "*?[") and not Path(name).is_file():
            missing((*LOADER, "data_files"), f"there is no file {name} on this machine")
    if view.megatron:
        split = view.get((*_CONFIG, "split"))
        try:
            training_share(split if isinstance(split, str) else "1")
        except DataError as error:
            found.error((*_CONFIG, "split"), f"{split!r}: {error}")
        corpora = _corpora(view.get(_PATH), found)
        for prefix, share in corpora:
            _dataset(prefix, share, view, built, found, missing)
        if corpora and not any(share for _, share in corpora):
            _one_pass([prefix for prefix, _ in corpora], view, built, found)


def _speed_up(view: View, found: Findings) -> None:
    """Check `parallel_speed_up_json_path`: without its file MindSpore refuses the key."""
    name = view.get(_SPEED_UP)
    if not isinstance(name, str) or not name:
        return
    if not Path(name).is_file():
        wrong = f"there is no file {name}, and MindFormers does not ship one"
        right = "write this file, or set context.dataset_broadcast_opt_level: 3 instead"
        found.error(_SPEED_UP, wrong, right, rule="speed_up_json")
        return
    try:
        level = json.loads(Path(name).read_text(encoding="utf-8")).get("dataset_broadcast_opt_level", 0)
    except (OSError, ValueError, AttributeError) as error:
        found.error(_SPEED_UP, f"{name} is not a JSON object ({error})", rule="speed_up_json")
        return
    if view.megatron and view.parallel and level != 3:
        wrong = f"{name} sets dataset_broadcast_opt_level to {level}, but the Megatron loader needs 3"
        found.error(_SPEED_UP, wrong, rule="broadcast_level")


def _corpora(value: Any, found: Findings) -> list[tuple[str, float]]:
    """Return each prefix of a `data_path` with its share of the samples; 0 for several without weights, of which
    MindFormers reads each once.
    """
    if not isinstance(value, list):
        return []
    try:
        prefixes, weights = read_blend(value)
    except DataError as error:
        found.error(_PATH, str(error), rule="blend")
        return []
    if weights is None and any(map(_is_number, prefixes)):
        found.error(
            _PATH, f"in this list of length {len(value)} a weight has no prefix", "write ['1', PREFIX]", rule="blend"
        )
        return []
    shares = [weight / sum(weights) for weight in weights] if weights else [float(len(prefixes) == 1)] * len(prefixes)
    return list(zip(prefixes, shares, strict=True))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _dataset(prefix: str, share: float, view: View, built: Built, found: Findings, missing: Any) -> None:
    """Check one .bin/.idx pair against vocabulary, sequence length and the recipe's number of samples."""
    absent = [prefix + end for end in (".bin", ".idx") if not Path(prefix + end).is_file()]
    if absent:
        missing(
            _PATH,
            f"{' and '.join(absent)} not found on this machine",
            f"`tc3 data prepare --input TEXT --output {prefix}` writes them",
        )
        return
    try:
        index = IndexReader(prefix)
    except DataError as error:
        found.error(_PATH, str(error), f"`tc3 data verify {prefix}` says more")
        return
    seq, vocabulary = built.number("seq_length", 1), built.number("vocab_size")
    if index.tokens <= seq:
        found.error(_PATH, f"{prefix} holds {index.tokens:,} tokens, but one sample needs {seq + 1:,}", "use more data")
    _sidecar(prefix, vocabulary, view, found)
    _documents(index, seq, view, found)
    sizes = view.get((*LOADER, "sizes"))
    wanted = share * sizes[0] * seq if isinstance(sizes, list) and sizes and type(sizes[0]) is int else 0
    if wanted > 8 * index.tokens > 0:
        part = f"{100 * share:.3g} % of " if share < 1 else ""
        passes = f"{wanted / index.tokens:.0f} times the {index.tokens:,} tokens of {prefix}"
        found.warning((*LOADER, "sizes"), f"{part}{sizes[0]:,} samples repeat {passes}")


def _one_pass(prefixes: list[str], view: View, built: Built, found: Findings) -> None:
    """Check that corpora without weights hold as many samples as the recipe trains; otherwise the run ends early."""
    split, sizes = view.get((*_CONFIG, "split")), view.get((*LOADER, "sizes"))
    try:
        share = training_share(split if isinstance(split, str) else "1")
        lengths = [map_lengths(prefix) for prefix in prefixes]
    except DataError:
        return  # it is said of the corpus, or of the split
    used = (int(np.sum(each[: round(share * len(each))], dtype=np.int64)) for each in lengths)
    more = int(view.flag((*_CONFIG, "add_extra_token_to_sequence"), True))
    held = sum(max(tokens - more, 0) // built.number("seq_length", 1) for tokens in used)
    steps = view.ramp.steps_of
    if isinstance(sizes, list) and sizes and type(sizes[0]) is int and steps(sizes[0]) > steps(held):
        found.error(
            (*LOADER, "sizes"),
            f"{sizes[0]:,} samples are more than the {held:,} of one pass over the corpora of data_path, which "
            "MindFormers reads only once if they have no weights, so that the run would end early",
            f"write at most {held:,} samples, or a weight before each prefix",
        )


def _sidecar(prefix: str, vocabulary: int, view: View, found: Findings) -> None:
    """Check what `tc3 data prepare` wrote beside the pair: vocabulary and end-of-document id."""
    try:
        notes = read_sidecar(prefix)
    except DataError:
        return  # not made by our tool: nothing is known of its tokenizer
    size, eod, written = notes.get("vocab_size"), notes.get("eod_id"), view.get((*_CONFIG, "eod"))
    if isinstance(size, int) and size > vocabulary:
        wrong = f"{prefix} was made with a vocabulary of {size:,}, but the model's vocabulary is {vocabulary:,}"
        found.error(("model", "model_config", "vocab_size"), wrong, f"write at least {size:,}")
    if isinstance(eod, int) and isinstance(written, int) and eod != written:
        wrong = f"is {written}, but {prefix} ends its documents with id {eod}"
        found.error((*_CONFIG, "eod"), wrong, f"write {eod}", rule="eod_count")


def _documents(index: IndexReader, seq: int, view: View, found: Findings) -> None:
    """Check that samples fit the compressed mask, which has room for eod_pad_length documents per sample. With one more
    MindFormers drops the last end in silence, with two more the run stops. A sample may begin and end inside a
    document: it holds parts of two beside the whole ones. Context parallelism needs the last entry as padding.
    """
    if not view.flag((*_CONFIG, "create_compressed_eod_mask")) or not len(index):
        return
    path, algorithm = (*_CONFIG, "eod_pad_length"), view.get((*PARALLEL, "context_parallel_algo"), "colossalai_cp")
    padding = padding_under(view.cp if view.parallel else 1, algorithm)
    room = view.mask_documents - padding
    mean = seq * len(index) / max(index.tokens, 1)
    most = int(np.searchsorted(np.cumsum(np.sort(index.lengths), dtype=np.int64), seq)) + 2
    most_entries = most + padding
    if mean > room:
        wrong = f"the mask has room for {room} documents per sample, but this data has {mean:.0f} on average"
        found.error(
            path, wrong, f"write more than {mean + padding:.0f}; {most_entries} is always enough", rule="eod_count"
        )
    elif most > room:
        wrong = (
            f"the mask has room for {room} documents per sample, but a sample of the shortest documents may hold {most}"
        )
        found.warning(path, wrong, f"write {most_entries}, which is always enough", rule="eod_count")
