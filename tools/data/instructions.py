"""This module makes instruction-tuning data from Python sources, and counts the samples into which conversations are
packed.

Of each function in the sources, the signature is the question, and the first paragraph of the docstring is the answer.

Every machine has such sources: Python's standard library. Held-out documents are chosen as in `tc3 data prepare`
(`tools.data.sources.held_out`): with the same Python files, seed and share, the held-out instructions come from modules
on which neither the tokenizer nor the pre-training of that corpus was trained.

The number of samples is counted by the steps with which a run makes samples of conversations:
`AlpacaInstructDataHandler` (`mindformers/dataset/handler/alpaca_handler.py`) makes three texts of a conversation and
tokenizes each text separately, and `plugins/packed_labels` packs whole conversations. This module repeats both steps
with the `tokenizers` library.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from plugins.errors import DataError, not_json
from plugins.lines import flush
from tools.data.outputs import HELD_OUT, split_name
from tools.data.sources import Corpus, Skips, held_out
from tools.files.atomic import atomic_file, keep_existing
from tools.process.children import uninterrupted

INSTRUCTION = "Say what this Python function does."
SHORTEST, LONGEST = 12, 300  # characters of an answer
MOST = 20_000  # conversations that are counted: some seconds
_WANTED = 'the file must hold lines such as {"instruction": "...", "input": "", "output": "..."}'
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


@dataclass(frozen=True)
class Options:
    """An `Options` holds the options of `tc3 data instructions`, which have the same meanings as for `tc3 data
    prepare`.
    """

    corpus: Corpus
    output: Path
    held_out: float = 0.0
    seed: int = 1234
    force: bool = False

    def files(self) -> dict[str, Path]:
        """Return the path of the output file of each split (training and held-out) as a dictionary.

        Raises:
            DataError: the output is a folder.
        """
        if not self.output.name or self.output.is_dir():
            where = self.output / "instructions"
            raise DataError(
                f"--output {self.output}: this is a folder; give the first part of the files' names, such as {where}"
            )
        splits = ("train", HELD_OUT) if self.held_out else ("train",)
        return {split: self.output.parent / f"{split_name(self.output.name, split)}.jsonl" for split in splits}


@dataclass
class _Found:
    rows: dict[str, list[dict[str, str]]] = field(default_factory=lambda: {"train": [], HELD_OUT: []})
    documents: int = 0
    without: int = 0  # documents that are no Python


def write(options: Options, skips: Skips) -> dict[str, Any]:
    """Write the instructions as JSON lines with the keys `instruction`, `input` and `output`, and return the number of
    documents read and the number of instructions written to each split.

    The order of the instructions is a shuffle that depends only on the instructions and the seed. An instruction whose
    answer also occurs in the training split, word for word, is left out of the held-out split.

    Raises:
        DataError: the input is missing or holds no documented function, or the output exists already or cannot be
            written.
    """
    files = options.files()
    stale = _stale_split(options)
    for path in (*files.values(), *stale):
        keep_existing("--output", path, options.force)
    found = _collect(options, skips)
    known = {row["output"] for row in found.rows["train"]}
    found.rows[HELD_OUT] = [row for row in found.rows[HELD_OUT] if row["output"] not in known]
    for split in files:
        if not found.rows[split]:
            raise DataError(
                f"--input {' '.join(options.corpus.inputs)}: {found.documents} documents were read, but "
                f"the {split} split has no function with a docstring; give Python sources, such as --input stdlib"
            )
    summary: dict[str, Any] = {"documents": found.documents, "no_python": found.without, "held_out": options.held_out}
    texts = {}
    for split in reversed(files):
        rows = sorted(found.rows[split], key=lambda row: _place(row, options.seed))
        texts[split] = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        digest = hashlib.sha256(texts[split].encode()).hexdigest()
        summary[split] = {"file": str(files[split]), "instructions": len(rows), "sha256": digest}
    _publish(files, texts, stale)
    return summary


def _publish(files: dict[str, Path], texts: dict[str, str], stale: list[Path]) -> None:
    """Write the files of all splits, and remove the `stale` ones.

    All texts are on the disk before the first file changes. Beside new held-out data, training data of an earlier run
    would hold rows that are held out now: these training data are removed first, and the new ones get their name last.
    """
    with ExitStack() as parts:
        for split, path in files.items():  # closed in reverse order: the training data last
            part = parts.enter_context(atomic_file(path))
            part.write_text(texts[split], encoding="utf-8")
            flush(part)
        with uninterrupted():
            for path in (*stale, *([files["train"]] if HELD_OUT in files else [])):
                path.unlink(missing_ok=True)
            parts.close()


def _stale_split(options: Options) -> list[Path]:
    """Return the held-out file that an earlier run wrote for this prefix if this run holds nothing out: beside the new
    training data it would be no held-out data any more, because the training data has its rows, too.
    """
    path = options.output.parent / f"{split_name(options.output.name, HELD_OUT)}.jsonl"
    if options.held_out or not path.is_file():
        return []
    try:
        with path.open(encoding="utf-8") as rows:
            return [path] if json.loads(rows.readline())["instruction"] == INSTRUCTION else []
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return []  # somebody else's file


def _collect(options: Options, skips: Skips) -> _Found:
    found, seen = _Found(), set()
    for document in options.corpus.documents(skips):
        split = HELD_OUT if held_out(options.seed, found.documents, options.held_out) else "train"
        found.documents += 1
        try:
            for row in instructions_of(document.text, _module(Path(document.where))):
                if (key := tuple(row.values())) not in seen:
                    seen.add(key)
                    found.rows[split].append(row)
        except (SyntaxError, ValueError, RecursionError, MemoryError):  # the parser calls too deep a nesting either
            found.without += 1
    return found


def _module(path: Path) -> str:
    """Return the name of the module that a file is imported as, without the names of packages."""
    return path.parent.name if path.stem == "__init__" else path.stem


def _place(row: dict[str, str], seed: int) -> bytes:
    return hashlib.sha256(f"{seed}\n{row['input']}\n{row['output']}".encode()).digest()


def instructions_of(source: str, module: str) -> Iterator[dict[str, str]]:
    """Yield an instruction for each public function and method of a module whose docstring begins with a usable
    paragraph.

    Raises:
        SyntaxError, ValueError, RecursionError, MemoryError: `source` cannot be parsed as Python here.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of escapes in other people's strings
        tree = ast.parse(source)
    for scope, node in _functions(tree.body, ()):
        answer = _answer(ast.get_docstring(node, clean=False))
        if answer:
            name = ".".join((module, *scope, node.name))
            question = f"{name}({ast.unparse(node.args)})"
            yield {"instruction": INSTRUCTION, "input": question, "output": answer}


