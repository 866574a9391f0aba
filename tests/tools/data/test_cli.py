"""The command; what a killed run leaves behind; peak memory, which must not depend on the size of the corpus."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner, Result

from plugins.errors import DataError
from tests.tools.data.data_helpers import CALL, environment
from tools.data.cli import data


def run(*arguments: object) -> Result:
    return CliRunner().invoke(data, list(map(str, arguments)))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "a.txt"
    path.write_text("some text to train a tokenizer on, some text\n" * 20)
    return path


def test_prepare_then_verify(tmp_path: Path, source: Path) -> None:
    result = run("prepare", "--input", source, "--output", tmp_path / "out", "--workers", 1)
    assert result.exit_code == 0, result.output
    assert f"data_path: ['1', '{tmp_path / 'out'}'], eod: 0, pad: -1" in result.stdout
    assert "checked train: 1 documents" in result.stderr
    verified = run("verify", tmp_path / "out")
    assert verified.exit_code == 0 and verified.stdout.startswith("ok: 1 documents")


def test_json_is_alone_on_stdout(tmp_path: Path, source: Path) -> None:
    result = run("prepare", "--input", source, "--output", tmp_path / "out", "--workers", 1, "--json")
    assert json.loads(result.stdout) == json.loads((tmp_path / "out.json").read_text())
    assert json.loads(run("verify", tmp_path / "out", "--json").stdout)["findings"] == []


def test_verify_exits_1_when_something_is_wrong(tmp_path: Path, source: Path) -> None:
    run("prepare", "--input", source, "--output", tmp_path / "out", "--workers", 1)
    source.write_text("something else")
    result = run("verify", tmp_path / "out")
    assert result.exit_code == 1
    assert result.stdout.startswith("WRONG") and "one of the two has changed" in result.stderr
    moved = source.rename(tmp_path / "b.txt")
    assert run("verify", tmp_path / "out").exit_code == 0
    assert run("verify", tmp_path / "out", "--input", moved).exit_code == 1
    tokenizer = (tmp_path / "out_tokenizer").rename(tmp_path / "elsewhere")
    assert "no such folder" in str(run("verify", tmp_path / "out", "--input", moved).exception)
    result = run("verify", tmp_path / "out", "--input", moved, "--tokenizer", tokenizer)
    assert "one of the two has changed" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--input", "nowhere.txt"], "nowhere.txt: there is no such file or folder"),
        (["--input", "stdlib", "--tokenizer", "nowhere"], "--tokenizer nowhere: there is no such folder"),
        (
            ["--input", "stdlib", "--tokenizer", "x", "--vocab-size", "300"],
            "--vocab-size works only with --tokenizer bytes",
        ),
        (
            ["--input", "stdlib", "--eod-token", "x"],
            "--eod-token and --trust-remote-code work only with --tokenizer DIR",
        ),
        (["--input", __file__, "--held-out", "0.5"], "leaves the"),
    ],
)
def test_user_errors_are_data_errors(tmp_path: Path, arguments: list[str], message: str) -> None:
    result = run("prepare", "--output", tmp_path / "out", "--workers", 1, *arguments)
    assert isinstance(result.exception, DataError)
    assert message in str(result.exception) and "\n" not in str(result.exception)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments",
    [
        *(["--held-out", "1"], ["--held-out", "-0.1"], ["--workers", "0"], ["--dtype", "int8"], ["--inptu", "x"]),
        ["--vocab-size", "5"],
    ],
)
def test_values_out_of_range_are_usage_errors(tmp_path: Path, source: Path, arguments: list[str]) -> None:
    result = run("prepare", "--input", source, "--output", tmp_path / "out", *arguments)
    assert result.exit_code == 2 and "Usage:" in result.stderr


def test_the_help_is_for_newcomers() -> None:
    assert "--input stdlib --output output/stdlib" in run("--help").stdout
    text = run("prepare", "--help").stdout
    for word in ("PREFIX_heldout", ".jsonl", "stdlib", "[default: 2048]", "PREFIX_tokenizer/"):
        assert word in text


def test_in_a_process_of_its_own_an_error_is_one_line_and_exit_code_2(tmp_path: Path, source: Path, tc3) -> None:
    broken = tmp_path / "a.jsonl"
    broken.write_text('{"text": "x"}\n{oops\n')
    for arguments, message in [
        (["--input", "b.txt"], "tc3: --input b.txt: there is no such file or folder (did you mean 'a.txt'?)"),
        (["--input", broken, "--strict"], f"tc3: {broken}:2: is not JSON"),
    ]:
        result = tc3("prepare", "--output", "out", *arguments)
        lines = [line for line in result.stderr.splitlines() if not line[0].isdigit()]  # without "1 files, 20 bytes"
        assert (result.returncode, result.stdout) == (2, "")
        assert len(lines) == 1 and lines[0].startswith(message), result.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "a.txt"]


def test_in_a_process_of_its_own_workers_give_the_same_output(tmp_path: Path, jsonl: Path, tc3) -> None:
    for workers in (1, 2):
        result = tc3("prepare", "--input", jsonl, "--output", f"out/{workers}", "--workers", workers, "--json")
        assert result.returncode == 0, result.stderr
        assert json.loads(result.stdout)["documents"] == 60
    assert (tmp_path / "out/1.bin").read_bytes() == (tmp_path / "out/2.bin").read_bytes()
    assert (tmp_path / "out/1.idx").read_bytes() == (tmp_path / "out/2.idx").read_bytes()


def test_a_bar_appears_on_a_terminal_and_only_on_stderr(tmp_path: Path, source: Path) -> None:
    main, terminal = os.openpty()
    command = [*CALL, "data", "prepare", "--input", str(source), "--output", "out", "--json"]
    run_here = {"cwd": tmp_path, "env": environment() | {"TERM": "xterm"}, "stdout": subprocess.PIPE}
    result = subprocess.run(command, stderr=terminal, check=True, **run_here)
    os.close(terminal)
    written = b""
    with contextlib.suppress(OSError):  # how Linux says that there is no more
        while part := os.read(main, 1 << 20):  # a few KB at a time
            written += part
    os.close(main)
    seen = written.decode()
    assert json.loads(result.stdout)["documents"] == 1
    assert "\x1b[" in seen and "checked train" in seen


@pytest.fixture
def long_corpus(tmp_path: Path) -> Path:
    """Some 20 MB: seconds of work."""
    source = tmp_path / "source"
    source.mkdir()
    line = json.dumps({"text": Path(psutil.__file__).read_text()}) + "\n"
    (source / "a.jsonl").write_text(line * (20_000_000 // len(line)))
    return source


def until_encoding(process: subprocess.Popen[str], folder: Path) -> list[psutil.Process]:
    """Wait until .bin grows; return the worker processes."""
    deadline = time.monotonic() + 300
    while not any(path.stat().st_size for path in folder.glob(".out.unfinished-*/out.bin")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    children = psutil.Process(process.pid).children()
    assert len(children) >= 2
    return children


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_run(tmp_path: Path, long_corpus: Path, tokenizer_folder: str, start_tc3, number: int) -> None:
    folder = tmp_path / "out"
    arguments = ["--input", long_corpus, "--output", folder / "out", "--tokenizer", tokenizer_folder, "--workers", 2]
    process = start_tc3("prepare", *arguments)
    children = until_encoding(process, folder)
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # Ctrl-C reaches the whole group
    else:
        process.send_signal(number)
    _, errors = process.communicate(timeout=300)
    assert process.returncode != 0 and "Traceback" not in errors
    _, alive = psutil.wait_procs(children, timeout=300)
    assert alive == []
    left = [path.name for path in folder.iterdir()]
    if number == signal.SIGKILL:  # nobody could clean up, but nothing carries the name
        assert len(left) == 1 and left[0].startswith(".out.unfinished-")
    else:
        assert left == []


MEASURE = """
import json, resource, sys
from launch.cli import main
if __name__ == "__main__":
    try:
        main()
    except SystemExit as stop:
        assert not stop.code, stop.code
    peaks = [resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    print(json.dumps(peaks))
"""


def peaks(folder: Path, megabytes: int) -> list[int]:
    """Peak KiB of the parent and of the largest worker."""
    source = folder / f"{megabytes}.jsonl"
    text = Path(psutil.__file__).read_text()
    with open(source, "w") as stream:
        while stream.tell() < megabytes << 20:
            for start in range(0, len(text), 8000):
                stream.write(json.dumps({"text": text[start : start + 8000]}) + "\n")
    arguments = ["data", "prepare", "--input", str(source), "--output", str(folder / f"out{megabytes}")]
    command = [sys.executable, "-c", MEASURE, *arguments, "--workers", "2", "--held-out", "0.1", "--json"]
    result = subprocess.run(command, env=environment(), stdout=subprocess.PIPE, text=True, check=True, timeout=600)
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.slow
def test_memory_is_flat_in_the_corpus(tmp_path: Path) -> None:
    small, large = peaks(tmp_path, 5), peaks(tmp_path, 20)
    for before, after in zip(small, large, strict=True):
        assert after - before < 6 * 1024, (small, large)  # KiB; 15 MiB more text
