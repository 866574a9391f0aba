"""This module checks the files that a recipe names: whether they exist, and whether the dataset's index fits the model.

A full-size recipe is checked on machines that do not hold its data: missing data and checkpoints are warnings, and
errors only with `here` (the run starts on this machine). A file on which the compilation depends must always exist.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from plugins.attention_balance.samples import padding_under
from plugins.errors import CheckpointError, DataError
from plugins.held_out_loss.plan import paths_of
from plugins.spike_guard import plan as spike_guard
from plugins.spike_guard.ledger import count
from tools.check.conflicts import NOT_AGAIN
from tools.checkpoint.stored import refuse_moved
from tools.data.blend import Corpora, asked_of, shares_of
from tools.data.index import PARTS, IndexReader, parts_of, read_blend, training_share
from tools.data.outputs import read_sidecar
from tools.recipe.findings import Findings
from tools.recipe.load import KeyPath, look
from tools.recipe.view import LOADER, MODEL, PARALLEL, View
from tools.schema.converter import Built

_CONFIG = (*LOADER, "config")
_PATH, _SPLIT, _ALL = (*_CONFIG, "data_path"), (*_CONFIG, "split"), "1, 0, 0"
_HELD_OUT, _GUARD, _BALANCE = (("plugins", name) for name in ("held_out_loss", "spike_guard", "attention_balance"))
_VOCABULARY = (*MODEL, "vocab_size")
_BY_EOD = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss", "create_compressed_eod_mask")
_ORDER = ("dataset_path", "split", "num_samples", "random_seed", "sequence_length")  # what MindFormers finds it by
_SPEED_UP = ("context", "ascend_config", "parallel_speed_up_json_path")
_CHECKPOINTS = (("checkpoint", "load_path"), ("load_checkpoint",), ("model", "model_config", "checkpoint_name_or_path"))


def check_files(view: View, built: Built, found: Findings, here: bool = False) -> None:
    """Check the files that a recipe reads (weights, checkpoints, conversations, corpora): whether they exist, and
    whether the corpora fit the model. Relative paths start at the working folder, as in MindFormers.
    """
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
        _megatron(view, built, found, missing)


def _megatron(view: View, built: Built, found: Findings, missing: Any) -> None:
    """Check the corpora of Megatron's loader, and those of `plugins.held_out_loss` that are on this machine."""
    _sources(view, found)
    split = view.get(_SPLIT)
    split = split if isinstance(split, str) else _ALL
    try:
        training_share(split)
    except DataError as error:
        found.error(_SPLIT, f"{split!r}: {error}")
        split = _ALL
    corpora, tokens = _corpora(view.get(_PATH), found), {}
    documents: list[tuple[float, int]] = []
    for prefix, share in corpora:
        asked = _asked(view.samples, share, len(view.get(_PATH)) > len(corpora))
        if (index := _opened(prefix, _PATH, found, missing)) is not None:
            used = index.lengths[: round(training_share(split) * len(index))]
            if not len(index):
                _size(used, prefix, _PATH, share, view, built, found)
                continue
            if _parts(index, prefix, share, split, view, built, found) and len(used):
                tokens[prefix] = int(used.sum(dtype=np.int64))
                _size(used, prefix, _PATH, share, view, built, found)
                documents.append(_documents(used, asked, built))
            _tokens(index, prefix, view, built, found)
            _kept_order(index, prefix, _PATH, view, found, (view.get(_SPLIT), asked))
    if corpora:
        _numbers(view, len(view.get(_PATH)) > len(corpora), found)
    if corpora and all(prefix in tokens for prefix, _ in corpora):
        _samples([prefix for prefix, _ in corpora], _as_read(corpora, tokens, view, built), view, found)
    path = (*_HELD_OUT, "data_path")
    for prefix in paths_of(look(view.get(_HELD_OUT), ("data_path",))):
        there = all(Path(prefix + end).is_file() for end in (".bin", ".idx"))
        index = _opened(prefix, path, found, missing) if there else None
        if index is not None and index.tokens < 2:
            _size(index.lengths, prefix, path, 1.0, view, built, found)
        elif index is not None:
            samples = view.number((*_HELD_OUT, "samples"), view.global_batch)
            asked = _asked(samples, 1.0, True)
            documents.append(_documents(index.lengths, asked, built))
            _tokens(index, prefix, view, built, found)
            _kept_order(index, prefix, path, view, found, (_ALL, asked))
    _room(documents, view, found)


