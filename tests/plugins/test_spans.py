"""The form of spans, and that saving writes them."""

import json
import time

import pytest

from plugins.sealed_checkpoint.adapter import SealingCheckpointMonitor
from plugins.spans import Span, as_span, note, spans_file
from tests.plugins.sealed_checkpoint.saving import Run


def read(folder):
    return [as_span(json.loads(line)) for line in spans_file(folder).read_text().splitlines()]


def test_what_is_noted_is_read(tmp_path):
    spans = [Span("save", 3, 1.5, 2.5, True), Span("evaluation", 0, 2.0, 2.0)]
    for span in spans:
        note(tmp_path / "new", span)
    assert read(tmp_path / "new") == spans


@pytest.mark.parametrize(
    "change", [{"kind": "nap"}, {"kind": None}, {"step": None}, {"begin": "1"}, {"end": 0.5}, {"end": None}]
)
def test_another_form_is_nothing(change):
    assert as_span({"kind": "save", "step": 3, "begin": 1.0, "end": 2.0, "later": 1}) == Span("save", 3, 1.0, 2.0)
    assert as_span({"kind": "save", "step": 3, "begin": 1.0, "end": 2.0} | change) is None


@pytest.mark.parametrize("background", [False, True])
def test_saves_are_noted_with_their_time_and_whether_they_were_sealed(tmp_path, monkeypatch, background):
    monkeypatch.setattr(SealingCheckpointMonitor, "run_dir", str(tmp_path / "run"))
    before = time.time()
    run = Run(tmp_path / "saves", async_save=background, save_optimizer=False)
    for step in (1, 2):
        run.step(step)
        run.step(step)  # what is saved already is not saved again, and not noted
    run.end()
    found = read(tmp_path / "run")
    assert [span.kind for span in found] == ["save"] * len(found)
    assert {span.step for span in found} == {1, 2}
    assert all(before <= span.begin <= span.end <= time.time() for span in found)
    if background:
        assert found[0] == Span("save", 1, found[0].begin, found[0].end) and found[-1].sealed
    else:
        assert [(span.step, span.sealed) for span in found] == [(1, True), (2, True)]


def test_without_a_run_nothing_is_noted(tmp_path):
    run = Run(tmp_path, save_optimizer=False)
    run.step(1)
    run.end()
    assert not spans_file(tmp_path).exists()
