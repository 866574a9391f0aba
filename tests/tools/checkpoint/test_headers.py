"""A header may say only what safetensors itself would read: every byte of a file belongs to one tensor."""

import json

import pytest

from plugins.errors import CheckpointError
from tools.checkpoint.headers import Header, read_headers


def written(path, header, size=16):
    text = json.dumps(header).encode() if not isinstance(header, bytes) else header
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(size))
    return path


def tensor(first, last, shape=(2,), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [first, last]}


def test_tensors_one_after_the_other(tmp_path):
    content = {"__metadata__": {"format": "ms"}, "b": tensor(8, 16), "a": tensor(0, 8), "none": tensor(16, 16, (0,))}
    found = read_headers(written(tmp_path / "f", content))
    assert {name: header.bytes for name, header in found.items()} == {"b": 8, "a": 8, "none": 0}
    assert found["a"] == Header("F32", (2,), 8)


@pytest.mark.parametrize(
    "content",
    [
        {"a": tensor(-8, 0), "b": tensor(0, 16, (4,))},
        {"a": tensor(8, 0), "b": tensor(0, 16, (4,))},
        {"a": tensor(0, 16)},
        {"a": tensor(0, 8), "b": tensor(4, 16, (3,))},
        {"a": tensor(8, 16)},
        {"a": tensor(0, 16, (-4, -1))},
        {"a": tensor(0, 16, (2.0, 2))},
        {"a": tensor(0, 16, (4,), "F7")},
        {"a": tensor(0, 16, (4,), 3)},
        {"a": {"dtype": "F32", "shape": [4], "data_offsets": [0]}},
        {"a": [0, 16]},
        {"a": tensor(0, True * 16, (True, 4))},
        [],
        b"",
        b"[" * 100_000,
        b'{"a": 99',
    ],
)
def test_what_no_safetensors_file_says(tmp_path, content):
    with pytest.raises(CheckpointError, match=r"not a complete safetensors file|known are"):
        read_headers(written(tmp_path / "f", content))
