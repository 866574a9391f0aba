"""This module converts Megatron-Core's pipeline layout strings to MindFormers' `offset` and back, and computes the
order of forward and backward passes in a 1F1B stage.

A layout string says what each chunk of each stage holds: E is the embedding, t a decoder layer, m an MTP layer, L the
loss. `|` ends a chunk; chunk 0 of all stages comes first, then chunk 1 (vpp-major, as in MindFormers). `x*n` repeats a
letter, `(...)*n` repeats a group, and commas have no meaning: "Et*3|(t*4|)*6,t*3,mL" is 3 + 6 x 4 + 3 layers in 8
chunks, with MTP and loss at the end.

MindFormers' offset says how many decoder layers chunk v of stage p holds: num_layers // (stages * chunks) +
offset[v][p]. Embedding and loss always stay on their stages; MTP layers run where the last decoder layer runs
(MindFormers 1.9.0, multi_token_prediction.py, `_build_layers`).

The order of passes in a stage is 1F1B, that of PipeDream-flush (arXiv 2006.09503, figure 2, with a flush at the end of
the step), as in Megatron-LM; the table shows it for 3 stages and 4 micro-batches, with a column for each point in time,
forward passes as 0 1 2 3 and backward passes as a b c d. The module needs only NumPy.

    stage 0   0 1 2     a 3 b   c   d
    stage 1     0 1   a 2 b 3 c   d
    stage 2       0 a 1 b 2 c 3 d
"""

from __future__ import annotations

import itertools
import re

import numpy as np

from plugins.errors import RecipeError

FORWARD, BACKWARD = 0, 1
LETTERS = {"E": "embedding", "t": "decoder layer", "m": "MTP layer", "L": "loss"}
_GROUP = re.compile(r"\(([^()]+)\)\*(\d+)")
_LETTER = re.compile(r"([A-Za-z|])\*(\d+)")
_LONGEST = 100_000  # letters; the deepest model that anybody has trained has a thousandth of them
MICRO_BATCHES_OF_A_STAGE = {"zero_bubble_v": 2}  # schedule -> micro-batches that it needs for each stage; others: 1
Counts = list[list[int]]  # [chunks][stages]


def fewest_to_fill(stages: int, schedule: str = "") -> int:
    """Return the smallest number of micro-batches that fills the stages of a pipeline under one of MindSpore's
    schedules.
    """
    return stages * MICRO_BATCHES_OF_A_STAGE.get(schedule, 1)


def by_turns(forward: np.ndarray, backward: np.ndarray, warm_up: int) -> np.ndarray:
    """Return the operations of a 1F1B stage in order: first `warm_up` forward passes, then alternately one forward and
    one backward pass, then the remaining backward passes.

    Args:
        forward, backward: [operations, columns], each in its own order, with the same number of operations.
        warm_up: the number of forward passes before the first backward pass, minus 1; a number that is too large means
            all.
    """
    warm_up = min(warm_up, len(forward))
    steady = len(forward) - warm_up
    turns = np.stack([forward[warm_up:], backward[:steady]], axis=1).reshape(-1, forward.shape[1])
    return np.concatenate([forward[:warm_up], turns, backward[steady:]])


def one_forward_one_backward(stage: int, stages: int, micro_batches: int) -> np.ndarray:
    """Return the passes that `stage` of `stages` runs, in order: int64 [2 * micro_batches, 2], each row is `FORWARD` or
    `BACKWARD` and the number of the micro-batch.
    """
    numbers = np.arange(micro_batches)
    forward, backward = (np.stack([np.full(micro_batches, kind), numbers], axis=1) for kind in (FORWARD, BACKWARD))
    return by_turns(forward, backward, stages - 1 - stage)


def parse(text: str) -> list[str]:
    """Return the chunks of a layout string in model order, each as a string of its letters: "Et*2|(t|)*2,L" gives Ett,
    t, t, L.

    Raises:
        RecipeError: a letter is unknown, a parenthesis or `*` is misplaced, or groups are nested (as in Megatron).
    """
    unrolled = re.sub(r"[,\s]", "", text)
    for pattern in (_GROUP, _LETTER):
        length = sum(
            len(found[1]) * min(int(found[2].lstrip("0")[:9] or 0), _LONGEST + 1)
            for found in pattern.finditer(unrolled)
        )
        if length > _LONGEST:
            raise RecipeError(
                f"layout {text[:80]!r}: the layout stands for more than {_LONGEST:,} layers; shorten its repetitions"
            )
        unrolled = pattern.sub(lambda found: found[1] * int(found[2]), unrolled)
    for place, letter in enumerate(unrolled):
        if letter in "()*" or letter.isdigit():
            raise RecipeError(
                f"layout {text!r}: {unrolled[place : place + 8]!r} cannot be unrolled: write x*n for a letter, or "
                "(...)*n for a group, which must not contain another group"
            )
        if letter not in LETTERS and letter != "|":
            known = ", ".join(f"{key} ({name})" for key, name in LETTERS.items())
            raise RecipeError(
                f"layout {text!r}: the symbol {letter!r} is unknown; the symbols are {known} and | (between chunks)"
            )
    return unrolled.split("|")


