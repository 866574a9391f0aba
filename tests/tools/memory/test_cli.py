import json

import pytest
from click.testing import CliRunner

from tools.memory.cli import memory

RECIPE = "recipes/telechat3_105b/pretrain_4k.yaml"


def run(*words):
    return CliRunner().invoke(memory, [RECIPE, *map(str, words)])


def test_json_has_stages_room_and_the_peaks_owners():
    result = run("--json", "--stage", 7)
    found = json.loads(result.stdout)
    assert result.exit_code == 0 and found["fit"] == "fits" and len(found["stages"]) == 8
    assert found["peak"]["stage"] == 7
    assert found["peak"]["bytes"] == pytest.approx(found["stages"][7]["peak"])
    assert sum(owner["bytes"] for owner in found["peak"]["owners"]) == pytest.approx(found["peak"]["bytes"])
    assert found["known_error"][0] < 0 < found["known_error"][1]


def test_a_limit_that_is_too_small_is_exit_code_1():
    result = run("--limit", 10)
    assert result.exit_code == 1 and "does not fit" in result.stdout and "by --limit" in result.stdout


def test_explained_with_keys():
    result = run("--limit", 16, "--explain-oom")
    assert "gradient_accumulation_shard: True" in result.stdout
    assert "optimizer_level: level3" in result.stdout


@pytest.mark.parametrize("name", ["a.svg", "a.json"])
def test_the_line_is_written(tmp_path, name):
    result = run("--time-line", tmp_path / name)
    text = (tmp_path / name).read_text("utf-8")
    assert result.exit_code == 0 and f"written: {tmp_path / name}" in result.stderr
    if name.endswith("json"):
        line = json.loads(text)
        assert max(map(sum, line["live"])) == pytest.approx(line["peak"]["bytes"], abs=50)
    else:
        assert "accumulated gradients" in text