def _parts(
    index: IndexReader, prefix: str, share: float, split: str, view: View, built: Built, found: Findings
) -> bool:
    """Return whether MindFormers can make a data set of each part of a corpus, also of those that are not trained; the
    training part may be too small (`_size`).
    """
    more = int(view.flag((*_CONFIG, "add_extra_token_to_sequence"), True))
    partial = not view.flag((*_CONFIG, "drop_last_partial_validation_sequence"), True)
    for part, first, end in parts_of(split, len(index)):
        tokens = int(index.lengths[first:end].sum(dtype=np.int64))
        once = not share and not (partial and part == PARTS[1])
        least = built.number("seq_length", 1) + more if once else 2
        if first == end:
            wrong = (
                f"gets none of the {len(index):,} documents of {prefix}, and MindFormers counts the tokens of such a"
            )
            found.error(_SPLIT, f"the {part} part {wrong} part without end", f"write {_ALL!r}")
            return False
        if part != PARTS[0] and tokens < least:
            wrong = f"has only {tokens:,} tokens of {prefix}, but MindFormers makes no data set of fewer than {least:,}"
            found.error(_SPLIT, f"the {part} part {wrong}", f"write {_ALL!r}")
            return False
    return True


def _sources(view: View, found: Findings) -> None:
    """Check the keys that name corpora: MindFormers divides those of `data_path` by `split`, or reads other corpora for
    each part, which tc3 does not support because `data_path` names the same corpora.
    """
    parts = [(*_CONFIG, f"{part}_data_path") for part in ("train", "valid", "test")]
    written = [path for path in parts if view.get(path) is not None]
    named = view.get(_PATH) is not None
    for path in written:
        wrong = "MindFormers refuses this key beside data_path or split, and tc3 reads only the corpora of data_path"
        renamed = path == parts[0] and not named
        found.error(path, wrong, f"name it data_path, with split: {_ALL!r}" if renamed else "leave this key out")
    if not named and parts[0] not in written:
        found.error(_PATH, "the recipe names no corpus to train on", "write ['1', PREFIX]")
    elif named and view.get(_SPLIT) is None:
        found.error(_SPLIT, "the key is missing, and MindFormers needs it beside data_path", f"write {_ALL!r}")


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
    shares = shares_of(weights) if weights else [float(len(prefixes) == 1)] * len(prefixes)
    return list(zip(prefixes, shares, strict=True))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _opened(prefix: str, path: KeyPath, found: Findings, missing: Any) -> IndexReader | None:
    """Return the index of a corpus that the key `path` names; None if there is a finding that it cannot be read."""
    absent = [prefix + end for end in (".bin", ".idx") if not Path(prefix + end).is_file()]
    if absent:
        missing(
            path,
            f"{' and '.join(absent)} cannot be found on this machine",
            f"`tc3 data prepare --input TEXT --output {prefix}` writes them",
        )
        return None
    try:
        return IndexReader(prefix)
    except DataError as error:
        found.error(path, str(error), f"`tc3 data verify {prefix}` says more")
        return None


