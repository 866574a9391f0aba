"""Metrics: read while they are written, across resumes; the bar, the plain lines and the picture made of them."""

import io
import json

import pytest
from rich.console import Console

from launch.run import progress
from launch.run.picture import draw_loss_curve
from launch.run.progress import TrainingProgress
from launch.run.readings import Follower, loss_rank, read_held_out, read_metrics
from tools.recipe.load import Recipe


def step(number, loss=5.0, seconds=0.5):
    return {"step": number, "loss": loss, "lm_loss": loss - 1, "tokens": 100, "seconds": seconds}


def header(total, start=0):
    return {"total_steps": total, "start_step": start, "world_size": 2}


@pytest.fixture
def metrics(tmp_path):
    path = tmp_path / "metrics" / "rank_0.jsonl"
    path.parent.mkdir()
    path.touch()
    return path


def append(path, *records):
    with path.open("a") as out:
        out.writelines(json.dumps(record) + "\n" for record in records)


def test_a_resumed_part_replaces_what_it_repeats(metrics):
    append(metrics, header(10), *(step(n, loss=n) for n in range(1, 8)))
    append(metrics, header(20, start=5), step(6, loss=60))
    readings = read_metrics(metrics)
    assert [(n, record["loss"]) for n, record in sorted(readings.steps.items())] == [
        *((n, n) for n in range(1, 6)),
        (6, 60),
    ]
    assert (readings.total_steps, readings.start_step, readings.last["loss"]) == (20, 5, 60)


def test_speed_is_the_median_without_the_compiling_step(metrics):
    append(metrics, header(9, start=4), step(5, seconds=50), step(6, seconds=1), step(7, seconds=2), step(8, seconds=9))
    assert read_metrics(metrics).tokens_per_second() == 50.0


def test_the_speed_of_one_step_is_not_known(metrics):
    append(metrics, header(9), step(1))
    assert read_metrics(metrics).tokens_per_second() is None


def test_a_follower_waits_for_whole_lines_and_leaves_out_broken_ones(tmp_path):
    file = tmp_path / "x.jsonl"
    follower = Follower(file)
    assert follower.new_records() == []
    file.write_bytes(b'{"step": 1}\n{"st')
    assert follower.new_records() == [{"step": 1}]
    with file.open("ab") as out:
        out.write(b'ep": 2}\n{"step": {"step": 3}\n7\n')
    assert follower.new_records() == [{"step": 2}]
    assert Follower(file, from_end=True).new_records() == []


def test_held_out_losses_count_as_last_written(tmp_path, metrics):
    append(tmp_path / "metrics" / "held_out.jsonl", *({"step": 0, "held_out_loss": loss} for loss in (7.0, 6.5)))
    assert read_held_out(tmp_path) == {0: 6.5}


@pytest.mark.parametrize(
    ("recipe", "rank"),
    [
        ({}, 0),
        ({"use_parallel": True, "parallel_config": {"data_parallel": 4}}, 0),
        ({"use_parallel": True, "parallel_config": {"data_parallel": 2, "pipeline_stage": 4}}, 7),
        ({"use_parallel": False, "parallel_config": {"pipeline_stage": 4}}, 0),
        (
            {
                "use_parallel": True,
                "parallel_config": {"pipeline_stage": 4},
                "parallel": {"pipeline_config": {"pipeline_scheduler": "zero_bubble_v"}},
            },
            0,
        ),
    ],
)
def test_the_loss_is_that_of_the_rank_that_has_it(recipe, rank):
    assert loss_rank(Recipe(recipe)) == rank


def test_the_progress_follows_the_rank_it_is_told(tmp_path):
    out = io.StringIO()
    (tmp_path / "metrics").mkdir()
    with TrainingProgress(tmp_path, Console(file=out, force_terminal=False), rank=3):
        append(tmp_path / "metrics" / "rank_0.jsonl", header(1), step(1, loss=0.0))
        append(tmp_path / "metrics" / "rank_3.jsonl", header(1), step(1, loss=3.0))
    assert "step 1/1  loss 3.0000" in out.getvalue()


def shown(tmp_path, terminal, *parts):
    """What the progress writes when `parts` (lists of records) arrive one after the other."""
    out = io.StringIO()
    with TrainingProgress(tmp_path, Console(file=out, force_terminal=terminal, width=120)) as progress:
        for records in parts:
            append(tmp_path / "metrics" / "rank_0.jsonl", *records)
            progress.tick()
    return out.getvalue()


def test_without_a_terminal_there_is_a_line_every_tenth(tmp_path, metrics):
    append(metrics, header(50), step(1, loss=99.0))  # an earlier part
    text = shown(tmp_path, False, [header(100)], [step(n, loss=n / 10) for n in range(1, 101)])
    lines = text.splitlines()
    assert lines[0] == "compiling…"
    assert lines[1].startswith("step 1/100  loss 0.1000  (first step after")
    assert [line.split()[1] for line in lines[2:]] == [f"{n}/100" for n in range(10, 101, 10)]
    assert lines[-1] == "step 100/100  loss 10.0000  200 tokens/s"


def test_without_a_terminal_there_is_a_line_every_minute_too(tmp_path, metrics, monkeypatch):
    out, now = io.StringIO(), [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with TrainingProgress(tmp_path, Console(file=out, force_terminal=False)) as shown:
        for now[0] in (30.0, 61.0, 62.0, 125.0):
            shown.tick()
        append(metrics, header(1000), step(1))
        for now[0] in (126.0, 127.0, 190.0):
            shown.tick()
    assert out.getvalue().splitlines() == [
        *("compiling…", "compiling… 61 s", "compiling… 125 s"),
        *("step 1/1000  loss 5.0000  (first step after 126 s)", "step 1/1000  loss 5.0000"),
    ]


def test_steps_that_arrive_last_are_shown_too(tmp_path, metrics):
    out = io.StringIO()
    with TrainingProgress(tmp_path, Console(file=out, force_terminal=False)):
        append(metrics, header(1), step(1, loss=3.0))
    assert "step 1/1  loss 3.0000" in out.getvalue()


def test_on_a_terminal_a_bar_follows_the_steps(tmp_path, metrics):
    text = shown(tmp_path, True, [header(40), step(1)], [step(2, loss=4.25), step(3, loss=4.125)])
    assert "compiling" in text and "training" in text
    assert "3/40" in text and "loss 4.1250" in text and "200 tokens/s" in text


@pytest.mark.parametrize(("name", "magic"), [("a.png", b"\x89PNG"), ("sub/a.svg", b"<?xml")])
def test_the_loss_curve_is_drawn(tmp_path, metrics, name, magic):
    append(metrics, header(3), step(1, 3.0), step(2, 2.0), step(3, 1.0))
    path = draw_loss_curve([metrics], tmp_path / name, {0: 3.5, 3: 1.5})
    assert path.read_bytes().startswith(magic)
    if path.suffix == ".svg":
        text = path.read_text()
        assert all(word in text for word in ("training loss", "language model only", "held out", "nats per token"))


def test_nothing_to_draw_is_an_error(tmp_path, metrics):
    with pytest.raises(ValueError, match="no steps to draw"):
        draw_loss_curve([metrics], tmp_path / "a.png")
