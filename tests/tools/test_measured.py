"""A bundle is read as it was written, or refused in one line."""

import json
import random
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from plugins.errors import DataError
from tools import measured as module
from tools.estimate.from_recipe import from_recipe
from tools.estimate.memory.model import all_stages
from tools.measured import (
    MANIFEST,
    Manifest,
    MemoryTerms,
    applied,
    hashed,
    measured_cluster,
    measured_memory,
    memory_in_words,
    origin,
    read_bundle,
    recipe_digest,
    software,
    without_names,
    write_bundle,
)
from tools.recipe.load import load_recipe

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "mini" / "pretrain.yaml"
TEXTS = {"outcomes.json": "[]\n", "memory.json": json.dumps({"activations": 1.1, "buffers": 0.9, "reserve_bytes": 5e8,
                                                             "error": 0.0}), "cluster.yaml": "name: x\n"}  # fmt: skip


def manifest(**changes):
    content = {
        "format": 2, "made": "2026-11-26T12:00:00Z", "device": "910B3", "devices": 512, "simulated": False,
        "names": "plain", "recipe": "recipes/mini/pretrain.yaml", "digest": recipe_digest(RECIPE),
        "versions": software(), "verdict": "go",
    }  # fmt: skip
    return Manifest(**{**content, **changes})


@pytest.fixture
def path(tmp_path):
    write_bundle(tmp_path / "b.zip", manifest(), TEXTS)
    return tmp_path / "b.zip"


def rewrite(path, change):
    """Write the entries of a zip file anew; `change` maps name -> text to name -> text."""
    with zipfile.ZipFile(path) as archive:
        texts = {name: archive.read(name).decode() for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in change(texts).items():
            archive.writestr(name, text)


def test_what_was_written_is_read(path):
    found = read_bundle(path, RECIPE)
    assert found.texts == TEXTS
    assert measured_cluster(found) == "name: x\n"
    assert measured_memory(found) == MemoryTerms(1.1, 0.9, 5e8, 0.0)
    assert found.claim == "measured-910B3-512"
    assert "measured by" in origin(found)
    with zipfile.ZipFile(path) as archive:
        assert set(archive.namelist()) == {MANIFEST, *TEXTS}


def test_equal_content_gives_equal_bytes(path, tmp_path):
    write_bundle(tmp_path / "again.zip", manifest(), dict(reversed(TEXTS.items())))
    assert (tmp_path / "again.zip").read_bytes() == path.read_bytes()


def sealed(texts, **changes):
    """The entries with a manifest that somebody changed and sealed anew."""
    content = {**json.loads(texts[MANIFEST]), **changes}
    content["seal"] = module._seal(content)
    return {**texts, MANIFEST: json.dumps(content)}


def without(texts, name):
    """The entries but one."""
    return {key: text for key, text in texts.items() if key != name}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda texts: {**texts, "cluster.yaml": "name: y\n"}, "cluster.yaml: the file was edited"),
        (lambda texts: {**texts, MANIFEST: texts[MANIFEST].replace("512", "4096")}, "the manifest was edited"),
        (lambda texts: {**texts, "more.txt": "x"}, "more.txt: no such file of the manifest"),
        (lambda texts: without(texts, "memory.json"), "memory.json: the file is missing"),
        (lambda texts: without(texts, MANIFEST), "is not a bundle of tc3 firsthour"),
        (lambda texts: {**texts, MANIFEST: "{"}, "manifest.json: the file is not JSON"),
        (lambda texts: sealed(texts, format=1), "format is 1, but this tc3 reads format 2"),
        (lambda texts: sealed(texts, devises=3), "devises: no such key (did you mean 'devices'?)"),
        (lambda texts: sealed(texts, versions={**software(), "tc3": "0.0.9"}), "measured with tc3 0.0.9, but this is"),
        (lambda texts: sealed(texts, versions={**software(), "mindspore": "2.8.0"}), "measured with mindspore 2.8.0"),
        (lambda texts: sealed(texts, versions={**software(), "estimator": "older"}), "measured with estimator older"),
        (lambda texts: sealed(texts, digest="0" * 16), "is another recipe"),
    ],
)  # fmt: skip
def test_a_bundle_that_cannot_be_trusted_is_refused_in_one_line(path, change, words):
    rewrite(path, change)
    with pytest.raises(DataError) as error:
        read_bundle(path, RECIPE)
    assert words in str(error.value)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_every_truncation_is_refused(path):
    whole = path.read_bytes()
    for size in [0, *random.Random(7).sample(range(len(whole)), 60), len(whole) - 1]:
        path.write_bytes(whole[:size])
        with pytest.raises(DataError, match="truncated or damaged"):
            read_bundle(path)


def test_a_changed_byte_is_never_read_as_another_number(path):
    whole = path.read_bytes()
    for at in {*random.Random(3).sample(range(len(whole)), 120), *range(len(whole) - 200, len(whole))}:  # the directory
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x41]) + whole[at + 1 :])
        try:
            found = read_bundle(path)
        except DataError:
            continue
        assert found.texts == TEXTS  # such as the date of an entry


