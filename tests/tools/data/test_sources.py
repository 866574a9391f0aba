from __future__ import annotations

import gzip
import json
import os
import sysconfig
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plugins.errors import DataError
from tools.data.sources import SHOWN, Corpus, Document, Skips
from tools.process.waiting import Reporter


class Recorder(Reporter):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def log(self, message: str) -> None:
        self.lines.append(message)


def documents(*inputs: Path | str, skips: Skips | None = None, **settings) -> list[Document]:
    return list(Corpus(tuple(map(str, inputs)), **settings).documents(skips or Skips()))


def texts(*inputs: Path | str, **settings) -> list[str]:
    return [document.text for document in documents(*inputs, **settings)]


def test_a_folder_is_read_sorted_and_without_hidden_or_foreign_files(tmp_path: Path) -> None:
    for name in ("b.txt", "a.md", "sub/c.py", "sub/.hidden/d.txt", ".e.txt", "image.png", "settings.json", "z.txt.gz"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(name.encode()) if name.endswith(".gz") else name.encode())
    (tmp_path / "dangling.png").symlink_to(tmp_path / "nowhere")
    assert texts(tmp_path) == ["a.md", "b.txt", "z.txt.gz", "sub/c.py"]
    assert texts(tmp_path, globs=("i*.png", "c.*")) == ["image.png", "sub/c.py"]


def test_linked_folders_are_read_once_and_never_in_circles(tmp_path: Path) -> None:
    root, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
    for path in (root / "a.txt", root / "sub" / "b.txt", elsewhere / "deep" / "c.txt"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(path.name)
    (root / "linked").symlink_to(elsewhere)
    (root / "twice").symlink_to(elsewhere / "deep")
    (root / "sub" / "circle").symlink_to(root)
    (elsewhere / "back").symlink_to(root / "sub")
    found = documents(root)
    assert [Path(d.where).relative_to(root) for d in found] == [
        Path("a.txt"),
        Path("linked/back/b.txt"),
        Path("linked/deep/c.txt"),
    ]


@pytest.mark.parametrize("target", ["nowhere", "lost.txt"])
def test_a_link_to_a_file_that_is_not_there_is_named(tmp_path: Path, target: str) -> None:
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "lost.txt").symlink_to(target)
    with pytest.raises(DataError, match=rf"lost\.txt: the file cannot be read .* is a link to {target}"):
        Corpus((str(tmp_path),)).measure()


def test_inputs_keep_their_order_and_a_named_file_needs_no_suffix(tmp_path: Path) -> None:
    for name in ("z", "a.weird"):
        (tmp_path / name).write_text(name)
    assert texts(tmp_path / "z", tmp_path / "a.weird") == ["z", "a.weird"]


