"""Lines that a run appends, a record a step: after a kill, after a resume."""

from dataclasses import dataclass

import pytest

from plugins.lines import append_line, read_steps


@dataclass(frozen=True)
class Record:
    step: int
    kind: str


def parse(content, place):
    return Record(content["step"], content["kind"])


def same_kind(before, record, place):
    if before.kind != record.kind:
        raise ValueError(f"{place}: {record.kind} behind {before.kind}")


def test_half_a_line_is_left_out_and_the_next_one_stands_alone(tmp_path):
    path = tmp_path / "metrics" / "x.jsonl"
    append_line(path, '{"step": 1, "kind": "a"}')
    with path.open("a") as file:
        file.write('{"step": 2, "ki')
    append_line(path, '{"step": 2, "kind": "a"}')
    assert read_steps(path, parse) == [Record(1, "a"), Record(2, "a")]


def test_a_resumed_run_replaces_what_it_repeats_and_is_held_to_what_stands(tmp_path):
    path = tmp_path / "x.jsonl"
    for step, kind in ((1, "a"), (2, "b"), (3, "b"), (2, "a")):
        append_line(path, f'{{"step": {step}, "kind": "{kind}"}}')
    assert read_steps(path, parse) == [Record(1, "a"), Record(2, "a")]
    with pytest.raises(ValueError, match=r"x.jsonl:2: b behind a"):
        read_steps(path, parse, same_kind)