def test_an_hour_that_did_not_come_so_far_has_no_cluster_and_no_memory(tmp_path):
    write_bundle(tmp_path / "b.zip", manifest(simulated=True), {"outcomes.json": "[]\n"})
    found = read_bundle(tmp_path / "b.zip")
    assert measured_memory(found) is None
    assert memory_in_words(found) == "memory is as modelled: the bundle has no measured memory"
    with pytest.raises(DataError, match="the check `calibrate` gave no result"):
        measured_cluster(found)
    with pytest.raises(DataError, match=r"card\.yaml may state only measured results"):
        _ = found.claim
    assert "nothing in them was measured" in origin(found)


def test_names_of_hosts_are_replaced_the_longest_first():
    names = {name: hashed(name) for name in ("node1", "node10")}
    text = without_names({"a": "node1 node10 NODE1"}, names)["a"]
    assert text == f"{hashed('node1')} {hashed('node10')} {hashed('node1')}"


def test_words_that_only_begin_like_a_host_stay():
    names = {name: hashed(name) for name in ("worker", "e4")}
    one, two = names.values()
    written = json.dumps([{"seen": "workers: worker\nworker: e4"}])
    assert json.loads(without_names({"a.json": written}, names)["a.json"]) == [
        {"seen": f"workers: {one}\n{one}: {two}"}
    ]
    assert without_names({"a.json": "e4"}, {}) == {"a.json": "e4"}


BEFORE = "\n", "\\n", "\\\\n", "\\t", "\x1b[31m", "\\u001b[1;31m", "\\u2192", "_", "/"
ESCAPED = (
    "\x1b[31m\x1b[K",
    "\x1b[?25h",
    "\\x1b[0m",
    "\\033[0m",
    "\\e[1m",
    "\\x00",
    "%20",
)  # of grep, Python, echo, a URL


@pytest.mark.parametrize("before", [*BEFORE, *ESCAPED])
def test_words_that_only_end_like_a_host_stay(before):
    """The recipe pretrain1.yaml was called prehost-..., which nobody could find again."""
    name = hashed("train1")
    written = json.dumps([{"seen": f"pretrain1.yaml on{before}train1: 10train1 {before}TRAIN1"}])
    found = json.loads(without_names({"a.json": written}, {"train1": name})["a.json"])
    assert found == [{"seen": f"pretrain1.yaml on{before}{name}: 10train1 {before}{name}"}]


def test_a_host_that_is_called_like_a_key_renames_no_key():
    """Otherwise a bundle of a host that is called report cannot be read any more."""
    words = ("report", "findings", "evidence", "probes", "workers", "hosts", "fail", "verdict", "memory", "facts")
    names = {name: hashed(name) for name in words}
    told = {"findings": [{"check": "memory", "verdict": "fail", "seen": "on report"}], "facts": {"host": "facts"}}
    rows = [
        {"check": "hosts", "verdict": "fail", "findings": [{"what": "disk", "where": "report"}],
         "evidence": {name: {"report": json.dumps(told), "trouble": None} for name in words}},
        {"check": "devices", "verdict": "ok", "findings": [],
         "evidence": {"probes": {name: {"workers": [1]} for name in words}, "memory": []}},
    ]  # fmt: skip
    texts = without_names({"outcomes.json": json.dumps(rows), "cluster.yaml": "memory: 3 # of memory\n"}, names)
    hosts, devices = json.loads(texts["outcomes.json"])
    assert (hosts["check"], hosts["verdict"], hosts["findings"][0]["where"]) == ("hosts", "fail", names["report"])
    assert list(hosts["evidence"]) == list(devices["evidence"]["probes"]) == list(names.values())
    assert devices["evidence"]["probes"][names["facts"]] == {"workers": [1]}
    told["findings"][0]["seen"], told["facts"]["host"] = f"on {names['report']}", names["facts"]
    assert json.loads(hosts["evidence"][names["fail"]]["report"]) == told
    assert texts["cluster.yaml"] == f"memory: 3 # of {names['memory']}\n"


def test_a_reserve_below_zero_adds_no_memory_where_its_factors_are_not_used():
    """The fit of a run may have too large factors and a reserve that makes up for them."""
    assert MemoryTerms(1.2, 1.0, -3e9, 0.0).reserve == 0 and MemoryTerms(0.9, 1.0, 3e9, 0.0).reserve == 3e9


def test_measured_factors_change_what_they_name():
    stage = all_stages(from_recipe(load_recipe(RECIPE)))[0]
    found = applied(stage, MemoryTerms(2.0, 3.0, 1e9, 0.0))
    assert found.static == stage.static
    assert found == replace(
        stage, activations=2 * stage.activations, working=2 * stage.working, buffers=3 * stage.buffers
    )
