"""Every check on recorded hosts: once failing, once mended, and unknown where nothing can be read."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tools.doctor.recorded import NEW, OLD
from tests.tools.process.roots import OUTPUTS, PAIRS, cpuset_files, numa_files, topology, write
from tools.doctor.checks import CHECKS, Patient, examine
from tools.doctor.cli import MODULES
from tools.process.host import Root
from tools.recipe.load import load_recipe
from tools.recipe.view import View

ROOT = Path(__file__).resolve().parents[3]
LARGE, MINI = (ROOT / "recipes" / name for name in ("telechat3_438b/pretrain_4k.yaml", "mini/pretrain_dp2.yaml"))
CPU = "sys/devices/system/cpu"
LIMITS = "Limit                     Soft Limit           Hard Limit           Units     \n"
SMI, COMMON = "outputs/npu-smi_info.txt", "outputs/npu-smi_info_-t_common_-i_5.txt"


def tcp(*ports):
    """/proc/net/tcp with somebody listening on these ports."""
    rows = [f"{i}: 0100007F:{port:04X} 00000000:0000 0A 0:0 00:0 0 0 0 1" for i, port in enumerate(ports)]
    return "\n".join(["  sl  local_address rem_address   st", *rows]) + "\n"


def df(mount, total, free):
    """`df -kP`, sizes in GiB."""
    head = "Filesystem     1024-blocks      Used Available Capacity Mounted on\n"
    return head + f"/dev/sda {total << 20} 1 {free << 20} 1% {mount}\n"


def davinci(count):
    return {f"dev/davinci{number}": "" for number in range(count)}


def card(number, size):
    return {f"sys/class/net/eth{number}/mtu": f"{size}\n", f"sys/class/net/eth{number}/device/vendor": "0x19e5\n"}


def hostname(address):
    return {"proc/sys/kernel/hostname": "node7\n", "etc/hosts": f"127.0.0.1 localhost\n{address} node7  # this one\n"}


PORTS = "proc/sys/net/ipv4/ip_local_port_range"
GETENT = "outputs/getent_{}_node7.txt"
CHRONY = "outputs/chronyc_-n_tracking.txt"
NTP = "outputs/timedatectl_show_-p_NTPSynchronized.txt"
BALANCE = {"proc/812/comm": "irqbalance\n"}
# lines of `npu-smi info -t common` as public guides print them
CLOCKS = """\
        Aicore Usage Rate(%)           : 90
        Aicore Freq(MHZ)               : 1800
        Aicore curFreq(MHZ)            : {}
