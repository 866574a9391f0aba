"""`tc3 runs` of records with values that no run writes: no value ends it in a traceback."""

import json

import pytest
from click.testing import CliRunner

from plugins.errors import TC3Error
from plugins.straggler_probe.record import Record, append, probe_file
from tests.corrupted import corrupted, places
from tests.tools.runs.builders import Builder
from tools.runs.cli import runs


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    builder = Builder(folder, 4)
    builder.plan()
    builder.beat()
    builder.train(3, every=2)
    for rank in range(2):
        append(probe_file(folder, rank), Record(2, rank, "node0", "CPU", 4, 0.01, 1.0, 1, 0.1, 0.5, 0.0, 0.0))
    evaluation = {"step": 2, "held_out_loss": 5.0, "corpora": {"code": 4.0}}
    (folder / "metrics" / "held_out.jsonl").write_text(json.dumps(evaluation) + "\n")
    return folder


@pytest.mark.parametrize("wrong", [10**400, {}, "text"], ids=["huge", "object", "text"])
@pytest.mark.parametrize("name", ["rank_0.jsonl", "held_out.jsonl", "probe_0.jsonl", "spans.jsonl"])
def test_no_value_ends_a_report_or_a_status_in_a_traceback(run, name, wrong):
    """Each key of the last line."""
    file = run / "metrics" / name
    text = file.read_text()
    lines = text.splitlines(keepends=True)
    command = ["watch", str(run), "--once"] if name == "held_out.jsonl" else ["report", str(run)]
    for path in places(json.loads(lines[-1])):
        changed, _ = corrupted(lines[-1], path, wrong)
        file.write_text("".join([*lines[:-1], changed]))
        result = CliRunner().invoke(runs, command)
        file.write_text(text)
        assert result.exception is None or isinstance(result.exception, (SystemExit, TC3Error)), path
