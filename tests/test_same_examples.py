"""Property tests draw the same examples whatever the process has imported before."""

import importlib.util
import sys

from hypothesis import given, settings
from hypothesis import strategies as st


def drawn():
    found = []

    @settings(max_examples=200, derandomize=True)
    @given(st.integers(), st.floats(), st.text())
    def test(number, real, text):
        found.append(repr((number, real, text)))

    test()
    return found


def test_a_module_that_was_imported_meanwhile_changes_no_example(tmp_path):
    before = drawn()
    file = tmp_path / "constants_of_somebody.py"
    file.write_text("\n".join(f"A{n} = {7_654_321 * n}, {n}.125, 'word {n}'" for n in range(1, 200)))
    spec = importlib.util.spec_from_file_location("constants_of_somebody", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules["constants_of_somebody"] = module
    try:
        spec.loader.exec_module(module)
        assert drawn() == before
    finally:
        del sys.modules["constants_of_somebody"]
