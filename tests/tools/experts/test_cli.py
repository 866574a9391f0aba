"""`tc3 experts report` on logs of a stated model of loads (`tests.plugins.expert_balance.drifting`)."""

import json
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import yaml
from click.testing import CliRunner

from plugins.errors import DataError
from plugins.expert_balance.plan import device_loads
from plugins.expert_balance.record import append, load_file
from plugins.expert_balance.settings import Settings
from tests.plugins.expert_balance.drifting import live
from tests.tools.check.test_mutations import ROOT
from tools.estimate.from_recipe import from_recipe
from tools.estimate.loads import loads_of
from tools.experts.cli import experts
from tools.experts.study import open_run, seconds_of, study
from tools.layout.advise import advise
from tools.recipe.load import load_recipe

LAYERS = 53  # MoE layers of the 438B recipe
LARGE = ROOT / "recipes" / "telechat3_438b" / "pretrain_4k.yaml"
MINI = ROOT / "recipes" / "mini" / "pretrain_ep4.yaml"


def write(path, records):
    for record in records:
        append(path, record)
    return str(path)


def run(*arguments):
    return CliRunner().invoke(experts, ["report", *map(str, arguments)])


def told(*arguments):
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A log of as many experts, devices and layers as the 438B recipe has, without plans."""
    records = live(Settings(every=0), steps=12, devices=16, layers=LAYERS, experts=256)
    return write(tmp_path_factory.mktemp("large") / "log.jsonl", records)


def test_layers_are_as_counted_by_hand(tmp_path):
    records = live(Settings(every=3))
    found = told(write(tmp_path / "log", records))
    on = np.array([device_loads(record.tokens, record.slots, 4) for record in records])
    ratios = on.max(2) / on.mean(2)
    for at, layer in enumerate(found["layers"]):
        total = sum(record.tokens[at] for record in records)
        assert layer["max_over_mean"] == pytest.approx(ratios[:, at].mean())
        assert layer["worst"] == pytest.approx(ratios[:, at].max())
        assert layer["worst_step"] == 1 + ratios[:, at].argmax()
        assert layer["devices"] == pytest.approx((on[:, at].sum(0) / on[:, at].sum(0).mean()).tolist())
        assert layer["busiest_expert"]["expert"] == total.argmax()
        assert layer["bound"] <= layer["max_over_mean"]
    assert found["devices"] == 4 and found["experts"] == 32 and found["recorded_steps"] == 13


def test_a_run_that_moved_is_compared_with_what_others_would_have_done(tmp_path):
    records = live(Settings(every=3), steps=18)
    rows = {
        (row["policy"], row["every"]): row for row in told(write(tmp_path / "log", records), "--every", "3")["policies"]
    }
    assert list(rows) == [
        *(("experts stay", 0), ("as recorded", 3), ("greedy (EPLB, MindFormers)", 3)),
        *(("swaps", 3), ("aligned", 3), ("swaps", 15)),
    ]
    recorded, stay = rows["as recorded", 3], rows["experts stay", 0]
    assert recorded["by_step"] == rows["swaps", 3]["by_step"]  # the run had the default settings
    assert recorded["moves"] == rows["swaps", 3]["moves"] == sum(one.moved.experts for one in records if one.moved)
    assert recorded["measured_move_seconds"] == 0.25
    assert stay["moves"] == 0 and stay["by_step"][:3] == recorded["by_step"][:3]
    assert recorded["max_over_mean"] < stay["max_over_mean"]
    assert rows["greedy (EPLB, MindFormers)", 3]["moves"] > 2 * recorded["moves"]


@pytest.mark.slow
def test_seconds_are_those_of_ep_report(large):
    """Both commands use one estimator: recorded loads cost the seconds that `tc3 ep-report --loads` prints."""
    source = open_run(Path(large), LARGE, print)
    found = seconds_of(source.recipe, source.records, "atlas_800t_a2")
    even, uneven, recorded = (
        advise(source.recipe, "atlas_800t_a2", loads).written.step.total for loads in ("even", "1.2", large)
    )
    assert found.even == even
    assert found.waits(np.full((2, LAYERS), 1.2)) == pytest.approx(uneven - even)
    assert found.waits(study(source, "atlas_800t_a2", None).ratios) == pytest.approx(recorded - even)


def test_what_waits_is_saved_by_moving(large):
    found = told(large, "--recipe", LARGE, "--every", "5")
    rows = {row["policy"]: row for row in found["policies"] if row["every"] in (0, 5)}
    assert found["seconds"]["cluster"] == "atlas_800t_a2" and found["seconds"]["unknown"] is None
    assert rows["swaps"]["saves_seconds"] == pytest.approx(
        rows["experts stay"]["waits_seconds"] - rows["swaps"]["waits_seconds"]
    )
    assert 0 < rows["swaps"]["waits_seconds"] < rows["experts stay"]["waits_seconds"]


def test_seconds_that_nobody_knows_are_unknown_with_the_reason(tmp_path, large):
    small = write(tmp_path / "log", live(Settings(every=0), experts=16))
    few = write(tmp_path / "few", live(Settings(every=0), steps=3, devices=8, layers=LAYERS, experts=256))
    for arguments, reason in (
        ([small], "--recipe names one"),
        ([small, "--recipe", MINI], "CPU workers"),
        ([few, "--recipe", LARGE], "of 8 devices that share experts, the recipe of 16"),
    ):
        found = told(*arguments)
        assert reason in found["seconds"]["unknown"] and found["policies"][0]["waits_seconds"] is None
        text = run(*arguments).stdout
        assert reason in text.replace("\n", " ") and "unknown" in text


def test_a_log_of_another_model_is_refused(tmp_path):
    experts = write(tmp_path / "experts", live(Settings(every=0), steps=1))
    layers = write(tmp_path / "layers", live(Settings(every=0), steps=1, devices=16, experts=256))
    for log, message in (
        (experts, "32 experts, but the recipe has 256"),
        (layers, "3 MoE layers, but the recipe has 53"),
    ):
        with pytest.raises(DataError, match=f"tokens: the log has {message}"):
            raise run(log, "--recipe", LARGE).exception
        with pytest.raises(DataError, match=f"tokens: the log has {message}"):
            loads_of(log, from_recipe(load_recipe(LARGE)))


def test_the_last_line_of_a_live_run_may_be_unfinished_and_no_other(tmp_path):
    """The report and `--loads` have one rule."""
    log = Path(write(tmp_path / "log.jsonl", live(Settings(every=0), steps=3, devices=16, layers=LAYERS, experts=256)))
    config, whole = from_recipe(load_recipe(LARGE)), log.read_text()
    log.write_text(whole + whole[:50])
    result = run(log)
    assert result.exit_code == 0 and "log.jsonl:4: this line is not finished" in result.stderr
    assert told(log)["recorded_steps"] == 3
    loads = loads_of(str(log), config)
    assert loads.steps == (1, 2, 3) and "without its last line, which is not finished" in loads.words
    for text in (whole + whole[:50] + "\n", whole[:50] + "\n" + whole):
        log.write_text(text)
        for read in (lambda: open_run(log, None, print), lambda: loads_of(str(log), config)):
            with pytest.raises(DataError, match=r"this line is not JSON.*cut off"):
                read()


def test_copies_are_replayed_beside_those_of_eplb(tmp_path):
    log = write(tmp_path / "log", live(Settings(every=0), steps=40, spread=1.5))
    rows = {row["policy"]: row for row in told(log, "--every", "5", "--spare", "2")["policies"]}
    swaps, ours, eplb = (rows[name] for name in ("swaps", "swaps, 2 spare slots", "EPLB, 2 spare slots"))
    assert ours["max_over_mean"] < swaps["max_over_mean"] and swaps["copies_of_a_layer"] == 0
    assert 0 < ours["copies_of_a_layer"] <= eplb["copies_of_a_layer"] == 8
    assert "swaps, 1 spare slot" in run(log, "--every", "5", "--spare", "1").stdout
    assert not any("slot" in row["policy"] for row in told(log, "--every", "5")["policies"])


def test_a_run_that_made_copies_replays_to_them(tmp_path):
    settings = Settings(every=4, gate=0.0, spare=1)
    written = {"every": 4, "gate": 0, "spare": 1}
    recipe = {**load_recipe(MINI), "plugins": {"expert_balance": written}}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(json.loads(json.dumps(recipe))))
    records = live(settings, spread=1.5, experts=16)
    write(load_file(tmp_path), records)
    found = told(tmp_path)
    rows = {row["policy"]: row for row in found["policies"]}
    assert found["replay_differs_at"] == [] and rows["as recorded"]["copies_of_a_layer"] > 0
    assert rows["as recorded"]["by_step"] == pytest.approx(
        [(one.on_devices.max(1) / one.on_devices.mean(1)).mean() for one in records]
    )


def test_a_run_brings_its_recipe_and_its_settings(tmp_path):
    settings = Settings(every=4, method="aligned", gate=0.0)
    recipe = {**load_recipe(MINI), "plugins": {"expert_balance": {"every": 4, "method": "aligned", "gate": 0}}}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(json.loads(json.dumps(recipe))))
    write(load_file(tmp_path), live(settings, experts=16))
    for place in (tmp_path, load_file(tmp_path)):
        found = told(place)
        assert found["every"] == 4 and found["replay_differs_at"] == []
    assert "gives the recorded placements exactly" in run(tmp_path).stdout
    other = {"expert_balance": {"every": 4, "method": "aligned", "gate": 0, "memory": 0.1}}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(json.loads(json.dumps({**recipe, "plugins": other}))))
    assert told(tmp_path)["replay_differs_at"] != []
    assert "first differs at step" in run(tmp_path).stdout


def test_a_log_too_short_for_a_plan_says_so(tmp_path):
    result = run(write(tmp_path / "log", live(Settings(every=0), steps=5)))
    assert result.exit_code == 0 and "a log longer than 20 steps" in result.stdout


def test_a_worst_micro_batch_is_shown_where_it_is_known(tmp_path):
    records = live(Settings(every=0), steps=3)
    records[1] = replace(records[1], micro_batch=(1.75, None, None))
    found = told(write(tmp_path / "log", records))
    assert [layer["worst_micro_batch"] for layer in found["layers"]] == [1.75, None, None]


def test_even_routing_shows_the_noise_of_counting(tmp_path):
    """128 tokens an expert: 8 experts hold 1024 +- 32 of them, the fullest of 4 devices about 1 deviation more."""
    text = run(write(tmp_path / "log", live(Settings(every=0), spread=0.0))).stdout
    noise = float(text.split("have a max/mean of ")[1].split()[0])
    assert 1.01 < noise < 1.06


@pytest.mark.slow
@pytest.mark.parametrize("layers", [2, 6])
def test_pictures_and_page(tmp_path, layers):
    log = write(tmp_path / "a<b.jsonl", live(Settings(every=3), layers=layers))
    for name in ("loads.svg",) if layers > 2 else ("loads.svg", "loads.png"):
        result = run(log, "--picture", tmp_path / name)
        assert result.exit_code == 0 and f"drawn: {tmp_path / name}" in result.stderr
    drawing = ElementTree.parse(tmp_path / "loads.svg").getroot()
    words = " ".join(element.text or "" for element in drawing.iter() if element.tag.endswith("text"))
    for word in ("fullest device / mean", "as recorded", "device of the EP group", "expert"):
        assert word in words
    assert ("layer 2" in words) == (layers == 2) and ("steps 1 to" in words) == (layers == 6)
    result = run(log, "--html", tmp_path / "loads.html")
    page = (tmp_path / "loads.html").read_text()
    assert result.exit_code == 0 and page.count("<svg") == 1 and page.count("<table") == 2
    assert "a&lt;b.jsonl" in page and "a<b" not in page


def test_wrong_places_are_refused(tmp_path):
    for arguments, message in (
        ([tmp_path / "none"], "there is no such run or file"),
        ([tmp_path], "record: True writes it"),
        ([tmp_path / "log", "--picture", "a.txt"], "--picture a.txt"),
        ([tmp_path / "log", "--html", "a.txt"], "--html a.txt"),
    ):
        write(tmp_path / "log", live(Settings(every=0), steps=1))
        with pytest.raises(DataError, match=message):
            raise run(*arguments).exception
