"""These tests check that `verify` reports every change of a pair of files and its sidecar: it never ends in a
traceback, and never says "ok" for changed bytes.
"""

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
from tools.data.verify import verify


@pytest.fixture
def pair(tmp_path: Path, jsonl: Path) -> Path:
    prepare(PrepareOptions(Corpus((str(jsonl),)), tmp_path / "out", vocab_size=300, held_out=0.3))
    return tmp_path / "out"


def flip(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


def edit(prefix: Path, **changes: object) -> None:
    path = Path(f"{prefix}.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("split", ["", "_heldout"])
def test_a_good_pair_has_no_findings(pair: Path, split: str) -> None:
    report = verify(f"{pair}{split}")
    assert report.findings == [] and report.notes == []
    assert report.method == "text" and report.compared == report.documents > 0


def test_any_flipped_byte_of_the_bin_is_found(pair: Path) -> None:
    path = Path(f"{pair}.bin")
    size = path.stat().st_size
    for offset in (0, 1, size // 2, size - 1):
        flip(path, offset)
        assert any("sha256" in finding for finding in verify(pair).findings), offset
        flip(path, offset)
    assert verify(pair).findings == []


def test_a_wrong_bin_is_found_by_its_text_when_the_sidecar_agrees_with_it(pair: Path) -> None:
    import hashlib

    flip(Path(f"{pair}.bin"), 4)
    edit(pair, bin_sha256=hashlib.sha256(Path(f"{pair}.bin").read_bytes()).hexdigest())
    report = verify(pair)
    assert len(report.findings) == 1 and "document 0 is not its source" in report.findings[0]
    assert "corpus.jsonl:" in report.findings[0]


def test_what_the_sidecar_says_must_hold(pair: Path) -> None:
    good = Path(f"{pair}.json").read_text()
    for change, finding in [
        ({"documents": 3}, "documents"),
        ({"tokens": 3}, "tokens"),
        ({"dtype": "int32"}, "dtype"),
        ({"vocab_size": 100}, "the vocabulary ends at 99"),
        ({"eod_id": 5}, "do not end with id 5"),
    ]:
        edit(pair, **change)
        assert any(finding in line for line in verify(pair).findings), change
        Path(f"{pair}.json").write_text(good)


def test_a_truncated_pair_is_a_finding_and_a_missing_file_an_error(pair: Path) -> None:
    path = Path(f"{pair}.bin")
    path.write_bytes(path.read_bytes()[:-2])
    assert f"according to its index {pair}.idx" in verify(pair).findings[0]
    path.unlink()
    with pytest.raises(DataError, match=r"out\.bin: there is no such file"):
        verify(pair)
    with pytest.raises(DataError, match=r"nowhere\.json: this file does not exist"):
        verify(pair.parent / "nowhere")
    Path(f"{pair}.json").write_text('{"some": "json"}')
    with pytest.raises(DataError, match="did not write this file"):
        verify(pair)


def test_a_changed_source_is_found(pair: Path, jsonl: Path) -> None:
    lines = jsonl.read_text().splitlines(keepends=True)
    jsonl.write_text("".join(lines[:30] + [line.replace("fox", "cat") for line in lines[30:]]))
    found = verify(pair).findings
    assert found and all("is not its source" in finding for finding in found)
    jsonl.write_text("".join(lines[:30]))
    assert "the source has" in verify(pair).findings[0]
    jsonl.write_text("".join(lines + lines))
    assert "the source has" in verify(pair).findings[0]


def test_sources_that_are_gone_are_said_so_and_can_be_named(pair: Path, jsonl: Path) -> None:
    moved = jsonl.rename(jsonl.with_name("moved.jsonl"))
    report = verify(pair)
    assert report.findings == [] and report.method == "none" and report.compared == 0
    assert "corpus.jsonl is not here; name it with --input" in report.notes[0]
    assert verify(pair, Corpus((str(moved),))).method == "text"


def test_pair_and_tokenizer_move_together(pair: Path, tmp_path: Path) -> None:
    target = tmp_path / "elsewhere"
    target.mkdir()
    for suffix in (".bin", ".idx", ".json", "_tokenizer"):
        shutil.move(f"{pair}{suffix}", target)
    report = verify(target / "out")
    assert report.findings == [] and report.method == "text"


def test_another_tokenizer_is_refused(pair: Path, tokenizer_folder: str) -> None:
    shutil.rmtree(f"{pair}_tokenizer")
    shutil.copytree(tokenizer_folder, f"{pair}_tokenizer")
    assert "is not the tokenizer that wrote this pair" in verify(pair).findings[0]


def test_a_sample_compares_some(pair: Path) -> None:
    some = verify(pair, fraction=0.3)
    assert 0 < some.compared < some.documents
    assert verify(pair, fraction=0.0).compared == 1


def test_a_tokenizer_that_loses_text_is_compared_by_ids(tmp_path: Path, jsonl: Path) -> None:
    folder = tmp_path / "t5"
    folder.mkdir()
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "ByT5Tokenizer", "eos_token": "</s>"}')
    prepare(PrepareOptions(Corpus((str(jsonl),)), tmp_path / "out", tokenizer=str(folder)))
    report = verify(tmp_path / "out")
    assert (report.method, report.findings, report.compared) == ("ids", [], 60)
    assert "encoded again" in report.summary()
    jsonl.write_text(jsonl.read_text().replace("fox", "cat"))
    assert "is not its source" in verify(tmp_path / "out").findings[0]


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


@pytest.mark.slow
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
