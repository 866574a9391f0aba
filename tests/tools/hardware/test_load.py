"""Hardware files: those of the repository are whole, and an own file is refused where it is wrong."""

import copy
import re
from pathlib import Path

import pytest
import yaml

from plugins.errors import RecipeError
from tools.estimate.efficiency import cluster
from tools.hardware import known_hardware, load_hardware
from tools.hardware.load import CERTAINTIES, DTYPES, FOLDER, read_yaml
from tools.hardware.units import BOTH, LONG, same_dtype, short_dtype
from tools.search.request import file_of


def content(name="atlas_800t_a2"):
    return yaml.safe_load((FOLDER / f"{name}.yaml").read_text("utf-8"))


def written(tmp_path, change):
    """The path of a copy of a good file after `change`."""
    mapping = copy.deepcopy(content())
    change(mapping)
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(mapping), "utf-8")
    return file


def test_every_shipped_file_is_whole():
    assert set(known_hardware()) >= {"atlas_800t_a2", "atlas_900_a3", "a100_80g", "h100", "h800"}
    for name in known_hardware():
        hardware = load_hardware(name)
        assert hardware.name == name
        assert hardware.peak_flops["bf16"] > 1e14
        assert hardware.intra_node.reached > hardware.inter_node.reached
        assert {origin.certainty for origin in hardware.origins.values()} <= set(CERTAINTIES)
        # what no public source says is never passed off as known
        assert {"launch_s", "inter_node.latency_s"} <= set(hardware.assumed)


def test_numbers_of_the_ascend_files_are_those_of_their_source():
    """cores x 8192 x clock: the platform files' bf16 peaks."""
    assert load_hardware("atlas_800t_a2").peak_flops["bf16"] == pytest.approx(20 * 8192 * 1.8e9, rel=1e-3)
    assert load_hardware("atlas_900_a3").peak_flops["bf16"] == pytest.approx(24 * 8192 * 1.8e9, rel=1e-3)


def test_an_own_file_and_numbers_written_as_people_write_them(tmp_path):
    def change(mapping):
        mapping["hbm_bytes"]["value"] = "32e9"  # YAML 1.1 reads 32e9 as text
        mapping["inter_node"]["latency_s"]["value"] = 0

    hardware = load_hardware(written(tmp_path, change))
    assert (hardware.hbm_bytes, hardware.inter_node.latency_s) == (32e9, 0)
    assert isinstance(hardware.devices_per_node, int)


def test_ports_may_be_left_out_and_are_counted(tmp_path):
    assert load_hardware("atlas_800t_a2").inter_node.ports == 1 and cluster("b300").inter_node.ports == 2

    def change(value):
        return lambda mapping: mapping["inter_node"].update(
            ports={"value": value, "certainty": "assumed", "source": "x"}
        )

    assert load_hardware(written(tmp_path, change(4))).inter_node.ports == 4
    with pytest.raises(RecipeError, match=r"inter_node\.ports\.value: 0 "):
        load_hardware(written(tmp_path, change(0)))


def test_what_matmuls_reach_is_no_longer_a_files_own_word(tmp_path):
    """It is fitted; a file of before says so, with what to do."""

    def change(mapping):
        mapping["matmul_efficiency"] = {"value": 0.6, "certainty": "assumed", "source": "of before"}

    with pytest.raises(
        RecipeError, match=r"matmul_efficiency: the key is no longer read; delete it: .*efficiencies\.yaml"
    ):
        load_hardware(written(tmp_path, change))


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("hbm_bytes.value", -1, ["hbm_bytes.value", "out of range", "-1"]),
        ("hbm_bytes.value", 0, ["hbm_bytes.value", "out of range"]),
        ("hbm_bytes.value", 64, ["hbm_bytes.value", "from 1,000,000 to"]),  # GiB are no bytes
        ("peak_flops.bf16.value", 354, ["peak_flops.bf16.value", "out of range"]),
        ("inter_node.latency_s.value", 20, ["inter_node.latency_s.value", "to 10"]),
        ("devices_per_node.value", float("nan"), ["devices_per_node.value", "not finite"]),
        ("devices_per_node.value", 10**30, ["devices_per_node.value", "out of range"]),
        ("hbm_bytes.value", "many", ["hbm_bytes.value", "'many'"]),
        ("hbm_bytes.value", float("inf"), ["hbm_bytes.value"]),
        ("hbm_bytes.value", True, ["hbm_bytes.value"]),
        ("launch_s.value", -1e-6, ["launch_s.value", "from 0 to 10"]),
        ("inter_node.efficiency.value", 1.2, ["inter_node.efficiency.value", "at most 1"]),
        ("inter_node.efficiency.value", 0, ["inter_node.efficiency.value"]),
        ("devices_per_node.value", 7.5, ["devices_per_node.value", "whole number"]),
        ("peak_flops.bf16.value", None, ["peak_flops.bf16.value"]),
        ("peak_flops", {}, ["peak_flops", "at least one"]),
        ("peak_flops", {"bf61": {}}, ["peak_flops.bf61", "did you mean 'bf16'"]),
        ("launch_s.certainty", "measured", ["launch_s.certainty", "quoted, derived, assumed"]),
        ("launch_s.certainty", "assume", ["did you mean 'assumed'"]),
        ("launch_s.source", " ", ["launch_s.source", "where"]),
        ("launch_s", 1e-5, ["launch_s", "value, certainty, source"]),
        ("name", 3, ["name", "text"]),
        ("intra_node", None, ["intra_node", "bytes_per_s"]),
    ],
)
def test_what_is_refused(path, value, words, tmp_path):
    def change(mapping):
        *parents, last = path.split(".")
        for key in parents:
            mapping = mapping[key]
        mapping[last] = value

    file = written(tmp_path, change)
    with pytest.raises(RecipeError) as caught:
        load_hardware(file)
    for word in [str(file), *words]:
        assert word in str(caught.value)


