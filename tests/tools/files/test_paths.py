import os

import pytest

from tools.files.paths import real_path, what_is


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
        ("loop/below", "a link that leads back to itself"), ("a\0b", "no name of a file"),
    ],
)  # fmt: skip
def test_what_stands_at_a_path(places, name, words):
    assert what_is(places / name) == words


def test_links_are_followed_as_far_as_they_lead(places):
    assert real_path(places / "good") == places.resolve() / "file"
    assert real_path(places / "loop").name == "loop"
