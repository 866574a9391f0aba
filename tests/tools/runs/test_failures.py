"""Causes by the lines that logs hold; who began a failure, and who only fell with it."""

import os
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from plugins.errors import DataError
from tests.tools.runs.builders import Builder
from tools.runs import attempts, cli
from tools.runs.attempts import End, Verdict
from tools.runs.failures import UNKNOWN, diagnose, failures, signatures
from tools.runs.readings import load_run
from tools.runs.render import failure_line
from tools.runs.watch import Watch

ROOT = Path(__file__).parents[3]
# one line of each row: as printed by MindSpore 2.9.0, MindFormers or this repository, or as the row's source quotes it
LINES = {
    "not finite": "tc3: stopped: step 7: loss is NaN",
    "spike": "tc3: stopped: spike: loss 9.1 is 15 standard deviations above 5.2",
    "user error": "tc3: recipes/a.yaml:3: no such key",
    "disk full": "OSError: [Errno 28] No space left on device: '/disk/a.safetensors'",
    "disk": "OSError: [Errno 116] Stale file handle",
    "device memory": "RuntimeError: Memory not enough:Device(id:3) memory isn't enough and alloc failed",
    "host memory": "RuntimeError: std::bad_alloc",
    "HBM error": "[Hardware Error] error_type: 3, multi-bit ECC",
    "device lost": "tsd client wait response fail, device response code[1]. unknown device error.",
    "operator error": "there is an aivec error exception, core id is 15, error code = 0x800000",
    "RoCE retransmission": "Execution Error ROCE CQE(EI0013): An error CQE occurred during operator execution.",
    "HCCL peer gone": "Cluster Exception Location[IP/ID]:[90.90.92.240/1], ExceptionType:[Heartbeat Lost",
    "HCCL time-out": "EI0002: [PID: 7277] The wait execution of the Notify register times out.",
    "HCCL connection": "topo exchange server get socket timeout! timeout[120 s]",
    "port": "Configured scheduler port MS_SCHED_PORT is occupied by other processes.",
    "cluster not formed": "Topology build timed out.",
    "scheduler lost": "Failed to connect to the meta server. Maybe it has exited. Please check scheduler's log.",
    "node timed out": "[ERROR] ME(1:2,MainProcess): Time out nodes are ['3']",
    "collective failed": "RuntimeError: Launch kernel failed, name:Default/AllReduce-op62",
    "connection broken": "recv failed: Connection reset by peer",
    "data": "RuntimeError: Exception thrown from dataset pipeline. Refer to 'Dataset Pipeline Error Message'.",
    "crash": "Fatal Python error: Segmentation fault",
    "killed": "Out of memory: Killed process 4711 (python)",
    "worker failed": "Worker process 130673 exit with exception. Error code: -9.",
}


IMPORTS = [  # of every worker, whatever becomes of it
    "2026-11-23 22:32:44,894 - mindformers/run[mindformers/models/qwen3/modeling_qwen3.py:35] - WARNING - Import "
    "PyNativeDeepseekV3ForCausalLM failed: No module named 'hyper_parallel'",
    "/site-packages/x.py:12: UserWarning: loading failed, MemoryError is possible",
    "  warnings.warn(f'{error}: no space left on device')",
]


def test_warnings_are_nobodys_cause():
    """A worker that SIGKILL has ended could say nothing: what its imports warned of long before is no cause."""
    found = diagnose(
        [*IMPORTS, "2026 - mindformers/run[callback.py:747] - INFO - { step:[ 12/ 20], overflow cond: False }"]
    )
    assert (found.name, found.lines, found.telling) == (UNKNOWN, (), False)
    crashed = diagnose([*IMPORTS, "ValueError: 3 is odd", "-" * 52, "- C++ Call Stack: (For framework developers)"])
    assert crashed.lines[0] == "ValueError: 3 is odd"


@pytest.mark.parametrize(
    "words",
    [
        *attempts.TOLD,
        f"{attempts.SAVED}step 40: /disk/iteration_00000040",
        f"{attempts.ASKED} at step 40: not all ranks knew in time; training goes on",
    ],
)
def test_what_a_worker_says_that_was_told_to_save_or_end_is_no_error_of_the_user(words):
    assert diagnose([words]).name == UNKNOWN
    assert diagnose([words, LINES["disk full"]]).name == "disk full"


