"""How many samples a recipe's conversations make, counted before any worker starts: rows, tokens, packing.

`AlpacaInstructDataHandler` (`mindformers/dataset/handler/alpaca_handler.py`) makes three texts of a conversation and
tokenizes each by itself; `plugins/packed_labels` packs whole conversations. Both are repeated here with the tokenizer's
own library, for files of at most `MOST` conversations; more are left to the workers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from launch.run.effective import steps_overrides
from plugins.errors import DataError
from plugins.held_out_loss.plan import KEY as HELD_OUT
from plugins.packed_labels.plan import KEY as PACKED
from plugins.packed_labels.plan import LOADER, PACKING
from tools.recipe.load import Recipe
from tools.recipe.override import apply_overrides
from tools.recipe.view import View

MOST = 20_000  # conversations that are counted: some seconds
_HANDLER = "AlpacaInstructDataHandler"
_FILES = f"{LOADER}.data_files"
_WANTED = 'want lines such as {"instruction": "...", "input": "", "output": "..."}'
# the handler's words, which tests hold to MindFormers' own
SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)
_BELOW = "Below is an instruction that describes a task"
WITH_INPUT = (
    f"{_BELOW}, paired with an input that provides further context. Write a response that appropriately completes the "
    "request.\n\n### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:"
)
WITHOUT_INPUT = (
    f"{_BELOW}. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:"
)


def fitted(recipe: Recipe, steps: int | None) -> Recipe:
    """The recipe with as many steps as its conversations make, where it asks for more of its own accord.

    Args:
        steps: that the user asked for; these are refused if there is not enough for them.

    Raises:
        DataError: a row that is no conversation, no tokenizer, or fewer samples than are asked for.
    """
    view = View(recipe)
    handler = _handler(view)
    held_out = _section(view, HELD_OUT)
    files = [*map(Path, view.instruction_files), *([Path(str(held_out.get("data_path")))] if held_out else [])]
    if handler is None or not view.instruction_files or not all(file.is_file() for file in files):
        return recipe  # of another form, or missing: `preflight.check_data` says so
    tokenizer = _tokenizer(handler)
    if tokenizer is None:
        return recipe
    if held_out:
        _check_held_out(view, held_out, handler, tokenizer)
    made = _made([(_FILES, Path(file)) for file in view.instruction_files], handler, tokenizer)
    batch = view.global_batch
    if made is None or not view.samples or view.samples <= made:
        return recipe
    least = made // batch
    what = f"{_FILES}: {', '.join(view.instruction_files)} makes {made:,} samples of {handler['seq_length']:,} tokens"
    if not least:
        raise DataError(f"{what}, a step takes {batch:,}: add conversations, or --set runner_config.batch_size={made}")
    if steps is not None:
        raise DataError(
            f"{what}, --steps {steps:,} takes {view.samples:,}: --steps {least} at most, or more conversations; for "
            f"several passes --set runner_config.epochs=N without --steps"
        )
    changes = steps_overrides(recipe, least)
    if view.number(("lr_schedule", "warmup_steps"), 0) >= least:
        changes.append(f"lr_schedule.warmup_steps={least // 10}")
    click.echo(f"{what}: {least:,} steps, and not what takes {view.samples:,} ({'; '.join(changes)})", err=True)
    return apply_overrides(recipe, changes)


def _handler(view: View) -> dict[str, Any] | None:
    """The handler that makes conversations, with the number of its place, where its samples can be counted."""
    handlers = view.get(("train_dataset", "data_loader", "handler"))
    if view.get(tuple(PACKED.split("."))) in (None, False) or not isinstance(handlers, list) or len(handlers) < 2:
        return None
    first, second = handlers[:2]
    known = isinstance(first, dict) and first.get("type") == _HANDLER and not first.get("padding", True)
    packs = isinstance(second, dict) and second.get("type") == PACKING
    length = first.get("seq_length") if known else None
    return first if packs and type(length) is int and second.get("seq_length") == length else None


def _section(view: View, key: str) -> Mapping[str, Any]:
    found = view.get(tuple(key.split(".")))
    return found if isinstance(found, Mapping) else {}


def _tokenizer(handler: Mapping[str, Any]) -> Any:
    """The tokenizer of the recipe as its own library reads it; None where its folder has no tokenizer.json.

    Raises:
        DataError: there is no such folder, or its file cannot be read.
    """
    key = f"{LOADER}.handler.0.tokenizer.pretrained_model_dir"
    folder = (handler.get("tokenizer") or {}).get("pretrained_model_dir")
    if not isinstance(folder, str):
        return None
    if not Path(folder).is_dir():
        raise DataError(
            f"{key}: {folder}: no such folder; the tokenizer of the weights to begin with, such as the one that "
            f"launch/quickstart makes: --set {key}=FOLDER"
        )
    file = Path(folder) / "tokenizer.json"
    if not file.is_file():
        return None
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library's errors have no class of their own
        raise DataError(f"{key}: {file}: no tokenizer that can be read ({error})") from None


def rows_of(key: str, file: Path) -> Iterator[dict[str, str]]:
    """The conversations of a file: JSON lines, or one JSON list.

    Raises:
        DataError: the first line that is none.
    """
    try:
        text = file.read_text("utf-8")
        listed = json.loads(text) if text.lstrip().startswith("[") else None
    except (OSError, ValueError) as error:
        raise DataError(f"{key}: {file}: cannot be read ({error}); {_WANTED}") from None
    rows = enumerate(listed, 1) if listed is not None else _parsed(key, file, text)
    for number, row in rows:
        wrong = "is no mapping" if not isinstance(row, dict) else ""
        for name in ("instruction", "output") if not wrong else ():
            if not isinstance(row.get(name), str) or not row[name].strip():
                wrong = f"has no text under {name!r}"
                break
        if wrong:
            raise DataError(f"{key}: {file}:{number}: {wrong}; {_WANTED}")
        yield row


def _parsed(key: str, file: Path, text: str) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except ValueError as error:
                raise DataError(f"{key}: {file}:{number}: is not JSON ({error}); {_WANTED}") from None


def _made(files: list[tuple[str, Path]], handler: Mapping[str, Any], tokenizer: Any) -> int | None:
    """Samples of these files, packed one behind the other; None where they have more than `MOST` conversations.

    Raises:
        DataError: a row is no conversation, or no answer is within a sample.
    """
    rows = []
    for key, file in files:
        for row in rows_of(key, file):
            rows.append(row)
            if len(rows) > MOST:
                return None
    made = samples(rows, handler["seq_length"], tokenizer)
    if not made:
        key, file = files[0]
        raise DataError(f"{key}: {file}: no conversation has an answer within {handler['seq_length']:,} tokens")
    return made


def samples(rows: list[dict[str, str]], length: int, tokenizer: Any) -> int:
    """How many samples of `length` tokens the conversations make, as `plugins.packed_labels.plan.pack` packs them."""

    def tokens(text: str) -> int:
        return len(tokenizer.encode(text).ids)

    system, made, held = tokens(f"{SYSTEM} "), 0, 0
    for row in rows:
        prompt = (WITH_INPUT if row.get("input") else WITHOUT_INPUT).format_map(row)
        asked = system + tokens(f"USER: {prompt} ")
        whole = min(length, asked + tokens(f"ASSISTANT: {row['output']}</s>"))
        if asked > whole:
            continue  # the answer was cut away whole: the last label is that of its first token
        if held and held + whole > length:
            made, held = made + 1, 0
        held += whole
    return made + (held > 0)


def _check_held_out(view: View, settings: Mapping[str, Any], handler: Mapping[str, Any], tokenizer: Any) -> None:
    """Raise DataError where the held-out conversations make fewer samples than are asked for, or than a step."""
    file = Path(settings["data_path"])
    made = _made([(f"{HELD_OUT}.data_path", file)], handler, tokenizer)
    if made is None:
        return
    what = f"{file} makes {made:,} samples of {handler['seq_length']:,} tokens"
    if made < view.global_batch:
        raise DataError(
            f"{HELD_OUT}.data_path: {what}, a step takes {view.global_batch:,}: hold out more conversations, or "
            f"--set {HELD_OUT}=False"
        )
    wanted = settings.get("samples")
    if type(wanted) is int and wanted > made:
        raise DataError(
            f"{HELD_OUT}.samples: {wanted:,}, and {what}: --set {HELD_OUT}.samples={made}, or leave it out to read all"
        )
