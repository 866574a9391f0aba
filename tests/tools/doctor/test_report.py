"""What a host says of a recipe and its data; of its hardware, tests/tools/doctor/test_devices.py."""

from __future__ import annotations

from pathlib import Path

from tools.doctor.checks import Patient
from tools.doctor.report import gather
from tools.process.host import Root
from tools.recipe.load import load_recipe
from tools.recipe.override import apply_overrides
from tools.recipe.view import View

MINI = Path(__file__).resolve().parents[3] / "recipes/mini/pretrain_dp2.yaml"


def facts(*overrides):
    return gather(Patient(Root(), View(apply_overrides(load_recipe(MINI), overrides))))


def test_a_recipe_on_cpu_wants_nothing_of_npus(tmp_path):
    assert not facts().keys() & {"driver", "firmware", "CANN", "NPUs"}
    assert gather(Patient(Root(tmp_path)))["driver"] is None


def test_another_value_is_another_recipe():
    """Also one that stands in the base; the same one twice is the same recipe."""
    assert facts()["recipe"] == facts()["recipe"] != facts("lr_schedule.learning_rate=0.125")["recipe"]


def test_data_by_size_and_content(tmp_path):
    prefix = tmp_path / "text"

    def data():
        return facts(f"train_dataset.data_loader.config.data_path.1={prefix}")[f"data {prefix}"]

    assert data() == "not there"
    Path(f"{prefix}.idx").write_bytes(b"index")
    Path(f"{prefix}.bin").write_bytes(bytes(1000))
    first = data()
    assert first.startswith(".idx 5 bytes, .bin 1,000 bytes, ") and data() == first
    Path(f"{prefix}.bin").write_bytes(bytes(999) + b"x")
    assert data().startswith(".idx 5 bytes, .bin 1,000 bytes, ") and data() != first