@pytest.mark.parametrize("name", [row.name for row in signatures()])
def test_every_row_has_a_line_that_it_alone_decides(name):
    found = diagnose(["[WARNING] something else", LINES[name], "Distributed job goes on"])
    assert found.name == name and found.lines == (LINES[name],)
    assert found.words and next(row for row in signatures() if row.name == name).source


def test_the_last_words_of_workers_stand_once():
    """What a worker says and what its readers look for would drift apart."""
    places = [*ROOT.glob("launch/**/*.py"), *ROOT.glob("tools/**/*.py"), *ROOT.glob("tools/**/*.yaml")]
    for words in (attempts.STOPPED, attempts.SAVED, attempts.ASKED):
        stand = [path.name for path in places if words.removeprefix("tc3: ").rstrip(": ") in _texts(path)]
        assert stand == ["attempts.py"], words


def _texts(path):
    """Return the words that follow `tc3: ` in each text or regular expression of a file."""
    return re.findall(r"""["'^]tc3: (?:\(\?!)?([\w ]+)""", path.read_text(encoding="utf-8"))


def test_names_are_told_once():
    assert len({row.name for row in signatures()}) == len(signatures())


def test_a_cause_of_its_own_goes_before_what_it_brings_about_whatever_the_order():
    lines = [LINES["HCCL time-out"], LINES["connection broken"], LINES["disk full"], LINES["worker failed"]]
    for each in (lines, lines[::-1]):
        assert (diagnose(each).name, diagnose(each).victim) == ("disk full", False)
    assert diagnose(lines[:2]).victim


def test_a_rank_that_lost_another_one_is_a_victim():
    for how in ("closed its connection", "is out of reach: [Errno 110] timed out"):
        found = diagnose([f"tc3 train: error: rank 0, AllReduce 3 of ranks 0, 1: float32 [4]: rank 1 {how}"])
        assert (found.name, found.victim) == ("connection broken", True)


def test_an_unknown_log_is_unknown_with_its_telling_lines():
    found = diagnose(["a", "Frobnication error 1", "b", "critical: 2", "", "Exception: 3", "failed 4", "bye"])
    assert (found.name, found.lines) == (UNKNOWN, ("critical: 2", "Exception: 3", "failed 4"))
    assert diagnose(["a", "", "b"]).lines == ("a", "b")
    assert diagnose([]).lines == () and "empty" in diagnose([]).words
    assert len(diagnose(["error " + "x" * 10_000]).lines[0]) == 300


def one_failure(tmp_path, **kill):
    builder = Builder(tmp_path / "run", 10)
    builder.plan()
    builder.train(7)
    builder.kill(**kill)
    return builder


def test_who_began_it_stands_apart_from_its_victims(tmp_path):
    one_failure(tmp_path, host=1, lines=(LINES["connection broken"], LINES["disk full"]))
    (found,) = failures(load_run(tmp_path / "run"))
    assert (found.host, found.rank, found.name, found.step) == ("node1", 1, "disk full", 7)
    assert found.victims == {"node0": "told to end"} and found.counts


def test_a_full_disk_that_the_cut_log_no_longer_names_is_known_from_the_end(tmp_path):
    builder = one_failure(tmp_path, host=1, lines=("Traceback (most recent call last):", '  File "/mi'), cause="exit")
    log = str(builder.folder() / "logs" / "worker_1.log")
    words = "worker 1 failed with exit code 1: its log ends within a traceback: No space left on device"
    end = End("node1", builder.time(), "failed", "step", 7, "exit", 1, 1, words, log)
    attempts.write(builder.folder() / f"{attempts.END}node1.json", end)
    (found,) = failures(load_run(tmp_path / "run"))
    assert (found.name, found.rank) == ("disk full", 1) and "make room" in found.found.mend


