"""This module makes sure that a resumed run trains on the same data as the run before the interruption: it leaves out
the same samples, its corpora have the same content, and it reads the samples in the same order.

The first part handles samples that are left out (`apply_ledger`, `guilty`). The worker that ends a run after a spike
lists them (`plugins/spike_guard/ledger.py`). The agent that plans the next attempt puts them into the effective recipe,
and goes on from the newest checkpoint that was trained on none of them; checkpoints that were trained on some of them
are set aside once the plan is valid. No node knows what another node has planned, so the agent reads the list before
each plan.

The second part checks the content of a corpus (`keep_digests`, `replaced`). A resume notices if a corpus was prepared
again at the same path. A corpus may have terabytes, so `RUN/data.json` covers for each corpus the whole .idx (the
length and place of every document), the size of the .bin, and 256 evenly spread blocks of the .bin, including the first
and the last (a file of up to 16 MiB is covered completely). Another text practically always has other lengths; tokens
that were changed in place, between these blocks, are not noticed.

The third part checks the order of the data (`differences`, `most_steps`). A resumed run skips trained samples by their
number, so another order, by another recipe or for more steps, would repeat samples and leave others out. MindFormers'
GPTDataset shuffles together all epochs of the corpus that the requested samples need: a request for more samples keeps
the order as long as it needs the same number of epochs (and, with several epochs, as long as it does not change whether
the last epoch is shuffled separately).
"""

from __future__ import annotations

import copy
import filecmp
import json
import os
from bisect import bisect_left
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np

from launch.run.preflight import data_prefixes
from plugins.attention_balance.plan import COST, layout_of
from plugins.errors import DataError
from plugins.sealed_checkpoint.plan import checksum, global_batch_of, made
from plugins.spike_guard import plan as spike_guard
from plugins.spike_guard.ledger import Ranges, normal, reached, read_ledger, same_until, samples_of
from tools.checkpoint.scan import iteration, iterations, set_aside
from tools.data.blend import asked_of, shares_of
from tools.data.index import map_lengths, read_blend, training_share
from tools.files.atomic import sampled_digest, write_atomically
from tools.recipe.load import Recipe, load_recipe
from tools.recipe.override import dotted
from tools.recipe.view import LOADER, RUNNER, View

DIGESTS = "data.json"  # of a run's data, in its folder
_OF_TOKENIZERS = {"tokenizer.json", "tokenizer.model", "tokenizer_config.json"}  # from which a tokenizer is read
SECTION = ("plugins", "spike_guard")
SKIPPED = (*SECTION, "skipped")
CONFIG = (*LOADER, "config")
DATA_PATH = (*LOADER, "config", "data_path")
SIZES = (*LOADER, "sizes")
_DATA_FILES = (*LOADER, "data_files")
_BALANCE, RAMP = ("plugins", "attention_balance"), ("plugins", "batch_ramp")
_WINDOW = (*_BALANCE, "window")
_SLOW_INDEX = 2 << 30  # bytes of index that take seconds to read
_WHOLE_EPOCH = 0.80  # GPTDataset shuffles the last epoch apart when less of it is used
_MEGATRON_KEYS = (  # with MindFormers' defaults
    ((*LOADER, "datasets_type"), "GPTDataset"),
    ((*CONFIG, "seed"), 1234),
    ((*CONFIG, "seq_length"), None),
    ((*CONFIG, "split"), None),
    ((*CONFIG, "add_extra_token_to_sequence"), True),
)
_OTHER_KEYS = ((("train_dataset", "shuffle"), None), (("seed",), None))


def guard_is_on(recipe: Recipe) -> bool:
    """Return whether the recipe's run has a spike guard."""
    return View(recipe).get(SECTION) not in (None, False)


def left_out(recipe: Recipe) -> Ranges:
    """Return the samples that a recipe's run leaves out."""
    return normal(View(recipe).get(SKIPPED) or ()) if guard_is_on(recipe) else ()


def apply_ledger(recipe: Recipe, run_dir: Path, before: Ranges = ()) -> None:
    """Change `recipe` in place so that it also leaves out the samples that `RUN/skipped.json` in `run_dir` lists.

    The agent that plans an attempt calls this first, because another node may have planned the attempts before.

    Args:
        before: the samples that an earlier attempt has left out. A late rank may have written an older list over a
            newer one.

    Raises:
        DataError: the ledger cannot be read.
        RecipeError: the guard's settings are wrong.
    """
    found = normal([*samples_of(read_ledger(run_dir)), *before]) if guard_is_on(recipe) else ()
    if found:
        own = spike_guard.read(recipe["plugins"]["spike_guard"]).skipped
        recipe["plugins"]["spike_guard"] = {
            **recipe["plugins"]["spike_guard"],
            "skipped": [list(pair) for pair in normal([*own, *found])],
        }