@pytest.mark.parametrize("path", ["launch_s", "inter_node.efficiency", "intra_node", "hbm_bytes.source", "device"])
def test_what_is_missing(path, tmp_path):
    def change(mapping):
        *parents, last = path.split(".")
        for key in parents:
            mapping = mapping[key]
        del mapping[last]

    with pytest.raises(RecipeError, match=f"{path}: the key is missing"):
        load_hardware(written(tmp_path, change))


def test_a_misspelt_key(tmp_path):
    with pytest.raises(RecipeError, match=r"inter_nod: no such key \(did you mean 'inter_node'\?\)"):
        load_hardware(written(tmp_path, lambda mapping: mapping.update(inter_nod=mapping.pop("inter_node"))))


@pytest.mark.parametrize(
    ("text", "word"), [("a: [", "cannot be read"), ("- 1", "is not a mapping; write a mapping with the keys")]
)
def test_a_file_that_is_none(text, word, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(text, "utf-8")
    with pytest.raises(RecipeError, match=word):
        load_hardware(file)


def test_a_name_that_is_none():
    with pytest.raises(RecipeError, match=r"atlas_800_a2: there is no such file.*did you mean 'atlas_800t_a2'"):
        load_hardware("atlas_800_a2")


@pytest.mark.parametrize("word", ["Atlas 800T A2", "atlas 800t a2", "atlas_800t_a2", "910B"])
def test_a_device_is_known_by_the_names_that_people_use(word):
    assert load_hardware(word).name == "atlas_800t_a2"
    assert cluster(word).name == "atlas_800t_a2" and file_of(word) == "atlas_800t_a2"


def test_a_missing_file_does_not_pass_for_the_device_in_its_name():
    with pytest.raises(RecipeError, match=r"cluster my_h100.yaml: there is no such file"):
        load_hardware("my_h100.yaml")


def test_an_alias_bomb_is_refused_at_once(tmp_path):
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 10)]
    file = tmp_path / "bomb.yaml"
    file.write_text("\n".join(lines), "utf-8")
    with pytest.raises(RecipeError, match=r"bomb\.yaml:\d+: the file cannot be read: the file has more than"):
        load_hardware(file)


TOOLS = Path(__file__).resolve().parents[3] / "tools"


def test_a_key_that_stands_twice_and_one_that_was_merged(tmp_path):
    """A mapping that another one merges may itself have merged: its keys are not written twice for that."""
    path = tmp_path / "a.yaml"
    path.write_text("a: &a {x: 1}\nt: {b: &b {<<: *a, x: 2}}\nc: {<<: *b}\n", "utf-8")
    assert read_yaml(path, RecipeError) == {"a": {"x": 1}, "t": {"b": {"x": 2}}, "c": {"x": 2}}
    path.write_text("a: {x: 1,\n  x: 2}\n", "utf-8")
    with pytest.raises(RecipeError, match=r"a\.yaml:2: the file cannot be read: key 'x' is already set in line 1"):
        read_yaml(path, RecipeError)


def test_types_by_either_name():
    assert set(BOTH) == {"bf16", "bfloat16", "float16", "float32", "fp16", "fp32"}
    assert [short_dtype(name, "fp32") for name in ("bfloat16", "bf16", "float16", "int8", None)] == [
        "bf16", "bf16", "fp16", "fp32", "fp32"
    ]  # fmt: skip
    assert same_dtype("bf16", "bfloat16") and same_dtype("RMSNorm", "rmsnorm") and not same_dtype("bf16", "fp16")
    assert set(LONG) < set(DTYPES)


@pytest.mark.parametrize("again", [r'"bf16": \(?"bfloat16"', r'"bfloat16": \(?"bf16"', r"GIB = 1 <<|\* ?2\*\*30"])
def test_no_tool_says_it_again(again):
    found = [path.relative_to(TOOLS).as_posix() for path in TOOLS.rglob("*.py") if re.search(again, path.read_text())]
    assert set(found) <= {"hardware/units.py"}


def test_the_cluster_where_nobody_names_one_stands_once():
    said = [path for path in TOOLS.rglob("*.py") if re.search(r'= ?"atlas_800t_a2"', path.read_text())]
    assert said == [TOOLS / "hardware/__init__.py"]
