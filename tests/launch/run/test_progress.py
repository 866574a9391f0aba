"""These tests check what a user sees of a run: its metrics while they are written (the bar, the plain lines and the
picture), and the message about a worker that failed, which states the error first and leaves out what only MindSpore's
developers read.
"""

import io
import math
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from launch.agent.part import last_words
from launch.run import failure as failure_module
from launch.run import summary as progress
from launch.run.failure import Failure, worker_failure
from launch.run.summary import (
    TrainingProgress,
    complain,
    draw_loss_curve,
    print_failure,
    print_next_command,
    print_summary,
    summarize,
    words_to_go_on,
)
from launch.run.supervise import Outcome
from plugins.sealed_checkpoint import plan
from tests.tools.runs.builders import append, empty, header, step
from tools.recipe.load import Recipe
from tools.runs.failures import UNKNOWN, diagnose
from tools.runs.readings import Evaluation, read_metrics


@pytest.fixture
def metrics(tmp_path):
    return empty(tmp_path)


def test_the_progress_follows_the_rank_it_is_told(tmp_path):
    out = io.StringIO()
    (tmp_path / "metrics").mkdir()
    with TrainingProgress(tmp_path, Console(file=out, force_terminal=False), rank=3):
        append(tmp_path / "metrics" / "rank_0.jsonl", header(1), step(1, loss=0.0))
        append(tmp_path / "metrics" / "rank_3.jsonl", header(1), step(1, loss=3.0))
    assert "step 1/1  loss 3.0000" in out.getvalue()


def shown(tmp_path, terminal, *parts):
    """Return the text that the progress writes if `parts` (lists of records) arrive one after the other."""
    out = io.StringIO()
    with TrainingProgress(tmp_path, Console(file=out, force_terminal=terminal, width=120)) as progress:
        for records in parts:
            append(tmp_path / "metrics" / "rank_0.jsonl", *records)
            progress.tick()
    return out.getvalue()


def test_without_a_terminal_there_is_a_line_every_tenth(tmp_path, metrics):
    append(metrics, header(50), step(1, loss=99.0))  # an earlier part
    text = shown(tmp_path, False, [header(100)], [step(n, loss=n / 10) for n in range(1, 101)])
    lines = text.splitlines()
    assert lines[0] == "compiling…"
    assert lines[1].startswith("step 1/100  loss 0.1000  (first step after")
    assert [line.split()[1] for line in lines[2:]] == [f"{n}/100" for n in range(10, 101, 10)]
    assert lines[-1] == "step 100/100  loss 10.0000  200 tokens/s (median)"