def test_newlines_and_byte_order_mark_of_a_text_stay(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\ntwo\rthree\n")
    assert texts(path) == ["\ufeffone\r\ntwo\rthree\n"]


@pytest.mark.parametrize("suffix", [".jsonl", ".ndjson", ".json", ".jsonl.gz"])
def test_json_lines(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a{suffix}"
    content = b'\xef\xbb\xbf{"text": "one"}\r\n\n{"body": 1, "text": "two\\n"}'
    path.write_bytes(gzip.compress(content) if suffix.endswith("gz") else content)
    skips = Skips(strict=True)
    found = documents(path, skips=skips)
    assert [(d.text, d.where) for d in found] == [("one", f"{path}:1"), ("two\n", f"{path}:3")]
    assert skips.counts == {"empty": 1, "invalid_utf8": 0, "broken_lines": 0}
    assert sum(d.consumed for d in found) == path.stat().st_size


BROKEN = [
    (b"{oops", "broken_lines", "is not JSON"),
    (b"[" * 100_000, "broken_lines", "is not JSON"),
    (b'["text"]', "broken_lines", "a JSON list, not an object"),
    (b'{"txt": "x"}', "broken_lines", "did you mean 'txt'?"),
    (b'{"title": 1}', "broken_lines", "it has: 'title'"),
    (b"{}", "broken_lines", "it has: nothing"),
    (b'{"text": 5}', "broken_lines", "is a int, not a string"),
    (b'{"text": null}', "broken_lines", "is a NoneType"),
    (b'{"text": "\xff"}', "invalid_utf8", "byte 10: 0xff"),
    (b'{"text": "\\ud800"}', "invalid_utf8", "half a surrogate pair"),
]


@pytest.mark.parametrize(("line", "kind", "why"), BROKEN)
def test_a_faulty_line_is_named_counted_and_stops_a_strict_run(
    tmp_path: Path, line: bytes, kind: str, why: str
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "good"}\n' + line + b'\n{"text": "also good"}\n')
    recorder = Recorder()
    skips = Skips(reporter=recorder)
    assert [d.text for d in documents(path, skips=skips)] == ["good", "also good"]
    assert skips.counts[kind] == sum(skips.counts.values()) == 1
    assert len(recorder.lines) == 1 and f"{path}:2: " in recorder.lines[0] and why in recorder.lines[0]
    with pytest.raises(DataError, match=r"a\.jsonl:2: .*--strict"):
        documents(path, skips=Skips(strict=True))


def test_invalid_utf8_and_empty_text_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"latin \xe9 text")
    (tmp_path / "b.txt").write_bytes(b"")
    (tmp_path / "c.txt").write_bytes(b" \n\t")
    skips = Skips()
    assert documents(tmp_path, skips=skips) == []
    assert skips.counts == {"empty": 2, "invalid_utf8": 1, "broken_lines": 0}
    assert skips.summary() == "skipped items: 2 empty, 1 invalid_utf8"
    assert skips.first.endswith("a.txt: is not UTF-8 (byte 6: 0xe9)")


def test_many_faults_do_not_flood_the_terminal(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("oops\n" * 500)
    recorder = Recorder()
    skips = Skips(reporter=recorder)
    documents(path, skips=skips)
    assert len(recorder.lines) == SHOWN + 1
    assert skips.counts["broken_lines"] == 500


@pytest.mark.parametrize("keep", [5, 30, -4])
def test_a_truncated_gzip_is_refused(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(os.urandom(50).hex().encode())[:keep])
    with pytest.raises(DataError, match=r"a\.jsonl\.gz: the gzip file is truncated or broken"):
        documents(path)


def test_what_is_no_gzip_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.txt.gz"
    path.write_text("plain text")
    with pytest.raises(DataError, match="truncated or broken"):
        documents(path)


def test_missing_inputs_and_pipes_are_refused_with_a_suggestion(tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text("x")
    with pytest.raises(DataError, match=r"corpsu\.txt: there is no such file .*did you mean 'corpus\.txt'"):
        Corpus((str(tmp_path / "corpsu.txt"),)).measure()
    with pytest.raises(DataError, match="did you mean 'stdlib'"):
        Corpus(("stdlb",)).measure()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="a pipe or a device"):
        Corpus((str(tmp_path / "pipe"),)).measure()
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="--glob"):
        Corpus((str(tmp_path / "empty"),)).measure()


def test_the_standard_library_is_library_code_only() -> None:
    corpus = Corpus(("stdlib",))
    root = Path(sysconfig.get_paths()["stdlib"])
    names = [path.relative_to(root) for path in corpus.files()]
    assert {Path("argparse.py"), Path("json/decoder.py"), Path("lib2to3/refactor.py")} - set(names) <= {
        Path("lib2to3/refactor.py")  # gone in newer Pythons
    }
    assert not {"test", "tests", "site-packages", "idle_test", "__pycache__"} & {
        p for name in names for p in name.parts
    }
    assert not any(name.name.startswith("_sysconfigdata") for name in names)
    assert names == [path.relative_to(root) for path in Corpus(("python-stdlib",)).files()]
    files, size = corpus.measure()
    assert files == len(names) and size > 5_000_000


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1)))
def test_json_lines_give_back_any_text(tmp_path_factory: pytest.TempPathFactory, wanted: list[str]) -> None:
    path = tmp_path_factory.mktemp("any") / "a.jsonl"
    path.write_text("".join(json.dumps({"text": t}, ensure_ascii=False) + "\n" for t in wanted), encoding="utf-8")
    assert texts(path) == [text for text in wanted if not text.isspace()]
