"""Layout strings and offsets against a slow and obvious reference, which reads a layout string letter by letter."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plugins import pipeline_layout
from plugins.errors import RecipeError
from plugins.pipeline_layout import (
    BACKWARD,
    FORWARD,
    by_turns,
    counts_of,
    counts_of_offset,
    is_layout,
    layout_of,
    offset_of,
    one_forward_one_backward,
    parse,
)


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


def figure(stages, micro_batches):
    """A line for each stage, a column for each time: forwards as 0 1 2, backwards as a b c."""
    waiting = [one_forward_one_backward(stage, stages, micro_batches).tolist() for stage in range(stages)]
    lines, done = [""] * stages, set()
    while any(waiting):
        now = set()
        for stage, own in enumerate(waiting):
            kind, m = own[0] if own else (FORWARD, 0)
            source = stage - 1 if kind == FORWARD else stage + 1
            ready = bool(own) and (not 0 <= source < stages or (kind, source, m) in done)
            if ready:
                now.add((kind, stage, own.pop(0)[1]))
            lines[stage] += " " + ((str(m) if kind == FORWARD else chr(ord("a") + m)) if ready else " ")
        assert now, "a stage waits for ever"
        done |= now
    return [f"    stage {stage}  {line}".rstrip() for stage, line in enumerate(lines)]


def test_the_figure_of_the_docstring():
    assert "\n".join(figure(3, 4)) in pipeline_layout.__doc__


@given(st.integers(1, 6), st.integers(1, 12))
def test_all_work_is_done_once_and_no_stage_holds_more_than_it_must(stages, micro_batches):
    for stage in range(stages):
        found = one_forward_one_backward(stage, stages, micro_batches)
        assert sorted(map(tuple, found.tolist())) == [(kind, m) for kind in (0, 1) for m in range(micro_batches)]
        held = np.cumsum(np.where(found[:, 0] == FORWARD, 1, -1))
        assert held.min() >= 0 and held.max() == min(stages - stage, micro_batches)
    assert figure(stages, micro_batches)


@pytest.mark.parametrize(("warm_up", "right"), [(0, "FBFBFB"), (1, "FFBFBB"), (3, "FFFBBB"), (9, "FFFBBB")])
def test_turns(warm_up, right):
    forward, backward = (np.full((3, 1), kind) for kind in (FORWARD, BACKWARD))
    assert "".join("FB"[kind] for kind in by_turns(forward, backward, warm_up)[:, 0]) == right


@st.composite
def counted(draw):
    """Decoder layers [chunks][stages]: at least one in each chunk, but for the first and the last."""
    stages, chunks = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    flat = [draw(st.integers(0 if index in (0, stages * chunks - 1) else 1, 6)) for index in range(stages * chunks)]
    flat[0] += not sum(flat)
    return [flat[first : first + stages] for first in range(0, len(flat), stages)]


@given(counted(), st.integers(0, 3))
def test_layouts_and_offsets_say_the_same(counts, mtp):
    stages, chunks, layers = len(counts[0]), len(counts), sum(map(sum, counts))
    text, offset = layout_of(counts, mtp), offset_of(counts)
    assert counts_of(text, stages) == (counts, mtp)
    assert counts_of_offset(offset, layers, stages, chunks) == counts
    # layer by layer, as either framework counts
    rows = [[0]] if offset == 0 else offset if chunks > 1 else [offset]
    assert places_of_layout(text, stages) == places_of_offset(rows, layers, stages, chunks)


pieces = st.one_of(
    st.sampled_from(["t", "|", ",", "E", "L", "m", "t*3", "m*2", "|*2"]),
    st.builds("({})*{}".format, st.sampled_from(["t", "tt|", "|t", "t*2|", "t|tt|", "t,t*3|"]), st.integers(1, 12)),
)


@given(st.lists(pieces, max_size=8).map("".join))
def test_unrolling_equals_reading_letter_by_letter(text):
    assert "|".join(parse(text)) == unroll(text)


@pytest.mark.parametrize(
    ("text", "stages", "counts", "mtp"),
    [
        ("Ettt|(tt|)*29,L", 31, [[3, *[2] * 29, 0]], 0),
        ("Et*3|(tt|)*29,tm|L", 16, [[3, *[2] * 15], [2] * 14 + [1, 0]], 1),
        ("Et|t|t|tL", 2, [[1, 1], [1, 1]], 0),
        ("E t*4 L", 1, [[4]], 0),
    ],
)
def test_layouts_read_as_megatron_does(text, stages, counts, mtp):
    assert counts_of(text, stages) == (counts, mtp)


def test_layouts_are_written_briefly():
    assert layout_of([[3, 3, 3, 3], [4, 4, 4, 1]], mtp=1) == "Et*3|(t*3|)*3,(t*4|)*3,tmL"
    assert layout_of([[5, 5, 0]], mtp=1) == "Et*5|t*5m|L"
    assert layout_of([[2]]) == "EttL"


@pytest.mark.parametrize(
    ("text", "stages", "words"),
    [
        ("Et|tL", 3, "2 chunks do not fill 3 pipeline stages"),
        ("t|Et|tL", 3, "exactly one E .embedding., at the very beginning"),
        ("Et|tL|t", 3, "exactly one L .loss., at the very end"),
        ("Et|EtL", 2, "exactly one E"),
        ("Et|t|m|L", 4, "the last decoder layer is in chunk 1, and MindFormers runs MTP layers in that chunk"),
        ("Etm|tL", 2, "the last decoder layer is in chunk 1"),
        ("Et|mtL", 2, "must come after the last decoder layer"),
        ("Et||tL", 3, "chunk 1 holds no decoder layer"),
        ("Et|xL", 2, "the symbol 'x' is unknown; the symbols are E .embedding"),
        ("E((t|)*2)*2,tL", 5, "cannot be unrolled"),
        ("Et*|tL", 2, "cannot be unrolled"),
    ],
)
def test_what_mindformers_cannot_express_is_named(text, stages, words):
    with pytest.raises(RecipeError, match=words):
        counts_of(text, stages)


@pytest.mark.parametrize(
    ("offset", "layers", "stages", "chunks", "words"),
    [
        ([1, 0], 7, 3, 1, r"must hold 3 numbers, one for each stage, for each of 1 chunks"),
        ([[1, 0]], 9, 2, 2, r"must hold 2 numbers, one for each stage, for each of 2 chunks"),
        ([1, 1, 0], 7, 3, 1, "places 8 layers, but the model has 7"),
        ([1, -2, 1, 0], 8, 4, 1, "each chunk except the first and the last"),
        ([-3, 1, 1, 1], 8, 4, 1, "each chunk except the first and the last"),
    ],
)
def test_offsets_that_do_not_fit_are_named(offset, layers, stages, chunks, words):
    with pytest.raises(RecipeError, match=words):
        counts_of_offset(offset, layers, stages, chunks)


def test_a_layout_is_no_offset():
    assert is_layout("Et|tL") and not is_layout("auto") and not is_layout([1, 0])


@pytest.mark.parametrize(
    "text",
    ["Et*9999999999,L", "(t|)*99999999", "t*" + "9" * 5000, "t*" + "0" * 20 + "9" * 10, "(tttttttttt)*9999,(tt)*99999"],
)
def test_a_layout_of_a_billion_layers_is_not_unrolled(text):
    with pytest.raises(RecipeError, match="stands for more than 100,000 layers"):
        parse(text)
