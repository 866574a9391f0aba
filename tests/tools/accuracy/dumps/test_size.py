import shutil
from types import SimpleNamespace

import pytest

from launch.run import accuracy_dump, preflight
from plugins.errors import ClusterError
from tools.accuracy.dumps.size import bytes_of_dump, text
from tools.recipe.load import load_recipe

MINI = "recipes/mini/pretrain.yaml"


@pytest.mark.parametrize(
    ("level", "task", "steps", "measured"),
    [
        ("L0", "tensor", 2, 1201e6),
        ("L1", "tensor", 1, 2.8e9),
        ("mix", "tensor", 1, 3.63e9),
        ("L2", "tensor", 1, 2.81e9),
        ("L0", "statistics", 2, 2.1e6),
        ("L1", "statistics", 1, 6.1e6),
    ],
)
def test_the_estimate_is_near_what_was_written(level, task, steps, measured):
    """By these very dumps of the mini; in another size `test_compare_faults` looks."""
    assert bytes_of_dump(load_recipe(MINI), level, task, steps) == pytest.approx(measured, rel=0.15)


@pytest.mark.parametrize(
    "recipe", ["telechat3_36b/pretrain_8k", "telechat3_105b/pretrain_4k", "pangu_ultra_moe_718b/pretrain_4k"]
)
def test_every_kind_of_model_has_an_estimate(recipe):
    loaded = load_recipe(f"recipes/{recipe}.yaml")
    values, texts = (bytes_of_dump(loaded, "L0", task, 1) for task in ("tensor", "statistics"))
    assert values > 100 * texts > 1e8


def test_the_line_says_how_much_and_how_that_is_known():
    recipe = load_recipe(MINI)
    line = text(recipe, "L0", "tensor", 2, bytes_of_dump(recipe, "L0", "tensor", 2))
    assert "about 1.2 GB" in line and "1,024 tokens per worker" in line and "estimated from the model's sizes" in line
    assert "cannot be told" in text(recipe, "L0", "tensor", 2, None)


def test_a_dump_that_finds_no_room_is_refused_before_it_starts(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=preflight.MIN_FREE + 10**9))
    accuracy_dump.check_room(tmp_path / "new" / "dump", 10**9, "tensor")
    with pytest.raises(ClusterError, match=r"2\.1 GB free, .* wants about 1\.2 GB besides 1\.1 GB .*--task statistics"):
        accuracy_dump.check_room(tmp_path / "new" / "dump", 12 * 10**8, "tensor")


@pytest.mark.parametrize("new", [True, False])
def test_an_interrupted_dump_leaves_nothing(tmp_path, monkeypatch, capsys, new):
    out = tmp_path / "dump"
    if not new:
        out.mkdir()
    recipe = load_recipe(MINI)
    monkeypatch.setattr(accuracy_dump, "effective_recipe", lambda *settings: recipe)
    for check in ("check_machine", "check_sound", "check_data", "check_disk"):
        monkeypatch.setattr(preflight, check, lambda *settings: None)

    def killed(recipe, out, job):
        (out / "step0" / "rank0").mkdir(parents=True)
        (out / "step0" / "rank0" / "dump.json").touch()
        return accuracy_dump.Outcome(130)

    monkeypatch.setattr(accuracy_dump, "_supervised", killed)
    job = accuracy_dump.Job(MINI, str(out), False, 2, "L0", "statistics", [])
    assert accuracy_dump.run(job) == 130
    assert out.exists() != new and not (out.exists() and any(out.iterdir()))
    assert "was removed" in capsys.readouterr().err