"""
ASCEND = {
    "usr/local/Ascend/driver/version.info": "Version=25.5.2\n",
    "usr/local/Ascend/ascend-toolkit/latest/aarch64-linux/ascend_toolkit_install.info": "version=8.5.0\n",
}
DRIVER, FIRMWARE = next(iter(ASCEND)), "usr/local/Ascend/firmware/version.info"


def output(name):
    """Return what a real tool printed; SOURCES.md beside the file says whose tool."""
    return (OUTPUTS / f"{name}.txt").read_text()


def memory(gib):
    return {"proc/meminfo": f"MemTotal: 1 kB\nMemAvailable:   {gib << 20} kB\n"}


# an Atlas 800T A2, and one interrupt of its network card
BOARD = {**numa_files(8), **cpuset_files("0-191"), "outputs/npu-smi_info_-t_topo.txt": topology(PAIRS)}


def interrupt(core):
    return {"proc/irq/30/hns3-0000:7d:00.0-TxRx-0/x": "", "proc/irq/30/smp_affinity_list": f"{core}\n"}


def banned(words):
    return {"etc/sysconfig/irqbalance": f"IRQBALANCE_BANNED_CPU{words}\n"}


# check -> (verdict, files of a host that it finds wrong, files of the host mended)
CASES = {
    "governor": (
        "fail",
        {f"{CPU}/cpu0/cpufreq/scaling_governor": "powersave\n"},
        {f"{CPU}/cpu0/cpufreq/scaling_governor": "performance\n"},
    ),
    "idle_states": (
        "warn",
        {f"{CPU}/cpu0/cpuidle/state1/disable": "0\n", f"{CPU}/cpu0/cpuidle/state1/latency": "200\n"},
        {f"{CPU}/cpu0/cpuidle/state1/disable": "1\n", f"{CPU}/cpu0/cpuidle/state1/latency": "200\n"},
    ),
    "iommu": ("warn", {"sys/kernel/iommu_groups/0/type": "DMA-FQ\n"}, {"sys/kernel/iommu_groups/0/type": "identity\n"}),
    "numa_balancing": ("warn", {"proc/sys/kernel/numa_balancing": "1\n"}, {"proc/sys/kernel/numa_balancing": "0\n"}),
    "huge_pages": (
        "warn",
        {"sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]\n"},
        {"sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n"},
    ),
    "irqbalance": ("warn", BALANCE, {**BOARD, **BALANCE, **banned("LIST=0-191")}),
    "binding": ("warn", cpuset_files("0-7", 2), cpuset_files("0-7")),
    "isolated": (
        "warn",
        {**cpuset_files("0-7"), "sys/devices/system/cpu/isolated": "4-7\n"},
        {**cpuset_files("0-7"), "sys/devices/system/cpu/isolated": "\n"},
    ),
    "cores": ("warn", cpuset_files("0-3"), cpuset_files("0-7")),
    "open_files": (
        "fail",
        {"proc/self/limits": LIMITS + "Max open files            1024                 1048576              files\n"},
        {"proc/self/limits": LIMITS + "Max open files            1048576              1048576              files\n"},
    ),
    "locked_memory": (
        "warn",
        {"proc/self/limits": LIMITS + "Max locked memory         65536                65536                bytes\n"},
        {"proc/self/limits": LIMITS + "Max locked memory         unlimited            unlimited            bytes\n"},
    ),
    "stack": (
        "warn",
        {"proc/self/limits": LIMITS + "Max stack size            1048576              unlimited            bytes\n"},
        {"proc/self/limits": LIMITS + "Max stack size            8388608              unlimited            bytes\n"},
    ),
    "shared_memory": (
        "fail",
        {"outputs/df_-kP.txt": "shm 65536 0 65536 0% /dev/shm\n"},
        {"outputs/df_-kP.txt": df("/dev/shm", 64, 64)},
    ),
    "swap": (
        "warn",
        {"proc/swaps": "Filename Type Size Used Priority\n/dev/sda2 partition 8388604 0 -2\n"},
        {"proc/swaps": "Filename Type Size Used Priority\n"},
    ),
    "clock": ("fail", {NTP: "NTPSynchronized=no\n"}, {NTP: "NTPSynchronized=yes\n"}),
    "disk": ("fail", {"outputs/df_-kP.txt": df("/", 100, 0)}, {"outputs/df_-kP.txt": df("/", 100, 50)}),
    "reserved_ports": (
        "warn",
        {PORTS: "32768\t60999\n"},
        {PORTS: "32768\t60999\n", "proc/sys/net/ipv4/ip_local_reserved_ports": "60000-60031\n"},
    ),
    "free_ports": ("fail", {"proc/net/tcp": tcp(22, 60003)}, {"proc/net/tcp": tcp(22, 40000)}),
    "packet_size": ("warn", {**card(0, 1500), **card(1, 9000)}, {**card(0, 9000), **card(1, 9000)}),
    "host_name": ("warn", hostname("127.0.1.1"), hostname("10.0.0.7")),
    "npus": ("fail", davinci(4), davinci(8)),
    "npu_health": ("fail", {SMI: NEW.replace("| OK   ", "| Alarm")}, {SMI: NEW}),
    "npu_processes": ("warn", {SMI: OLD}, {SMI: NEW}),
    "npu_clock": ("warn", {SMI: NEW, COMMON: CLOCKS.format(800)}, {SMI: NEW, COMMON: CLOCKS.format(1800)}),
    "npu_links": (
        "fail",
        {"dev/davinci0": "", "outputs/hccn_tool_-i_0_-link_-g.txt": "link status: DOWN\n"},
        {"dev/davinci0": "", "outputs/hccn_tool_-i_0_-link_-g.txt": "link status: UP\n"},
    ),
    "ascend_software": (
        "fail",
        {**ASCEND, DRIVER: output("driver_24.1.rc2.2"), FIRMWARE: "Version=7.3.0.1.231\n"},  # a pair seen in public
        {**ASCEND, DRIVER: output("driver_24.1.rc3"), FIRMWARE: output("firmware_7.5.0.1.129")},
    ),
    "memory": ("fail", memory(1), memory(8)),
    "interrupts": ("warn", {**BOARD, **interrupt(150)}, {**BOARD, **interrupt(144)}),
    "checkpoint_room": (
        "fail",
        {"outputs/df_-kP.txt": df("/", 9000, 1000)},
        {"outputs/df_-kP.txt": df("/", 9000, 8000)},
    ),
}
OF_A_MINI = {"memory"}  # of workers that drive NPUs it is not known how much they need
ELSEWHERE = {"disk_write", "python_packages"}  # a recorded host does not say: tested in test_host.py


@pytest.fixture(autouse=True)
def _default_ports(monkeypatch):
    monkeypatch.delenv("HCCL_IF_BASE_PORT", raising=False)


@pytest.fixture(scope="module")
def large():
    return View(load_recipe(LARGE))


def test_every_check_has_its_case():
    assert CHECKS.keys() == CASES.keys() | ELSEWHERE


@pytest.mark.parametrize("name", CASES)
def test_a_check_fails_and_is_mended(name, tmp_path, large):
    verdict, wrong, mended = CASES[name]
    recipe = View(load_recipe(MINI)) if name in OF_A_MINI else large
    found = CHECKS[name].look(Patient(write(tmp_path / "wrong", wrong), recipe))
    assert found.verdict == verdict, found.seen
    found = CHECKS[name].look(Patient(write(tmp_path / "mended", mended), recipe))
    assert found.verdict == "ok", found.seen


def test_an_empty_host_is_fit_in_nothing_that_must_be_read(tmp_path, large):
    """Nothing to read is no good news."""
    found = {item.check: item.verdict for item in examine(Patient(Root(tmp_path), large), MODULES)}
    assert not {name for name, verdict in found.items() if verdict == "ok"}
    assert {name for name, verdict in found.items() if verdict == "fail"} == {"npus"}


@pytest.mark.parametrize(
    ("name", "files", "verdict"),
    [
        ("irqbalance", {"proc/1/comm": "sh\n"}, "unknown"),  # a container sees only its own processes
        ("irqbalance", {"proc/1/comm": "systemd\n", "proc/2/comm": "kthreadd\n"}, "ok"),
        ("numa_balancing", {"proc/sys/kernel/osrelease": "5.10.0\n"}, "ok"),
        ("interrupts", {**BOARD, "proc/irq/30/hns3-0000:7d:00.0-TxRx-0/x": ""}, "unknown"),
    ],
)
def test_what_a_host_hides_is_not_absent(name, files, verdict, tmp_path, large):
    (found,) = (one for one in examine(Patient(write(tmp_path, files), large), MODULES) if one.check == name)
    assert found.verdict == verdict, found.seen


GOVERNOR, IDLE = f"{CPU}/cpu0/cpufreq/scaling_governor", f"{CPU}/cpu7/cpuidle/state1"
TRACKING = """\
Reference ID    : {}
System time     : {} seconds slow of NTP time
Root delay      : 0.0004 seconds
Root dispersion : {} seconds
Leap status     : Normal
"""


@pytest.mark.parametrize(
    ("name", "files", "verdict"),
    [
        ("governor", {GOVERNOR: "performance", GOVERNOR.replace("cpu0", "cpu1"): ""}, "unknown"),
        ("idle_states", {f"{IDLE}/latency": "200"}, "unknown"),
        ("idle_states", {f"{IDLE}/disable": "0"}, "unknown"),
        ("idle_states", {f"{CPU}/cpu0/cpuidle/state1/disable": "1", f"{IDLE}/disable": "0", f"{IDLE}/latency": "200"},
         "warn"),
        ("iommu", {"sys/kernel/iommu_groups/0/type": "", "sys/kernel/iommu_groups/1/type": "identity"}, "unknown"),
        ("irqbalance", {**BOARD, **BALANCE, **banned("LIST=0-3")}, "warn"),
        ("irqbalance", {**BOARD, **BALANCE, **banned("LIST=''")}, "warn"),
        ("irqbalance", {**BOARD, **BALANCE, **banned("S=00000000,00000000")}, "warn"),
        ("irqbalance", {**BOARD, **BALANCE, **banned(f"S={','.join(6 * ['ffffffff'])}")}, "ok"),
        ("irqbalance", {**BALANCE, **banned("LIST=0-191")}, "unknown"),  # the workers' cores are not known
        ("interrupts", {**numa_files(1, 4, 1), **cpuset_files("0-3"), **interrupt(0)}, "unknown"),
        ("free_ports", {"proc/net/tcp6": tcp(22)}, "unknown"),
        ("free_ports", {"proc/net/tcp": tcp(22) + "\n   1:\n"}, "unknown"),
        ("swap", {"proc/swaps": "Filename Type\n\n/dev/sda2 partition\n"}, "unknown"),
        ("packet_size", card(0, ""), "unknown"),
        ("packet_size", {**card(0, 9000), **card(1, "")}, "unknown"),
        ("host_name", hostname("fe80::1"), "warn"),
        ("host_name", hostname("2001:db8::7"), "ok"),
        ("host_name", {**hostname(""), GETENT.format("hosts"): "fe80::7 node7"}, "warn"),
        ("host_name", {**hostname(""), GETENT.format("hosts"): "fe80::7 node7", GETENT.format("ahostsv4"): "10.1.2.3"},
         "ok"),
        ("disk", {"outputs/df_-kP.txt": df("/", 9000, 8000) + f"//nas/my share 9 9 0 100% {ROOT}\n"}, "fail"),
        ("disk", {"outputs/df_-kP.txt": df("/", 9000, 8000) + f"fuse - - - - {ROOT}\n"}, "unknown"),
        ("disk", {"outputs/df_-kP.txt": df("/", 9000, 8000) + f"/dev/sdb 9 11 -2 100% {ROOT}\n"}, "fail"),
        ("clock", {CHRONY: TRACKING.format("7F7F0101 ()", "0.000000000", "0.000000000")}, "warn"),
        ("clock", {CHRONY: TRACKING.format("C0A80101 (ntp)", "0.000100000", "3.500000000")}, "unknown"),
        ("clock", {CHRONY: TRACKING.format("C0A80101 (ntp)", "0.000100000", "0.000300000")}, "ok"),
    ],
)  # fmt: skip
def test_what_a_check_could_not_read_is_not_ok(name, files, verdict, tmp_path):
    recipe = load_recipe(LARGE)
    recipe["checkpoint"] = {**recipe["checkpoint"], "save_path": str(ROOT / "output")}
    (found,) = (one for one in examine(Patient(write(tmp_path, files), View(recipe)), MODULES) if one.check == name)
    assert found.verdict == verdict, found.seen


def test_a_file_in_an_unknown_form_is_unknown(tmp_path, large):
    root = write(tmp_path, {PORTS: "many\n"})
    item = next(item for item in examine(Patient(root, large), MODULES) if item.check == "reserved_ports")
    assert item.verdict == "unknown" and "could not be read" in item.seen


def test_a_recipe_on_cpu_wants_no_npu(tmp_path):
    found = {item.check for item in examine(Patient(Root(tmp_path), View(load_recipe(MINI))), MODULES)}
    assert "npus" not in found and "reserved_ports" not in found and "memory" in found


def test_every_check_says_why_by_which_source_and_what_mends_it():
    assert all(item.why and item.source and item.mend and item.look.__doc__ for item in CHECKS.values())


def test_the_ports_that_hccl_was_told(tmp_path, monkeypatch, large):
    monkeypatch.setenv("HCCL_IF_BASE_PORT", "20000")
    assert CHECKS["reserved_ports"].look(Patient(write(tmp_path, {PORTS: "32768 60999"}), large)).verdict == "ok"


def test_chrony_tells_the_skew(tmp_path):
    line = "System time     : {} seconds slow of NTP time\n"
    for skew, verdict in (("0.000012", "ok"), ("1.5", "fail")):
        root = write(tmp_path / skew, {"outputs/chronyc_-n_tracking.txt": line.format(skew)})
        assert CHECKS["clock"].look(Patient(root)).verdict == verdict


def test_chrony_without_a_server_has_an_offset_of_zero(tmp_path):
    text = "System time     : 0.000000000 seconds fast of NTP time\nLeap status     : {}\n"
    for status, verdict in (("Normal", "ok"), ("Not synchronised", "fail")):
        root = write(tmp_path / verdict, {"outputs/chronyc_-n_tracking.txt": text.format(status)})
        assert CHECKS["clock"].look(Patient(root)).verdict == verdict


def test_the_clocks_of_all_chips_of_a_card(tmp_path, large):
    """Cards of Atlas A3 have two chips, whose rows follow each other."""
    table = (OUTPUTS / "A3_25.2.0.txt").read_text("utf-8")
    both = "".join(f"        Chip ID                        : {chip}\n{CLOCKS}" for chip in (0, 1))
    for slow, fast in ((800, 1800), (1800, 800)):
        files = {f"outputs/npu-smi_info_-t_common_-i_{card}.txt": both.format(slow, fast) for card in (0, 1)}
        found = CHECKS["npu_clock"].look(Patient(write(tmp_path, {SMI: table, **files}), large))
        chip = 0 if slow == 800 else 1
        assert found.verdict == "warn" and f"NPU 0 chip {chip} 800 of 1800 MHz" in found.seen


def test_frozen_weights_have_no_moments_in_a_checkpoint(tmp_path):
    """The 36B has 36.2e9 parameters: 405 GiB with their moments, 135 without; the adapters have some 14 million."""
    recipe = load_recipe(ROOT / "recipes/telechat3_36b/finetune_8k_lora.yaml")
    found = CHECKS["checkpoint_room"].look(
        Patient(write(tmp_path, {"outputs/df_-kP.txt": df("/", 900, 200)}), View(recipe))
    )
    assert found.verdict == "ok" and found.seen.startswith("135.")
    recipe["plugins"] = {}
    whole = CHECKS["checkpoint_room"].look(Patient(Root(tmp_path), View(recipe)))
    assert whole.verdict == "fail" and whole.seen.startswith("405.0 GiB each")


def test_the_disk_is_that_on_which_checkpoints_are_saved(tmp_path, monkeypatch):
    """That of `checkpoint.save_path`, and behind symbolic links."""
    (tmp_path / "large").mkdir()
    (tmp_path / "output").symlink_to(tmp_path / "large")
    recipe = load_recipe(MINI)
    recipe["output_dir"] = str(tmp_path / "output/run")
    assert Patient(Root(), View(recipe)).folder == tmp_path / "large/run"
    recipe["checkpoint"] = {**recipe["checkpoint"], "save_path": str(tmp_path / "saves")}
    assert Patient(Root(), View(recipe)).folder == tmp_path / "saves"


def test_a_low_clock_without_work_says_nothing(tmp_path, large):
    """800 of 1800 MHz is what a healthy 910B3 shows at rest."""
    resting = CLOCKS.format(800).replace(": 90", ": 0")
    found = CHECKS["npu_clock"].look(Patient(write(tmp_path, {SMI: NEW, COMMON: resting}), large))
    assert found.verdict == "unknown" and "check again during a run" in found.seen


def test_the_clock_of_an_npu_that_tells_none_is_unknown(tmp_path, large):
    """Seven NPUs that told nothing were ok beside one at its rated clock."""
    files = {SMI: NEW, COMMON: CLOCKS.format(1800), **davinci(8)}
    found = CHECKS["npu_clock"].look(Patient(write(tmp_path, files), large))
    assert found.verdict == "unknown" and found.seen.startswith("only 1 of 8 NPUs tell")
    assert CHECKS["npu_clock"].look(Patient(write(tmp_path, {COMMON: CLOCKS.format(800)}), large)).verdict == "warn"


@pytest.mark.parametrize(
    "files",
    [
        {DRIVER: output("driver_24.1.rc3")},
        {FIRMWARE: "Version=7.3.0.1.231\n"},
        {DRIVER: "Version=25.5.2\ncompatible_version_fw=7.5.0+\n", FIRMWARE: "Version=1.3.0.1.231\n"},
        {DRIVER: "Version=25.5.2\ncompatible_version_fw=[7.1.0,7.3.9],[7.5.0,]\n", FIRMWARE: "Version=7.6.0.1\n"},
        {DRIVER: "Version=25.5.2\ncompatible_version_fw=[7.1.0,7.9.9]\n", FIRMWARE: "Version=7.8\n"},
        {DRIVER: "Version=25.5.2\ncompatible_version_fw=[7.1.0,7.9.9]\n", FIRMWARE: "Version=unknown\n"},
    ],
)
def test_a_firmware_that_was_not_compared_with_the_driver_is_unknown(tmp_path, large, files):
    """A host without a readable firmware version, or with ranges of another form, was ok."""
    found = CHECKS["ascend_software"].look(Patient(write(tmp_path, {**ASCEND, **files}), large))
    assert found.verdict == "unknown" and "it is unknown whether" in found.seen


def test_a_port_in_use_is_fatal_where_npus_are_wanted(tmp_path, large):
    root = write(tmp_path, {"proc/net/tcp": tcp(8118)})
    assert CHECKS["free_ports"].look(Patient(root, large)).verdict == "warn", (
        "tc3 train takes another for the scheduler"
    )
    write(tmp_path, {"proc/net/tcp": tcp(60003)})
    assert CHECKS["free_ports"].look(Patient(root, large)).verdict == "fail"
    assert CHECKS["free_ports"].look(Patient(root)).verdict == "ok", "no recipe and no NPU"
    write(tmp_path, davinci(8))
    assert CHECKS["free_ports"].look(Patient(root)).verdict == "fail"


def test_a_link_that_does_not_answer_is_unknown(tmp_path, large):
    answers = {"dev/davinci0": "", "dev/davinci1": "", "outputs/hccn_tool_-i_0_-link_-g.txt": "link status: UP\n"}
    found = CHECKS["npu_links"].look(Patient(write(tmp_path, answers), large))
    assert (found.verdict, found.seen) == ("unknown", "1 of 2 UP")


def test_only_interrupts_of_devices_count(tmp_path, large):
    files = {**BOARD, **interrupt(144), "proc/irq/31/i2c/x": "", "proc/irq/31/smp_affinity_list": "151"}
    found = CHECKS["interrupts"].look(Patient(write(tmp_path, files), large))
    assert (found.verdict, found.seen) == ("ok", "1 interrupts of devices, of which on workers' cores: none")
    write(tmp_path, {"proc/irq/30/effective_affinity_list": "150"})
    assert CHECKS["interrupts"].look(Patient(Root(tmp_path), large)).seen.endswith("150")


@pytest.mark.parametrize(("core", "verdict"), [(150, "warn"), (144, "unknown")])
@pytest.mark.parametrize("hidden", [29, 31])
def test_an_interrupt_without_readable_cores_hides_no_other(tmp_path, large, hidden, core, verdict):
    files = {**BOARD, **interrupt(core), f"proc/irq/{hidden}/hns3-0000:7d:00.0-TxRx-0/x": ""}
    (found,) = (one for one in examine(Patient(write(tmp_path, files), large), MODULES) if one.check == "interrupts")
    assert found.verdict == verdict, found.seen


def test_without_a_recipe_nobody_wants_npus(tmp_path):
    assert CHECKS["npus"].look(Patient(Root(tmp_path))).verdict == "unknown"
    assert CHECKS["npus"].look(Patient(write(tmp_path, davinci(1)))).verdict == "ok"
