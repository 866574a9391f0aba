from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.tools.data.data_helpers import CALL, environment
from tools.data import tokenizer as tokenizers

TEXTS = [
    "The quick brown fox jumps over the lazy dog.\n",
    "def f(x):\r\n    return x  # naïve café ☕\n",
    "a document that says <|endoftext|> in its middle",
    "一个中文文档。\n\n\n   spaces at the end   ",
    "\ufeffa byte-order mark stays",
    "\x00 control \x7f characters \u2028 and separators",
]


@pytest.fixture
def texts() -> list[str]:
    return [TEXTS[i % len(TEXTS)] * (1 + i % 3) + str(i) for i in range(60)]


@pytest.fixture
def jsonl(tmp_path: Path, texts: list[str]) -> Path:
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tokenizers.Tokenizer:
    return tokenizers.train(TEXTS * 3, 300, tmp_path_factory.mktemp("trained") / "tokenizer")


@pytest.fixture(scope="session")
def tokenizer_folder(trained: tokenizers.Tokenizer) -> str:
    return trained.spec.folder


@pytest.fixture
def tc3(tmp_path: Path):
    """Run `tc3 data ...` as a user would, in a process of its own, in the test's folder."""

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [*CALL, "data", *map(str, arguments)]
        return subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=600)

    return run


@pytest.fixture
def start_tc3(tmp_path: Path):
    """Start `tc3 data ...` in a session of its own, so that a signal can go to the whole group as Ctrl-C does."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: object) -> subprocess.Popen[str]:
        command = [*CALL, "data", *map(str, arguments)]
        process = subprocess.Popen(
            command, cwd=tmp_path, env=environment(), stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()
