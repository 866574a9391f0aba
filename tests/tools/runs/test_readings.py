"""What a run writes is read: across resumes, while it is written, with broken lines."""

import math

import pytest

from tests.tools.runs.builders import append, empty, header, step
from tools.recipe.load import Recipe
from tools.runs.readings import Follower, loss_in_words, loss_rank, perplexity, read_held_out, read_metrics


@pytest.fixture
def metrics(tmp_path):
    return empty(tmp_path)


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
    assert Follower(file, newest=0).new_records() == []


def test_held_out_losses_count_as_last_written(tmp_path, metrics):
    append(tmp_path / "metrics" / "held_out.jsonl", *({"step": 0, "held_out_loss": loss} for loss in (7.0, 6.5)))
    assert read_held_out(tmp_path) == {0: 6.5}


def test_held_out_losses_of_steps_that_a_run_has_left_behind_do_not_count(tmp_path, metrics):
    """A resumed part evaluates the step from which it goes on first."""
    written = [(0, 7.0), (4, 6.0), (8, 5.0), (4, 6.0), (6, 5.5)]
    lines = ({"step": number, "held_out_loss": loss} for number, loss in written)
    append(tmp_path / "metrics" / "held_out.jsonl", *lines)
    assert read_held_out(tmp_path) == {0: 7.0, 4: 6.0, 6: 5.5}


def test_a_perplexity_is_the_exponential_of_a_loss():
    assert perplexity(0.0) == 1.0 and perplexity(4.0) == pytest.approx(54.59815, rel=1e-6)
    assert perplexity(1e4) == perplexity(math.inf) == math.inf
    assert perplexity(None) is None and perplexity(math.nan) is None
    assert loss_in_words(4.0) == "4.0000, perplexity 54.6" and loss_in_words(8.0) == "8.0000, perplexity 2,981"
    assert loss_in_words(math.nan) == loss_in_words(None) == loss_in_words(math.inf) == "not finite"


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
