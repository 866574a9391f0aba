"""Whatever bytes a pair and its sidecar hold, verify says so: never a traceback, never "ok" for what has changed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from plugins.errors import DataError
from tools.data.cli import data
from tools.data.prepare import PrepareOptions, prepare
from tools.data.sources import Corpus

NAMES = ("c.bin", "c.idx", "c.json")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("whole")
    source = folder / "source.jsonl"
    source.write_text("".join(json.dumps({"text": f"document {n} " * (n % 5 + 1)}) + "\n" for n in range(12)))
    prepare(PrepareOptions(Corpus((str(source),)), folder / "c", vocab_size=260))
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} | {"folder": bytes(folder)}


def damaged(content: bytes, draw) -> bytes:
    """`content` with bytes turned, cut off, put in or said twice."""
    found = bytearray(content)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, max(len(found) - 1, 0)))
        kind = draw(st.sampled_from(["turn", "cut", "insert", "repeat"]))
        if kind == "turn" and found:
            found[at] ^= draw(st.integers(1, 255))
        elif kind == "cut":
            del found[at:]
        elif kind == "insert":
            found[at:at] = draw(st.binary(min_size=1, max_size=9))
        else:
            found[at:at] = found[at : at + draw(st.integers(1, 40))]
    return bytes(found)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(choice=st.data())
def test_a_damaged_pair_is_never_ok(tmp_path: Path, whole: dict[str, bytes], choice) -> None:
    folder = Path(whole["folder"].decode())
    name = choice.draw(st.sampled_from(NAMES))
    new = damaged(whole[name], choice.draw)
    for each in NAMES:
        (tmp_path / each).write_bytes(whole[each])
    (tmp_path / name).write_bytes(new)
    shutil.copytree(folder / "c_tokenizer", tmp_path / "c_tokenizer", dirs_exist_ok=True)
    result = CliRunner().invoke(data, ["verify", str(tmp_path / "c")])
    assert result.exception is None or isinstance(result.exception, (SystemExit, DataError)), repr(result.exception)
    if name != "c.json" and new != whole[name]:
        assert result.exit_code == 1 and "WRONG" in result.output and str(tmp_path / name) in result.output
    if result.exit_code == 0 and name == "c.json":  # what may change: words that decide nothing
        before, after = (json.loads(text) for text in (whole[name], new))
        deciding = ("documents", "tokens", "dtype", "bin_sha256")
        assert [after[key] for key in deciding] == [before[key] for key in deciding]
