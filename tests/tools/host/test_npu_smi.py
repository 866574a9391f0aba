"""Outputs of real tools, by drivers 22.0 to 26.0; SOURCES.md beside them says whose."""

from __future__ import annotations

import pytest

from tests.tools.host.roots import OUTPUTS
from tools.host import npu_smi

# file -> (version, (device, card, name, health, bus) of each chip, processes or None where no table is shown)
TABLES = {
    "910B_22.0.4.1": ("22.0.4.1", [(0, 0, "910B", "OK", "0000:81:00.0")], None),
    "910A_23.0.rc1": (
        "23.0.rc1.b070",
        [(0, 0, "910A", "Warning", "0000:c1:00.0"), (1, 1, "910A", "Warning", "0000:81:00.0")],
        [],
    ),
    "310B4_23.0.0": ("23.0.0", [(0, 0, "310B4", "Alarm", "")], None),
    "910B2C_23.0.2.1": (
        "23.0.2.1",
        [(0, 0, "910B2C", "OK", "0000:5a:00.0"), (1, 1, "910B2C", "OK", "0000:19:00.0")],
        [(0, 124528, "python3.8")],
    ),
    "910B4_24.1.1": (
        "24.1.1",
        [(0, 0, "910B4", "OK", "0000:c1:00.0"), (1, 1, "910B4", "OK", "0000:c2:00.0")],
        None,
    ),
    "A3_25.2.0": (
        "25.2.0",
        [
            (0, 0, "Ascend910", "OK", "0000:9c:00.0"),
            (1, 0, "Ascend910", "OK", "0000:9e:00.0"),
            (2, 1, "Ascend910", "OK", "0000:37:00.0"),
            (3, 1, "Ascend910", "OK", "0000:39:00.0"),
        ],
        [(1, 990711, "python")],
    ),
    "910B3_25.2.3": ("25.2.3", [(0, 3, "910B3", "OK", "0000:82:00.0")], []),
    "A3_26.0.rc2": (
        "26.0.rc2",
        [(0, 0, "Ascend910", "OK", "0000:9d:00.0"), (1, 0, "Ascend910", "OK", "0000:9f:00.0")],
        None,
    ),
    "A5_layout": (
        "99.0.rc1.b1",
        [(0, 0, "Ascend950DT", "OK", ""), (1, 3, "Ascend950DT", "Alarm", "")],
        [(0, 1001, "python"), (0, 1002, "python")],
    ),
}


def read(name):
    return (OUTPUTS / f"{name}.txt").read_text()


@pytest.mark.parametrize("name", TABLES)
def test_a_table_of_devices_and_processes(name):
    version, chips, processes = TABLES[name]
    text = read(name)
    assert npu_smi.version(text) == version
    assert npu_smi.chips(text) == [npu_smi.Chip(*chip) for chip in chips]
    assert npu_smi.processes(text) == processes


@pytest.mark.parametrize("name", TABLES)
def test_a_table_that_was_cut_off_names_no_device_twice_or_wrongly(name):
    text = read(name)
    whole = npu_smi.chips(text)
    for end in range(0, len(text), 37):
        found = npu_smi.chips(text[:end])
        assert [chip.card for chip in found] == [chip.card for chip in whole[: len(found)]]


@pytest.mark.parametrize(
    "text", ["", "dcmi model initialized failed, because the device is used. ret is -8020", "| a | b |"]
)
def test_no_table_at_all(text):
    assert npu_smi.chips(text) == [] and npu_smi.processes(text) is None and npu_smi.core_lists(text) == {}


def test_a_row_of_processes_in_another_form_is_not_taken_for_none():
    text = read("A3_25.2.0").replace("| 1       1                 | 990711 ", "| card 1  chip 1            | 990711 ")
    assert npu_smi.processes(text) is None


def test_cores_near_each_npu():
    nodes = ["144-167", "0-23", "144-167", "0-23", "96-119", "48-71", "96-119", "48-71"]
    assert npu_smi.core_lists(read("topo_910B1_23.0.rc2")) == dict(enumerate(nodes))
    assert npu_smi.core_lists(read("topo_four")) == {0: "144-167", 1: "96-119", 2: "48-71", 3: "0-23"}
    assert npu_smi.core_lists(read("topo_unsupported")) == {}


def test_every_output_has_its_source():
    named = (OUTPUTS / "SOURCES.md").read_text()
    assert [path.name for path in OUTPUTS.glob("*.txt") if f"`{path.name}`" not in named] == []
