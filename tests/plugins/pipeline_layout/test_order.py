import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plugins.pipeline_layout import order
from plugins.pipeline_layout.order import BACKWARD, FORWARD, by_turns, one_forward_one_backward


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
    assert "\n".join(figure(3, 4)) in order.__doc__


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