def guilty(recipe: Recipe, run_dir: Path) -> Callable[[Path, int], str | None]:
    """Return a function that maps a checkpoint (folder, step) to the reason why the run must not continue from the
    checkpoint: before this checkpoint, the run trained on samples that are left out now. Sample numbers are compared,
    because step numbers mean other samples if the global batch has changed.

    The seals of a checkpoint record which samples its run left out. If the seals do not record this, the samples that
    RUN/recipe.yaml leaves out count, so call this function before that file is written again.
    """
    entries = read_ledger(run_dir) if guard_is_on(recipe) else []
    stored = run_dir / "recipe.yaml"
    last = left_out(load_recipe(stored)) if entries and stored.exists() else ()
    ramp = View(recipe).ramp

    def why(folder: Path, step: int) -> str | None:
        own, batch = made(folder).get("skipped") if entries else None, global_batch_of(folder)
        known = last if own is None else normal(own)
        done = ramp.samples_until(step) if ramp.stages or not batch else step * batch
        late = [entry for entry in entries if not same_until(done, known, normal([*known, *entry.samples]))]
        return f"holds samples of step {min(late, key=lambda each: each.samples).first}, which spiked" if late else None

    return why


def put_guilty_aside(recipe: Recipe, run_dir: Path, root: Path) -> None:
    """Rename the checkpoints under `root` that were trained on samples which the run now leaves out (`guilty`)."""
    why = guilty(recipe, run_dir)
    for folder in iterations(root):
        step = iteration(folder)

        def still_guilty(moved: Path, step: int = step) -> bool:
            return why(moved, step) is not None

        if (words := why(folder, step)) and (aside := set_aside(folder, still_guilty)):
            click.echo(f"{folder} {words}: renamed {aside.name}", err=True)


def digests(recipe: Recipe) -> list[dict[str, Any]]:
    """Return for each corpus of `data_path` its prefix, and the sizes and digests (sha256) of its .idx and .bin files.

    For HFDataLoader, return for each of its files, and for the tokenizers that make ids of them: file, bytes, and
    sha256 of the covered part. The result is empty for other kinds of loaders.

    Raises:
        DataError: a file is missing or cannot be read.
    """
    view = View(recipe)
    path = view.get(DATA_PATH)
    if not view.megatron:
        return [_digest_of_file(Path(name)) for name in (*view.instruction_files, *_tokenizers(recipe))]
    return [_digest(prefix) for prefix in data_prefixes(path)] if path is not None else []


def tokenizer_folders(recipe: Recipe) -> list[str]:
    """Return the tokenizer folders that the handlers of HFDataLoader name; these tokenizers encode its files."""
    view = View(recipe)
    handlers = view.get((*LOADER, "handler"))
    sections = [item.get("tokenizer") for item in handlers if isinstance(item, dict)] if view.instruction_files else []
    folders = [section.get("pretrained_model_dir") for section in sections if isinstance(section, dict)]
    return [folder for folder in folders if isinstance(folder, str)]


def _tokenizers(recipe: Recipe) -> list[str]:
    """Return the paths of the files in the tokenizer folders that determine token ids; hidden files and files of the
    model are left out.
    """
    files = [file for folder in tokenizer_folders(recipe) for file in sorted(Path(folder).glob("tokenizer*"))]
    return [str(file) for file in files if file.is_file()]


def _digest_of_file(path: Path) -> dict[str, Any]:
    try:
        return {"prefix": str(path), "bytes": path.stat().st_size, "sample_sha256": sampled_digest(path)}
    except OSError as error:
        raise DataError(
            f"{dotted((*LOADER, 'data_files'))}: {path}: this file cannot be read ({error.strerror})"
        ) from None


def _digest(prefix: str) -> dict[str, Any]:
    try:
        index, tokens = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
        sizes = {"idx_bytes": index.stat().st_size, "bin_bytes": tokens.stat().st_size}
        if sizes["idx_bytes"] > _SLOW_INDEX:
            click.echo(f"{index}: reading its {sizes['idx_bytes'] / 1e9:.0f} GB, to know this data again", err=True)
        content = {"idx_sha256": checksum(index), "bin_sample_sha256": sampled_digest(tokens)}
        return {"prefix": prefix, **sizes, **content}
    except OSError as error:
        raise DataError(f"{dotted(DATA_PATH)}: {error.filename}: this file cannot be read ({error.strerror})") from None