def test_a_victim_that_failed_by_itself_is_named_by_its_log(tmp_path):
    builder = one_failure(tmp_path, host=1)
    log = builder.folder() / "logs" / "worker_0.log"
    log.write_text(LINES["scheduler lost"])
    end = End("node0", builder.time(), "failed", "step", 7, "exit", 0, 1, "", "/another/place/worker_0.log")
    attempts.write(builder.folder() / f"{attempts.END}node0.json", end)
    (found,) = failures(load_run(tmp_path / "run"))
    assert found.host == "node1" and found.victims == {"node0": "scheduler lost"}


def test_lines_of_a_victim_do_not_hide_what_the_launch_saw(tmp_path):
    one_failure(tmp_path, lines=(LINES["connection broken"],), cause="signal")
    (found,) = failures(load_run(tmp_path / "run"))
    assert found.name == "signal"


def test_what_the_user_must_mend_says_nothing_of_the_machines(tmp_path):
    one_failure(tmp_path, lines=(LINES["user error"],), cause="user error")
    (found,) = failures(load_run(tmp_path / "run"))
    assert not found.counts and found.name == "user error"


def nobody(builder, **logs):
    """The verdict names nobody; `logs`: worker -> lines."""
    verdict = Verdict(builder.time(), "restart", "it cannot be told")
    attempts.write(builder.folder() / attempts.VERDICT, verdict)
    for name, text in logs.items():
        (builder.folder() / "logs" / f"{name}.log").write_text(text)
    return failures(load_run(builder.built.folder))[0]


def test_without_a_verdict_on_who_began_it_one_log_with_a_cause_of_its_own_tells(tmp_path):
    builder = one_failure(tmp_path)
    found = nobody(builder, worker_1=LINES["disk full"], worker_0=LINES["HCCL time-out"])
    assert (found.host, found.rank, found.name) == (None, 1, "disk full")
    assert found.victims == {"worker_0": "HCCL time-out"}
    found = nobody(builder, worker_1=LINES["disk full"], worker_0=LINES["crash"])
    assert found.rank is None and "several logs" in found.message
    found = nobody(builder, worker_1=LINES["HCCL time-out"], worker_0=LINES["HCCL time-out"])
    assert found.rank is None and "no log" in found.message


def test_a_run_without_attempts_tells_by_its_logs(tmp_path):
    logs = tmp_path / "logs"
    logs.mkdir()
    (tmp_path / "metrics").mkdir()
    assert failures(load_run(tmp_path)) == []
    (logs / "msrun.log").write_text(LINES["worker failed"])
    (logs / "worker_3.log").write_text(LINES["device memory"])
    (found,) = failures(load_run(tmp_path))
    assert (found.rank, found.name, found.time) == (3, "device memory", None)


def test_ends_that_are_no_failures(tmp_path):
    builder = Builder(tmp_path / "run", 10)
    builder.plan()
    builder.train(10)
    builder.done()
    assert failures(load_run(tmp_path / "run")) == []


def test_a_killed_worker_is_reported_as_killed_and_not_by_its_warnings(tmp_path):
    builder = Builder(tmp_path / "run", 100)
    builder.plan()
    builder.train(3)
    builder.kill(host=1, lines=tuple(IMPORTS))
    (found,) = failures(load_run(tmp_path / "run"))
    line = failure_line(found)
    assert found.name == "signal" and "worker was killed" in line
    assert "hyper_parallel" not in line and "WARNING" not in line and "space" not in line


def test_prometheus_goes_on_where_the_folder_of_its_file_went_with_a_run_that_is_begun_anew(tmp_path, monkeypatch):
    written = SimpleNamespace(
        write_to_textfile=lambda path, _: Path(path).touch(), CollectorRegistry=list, Gauge=Mock()
    )
    monkeypatch.setitem(sys.modules, "prometheus_client", written)
    Builder(tmp_path / "run", 10).plan()
    exporter, status = cli.Exporter(tmp_path / "run" / "sub" / "a.prom"), Watch(tmp_path / "run").look()
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(DataError, match="cannot be written"):
        exporter.write(status)
    assert not (tmp_path / "run").exists(), "a new run would find a folder that is not a run's"
    Builder(tmp_path / "run", 10).plan()
    exporter.write(status)
    assert os.listdir(tmp_path / "run" / "sub") == ["a.prom"]
