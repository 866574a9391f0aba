"""Lines of a run's metrics, as tests write them."""

import json


def step(number, loss=5.0, seconds=0.5):
    return {"step": number, "loss": loss, "lm_loss": loss - 1, "tokens": 100, "seconds": seconds}


def header(total, start=0):
    return {"total_steps": total, "start_step": start, "world_size": 2}


def empty(run_dir):
    """The metrics file of rank 0, with nothing in it."""
    path = run_dir / "metrics" / "rank_0.jsonl"
    path.parent.mkdir()
    path.touch()
    return path


def append(path, *records):
    with path.open("a") as out:
        out.writelines(json.dumps(record) + "\n" for record in records)
