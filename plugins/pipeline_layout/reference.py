"""This module finds where each layer runs in a slow and obvious way: by a layout string read letter by letter, and by
MindFormers' own numbers.
"""

from __future__ import annotations


def unroll(text: str) -> str:
    """Return a layout string without `*`, groups and commas, read from left to right."""
    result, place = "", 0
    text = text.replace(",", "").replace(" ", "")
    while place < len(text):
        if text[place] == "(":
            close = text.index(")", place)
            piece, place = unroll(text[place + 1 : close]), close + 1
        else:
            piece, place = text[place], place + 1
        if text[place : place + 1] == "*":
            digits = place + 1
            while digits < len(text) and text[digits].isdigit():
                digits += 1
            piece, place = piece * int(text[place + 1 : digits]), digits
        result += piece
    return result


def places_of_layout(text: str, stages: int) -> list[tuple[int, int]]:
    """Return (chunk, stage) of each decoder layer, in model order, as Megatron-Core numbers them."""
    found, index = [], 0
    for letter in unroll(text):
        if letter == "|":
            index += 1
        elif letter == "t":
            found.append((index // stages, index % stages))
    return found


def places_of_offset(offset: list[list[int]], layers: int, stages: int, chunks: int) -> list[tuple[int, int]]:
    """Return (chunk, stage) of each layer: MindFormers counts up stage by stage, then goes on with the next chunk."""
    found = []
    for chunk in range(chunks):
        for stage in range(stages):
            for _ in range(layers // (stages * chunks) + offset[chunk][stage]):
                found.append((chunk, stage))
    return found
