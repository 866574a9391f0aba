import json

import pytest

from plugins.errors import DataError, not_json, refuse_unknown


def test_an_unknown_key_is_named_with_the_nearest_or_with_all():
    refuse_unknown("f: ", {"rows": 1}, ("rows", "about"))
    with pytest.raises(DataError, match=r"^f: rwos: no such key \(did you mean 'rows'\?\)$"):
        refuse_unknown("f: ", {"rwos": 1}, ("rows", "about"), DataError)
    with pytest.raises(DataError, match=r"^f: a\.z: no such setting; known are rows, about$"):
        refuse_unknown("f: a.", ["z"], ("rows", "about"), DataError, "setting")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"", "is empty: JSON was expected"), (b" \n", "is empty: JSON was expected"),
        (b'{\n"a": ,}', "is not JSON: line 2, column 6: expecting value"),
        (b'{"a": "\xff"}', "is not JSON: byte 8 is not UTF-8"),
        (b"[" * 100_000, "is not JSON that can be read: its brackets are nested too deep"),
        (b"9" * 5000, "is not JSON: Exceeds the limit (4300 digits) for integer string conversion"),
    ],
)  # fmt: skip
def test_why_a_text_is_not_json(text, words):
    with pytest.raises((ValueError, RecursionError)) as raised:
        json.loads(text)
    assert not_json(raised.value).startswith(words)
