"""These tests check what a worker measures, and what is subtracted from the measurement.

The checks of NPUs on what real tools printed, by generation of driver; SOURCES.md beside the outputs says whose.
"""

from __future__ import annotations

import itertools
import socket
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from plugins import processor_time
from tests.tools.process.roots import OUTPUTS, write
from tools.doctor import measures, probe_worker
from tools.doctor.checks import CHECKS, Patient
from tools.doctor.devices import ascend_versions
from tools.doctor.probe import ROOT
from tools.doctor.probe_worker import processor
from tools.doctor.report import gather
from tools.process.host import Root


def test_time_of_others_is_taken_out_of_the_rate_and_a_limit_is_not(monkeypatch):
    """A second of work: a quarter of it others had the core, a quarter a limit stopped us, both being waiting."""
    now = {"wall": 0.0}
    monkeypatch.setattr(probe_worker.time, "perf_counter", lambda: now["wall"])
    monkeypatch.setattr(probe_worker, "scheduled", lambda: (0.5 * now["wall"], 0.5 * now["wall"]))
    monkeypatch.setattr(probe_worker, "throttled", lambda read: 0.25 * now["wall"])

    def work():
        now["wall"] += 0.25
        return 10.0

    assert probe_worker.timed(work, 1.0) == pytest.approx((40 / 0.75, 0.25, 0.25))


def test_a_thread_that_waits_for_a_device_is_not_ready(monkeypatch):
    """Of a second the host's thread ran a hundredth and waited as long for its core: that is 1 %, not half."""
    now = {"wall": 0.0}
    monkeypatch.setattr(probe_worker.time, "perf_counter", lambda: now["wall"])
    monkeypatch.setattr(probe_worker, "scheduled", lambda: (0.01 * now["wall"], 0.01 * now["wall"]))
    monkeypatch.setattr(probe_worker, "throttled", lambda read: 0.0)

    def work():
        now["wall"] += 0.5
        return 1.0

    assert probe_worker.timed(work, 1.0).waited == pytest.approx(0.01)


def test_the_share_of_waiting_beside_a_result(monkeypatch):
    now = {"wall": 0.0}
    monkeypatch.setattr(probe_worker.time, "perf_counter", lambda: now["wall"])
    monkeypatch.setattr(probe_worker, "scheduled", lambda: (0.0, 0.25 * now["wall"]))
    assert probe_worker.waiting(lambda: now.update(wall=2.0) or "done") == ("done", 0.25)


@pytest.mark.parametrize(
    ("files", "seconds"),
    [
        (
            {
                "proc/self/cgroup": "5:cpu,cpuacct:/pod/box\n",
                "sys/fs/cgroup/cpu/pod/box/cpu.stat": "nr_periods 15\nnr_throttled 14\nthrottled_time 1500000000\n",
                "sys/fs/cgroup/cpu/pod/cpu.stat": "nr_periods 15\nnr_throttled 14\nthrottled_time 250000000\n",
            },
            1.75,
        ),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.stat": "usage_usec 9\nthrottled_usec 2500000\n"}, 2.5),
        ({"proc/self/cgroup": "0::/\n"}, 0.0),
        ({}, 0.0),
    ],
)
def test_a_limit_is_read_from_both_versions_of_control_groups(tmp_path, files, seconds):
    assert processor_time.throttled(write(tmp_path, files).read) == pytest.approx(seconds)


def test_the_kernel_counts_what_this_process_runs():
    before, _ = probe_worker.scheduled()
    while probe_worker.scheduled()[0] <= before:  # it counts by ticks, and would never end if it did not
        sum(range(1_000_000))


def test_a_link_to_oneself(monkeypatch):
    """Each message takes a millisecond of this clock."""
    now = itertools.count()
    monkeypatch.setattr(probe_worker, "time", SimpleNamespace(perf_counter=lambda: 1e-3 * next(now)))
    listener = probe_worker.listen("127.0.0.1")
    with listener:
        server = threading.Thread(target=probe_worker.serve, args=(listener,))
        server.start()
        bandwidth, latency = probe_worker.measure("127.0.0.1", listener.getsockname()[1], 0.01)
        server.join(300)
    assert not server.is_alive() and bandwidth == pytest.approx(2**20 / 1e6) and latency == pytest.approx(500)


def test_a_connection_that_was_given_up_before_is_passed_over():
    listener = probe_worker.listen("127.0.0.1")
    with listener:
        socket.create_connection(listener.getsockname()).close()
        server = threading.Thread(target=probe_worker.serve, args=(listener,))
        server.start()
        assert probe_worker.measure("127.0.0.1", listener.getsockname()[1], 0.01)[0] > 0
        server.join(300)
    assert not server.is_alive()


def test_a_link_whose_other_end_goes_is_an_error():
    listener = probe_worker.listen("127.0.0.1")
    with listener:

        def leave():
            listener.accept()[0].close()

        server = threading.Thread(target=leave)
        server.start()
        with pytest.raises(OSError):
            probe_worker.measure("127.0.0.1", listener.getsockname()[1], 0.01)
        server.join(300)


def test_products_copies_and_writes(tmp_path, monkeypatch):
    assert measures.cpu_matmul(1)() == pytest.approx(2e-9 * 768**3)
    assert measures.cpu_matmul(8)() == pytest.approx(2e-9 * 1536**3)
    monkeypatch.setattr(measures, "_COPY", 1 << 20)
    assert measures.memory_copy()() == pytest.approx(2e-9 * (1 << 20))
    assert measures.disk_write(str(tmp_path), 1 << 16) > 0 and not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_product_of_a_device_runs_through_mindspore():
    """On CPU: no NPU was there to run it on. In a process of its own: MindSpore takes a device only once in each."""
    code = (
        "from plugins.straggler_probe import watch; watch._PRODUCTS = 2; from tools.doctor import measures; "
        "print(measures.device_matmul('CPU', 64)())"
    )
    shown = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert float(shown.splitlines()[-1]) == pytest.approx(4e-9 * 64**3)


def test_the_processor_has_a_name():
    assert processor()


def test_a_rate_is_never_zero():
    """Also where others had the cores until the time was over."""
    assert probe_worker.timed(lambda: 2.0, seconds=0.0).rate > 0


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
    full = {SMI: real("910A_23.0.rc1"), **{common.format(card): real("common_910A") for card in range(8)}}
    verdict, seen = look("npu_clock", tmp_path / "b", full)
    assert verdict == "ok" and seen.startswith("NPU 0 1000 of 1000 MHz, NPU 1 1000 of")


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
    seen = "driver 24.1.rc3, firmware 9.9.9, no CANN seen: it is unknown whether the driver takes the firmware"
    assert look("ascend_software", tmp_path / "a", files) == ("unknown", seen)
    del files[f"{ASCEND}/firmware/version.info"]  # a container sees only the driver's folder
    verdict, seen = look("ascend_software", tmp_path / "b", files)
    assert verdict == "unknown" and seen.endswith("takes the firmware (in a container, run tc3 doctor on its host)")


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
