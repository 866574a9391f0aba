"""These tests check what exists at a path, files that are either complete or absent, and the end of a log.

Text in a page is escaped wherever it stands, and its elements are nested as they should be.
"""

import errno
import fcntl
import os
from contextlib import nullcontext
from html.parser import HTMLParser
from itertools import count

import pytest

from plugins import lines
from plugins.errors import DataError
from tests.crashes import deaths, patch_os
from tools.files import atomic
from tools.files.atomic import (
    atomic_file,
    atomic_folder,
    check_writable,
    last_lines,
    real_path,
    what_is,
    write_atomically,
)
from tools.files.figure import label_of, new_figure, save_figure
from tools.files.locks import LOCK, only_process_in
from tools.files.page import Cell, bullets, counted, folded, legend, page, table, text


@pytest.fixture
def places(tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "gone").symlink_to("nothere")
    (tmp_path / "good").symlink_to("file")
    os.mkfifo(tmp_path / "pipe")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (".", "a folder"), ("file", "a file"), ("good", "a file"), ("loop", "a link that leads back to itself"),
        ("gone", "a link to nothere, which is not there"), ("none", "no such file or folder"),
        ("file/below", "no such file or folder"), ("pipe", "a device, a pipe or a socket, not a file"),
        ("loop/below", "a link that leads back to itself"), ("a\0b", "not the name of a file"),
    ],
)  # fmt: skip
def test_what_stands_at_a_path(places, name, words):
    assert what_is(places / name) == words


def test_links_are_followed_as_far_as_they_lead(places):
    assert real_path(places / "good") == places.resolve() / "file"
    assert real_path(places / "loop").name == "loop"


def test_a_file_and_its_folders_are_made(tmp_path):
    path = tmp_path / "new" / "a.txt"
    write_atomically(path, "ü\n")
    assert path.read_text("utf-8") == "ü\n" and [file.name for file in path.parent.iterdir()] == ["a.txt"]


def test_others_may_read_what_the_umask_lets_them(tmp_path):
    write_atomically(tmp_path / "a", "")
    (tmp_path / "b").write_text("")
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "b").stat().st_mode


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_what_stood_there_stays_when_the_writer_stops_half_way(tmp_path, error):
    path = tmp_path / "a.txt"
    path.write_text("old")
    with pytest.raises(error), atomic_file(path) as part:
        part.write_text("ne")
        raise error
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_a_full_disk_is_one_message_and_leaves_nothing(tmp_path):
    path = tmp_path / "a.txt"
    with pytest.raises(DataError, match=r"a\.txt: .* cannot be written \(No space left"), atomic_file(path) as part:
        part.write_text("half")
        raise OSError(28, os.strerror(28))
    assert list(tmp_path.iterdir()) == []


def test_the_second_of_two_that_write_a_folder_is_told_that_it_is_there(tmp_path):
    """The second of two writers was told only that the folder is not empty."""
    other = pytest.raises(DataError, match="another process has written this folder meanwhile")
    with other, atomic_folder(tmp_path / "to") as late:
        (late / "file").write_text("late")
        (tmp_path / "to").mkdir()
        (tmp_path / "to" / "file").write_text("first")
    assert (tmp_path / "to" / "file").read_text() == "first" and [item.name for item in tmp_path.iterdir()] == ["to"]


def test_two_that_write_one_file_at_once_leave_one_of_the_two_complete_files(tmp_path, monkeypatch):
    """In containers, processes of two hosts have the same number: one put the other's half-written file in place."""
    path = tmp_path / "a.txt"
    monkeypatch.setattr(os, "getpid", lambda: 7)
    with atomic_file(path) as first:
        first.write_text("first")
        with atomic_file(path) as second:
            second.write_text("sec")
            assert first.read_text() == "first"
            second.write_text("second")
        assert path.read_text() == "second"
    assert path.read_text() == "first" and list(tmp_path.iterdir()) == [path]


def test_what_a_killed_process_of_the_same_number_left_stops_nobody(tmp_path, monkeypatch):
    """A command in a container has the same number each time: the second start was refused for ever."""
    monkeypatch.setattr(os, "getpid", lambda: 7)
    number = count()

    def write(root):
        with atomic_folder(root / "to") as part:
            (part / "weights").write_text("whole")

    for root, where in deaths(write, lambda: tmp_path / str(next(number))):
        if not (root / "to").exists():
            write(root)
        assert (root / "to" / "weights").read_text() == "whole", where