def keep_digests(recipe: Recipe, run_dir: Path) -> None:
    """Write digests of a recipe's present data into the run's folder; print a message if the data cannot be read."""
    try:
        write_atomically(run_dir / DIGESTS, json.dumps(digests(recipe), indent=1) + "\n")
    except DataError as error:
        click.echo(f"{error}; a resume will not know whether the data is still the same", err=True)


def replaced(run_dir: Path, recipe: Recipe) -> list[str]:
    """Return a text that says which corpora of `recipe` differ from those of the run in `run_dir`.

    A run without recorded digests (of an earlier version, or started without `tc3`) is reported, and accepted.
    """
    stored = run_dir / DIGESTS
    try:
        before = json.loads(stored.read_text(encoding="utf-8"))
        known = {Path(each["prefix"]).name for each in before} | _OF_TOKENIZERS
        names = ((each, Path(each["prefix"]).name) for each in digests(recipe))
        now = [each for each, name in names if name in known or not name.startswith("tokenizer")]
        if before and len(before) != len(now):  # a file was added to the tokenizer, or removed
            both = (", ".join(Path(each["prefix"]).name for each in every) for every in (before, now))
            return ["the files of the data and its tokenizer were {}, are now {}".format(*both)]
        pairs = zip(before, now, strict=True)
        return [_digest_in_words(old, new) for old, new in pairs if {**old, "prefix": ""} != {**new, "prefix": ""}]
    except (OSError, DataError, ValueError, TypeError, KeyError) as error:
        reason = "does not exist" if isinstance(error, FileNotFoundError) else f"does not tell ({error})"
        click.echo(f"{stored} {reason}: whether the data still holds what it did is unknown", err=True)
        return []


def _digest_in_words(old: dict[str, Any], new: dict[str, Any]) -> str:
    if "bytes" in new:
        sizes = f" ({old['bytes']:,} bytes then, {new['bytes']:,} now)" if old.get("bytes") != new["bytes"] else ""
        return f"{new['prefix']} is not what it was{sizes}: the data was prepared anew or replaced"
    same_index = old["idx_sha256"] == new["idx_sha256"]
    file = f"{new['prefix']}.{'bin' if same_index else 'idx'}"
    size = "bin_bytes" if same_index else "idx_bytes"
    sizes = f" ({old[size]:,} bytes then, {new[size]:,} now)" if old[size] != new[size] else ""
    return f"{file} is not what it was{sizes}: the corpus was prepared anew or replaced"


class Shuffle(NamedTuple):
    """A `Shuffle` says how many epochs of a corpus GPTDataset reads, and whether it shuffles the last epoch apart."""

    epochs: int
    last_apart: bool


