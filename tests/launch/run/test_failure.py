"""These tests check the message about a worker that failed: it states the error first, and leaves out what only
MindSpore's developers read.
"""

import signal
from pathlib import Path

import pytest

from launch.agent.part import last_words
from launch.run.failure import worker_failure
from launch.run.summary import complain
from tools.runs.failures import UNKNOWN, diagnose

RECORDED = Path(__file__).parents[1] / "agent" / "recorded" / "link_down_worker_1.txt"
RULE = "-" * 52
IMPORT = (
    "2026-11-23 22:32:44,894 - mindformers/run/logs[mindformers/models/qwen3/modeling_qwen3.py:35] - WARNING - "
    "Import PyNativeDeepseekV3ForCausalLM failed: No module named 'hyper_parallel'"
)
STEP = "2026-11-23 22:30:38,707 - mindformers/run/logs[mindformers/core/callback.py:747] - INFO - { step:[ 12/ 20] }"
FRAMES = [
    "Traceback (most recent call last):",
    '  File "/site-packages/click/core.py", line 1, in main',
    "    rv = self.invoke(ctx)",
    '  File "/mine/model.py", line 7, in construct',
    "    return self.matmul(x)",
    "           ^^^^^^^^^^^^^^",
    *[
        line
        for number in range(9)
        for line in (f'  File "/site-packages/mindspore/{number}.py", line 1, in f', "    g()")
    ],
]
SHAPES = [
    *FRAMES,
    "ValueError: For 'MatMul', the input dimensions must be equal, but got 'x1_col': 4 and 'x2_row': 8.",
    "",
    RULE,
    "- C++ Call Stack: (For framework developers)",
    RULE,
    "mindspore/ops/infer/ops_func_impl/matmul.cc:60 CheckMatMul",
    "",
    RULE,
    "- The Traceback of Net Construct Code:",
    RULE,
    "# 0 In file /mine/model.py:7, 11~32",
    "[INFO] DISTRIBUTED(1,7f,python):2026-11-23-22:31:08 [tcp_client.cc:357] Start] Event base dispatch success!",
]


@pytest.fixture
def failed(tmp_path):
    """(code, lines of the log) -> the failure of worker 1."""

    def failure(code, *lines):
        (tmp_path / "worker_1.log").write_text("\n".join(lines) + "\n")
        return worker_failure(tmp_path / "worker_1.log", 1, code)

    return failure


def test_the_error_is_said_first_and_what_is_for_developers_of_mindspore_not_at_all(failed, capsys):
    failure = failed(1, IMPORT, STEP, *SHAPES)
    complain(failure, " after step 12")
    first, log, *lines = capsys.readouterr().err.splitlines()
    assert first == f"tc3: worker 1 failed with exit code 1 after step 12: {failure.error}"
    assert failure.error.startswith("ValueError: For 'MatMul'") and log.startswith("Log: ")
    said = "\n".join(lines)
    assert (
        "C++" not in said
        and "---" not in said
        and "WARNING" not in said
        and "^^^" not in said
        and "dispatch" not in said
    )
    assert "/mine/model.py" in lines[0], "the last call of the user's own code"
    assert lines[-1].strip() == "# 0 In file /mine/model.py:7, 11~32" and len(lines) <= 12


def test_a_recorded_failure_of_a_collective(failed):
    failure = failed(1, RECORDED.read_text())
    assert failure.error == "RuntimeError: Launch kernel failed, name:Default/AllReduce-op62"
    assert last_words(failure) == f"worker 1 failed with exit code 1: {failure.error}"
    assert "plugins/cpu_backend/model.py" in failure.lines[0] and failure.lines[-1] == failure.error


@pytest.mark.parametrize(("code", "mend"), [(-signal.SIGKILL, "memory"), (-signal.SIGTERM, "another one")])
def test_a_worker_that_a_signal_ended_quotes_no_warnings(failed, code, mend):
    failure = failed(code, IMPORT, STEP)
    assert (failure.lines, failure.error) == ((), "") and mend in failure.mend
    assert last_words(failure) == failure.message


def test_a_crash_shows_where(failed):
    failure = failed(
        -signal.SIGSEGV, IMPORT, "Fatal Python error: Segmentation fault", "", "Current thread 0x1:", "  File x"
    )
    assert failure.error == "Fatal Python error: Segmentation fault" and failure.lines[-1] == "  File x"


def test_without_a_traceback_errors_are_quoted_and_no_warnings(failed):
    error = "[ERROR] DEVICE(1,7f,python):2026 [ascend.cc:1] Init] Memory not enough, 60 GB wanted"
    failure = failed(1, IMPORT, error, STEP)
    assert failure.lines == (error,) and failure.error == error and "tc3 search" in failure.mend


def test_a_log_that_says_nothing_is_shown_as_it_is(failed):
    assert failed(1, IMPORT, STEP).lines == (IMPORT, STEP)


def test_an_error_that_another_failure_brings_about_has_no_remedy_of_its_own(failed):
    assert not failed(1, *FRAMES, "RuntimeError: EI0002: The wait execution of the Notify register timed out").mend


@pytest.mark.parametrize(
    "words",
    [
        "tc3: interrupted",
        "tc3: saved on request: step 40: /disk/iteration_00000040",
        "tc3: asked to save at step 40: not all ranks knew in time; training goes on",
    ],
)
def test_a_worker_that_was_told_to_save_or_end_has_no_error_of_the_user(failed, words):
    assert not failed(None, words).user_error and diagnose([words]).name == UNKNOWN, "as tools/runs says"
    found = failed(None, "tc3: a.yaml:3: no such key", words)
    assert found.user_error and found.message == "a.yaml:3: no such key"