def test_without_a_terminal_there_is_a_line_every_minute_too(tmp_path, metrics, monkeypatch):
    out, now = io.StringIO(), [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with TrainingProgress(tmp_path, Console(file=out, force_terminal=False)) as shown:
        for now[0] in (30.0, 61.0, 62.0, 125.0):
            shown.tick()
        append(metrics, header(1000), step(1))
        for now[0] in (126.0, 127.0, 190.0):
            shown.tick()
    assert out.getvalue().splitlines() == [
        *("compiling…", "compiling… 61 s", "compiling… 125 s"),
        *("step 1/1000  loss 5.0000  (first step after 126 s)", "step 1/1000  loss 5.0000"),
    ]


def test_steps_that_arrive_last_are_shown_too(tmp_path, metrics):
    out = io.StringIO()
    with TrainingProgress(tmp_path, Console(file=out, force_terminal=False)):
        append(metrics, header(1), step(1, loss=3.0))
    assert "step 1/1  loss 3.0000" in out.getvalue()


def test_on_a_terminal_a_bar_follows_the_steps(tmp_path, metrics):
    text = shown(tmp_path, True, [header(40), step(1)], [step(2, loss=4.25), step(3, loss=4.125)])
    assert "compiling" in text and "training" in text
    assert "3/40" in text and "loss 4.1250" in text and "200 tokens/s" in text


@pytest.mark.parametrize(("name", "magic"), [("a.png", b"\x89PNG"), ("sub/a.svg", b"<?xml")])
def test_the_loss_curve_is_drawn(tmp_path, metrics, name, magic):
    append(metrics, header(3), step(1, 3.0), step(2, 2.0), step(3, 1.0))
    evaluations = {step: Evaluation(step, 1.5) for step in (0, 3)}
    path = draw_loss_curve(read_metrics(metrics).steps, tmp_path / name, evaluations)
    assert path.read_bytes().startswith(magic)
    if path.suffix == ".svg":
        text = path.read_text()
        assert all(word in text for word in ("training loss", "language model only", "held out", "nats per token"))


def test_the_end_of_a_run_says_the_losses_and_perplexities_of_each_corpus(tmp_path, capsys):
    (tmp_path / "metrics").mkdir()
    lines = (
        {"step": 0, "held_out_loss": 7.0, "corpora": {"code": 6.0, "prose": 8.0}},
        {"step": 9, "held_out_loss": 4.5, "corpora": {"code": 4.0, "prose": math.inf}},
    )
    append(tmp_path / "metrics" / "held_out.jsonl", *lines)
    recipe = Recipe({"checkpoint": {"save_path": str(tmp_path / "checkpoint")}})
    summary = summarize(tmp_path, recipe, Outcome(1), lambda *_: ["tc3"])
    assert (summary["first_held_out_loss"], summary["final_held_out_loss"]) == (7.0, 4.5)
    assert summary["final_perplexity"] == pytest.approx(math.exp(4.5))
    prose = {"first_held_out_loss": 8.0, "final_held_out_loss": None, "final_perplexity": None}
    assert list(summary["held_out_corpora"]) == ["code", "prose"] and summary["held_out_corpora"]["prose"] == prose
    print_summary(summary)
    text = capsys.readouterr().out
    assert "held-out loss: 7.0000 -> 4.5000, perplexity 90.02 (on text never trained on)\n" in text
    assert f"\n{'':<15}6.0000 -> 4.0000, perplexity 54.6 (code)\n{'':<15}8.0000 -> not finite (prose)\n" in text


def test_a_run_whose_last_evaluation_was_interrupted_says_which_step_its_held_out_loss_is_of(tmp_path, metrics, capsys):
    """Killed after the last save and within the evaluation that follows, it is complete and is not started again."""
    append(metrics, header(9), *(step(number) for number in range(1, 10)))
    lines = ({"step": number, "held_out_loss": 7.0 - number / 8} for number in (0, 8))
    append(tmp_path / "metrics" / "held_out.jsonl", *lines)
    recipe = Recipe({"checkpoint": {"save_path": str(tmp_path / "checkpoint")}})
    summary = summarize(tmp_path, recipe, Outcome(1), lambda *_: ["tc3"])
    assert (summary["final_held_out_loss"], summary["final_held_out_step"], summary["steps"]) == (6.0, 8, 9)
    print_summary(summary)
    text = capsys.readouterr().out
    assert "(on text never trained on; last evaluated after step 8 of 9)\n" in text


def test_a_loss_curve_that_cannot_be_written_hides_nothing(tmp_path, metrics, capsys):
    """On a full disk the user read, with exit code 2, that loss.png cannot be written, and not which worker failed."""
    append(metrics, header(2), step(1), step(2))
    (tmp_path / "loss.png").mkdir()
    recipe = Recipe({"checkpoint": {"save_path": str(tmp_path / "checkpoint")}})
    summary = summarize(tmp_path, recipe, Outcome(1, Failure("worker 0 failed", tmp_path)), lambda *_: ["tc3"])
    assert (summary["error"], summary["steps"], summary["picture"]) == ("worker 0 failed", 2, None)
    print_summary(summary)
    said = capsys.readouterr()
    assert "loss.png: this path cannot be written" in said.err and "it could not be written" in said.out


@pytest.mark.parametrize("code", [0, 1])
def test_a_checkpoint_that_cannot_be_read_hides_nothing(tmp_path, metrics, monkeypatch, capsys, code):
    """The user read only, with exit code 2, that a file cannot be read, and not how the run had ended."""
    append(metrics, header(2), step(1), step(2))
    folder = tmp_path / "checkpoint" / "iteration_00000002"
    folder.mkdir(parents=True)
    (folder / "mini-model-0000000-0000001.safetensors").touch()
    plan.write_seal(folder, 0, world_size=1, step=2)

    def refused(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(plan, "checksum", refused)
    recipe = Recipe({"checkpoint": {"save_path": str(folder.parent)}})
    outcome = Outcome(code, Failure("worker 0 failed", tmp_path) if code else None)
    if code:
        print_failure(tmp_path, recipe, outcome)
    summary = summarize(tmp_path, recipe, outcome, lambda *_: ["tc3", "train"])
    assert (summary["exit_code"], summary["steps"], summary["checkpoint"]) == (code, 2, None)
    assert summary["checkpoint_error"].endswith("this path cannot be read (Permission denied)")
    if code:
        print_next_command(summary, False)
    else:
        print_summary(summary)
    said = capsys.readouterr()
    assert "mini-model-0000000-0000001.safetensors: this path cannot be read (Permission denied)" in said.err
    assert ("worker 0 failed" in said.err) == bool(code)
    assert ("unknown, because a checkpoint cannot be read" in said.out) != bool(code)
    assert code == 0 or "Go on, as soon as the checkpoints can be read, with: tc3 train" in said.err


def test_a_folder_of_checkpoints_that_cannot_be_listed_is_not_an_empty_one(tmp_path, metrics, capsys):
    (tmp_path / "checkpoint").touch()
    recipe = Recipe({"checkpoint": {"save_path": str(tmp_path / "checkpoint")}})
    summary = summarize(tmp_path, recipe, Outcome(0), lambda *_: ["tc3"])
    assert summary["checkpoint_error"] == f"{tmp_path / 'checkpoint'}: this path cannot be read (Not a directory)"


def test_each_held_out_corpus_has_a_line_in_the_loss_curve(tmp_path, metrics):
    append(metrics, header(3), step(1, 3.0), step(2, 2.0), step(3, 1.0))
    found = {step: Evaluation(step, 3.0, {"code_heldout": 2.5, "prose_heldout": 3.5}) for step in (0, 3)}
    text = draw_loss_curve(read_metrics(metrics).steps, tmp_path / "a.svg", found).read_text()
    assert "held out, code_heldout" in text and "held out, prose_heldout" in text
    assert "held out, language model" not in text


def test_a_new_run_from_the_weights_does_not_save_among_the_checkpoints_of_this_one():
    """The command named the same folder of checkpoints, and was refused."""
    given = (["tc3", "train", "r.yaml"], ("checkpoint.save_path='/big/x/'", "a.b=1"), Path("RUN"), True, Recipe({}))
    words = words_to_go_on(*given, Path("/big/x/iteration_4"), "")
    assert words[3:9] == ["--run-dir", "RUN-next", "--set", "checkpoint.save_path=/big/x-next", "--set", "a.b=1"]
    assert "checkpoint.save_path='/big/x/'" in words_to_go_on(*given, None, ""), "a resume saves where it did"
    again = (given[0], ("checkpoint.save_path=null", "checkpoint.load_path=/old"), *given[2:])
    words = words_to_go_on(*again, Path("/new"), "")
    assert words[5:9] == ["--set", "checkpoint.save_path=null", "--set", "checkpoint.load_path=/new"]


def test_the_next_command_does_not_set_a_key_beside_a_mapping_that_sets_it():
    given = ("lr_schedule={learning_rate: 1.e-3, warmup_steps: 4}", "checkpoint={load_path: /old, save_path: /big/x}")
    command = (["tc3", "train", "r.yaml"], given, Path("RUN"), True, Recipe({}))
    words = words_to_go_on(*command, None, "lr_schedule.learning_rate=0.0005")
    found = [word for word in words if "lr_schedule" in word]
    assert found == ["lr_schedule.warmup_steps=4", "lr_schedule.learning_rate=0.0005"]
    words = words_to_go_on(*command, Path("/new"), "")
    found = [word for word in words if "checkpoint" in word]
    assert found == ["checkpoint.save_path=/big/x-next", "checkpoint.load_path=/new"] and given[0] in words


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


@pytest.mark.parametrize("free", [0, 1 << 30])
def test_a_log_that_a_full_disk_cut_off_within_the_traceback_says_so(failed, monkeypatch, capsys, free):
    """It said `failed with exit code 1: Traceback (most recent call last):`, and nothing of the disk."""
    monkeypatch.setattr(failure_module.shutil, "disk_usage", lambda folder: SimpleNamespace(free=free))
    full = ": No space left on device (0 bytes are free on the disk of the logs)" if not free else ""
    found = failed(1, STEP, *FRAMES[:4], '  File "/mi')
    assert found.error == f"its log ends within a traceback{full}" and ("make room" in found.mend) is (not free)
    assert ("No space left" in failed(1, STEP).error) is (not free), "nor could a traceback begin"
    assert failed(1, STEP, *SHAPES).error.startswith("ValueError: For 'MatMul'"), "the log has its end"
    complain(found, " after step 13")
    assert capsys.readouterr().err.startswith(f"tc3: worker 1 failed with exit code 1 after step 13: {found.error}\n")


def test_a_signal_without_a_name_is_a_number(failed):
    assert failed(-40).message == "worker 1 was ended by signal 40"


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