def is_layout(value: object) -> bool:
    """Return whether a value of `offset` is a layout string (the word `auto` is not)."""
    return isinstance(value, str) and value != "auto"


def counts_of(text: str, stages: int) -> tuple[Counts, int]:
    """Return the number of decoder layers [chunks][stages] that a layout string gives, and the number of MTP layers.

    Raises:
        RecipeError: see `parse`; or the chunks do not fill `stages`, or MindFormers cannot express the layout.
    """
    chunks = parse(text)
    if len(chunks) % stages:
        raise RecipeError(f"layout {text!r}: {len(chunks)} chunks do not fill {stages} pipeline stages evenly")
    _check_ends(text, chunks)
    last = max((index for index, chunk in enumerate(chunks) if "t" in chunk), default=0)
    for index, chunk in enumerate(chunks):
        if chunk.lstrip("E").rstrip("L") != "t" * chunk.count("t") + "m" * chunk.count("m"):
            raise RecipeError(
                f"layout {text!r}: chunk {index} ({chunk}): MTP layers (m) must come after the last decoder layer (t)"
            )
        if "m" in chunk and index != last:
            raise RecipeError(
                f"layout {text!r}: chunk {index} ({chunk}) holds MTP layers, but the last decoder layer is in chunk "
                f"{last}, and MindFormers runs MTP layers in that chunk; move the MTP layers there"
            )
        if "t" not in chunk and 0 < index < len(chunks) - 1:
            raise RecipeError(
                f"layout {text!r}: chunk {index} holds no decoder layer; only the first and the last chunk may be "
                "without one"
            )
    decoders = [chunk.count("t") for chunk in chunks]
    return [decoders[first : first + stages] for first in range(0, len(chunks), stages)], text_count(chunks, "m")


def _check_ends(text: str, chunks: list[str]) -> None:
    for letter, first, where in (("E", True, "at the very beginning"), ("L", False, "at the very end")):
        end = chunks[0][:1] if first else chunks[-1][-1:]
        if text_count(chunks, letter) != 1 or end != letter:
            raise RecipeError(
                f"layout {text!r}: the layout must have exactly one {letter} ({LETTERS[letter]}), {where}"
            )


def text_count(chunks: list[str], letter: str) -> int:
    """Return how often a letter, which stands for a kind of layer, occurs in all chunks of a pipeline layout."""
    return sum(chunk.count(letter) for chunk in chunks)


def offset_of(counts: Counts) -> int | list[int] | Counts:
    """Return MindFormers' `offset` for the given numbers of decoder layers [chunks][stages]: one list if each stage has
    one chunk, and 0 if there is only one chunk in total.
    """
    size = len(counts) * len(counts[0])
    if size == 1:
        return 0
    base = sum(map(sum, counts)) // size
    rows = [[count - base for count in row] for row in counts]
    return rows if len(rows) > 1 else rows[0]


def counts_of_offset(offset: int | list[int] | Counts, layers: int, stages: int, chunks: int = 1) -> Counts:
    """Return the number of decoder layers [chunks][stages] that an `offset` gives.

    Raises:
        RecipeError: the offset has another shape, does not place `layers` layers, or leaves a chunk empty.
    """
    rows: list = [[offset] * stages] * chunks if isinstance(offset, int) else list(offset)
    rows = rows if rows and isinstance(rows[0], list) else [rows] * chunks
    if len(rows) != chunks or any(not isinstance(row, list) or len(row) != stages for row in rows):
        raise RecipeError(
            f"offset {offset} must hold {stages} numbers, one for each stage, for each of {chunks} chunks"
        )
    base = layers // (stages * chunks)
    counts = [[base + extra for extra in row] for row in rows]
    flat = list(itertools.chain(*counts))
    if sum(flat) != layers:
        raise RecipeError(f"offset {offset}: the offset places {sum(flat)} layers, but the model has {layers}")
    if min(flat[:1] + flat[-1:]) < 0 or any(count < 1 for count in flat[1:-1]):
        raise RecipeError(
            f"offset {offset}: the chunks get {counts} layers, but each chunk except the first and the last needs at "
            "least one"
        )
    return counts


def layout_of(counts: Counts, mtp: int = 0) -> str:
    """Return the layout string for a table of the numbers of decoder layers, `counts[chunk][stage]`. Equal parts that
    follow one another are written as one group, such as `(t*4|)*3,`.
    """
    flat = list(itertools.chain(*counts))
    last = max((index for index, count in enumerate(flat) if count), default=len(flat) - 1)
    chunks = []
    for index, count in enumerate(flat):
        letters = ("E" * (index == 0), _times("t", count), _times("m", mtp if index == last else 0))
        chunks.append("".join(letters) + "L" * (index == len(flat) - 1))
    pieces = []
    for chunk, group in itertools.groupby(chunks[:-1]):
        repeats = len(list(group))
        pieces.append(f"{chunk}|" if repeats == 1 else f"({chunk}|)*{repeats},")
    return "".join([*pieces, chunks[-1]])


def _times(letter: str, count: int) -> str:
    return letter * count if count < 3 else f"{letter}*{count}"