def _size(
    lengths: np.ndarray, prefix: str, path: KeyPath, share: float, view: View, built: Built, found: Findings
) -> None:
    """Check the documents of a corpus that are trained on against sequence length and the recipe's number of
    samples. A corpus with a share of the samples is repeated until it has the number of samples in its share.
    """
    seq, tokens = built.number("seq_length", 1), int(lengths.sum(dtype=np.int64))
    if tokens <= (1 if share else seq):
        needed = "MindFormers needs at least 2" if share else f"one sample needs {seq + 1:,}"
        found.error(path, f"{prefix} holds {tokens:,} tokens, but {needed}", "use more data")
    elif (wanted := share * view.samples * seq) > 8 * tokens:
        part = f"{100 * share:.3g} % of " if share < 1 else ""
        passes = f"{wanted / tokens:.0f} times the {tokens:,} tokens of {prefix}"
        found.warning((*LOADER, "sizes"), f"{part}{view.samples:,} samples repeat {passes}")


def _as_read(corpora: list[tuple[str, float]], tokens: dict[str, int], view: View, built: Built) -> Corpora:
    """Return the corpora of `data_path`, which has weights if it is longer than the list of its prefixes."""
    weighted = len(view.get(_PATH)) > len(corpora)
    return Corpora(
        tuple(tokens[prefix] for prefix, _ in corpora),
        tuple(share for _, share in corpora) if weighted else None,
        built.number("seq_length", 1),
        int(view.flag((*_CONFIG, "add_extra_token_to_sequence"), True)),
    )


def _numbers(view: View, weighted: bool, found: Findings) -> None:
    """Check that `sizes` has the numbers that MindFormers and tc3 need: if the corpora have no weights, MindFormers
    makes one pass over each part without a number.
    """
    sizes, path = view.get((*LOADER, "sizes")), (*LOADER, "sizes")
    if isinstance(sizes, list) and sizes and sizes[0] is None:
        found.error(path, "the number of samples to be trained on is missing", "write it in place of the first null")
    elif weighted and isinstance(sizes, list) and None in sizes:
        wrong = "MindFormers needs a number of samples for each part of corpora with weights, but one is null"
        found.error(path, wrong, f"write {[size or 0 for size in sizes]}")


def _samples(prefixes: list[str], read: Corpora, view: View, found: Findings) -> None:
    """Check that the corpora have the samples that MindFormers takes of them, and those with which
    `plugins.spike_guard` may have to replace others.
    """
    samples, batch, steps, path = view.samples, view.global_batch, view.ramp.steps_of, (*LOADER, "sizes")
    guard = spike_guard.Settings.look(view.get(_GUARD))[0]
    # a run that goes on may have left out what it had to spare
    needed = (count(guard.skipped) or guard.rollbacks * guard.skip * batch) if guard else 0

    def nearest(counts: Iterable[int], otherwise: str) -> str:
        fit = (each for each in counts if each >= batch and not read.too_small(each))
        other = next((each for each in fit if not needed or read.spare(each, needed) == needed), 0)
        return f"write {other:,} samples, or {otherwise}" if other else otherwise

    if not samples:
        return
    if small := read.too_small(samples):
        corpus, held, taken = small
        exact = read.exact(samples)
        (found.error if exact else found.warning)(
            path,
            f"for {samples:,} samples MindFormers takes {'' if exact else 'up to '}{taken:,} of {prefixes[corpus]}, of "
            f"which it reads whole passes with only {held:,}; then the run ends before its first step",
            nearest(range(samples + batch, samples + 20 * batch, batch), "write another number of samples"),
        )
    elif steps(samples) > steps(held := read.size(samples)):
        found.error(
            path,
            f"{samples:,} samples are more than the {held:,} of one pass over the corpora of data_path, which "
            "MindFormers reads only once if they have no weights, so that the run would end early",
            nearest([held - needed], "write a weight before each prefix"),
        )
    elif guard and (spare := read.spare(samples, needed)) < needed:
        found.error(
            path,
            f"the data has only {max(spare, 0):,} samples beyond the {samples:,} to be trained, but {'.'.join(_GUARD)} "
            f"may leave out {needed:,}; then the run ends before its first step",
            nearest(range(samples - batch, samples - 20 * batch, -batch), "add data"),
        )


