"""Files that are written piece by piece are those of the safetensors package, byte for byte."""

import hashlib

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file as whole

from tools.checkpoint.stream import Made, save_file

TYPES = {"F32": np.float32, "BF16": ml_dtypes.bfloat16, "F16": np.float16}
tensors = st.dictionaries(
    st.text("ab.é1", min_size=1, max_size=9),
    st.tuples(st.sampled_from(sorted(TYPES)), st.lists(st.integers(1, 4), max_size=3), st.integers(1, 3)),
    min_size=1,
    max_size=6,
)


def made(kind, array, cuts):
    rows = [piece for piece in np.array_split(np.atleast_1d(array), cuts) if piece.size]
    return Made(kind, array.shape, lambda: iter(rows))


@settings(max_examples=60)
@given(tensors)
def test_it_is_the_packages_file(tmp_path_factory, drawn):
    folder, random = tmp_path_factory.mktemp("stream"), np.random.default_rng(0)
    arrays = {
        name: np.asarray(random.standard_normal(shape)).astype(TYPES[kind]) for name, (kind, shape, _) in drawn.items()
    }
    whole(arrays, folder / "whole", {"format": "pt"})
    found = save_file(
        {name: made(drawn[name][0], arrays[name], drawn[name][2]) for name in drawn}, folder / "own", {"format": "pt"}
    )
    content = (folder / "own").read_bytes()
    assert content == (folder / "whole").read_bytes()
    assert found == hashlib.sha256(content).hexdigest()


def test_pieces_that_are_not_the_tensor_are_no_file(tmp_path):
    wrong = Made("F32", (3,), lambda: iter([np.zeros(2, np.float32)]))
    with pytest.raises(AssertionError, match="a: 8 bytes instead of 12"):
        save_file({"a": wrong}, tmp_path / "own", {})