@pytest.fixture
def order(monkeypatch):
    """What is flushed and renamed, in this order."""
    found, fsync = [], os.fsync

    def flushed(descriptor):
        found.append(("flush", os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def moved(real):
        return lambda part, target: (found.append(("rename", str(target))), real(part, target))

    monkeypatch.setattr(os, "fsync", flushed)
    for name in ("replace", "rename"):
        patch_os(monkeypatch, name, moved(getattr(os, name)))
    return found


def test_the_content_is_on_the_disk_before_it_gets_its_name(tmp_path, order):
    """After a power cut an empty file had the final name."""
    atomic.write_atomically(tmp_path / "a.txt", "text")
    lines.write_whole(tmp_path / "b.json", {})
    for name in ("a.txt", "b.json"):
        (what, part), rename, folder = order[:3]
        assert what == "flush" and part.endswith(f".{name}")
        assert (rename, folder) == (("rename", str(tmp_path / name)), ("flush", str(tmp_path)))
        del order[:3]
    with atomic.atomic_folder(tmp_path / "c") as part:
        (part / "in").mkdir()
        (part / "in" / "file").touch()
    flushed = [("flush", str(path)) for path in (part / "in", part / "in" / "file", part)]
    assert order == [*flushed, ("rename", str(tmp_path / "c")), ("flush", str(tmp_path))]


def test_a_step_that_is_appended_does_not_wait_for_the_disk(tmp_path, order):
    lines.append_line(tmp_path / "metrics" / "rank_0.jsonl", {"step": 1})
    assert order == []


@pytest.mark.parametrize(("number", "said"), [(errno.EINVAL, None), (errno.EIO, r"a.txt: .* written \(Input")])
def test_a_disk_that_cannot_flush_is_left_at_that_and_one_with_an_error_is_not(tmp_path, monkeypatch, number, said):
    def fsync(descriptor):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(DataError, match=said) if said else nullcontext():
        atomic.write_atomically(tmp_path / "a.txt", "text")
    assert os.listdir(tmp_path) == ([] if said else ["a.txt"])


def test_a_file_in_the_place_of_a_folder_is_one_message(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot be written"):
        write_atomically(tmp_path / "file" / "a.txt", "")


@pytest.mark.parametrize("ending", ["svg", "png"])
def test_a_picture_is_the_same_for_the_same_numbers(tmp_path, ending):
    def draw(name):
        figure = new_figure(2, 1)
        figure.subplots().plot([1, 2, 3], label="line")
        return save_figure(figure, tmp_path / f"{name}.{ending}").read_bytes()

    assert draw("a") == draw("b")


def test_dollars_in_names_are_no_formulas_and_logarithmic_axes_keep_theirs(tmp_path):
    """A run whose name looks like a formula ended `tc3 runs report --picture` with a ParseSyntaxException."""
    figure, name = new_figure(4, 3), r"x$\frac{1}$"
    axes = figure.subplots()
    axes.plot([1, 2], [1, 1000], label=f"{name} line")
    axes.set_title(f"{name} title")
    axes.set_xticks([1, 2], [f"{name} tick", "b"])
    axes.set_yscale("log")
    axes.legend()
    for _ in range(2):
        text = save_figure(figure, tmp_path / "a.svg").read_text()
        assert all(f">{name} {where}<" in text for where in ("line", "title", "tick"))
        assert r"<!-- $\mathdefault{10^{2}}$ -->" in text and "10^{2}<" not in text


@pytest.mark.parametrize("ending", ["svg", "png"])
@pytest.mark.filterwarnings("error")  # about letters that the font does not have
def test_names_that_begin_with_an_underscore_are_in_the_legend(tmp_path, ending):
    figure = new_figure(4, 3)
    axes = figure.subplots()
    for name in ("_mine", "other"):
        axes.plot([1, 2], label=label_of(name))
    legend = axes.legend()
    written = save_figure(figure, tmp_path / f"a.{ending}").read_bytes()
    assert [each.get_text() for each in legend.get_texts()] == ["_mine", "other"]
    assert ending == "png" or b">_mine<" in written


def test_a_picture_that_cannot_be_finished_leaves_the_old_one(tmp_path, monkeypatch):
    path = tmp_path / "a.svg"
    path.write_text("old")
    figure = new_figure(2, 1)

    def half(target, **kwargs):
        target.write_text("<svg")
        raise KeyboardInterrupt

    monkeypatch.setattr(figure, "savefig", half)
    with pytest.raises(KeyboardInterrupt):
        save_figure(figure, path)
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_a_place_that_cannot_be_written_is_refused_beforehand_and_nothing_is_made(tmp_path):
    (tmp_path / "file").write_text("")
    for path, words in ((tmp_path, "it is a folder"), (tmp_path / "file" / "x", "is a file"), ("/proc/x", "/proc")):
        with pytest.raises(DataError, match=words):
            check_writable(path)
    check_writable(tmp_path / "new" / "folder" / "x.svg")
    assert [item.name for item in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("name", ["pipe", "standard output", "link to a pipe"])
def test_what_is_not_a_file_is_not_replaced_by_one(tmp_path, name):
    """Root's `--bind-file /dev/stdout`, and `--out /dev/null --force`, left a file in the place of the device."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "standard output").symlink_to("/proc/self/fd/1")
    (tmp_path / "link to a pipe").symlink_to("pipe")
    before = [(path.name, path.lstat().st_mode) for path in sorted(tmp_path.iterdir())]
    for write in (check_writable, lambda path: write_atomically(path, "text")):
        with pytest.raises(DataError, match=f"{name}: .* cannot be written .it is a .*, not a file"):
            write(tmp_path / name)
    assert [(path.name, path.lstat().st_mode) for path in sorted(tmp_path.iterdir())] == before


@pytest.mark.parametrize(("name", "words"), [("loop", "leads back to itself"), ("gone", "nothere, which is not there")])
def test_a_folder_that_is_a_link_to_nowhere_is_refused_before_the_long_work(places, name, words):
    """A search of minutes ended without its report: mkdir refuses what `exists` calls missing."""
    with pytest.raises(DataError, match=words):
        check_writable(places / name / "report.html")


def test_the_last_lines_of_a_log_or_none(tmp_path, monkeypatch):
    log = tmp_path / "worker.log"
    assert last_lines(log) == []
    log.write_bytes(b"first\nsecond \xff\nthird")
    assert last_lines(log) == ["first", "second \ufffd", "third"]
    monkeypatch.setattr(atomic, "_LIMIT", 7)
    assert last_lines(log) == ["\ufffd", "third"]


NASTY = "<script>&\"'"


class Nesting(HTMLParser):
    """It fails where an element is closed that is not open."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.said: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag != "meta":
            self.open.append(tag)
        assert tag != "script"

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.said.append(data)


def test_all_text_is_escaped_and_elements_are_closed():
    rows = [[NASTY, Cell(NASTY, "note")], [Cell(NASTY, "group", 2)]]
    tables = [table([NASTY, NASTY], rows), table([NASTY, NASTY], rows, "numbers", [1], ["own", ""])]
    body = [text(NASTY, "h1"), *tables, bullets([NASTY]), counted(NASTY, [NASTY]), legend(NASTY, {NASTY: NASTY})]
    parser = Nesting()
    parser.feed(page(NASTY, [*body, folded(NASTY, bullets([]))]))
    assert parser.open == []
    assert sum(said.count(NASTY) for said in parser.said) == 1 + 1 + 2 * (2 + 3) + 1 + 2 + 3 + 1


def test_a_row_has_its_class_and_a_wide_cell_its_columns():
    made = table(["a", "b"], [["1", "2"], [Cell("all", "group", 2)]], "numbers", [1], ["alike", ""])
    assert '<table class="numbers">' in made and '<tr class="alike"><td>1</td><td class="word">2</td></tr>' in made
    assert '<tr><td class="group" colspan=2>all</td></tr>' in made


def test_a_command_whose_number_is_not_written_yet_is_not_named(tmp_path):
    """It was "at work in this folder ()": the other command had locked the file, and not written into it yet."""
    with (tmp_path / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        words = "another tc3 x is at work in this folder; wait for its end"
        with pytest.raises(DataError, match=words), only_process_in(tmp_path, "tc3 x", "--work"):
            pass