def _tokens(index: IndexReader, prefix: str, view: View, built: Built, found: Findings) -> None:
    """Check the tokens of a corpus against the vocabulary and the end-of-document id: by what `tc3 data prepare` wrote
    beside the pair or, for a corpus of another program, by a part of the tokens.
    """
    vocabulary, eod, pad = built.number("vocab_size"), view.get((*_CONFIG, "eod")), view.get((*_CONFIG, "pad"))
    if type(pad) is int and pad >= 0 and pad != eod and view.masks_once and (index.some() == pad).any():
        found.error((*_CONFIG, "pad"), f"{prefix} holds the token id {pad}; {NOT_AGAIN}", "write -1", rule="padding")
    try:
        notes = read_sidecar(prefix)
    except DataError:
        _looked_at(index, prefix, vocabulary, view, found)
        return
    size, end = notes.get("vocab_size"), notes.get("eod_id")
    if isinstance(size, int) and size > vocabulary:
        wrong = f"{prefix} was made with a vocabulary of {size:,}, but the model's vocabulary is {vocabulary:,}"
        found.error(_VOCABULARY, wrong, f"write at least {size:,}")
    if isinstance(end, int) and isinstance(eod, int) and eod != end:
        wrong = f"the value is {eod}, but {prefix} ends its documents with id {end}"
        found.error((*_CONFIG, "eod"), wrong, f"write {end}", rule="eod_count")


def _looked_at(index: IndexReader, prefix: str, vocabulary: int, view: View, found: Findings) -> None:
    """Check some tokens of a corpus, and the last tokens of some documents, because nothing is known of its
    tokenizer.
    """
    pad, eod = (view.get((*_CONFIG, key), -1) for key in ("pad", "eod"))
    some, last = index.some(), index.last()
    if outside := some[((some < 0) | (some >= vocabulary)) & (some != pad)].tolist():
        wrong = f"{prefix} holds the token id {max(outside)}, but the model's vocabulary has {vocabulary:,} ids"
        larger = f"write at least {max(outside) + 1:,}, or " * (max(outside) >= vocabulary)
        found.error(_VOCABULARY, wrong, f"{larger}prepare the corpus again")
    if any(view.flag((*_CONFIG, key)) for key in _BY_EOD) and (other := last[last != eod].tolist()):
        wrong = (
            f"the value is {eod}, but {len(other)} of {len(last)} documents of {prefix} end with another id, such as"
        )
        wrong = f"{wrong} {other[0]}"
        tell = found.error if view.get(_BALANCE) not in (None, False) else found.warning  # the plugin ends the run
        tell((*_CONFIG, "eod"), wrong, "write the id with which the documents end", rule="eod_count")


def _asked(samples: int, share: float, weighted: bool) -> int | None:
    """Return the number of samples for which MindFormers asks a corpus with a share of the recipe's; None for all of
    one pass.
    """
    if weighted:
        return asked_of(samples, share)
    return samples or None if share else None


def _kept_order(
    index: IndexReader, prefix: str, path: KeyPath, view: View, found: Findings, asked: tuple[Any, int | None]
) -> None:
    """Check that the order of samples that MindFormers keeps beside a corpus is not that of another corpus, which was
    at the same path before: MindFormers would read the new one by it. (`tc3 data prepare` removes what is kept.)

    Args:
        asked: the split and the number of samples; an order of others is not read.
    """
    cache, seq = view.get((*_CONFIG, "path_to_cache")), view.get((*_CONFIG, "seq_length"))
    if cache is not None and not (isinstance(cache, str) and cache):
        return  # MindFormers keeps nothing, or it is said of the key
    folder = Path(prefix, "cache", "GPTDataset_indices") if cache is None else Path(cache)
    wanted = [prefix, *asked, view.get((*_CONFIG, "seed"), 1234), seq]
    for description in sorted(folder.glob("*-GPTDataset-train-description.txt")):  # no sample of other parts is read
        try:
            notes = json.loads(description.read_text("utf-8"))
            kept = str(description).removesuffix("description.txt")
            documents, samples = (np.load(f"{kept}{name}_index.npy", mmap_mode="r") for name in ("document", "sample"))
            read = wanted == [notes[name] for name in _ORDER]
            other = read and _of_another(index, documents, samples, seq)
        except (OSError, ValueError, KeyError, TypeError, EOFError):
            continue  # MindFormers makes it anew, or uses it for nothing
        if other:
            wrong = f"{folder} keeps the order of samples of another corpus, which was at {prefix} before"
            found.error(path, wrong, f"remove {kept}*, or MindFormers cuts the new corpus as the old one")
            return