def shuffle_of(tokens: int, samples: int, sequence_length: int) -> Shuffle:
    """Return how GPTDataset shuffles a corpus of `tokens` tokens if `samples` samples are requested."""
    if (epochs := max(1, -(-(samples * sequence_length + 1) // tokens))) == 1:
        return Shuffle(1, False)
    without_last = ((epochs - 1) * tokens - 1) // sequence_length
    return Shuffle(epochs, samples - without_last < int(_WHOLE_EPOCH * ((tokens - 1) // sequence_length)))


def shuffles(recipe: Recipe, samples: int) -> list[Shuffle]:
    """Return how each corpus of a recipe's `data_path` is shuffled if the recipe trains on `samples` samples.

    Corpora without weights are read once, whatever number of samples is requested; from a single corpus exactly the
    requested samples are read.

    Raises:
        DataError: an index is missing or broken.
    """
    view = View(recipe)
    prefixes, weights = read_blend(view.get((*CONFIG, "data_path")))
    if weights is None:
        wanted = [samples] if len(prefixes) == 1 else []
    else:
        wanted = [asked_of(samples, share) for share in shares_of(weights)]
    length = view.number((*CONFIG, "seq_length"), 1)
    share = training_share(str(view.get((*CONFIG, "split"), "1")))
    return [
        shuffle_of(_training_tokens(prefix, share), count, length)
        for prefix, count in zip(prefixes, wanted, strict=False)
    ]


@lru_cache
def _training_tokens(prefix: str, share: float) -> int:
    """Return the number of tokens of the training documents, which are the first ones of a corpus."""
    lengths = map_lengths(prefix)
    return int(np.sum(lengths[: round(share * len(lengths))], dtype=np.int64))


def differences(before: Recipe, after: Recipe, step: int, batch: int = 0) -> list[str]:
    """Return sentences that say why the recipe `after` would read the data in another order than the recipe `before`,
    with which `step` steps have been trained; the list is empty if the run can go on.

    Args:
        batch: the number of samples of each of these steps; by default the global batch of `before`, which may have
            changed since.
    """
    found = list(_changed_keys(View(before), View(after)))
    batch = batch or View(before).global_batch
    done = View(before).ramp.samples_until(step) if View(before).ramp.stages else step * batch
    return found or [
        *_changed_ramp(View(before), View(after), step),
        *_cut_steps(View(before), View(after), step, batch),
        *_changed_windows(View(before), View(after), step, done),
        *_changed_skips(before, after, done),
        *_changed_samples(before, after, done),
    ]


def _changed_keys(before: View, after: View) -> Iterator[str]:
    """Yield in words the changed keys on which the order depends, whatever the number of samples."""
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
    """Yield in words what changed in a loader of another kind; its files may move, and it may get more samples."""
    if _order_of(before) != _order_of(after):
        yield _difference(LOADER, before.get(LOADER), after.get(LOADER))
    old, new = before.instruction_files, after.instruction_files
    moved = zip(old, new, strict=False)
    if len(old) != len(new) or not all(_same_corpus(Path(one), Path(two)) for one, two in moved):
        yield _difference(_DATA_FILES, before.get(_DATA_FILES), after.get(_DATA_FILES))


def _order_of(view: View) -> Any:
    """Return a loader's section without the number of samples, and without files, whose contents are compared."""
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
    """Return whether two `data_path` have the same weights and corpora; the index of a corpus tells it if it moved."""
    if old == new or not (isinstance(old, list) and isinstance(new, list)):
        return bool(old == new)
    before, after = read_blend(old), read_blend(new)
    if before.weights != after.weights or len(before.prefixes) != len(after.prefixes):
        return False
    pairs = zip(before.prefixes, after.prefixes, strict=True)
    return all(_same_corpus(Path(f"{one}.idx"), Path(f"{two}.idx")) for one, two in pairs)


def _same_corpus(old: Path, new: Path) -> bool:
    """Return whether two paths have the same content; a file that is gone is assumed to have moved to the new path."""
    if os.path.abspath(old) == os.path.abspath(new) or not old.exists():
        return True
    return new.exists() and filecmp.cmp(old, new, shallow=False)


def _changed_ramp(before: View, after: View, step: int) -> Iterator[str]:
    """Yield in words why a growing batch would begin the next step with another sample."""
    if not (before.ramp.stages or after.ramp.stages):
        return
    done, would = (view.ramp.samples_until(step) for view in (before, after))
    if before.global_batch != after.global_batch:
        batches = f"the samples of a step of the recipe's own batch were {before.global_batch}"
        yield f"{batches}, would be {after.global_batch}: with {dotted(RAMP)} steps keep their numbers"
    elif done != would:
        yield f"{dotted(RAMP)}: until step {step:,} the samples were {done:,}, would be {would:,}"


def _cut_steps(before: View, after: View, step: int, batch: int) -> Iterator[str]:
    """Yield a message if the trained samples are not a whole number of steps of the new size, which MindFormers rounds
    down, also where its product is a little below the whole number (`training_process` of its base_trainer.py).
    """
    if before.ramp.stages or after.ramp.stages:
        return  # then the size does not change
    done = step * batch
    steps, rest = divmod(done, after.global_batch)
    batches = f"the samples of a step were {batch}, would be {after.global_batch}"
    if rest:
        yield f"{batches}, of which the {done:,} trained are not a whole number of steps"
    elif (skipped := int(step * (batch / after.global_batch))) != steps:
        yield f"{batches}: MindFormers would skip {skipped:,} of the {steps:,} steps that are trained (it rounds down)"


def _changed_windows(before: View, after: View, step: int, samples: int) -> Iterator[str]:
    """Yield a message if plugins.attention_balance would not finish a window, or a step, as it was begun."""
    done, blocks = reached(samples, left_out(before.recipe)), [_block(view) for view in (before, after)]
    if not any(done % block for block in blocks):
        return
    sizes, last = {before.samples, after.samples}, f"{dotted(_WINDOW)} {_window(before)}"
    if changed := _other_windows(before, after):
        yield from changed
    elif before.get(_BALANCE) not in (None, False) and len(sizes) > 1 and done > min(sizes) // blocks[0] * blocks[0]:
        yield f"step {step} is within the last window ({last}), which more samples would change"


def _window(view: View) -> int:
    return view.number(_WINDOW, 1)


def _block(view: View) -> int:
    """Return how many samples are dealt together: their order depends on the layout, and their set does not."""
    return _window(view) * view.global_batch


def _other_windows(before: View, after: View) -> list[str]:
    """Return in words why plugins.attention_balance would deal the samples of a window of steps otherwise."""
    old, new = _window(before), _window(after)
    was, would = ("off" if view.get(_BALANCE) in (None, False) else "on" for view in (before, after))
    weights = [((*_BALANCE, name), before.get((*_BALANCE, name)), after.get((*_BALANCE, name))) for name in COST]
    other = [weight for weight in weights if weight[1] not in (None, weight[2])]
    if old != new:
        return [f"{dotted(_WINDOW)} was {old}, would be {new}"]
    if was != would:
        return [f"{dotted(_BALANCE)} was {was}, would be {would}"]
    if other:
        return [_difference(*weight) for weight in other]
    if before.global_batch != after.global_batch:
        return [f"{_batches(before, after)}, with {dotted(_WINDOW)} {old}"] * (old > 1)
    if was == "off" or layout_of(before.recipe) == layout_of(after.recipe):
        return []
    return [f"{dotted(_WINDOW)} {old} deals samples otherwise in another parallel_config or recompute_config"]


def _batches(before: View, after: View) -> str:
    return f"the samples of a step were {before.global_batch}, would be {after.global_batch}"


def _changed_skips(before: Recipe, after: Recipe, done: int) -> Iterator[str]:
    """Yield a message if plugins.spike_guard leaves out other samples, of steps that are trained or of later ones."""
    old, new = left_out(before), left_out(after)
    views = View(before), View(after)
    if not same_until(done, old, new):
        was, would = ([list(pair) for pair in pairs] or "none" for pairs in (old, new))
        yield f"{dotted(SKIPPED)} was {was}, would be {would} (RUN/skipped.json says what is left out)"
    elif (old or new) and views[1].get(_BALANCE) and views[0].global_batch != views[1].global_batch:
        yield f"{_batches(*views)}, in whose order {dotted(SKIPPED)} counts"
    elif any(end > reached(done, new) and end % _block(view) for view in views for pair in new for end in pair):
        yield from (f"{words}, in whose order {dotted(SKIPPED)} counts" for words in _other_windows(*views))


def _changed_samples(before: Recipe, after: Recipe, done: int) -> Iterator[str]:
    """Yield a message if another number of samples changes the order of shuffled samples, or the end of a pass over
    them.
    """
    views = View(before), View(after)
    passes = [view.number((*RUNNER, "epochs"), 1) for view in views]
    old, new = (view.samples for view in views)
    whole = [view.ramp.samples_until(view.ramp.steps_of(count)) for count, view in zip((old, new), views, strict=True)]
    if max(passes) > 1 and whole[0] != whole[1] and done > min(whole):
        yield f"{dotted((*RUNNER, 'epochs'))} {passes[0]} of {old:,} samples would be {passes[1]} of {new:,}"
    if old == new or not views[1].megatron:
        return
    if views[1].get((*CONFIG, "data_path")) is None:
        yield f"{dotted(SIZES)}.0 was {old:,}, would be {new:,}: which samples are then shuffled anew is not known here"
        return
    try:
        orders = shuffles(after, old), shuffles(after, new)
    except DataError as error:
        yield f"{dotted(SIZES)}.0 was {old:,}, would be {new:,}; whether that shuffles anew is unknown: {error}"
        return
    for one, two in zip(*orders, strict=True):
        if one != two:
            was = f"{dotted(SIZES)}.0 was {old:,}, {_shuffle_in_words(one)}"
            yield f"{was}, would be {new:,}, {_shuffle_in_words(two)}: all are shuffled anew"
            return


def _shuffle_in_words(shuffle: Shuffle) -> str:
    epochs = f"{shuffle.epochs} epoch{'s' * (shuffle.epochs > 1)} of the data"
    return epochs + " with the last one apart" * shuffle.last_apart


def all_steps(recipe: Recipe) -> int:
    """Return the total number of steps that the recipe trains; return 0 if the recipe does not state this number."""
    view = View(recipe)
    return view.number((*RUNNER, "epochs"), 1) * view.ramp.steps_of(view.samples)


def most_steps(recipe: Recipe, wanted: int) -> int | None:
    """Return how many of `wanted` steps the recipe can train in the same order of its data (None: unknown)."""
    view = View(recipe)
    own = view.ramp.steps_of(view.samples)
    if wanted <= own or not view.megatron or view.number((*RUNNER, "epochs"), 1) > 1:
        return wanted if wanted <= own else None
    try:
        order = shuffles(recipe, view.samples)
        anew = bisect_left(
            range(own, wanted + 1), True, key=lambda steps: shuffles(recipe, view.ramp.samples_until(steps)) != order
        )
    except DataError:
        return None
    return max(own, own + anew - 1)
