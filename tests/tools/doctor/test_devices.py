"""The checks of NPUs on what real tools printed, by generation of driver; SOURCES.md beside the outputs says whose."""

from __future__ import annotations

import pytest

from tests.tools.process.roots import OUTPUTS, write
from tools.doctor.checks import CHECKS, Patient
from tools.doctor.devices import ascend_versions
from tools.doctor.report import gather
from tools.process.host import Root

SMI = "outputs/npu-smi_info.txt"
ASCEND = "usr/local/Ascend"


def real(name):
    return (OUTPUTS / f"{name}.txt").read_text()


def look(check, folder, files):
    found = CHECKS[check].look(Patient(write(folder, files)))
    return found.verdict, found.seen


@pytest.mark.parametrize(
    ("name", "verdict", "seen"),
    [
        ("910B_22.0.4.1", "ok", "1 OK"),
        ("910A_23.0.rc1", "fail", "NPU 0 Warning, NPU 1 Warning"),
        ("310B4_23.0.0", "fail", "NPU 0 Alarm"),
        ("910B2C_23.0.2.1", "ok", "2 OK"),
        ("910B4_24.1.1", "ok", "2 OK"),
        ("A3_25.2.0", "ok", "4 OK"),
        ("A3_26.0.rc2", "ok", "2 OK"),
        ("A5_layout", "fail", "NPU 1 Alarm"),
    ],
)
def test_health_by_driver(tmp_path, name, verdict, seen):
    assert look("npu_health", tmp_path, {SMI: real(name)}) == (verdict, seen)


@pytest.mark.parametrize(
    ("name", "verdict", "seen"),
    [
        ("910A_23.0.rc1", "ok", "none"),
        ("910B2C_23.0.2.1", "warn", "python3.8 124528 on NPU 0"),
        ("A3_25.2.0", "warn", "python 990711 on NPU 1"),
        ("A5_layout", "warn", "python 1001 on NPU 0, python 1002 on NPU 0"),
        ("910B4_24.1.1", "unknown", "npu-smi shows no table of processes that tc3 can read"),
    ],
)
def test_processes_by_driver(tmp_path, name, verdict, seen):
    assert look("npu_processes", tmp_path, {SMI: real(name)}) == (verdict, seen)


def test_a_table_of_the_future_is_unknown(tmp_path):
    text = "npu-smi 31.0\nNPU 0: fine, thank you\n"
    verdict, seen = look("npu_health", tmp_path, {SMI: text})
    assert verdict == "unknown" and "npu-smi 31.0: tc3 cannot read the form of this table" in seen
    assert look("npu_processes", tmp_path, {SMI: text})[0] == "unknown"
    assert look("npu_clock", tmp_path, {SMI: text})[0] == "unknown"


def test_an_npu_that_npu_smi_does_not_show_is_not_taken_for_healthy(tmp_path):
    files = {SMI: real("910B4_24.1.1"), **{f"dev/davinci{number}": "" for number in range(3)}}
    verdict, seen = look("npu_health", tmp_path, files)
    assert verdict == "unknown" and seen.startswith("2 OK, of 3")


def test_the_clock_of_a_resting_910b1_and_of_a_910a(tmp_path):
    common = "outputs/npu-smi_info_-t_common_-i_{}.txt"
    resting = {SMI: real("910B2C_23.0.2.1"), common.format(1): real("common_910B1_23.0.rc2")}
    verdict, seen = look("npu_clock", tmp_path / "a", resting)
    assert verdict == "unknown" and "NPU 1 800 of 1800 MHz" in seen
    full = {SMI: real("910A_23.0.rc1"), common.format(0): real("common_910A")}
    assert look("npu_clock", tmp_path / "b", full) == ("ok", "NPU 0 1000 of 1000 MHz")


def test_links(tmp_path):
    up = {"dev/davinci0": "", "outputs/hccn_tool_-i_0_-link_-g.txt": real("link_up")}
    assert look("npu_links", tmp_path / "up", up) == ("ok", "1 of 1 UP")
    down = {**up, "outputs/hccn_tool_-i_0_-link_-g.txt": real("link_up").replace("UP", "DOWN")}
    assert look("npu_links", tmp_path / "down", down)[0] == "fail"


@pytest.mark.parametrize(
    ("driver", "firmware", "verdict"),
    [
        ("driver_24.1.rc2.2", "7.3.0.1.231", "fail"),
        ("driver_24.1.rc2.2", "7.2.99.9", "ok"),
        ("driver_24.1.rc3", "7.5.0.1.129", "ok"),
        ("driver_24.1.rc3", "8.0.0", "fail"),
        ("driver_25.3.rc1", "6.4.12.1.241", "ok"),
        ("driver_25.3.rc1", "7.7.0.1.231", "ok"),
        ("driver_25.3.rc1", "6.5.0", "fail"),
    ],
)
def test_a_driver_takes_its_firmware(tmp_path, driver, firmware, verdict):
    files = {
        f"{ASCEND}/driver/version.info": real(driver),
        f"{ASCEND}/firmware/version.info": f"Version={firmware}\n",
        f"{ASCEND}/cann/aarch64-linux/ascend_toolkit_install.info": "package_name=Ascend-cann-toolkit\nversion=8.5.0\n",
    }
    found, seen = look("ascend_software", tmp_path, files)
    assert found == verdict and f"firmware {firmware}" in seen and "CANN 8.5.0" in seen


def test_ranges_of_another_form_say_nothing(tmp_path):
    text = real("driver_24.1.rc3").replace("[7.0.0,7.5.99]", "7.x")
    files = {f"{ASCEND}/driver/version.info": text, f"{ASCEND}/firmware/version.info": "Version=9.9.9\n"}
    assert look("ascend_software", tmp_path, files) == ("unknown", "driver 24.1.rc3, firmware 9.9.9, no CANN seen")


def test_facts_of_a_recorded_host(tmp_path):
    files = {
        SMI: real("A3_25.2.0"),
        f"{ASCEND}/driver/version.info": real("driver_25.3.rc1"),
        "sys/class/net/eth0/mtu": "9000\n",
        "sys/class/net/eth0/device/vendor": "0x19e5\n",
        "sys/class/net/lo/mtu": "65536\n",
        "proc/sys/kernel/osrelease": "5.10.0\n",
    }
    facts = gather(Patient(write(tmp_path, files)))
    assert facts["NPUs"] == "4 x Ascend910" and facts["driver"] == "25.3.rc1" and facts["packet size of eth0"] == "9000"
    assert facts["kernel"] == "5.10.0" and facts["mindspore"] is None and facts["CANN"] is None
    assert "packet size of lo" not in facts and ascend_versions(Root(tmp_path))["firmware"] is None
