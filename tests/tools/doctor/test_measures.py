"""What a worker measures, and what is taken out of it."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading

import pytest

from plugins import processor_time
from tests.tools.process.roots import write
from tools.doctor import measures, probe_worker
from tools.doctor.probe import ROOT
from tools.doctor.probe_worker import processor


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
    sum(range(3_000_000))
    assert probe_worker.scheduled()[0] > before


def test_a_link_to_oneself():
    listener = probe_worker.listen("127.0.0.1")
    with listener:
        server = threading.Thread(target=probe_worker.serve, args=(listener,))
        server.start()
        bandwidth, latency = probe_worker.measure("127.0.0.1", listener.getsockname()[1], 0.01)
        server.join(10)
    assert not server.is_alive() and bandwidth > 0.001 and 0 < latency < 1e6


def test_a_connection_that_was_given_up_before_is_passed_over():
    listener = probe_worker.listen("127.0.0.1")
    with listener:
        socket.create_connection(listener.getsockname()).close()
        server = threading.Thread(target=probe_worker.serve, args=(listener,))
        server.start()
        assert probe_worker.measure("127.0.0.1", listener.getsockname()[1], 0.01)[0] > 0
        server.join(10)
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
        server.join(10)


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