def _functions(
    body: list[ast.stmt], scope: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Yield public functions of a module and of its public classes, with the classes around them."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
            yield scope, node
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from _functions(node.body, (*scope, node.name))


def _answer(docstring: str | None) -> str:
    """Return the first paragraph of a docstring on one line; empty where it is too short, too long, or no sentence."""
    paragraph = inspect.cleandoc(docstring or "").split("\n\n")[0]
    answer = " ".join(paragraph.split())
    fits = SHORTEST <= len(answer) <= LONGEST and answer[0].isalpha() and " " in answer
    return answer if fits else ""


def rows_of(key: str, file: Path) -> Iterator[dict[str, str]]:
    """Yield the conversations of a file, which holds JSON lines or one JSON list.

    Raises:
        DataError: a line of the file is not a conversation; the message names the first such line.
    """
    try:
        text = file.read_text("utf-8")
    except OSError as error:
        raise DataError(f"{key}: {file}: the file cannot be read ({error.strerror}); {_WANTED}") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{key}: {file}: the file {not_json(error)}; {_WANTED}") from None
    try:
        listed = json.loads(text) if text.lstrip().startswith("[") else None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{key}: {file}: the file {not_json(error)}; {_WANTED}") from None
    rows = enumerate(listed, 1) if listed is not None else _parsed(key, file, text)
    for number, row in rows:
        wrong = "the conversation is not a mapping" if not isinstance(row, dict) else ""
        for name in ("instruction", "output") if not wrong else ():
            if not isinstance(row.get(name), str) or not row[name].strip():
                wrong = f"the conversation has no text under {name!r}"
                break
        if wrong:
            raise DataError(f"{key}: {file}:{number}: {wrong}; {_WANTED}")
        yield row


def _parsed(key: str, file: Path, text: str) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(text.split("\n"), 1):  # JSON strings may hold what else `splitlines` takes for an end
        if line.strip():
            try:
                yield number, json.loads(line)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{key}: {file}:{number}: this line {not_json(error)}; {_WANTED}") from None


def count_samples(files: list[tuple[str, Path]], length: int, tokenizer: Any) -> list[int] | None:
    """Return the number of conversations in each of the samples of `length` tokens that the conversations of the given
    files fill when they are packed one after another. Return None for more than `MOST` conversations.

    Raises:
        DataError: a row is not a conversation, or no answer fits in a sample.
    """
    rows = []
    for key, file in files:
        for row in rows_of(key, file):
            rows.append(row)
            if len(rows) > MOST:
                return None
    made = samples(rows, length, tokenizer)
    if not made:
        key, file = files[0]
        raise DataError(
            f"{key}: {file}: no conversation has an answer within its first {length:,} tokens; give other "
            "conversations, or raise seq_length"
        )
    return made


def samples(rows: list[dict[str, str]], length: int, tokenizer: Any) -> list[int]:
    """Return the number of conversations in each of the samples of `length` tokens into which `packed_labels.plan.pack`
    packs the conversations.
    """

    def tokens(text: str) -> int:
        return len(tokenizer.encode(text).ids)

    system, held = tokens(f"{SYSTEM} "), length + 1
    made: list[int] = []
    for row in rows:
        prompt = (WITH_INPUT if row.get("input") else WITHOUT_INPUT).format_map(row)
        asked = system + tokens(f"USER: {prompt} ")
        whole = min(length, asked + tokens(f"ASSISTANT: {row['output']}</s>"))
        if asked > whole:
            continue  # the answer was cut away whole: the last label is that of its first token
        if held + whole > length:
            made.append(0)
            held = 0
        made[-1] += 1
        held += whole
    return made


def read_tokenizer(key: str, folder: Path) -> Any:
    """Load the tokenizer in a folder with the `tokenizers` library, and return the tokenizer. Return None if the folder
    has no tokenizer.json.

    Raises:
        DataError: the folder does not exist, or its tokenizer.json cannot be read.
    """
    if not folder.is_dir():
        raise DataError(
            f"{key}: {folder}: this folder does not exist; with --set {key}=FOLDER name the folder of the tokenizer "
            "with which the initial weights were trained (launch/quickstart makes a tokenizer and weights)"
        )
    file = folder / "tokenizer.json"
    if not file.is_file():
        return None
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library's errors have no class of their own
        raise DataError(f"{key}: {file}: this is not a tokenizer that can be read ({error})") from None