def _of_another(index: IndexReader, documents: np.ndarray, samples: np.ndarray, seq: int) -> bool:
    """Return whether samples of `seq` tokens, which begin at `samples` (int64 [n, 2]: place in `documents`, token), do
    not follow each other in the documents of the index; at most a million documents are added up.
    """
    first = np.asarray(documents[: 1 << 20])
    if first.max(initial=0) >= len(index):
        return True
    lengths = index.lengths[first]
    places, tokens = np.asarray(samples[: int(np.searchsorted(samples[:, 0], len(first)))], np.int64).T
    begins = (np.cumsum(lengths, dtype=np.int64) - lengths)[places] + tokens
    return not np.array_equal(begins, seq * np.arange(len(places)))


def _documents(lengths: np.ndarray, asked: int | None, built: Built) -> tuple[float, int]:
    """Return how many documents a sample holds on average, and a number that no sample exceeds.

    Args:
        lengths: the tokens of each document.
        asked: the number of samples for which the corpus is asked.
    """
    seq, tokens = built.number("seq_length", 1), int(lengths.sum(dtype=np.int64))
    epochs = max(1, -(-((asked or 0) * seq + 1) // tokens))
    return seq * len(lengths) / tokens, _most_documents(lengths, seq, epochs)


def _room(documents: list[tuple[float, int]], view: View, found: Findings) -> None:
    """Check that the samples of all corpora fit the compressed mask, which has room for eod_pad_length documents per
    sample. With one more MindFormers drops the last end in silence, with two more the run stops. Context parallelism
    needs the last entry as padding.
    """
    if not view.flag((*_CONFIG, "create_compressed_eod_mask")) or not documents:
        return
    path, algorithm = (*_CONFIG, "eod_pad_length"), view.get((*PARALLEL, "context_parallel_algo"), "colossalai_cp")
    padding = padding_under(view.cp if view.parallel else 1, algorithm)
    room, mean, most = view.mask_documents - padding, *map(max, zip(*documents, strict=True))
    wrong, enough = f"the mask has room for {room} documents per sample, but", most + padding
    if mean > room:
        right = f"write more than {mean + padding:.0f}; {enough} is always enough"
        found.error(path, f"{wrong} this data has {mean:.0f} on average", right, rule="eod_count")
    elif most > room:
        right = f"write {enough}, which is always enough"
        found.warning(path, f"{wrong} a sample of the shortest documents may hold {most}", right, rule="eod_count")


def _most_documents(lengths: np.ndarray, seq: int, epochs: int) -> int:
    """Return a number of documents that no sample of `seq` tokens exceeds. A sample may begin and end inside a
    document, so that it holds parts of two beside the whole ones; as all epochs are shuffled together, it may hold a
    document `epochs` times.
    """
    rising = np.sort(lengths)
    sums = np.cumsum(rising, dtype=np.int64)
    sums *= epochs
    whole = int(np.searchsorted(sums, seq))  # so many lengths fit with all their copies
    rest = seq - (int(sums[whole - 1]) if whole else 0)
    copies = min((rest - 1) // int(rising[whole]), epochs) if whole < len(rising) else 0
    return epochs * whole + copies + 2
