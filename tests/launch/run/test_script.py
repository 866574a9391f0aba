"""The text of the launch scripts, and what they refuse; test_run.py runs them."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from launch.run.command import train
from launch.run.effective import steps_overrides
from launch.run.msrun import ROOT
from launch.run.script import (
    SCRIPTS,
    Launch,
    cluster_for,
    in_checkout,
    launch_script,
    of_script,
    reference_scripts,
    sourcing_script,
)
from plugins.errors import CheckpointError, ClusterError, RecipeError
from tests.launch.run.scripts import MINI, ascend, generate
from tools.recipe.load import load_recipe
from tools.recipe.override import apply_overrides


def test_the_scripts_of_the_reference_layouts_are_current():
    """Mend with: python -m launch.run.script"""
    wanted = reference_scripts()
    assert {path.name for path in wanted} >= {"mini-pretrain.sh", "mini-pretrain_dp2.sh"}
    assert {path: path.read_text() for path in SCRIPTS.glob("*")} == wanted
    assert all(os.access(path, os.X_OK) for path in wanted)
    assert not any(str(ROOT) in text for text in wanted.values()), "they run on any machine"


def test_a_reference_script_holds_what_is_its_own_and_the_printed_one_stands_by_itself():
    assert all(len(text.splitlines()) <= 20 + ("FUSION_FLAGS" in text) for text in reference_scripts().values())
    for path in (ROOT / "recipes" / "mini" / "pretrain_ep4.yaml", ROOT / "recipes/telechat3_438b/pretrain_4k.yaml"):
        launch, recipe = Launch(in_checkout(path), "output/x"), load_recipe(path)
        alone, sourcing = launch_script(launch, recipe), sourcing_script(launch, recipe)
        assert 'source "' in sourcing and 'source "' not in alone
        values = alone[alone.index("\nRECIPE=") : alone.index("\n# ----")]
        assert values.strip() in sourcing
        assert alone.endswith((ROOT / "launch/script_body.sh").read_text().split("\n", 1)[1])


@pytest.mark.slow
def test_every_kind_of_script_is_clean(tmp_path, hosts):
    texts = [
        generate(ascend(data_parallel=16)),
        generate(
            ascend(data_parallel=2), hosts("a 1\n[fe80::1] 1\n"), settings=["a.b=x y'z\n$(touch no)"], resume="c d"
        ),
        generate({**ascend(data_parallel=4096), "optimizer": {"swap": True}}, port=5000, run_dir="/shared/a b"),
    ]
    files = []
    for number, text in enumerate(texts):
        files.append(tmp_path / f"{number}.sh")
        files[-1].write_text(text)
    shellcheck = Path(sys.executable).with_name("shellcheck")
    files += [ROOT / "launch/script_body.sh", *SCRIPTS.glob("*.sh")]
    command = [shellcheck, "-x", "--source-path=SCRIPTDIR", *files]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_thousands_of_devices_are_one_line_of_names_to_edit():
    text = generate(ascend(data_parallel=256, model_parallel=2, pipeline_stage=8))
    assert (
        "\nHOSTS=(node{0..511}) # nodes by rank, the first is the master: put your names here" in text
        and "\nWORKERS=4096\n" in text
    )
    assert len(text.splitlines()) < 250
    line = next(line for line in text.splitlines() if line.startswith("HOSTS="))
    done = subprocess.run(
        ["bash", "-c", f"{line}\necho ${{#HOSTS[@]}} ${{HOSTS[511]}}"], capture_output=True, text=True
    )
    assert done.stdout == "512 node511\n"


def test_nodes_are_those_that_the_recipe_assumes():
    """Sixteen devices of a node of Atlas A3 were started as two nodes, across which groups inside a node would lie."""
    of_16 = {"model": {"model_config": {"npu_nums_per_device": 16}}}
    text = generate({**ascend(data_parallel=32), **of_16})
    assert "\nSLOTS=16 " in text and "\nHOSTS=(node{0..1}) " in text
    with pytest.raises(ClusterError, match="24 workers do not fill whole nodes of 16"):
        generate({**ascend(data_parallel=24), **of_16})
    on_cpu = {**ascend(data_parallel=4), "model": {"model_config": {"npu_nums_per_device": 2}}}
    on_cpu["context"] = {"device_target": "CPU"}
    assert "\nSLOTS=4 " in generate(on_cpu), "on CPU all workers start on one host"


@pytest.mark.parametrize(
    ("text", "workers", "nodes", "slots", "names"),
    [
        ("a\nb\n", 16, 2, 8, "a b"),
        ("# mine\n\na 2 # the first\n  b slots=2\n10.0.0.3\t2\n", 6, 3, 2, "a b 10.0.0.3"),
    ],
)
def test_a_hosts_file_gives_the_nodes_in_its_order(hosts, text, workers, nodes, slots, names):
    cluster = cluster_for(workers, hosts(text))
    assert (cluster.nodes, cluster.slots, cluster.names) == (nodes, slots, names)


def test_hosts_without_numbers_are_those_that_the_recipe_assumes(hosts):
    of_16 = {**ascend(data_parallel=32), "model": {"model_config": {"npu_nums_per_device": 16}}}
    text = launch_script(Launch("a.yaml", "output/a"), of_16, hosts("a\nb 16\n"))
    assert "\nSLOTS=16 " in text and "32 workers on 2 nodes" in text


def test_weights_to_begin_with_are_checked_by_the_first_worker(tmp_path):
    recipe = load_recipe(MINI)
    recipe["checkpoint"] |= {"save_path": str(tmp_path / "saves"), "load_path": str(tmp_path / "nothere")}
    check_and_keep = of_script(recipe, tmp_path / "run", None)
    check_and_keep(1)
    with pytest.raises(CheckpointError, match=r"load_path: \S+nothere: this is not a folder that can be read"):
        check_and_keep(0)
    assert not (tmp_path / "run").exists()


REFUSED = {
    "too few": ("a\nb\n", 32, "2 hosts x 8 = 16 workers, but the recipe needs 32 workers: list 4 hosts of 8"),
    "too many": ("a\nb\n", 12, "2 hosts x 8 = 16 workers, but the recipe needs 12"),
    "duplicate": ("a\n\na\n", 16, r"hosts.txt:3: a is already named in line 1"),
    "duplicate in capitals": ("node1\nNode1\n", 16, r"hosts.txt:2: Node1 is already named in line 1"),
    "duplicate address": ("2001:db8::7\n[2001:DB8:0::7]\n", 16, r"7 is already named in line 1"),
    "uneven": (
        "a 4\nb 8\n",
        12,
        r"hosts.txt:2: b has 8 workers, but a has 4; give all hosts the same number of workers",
    ),
    "empty": ("# nobody\n", 8, "names no host; write NAME or NAME WORKERS"),
    "no slots": ("a 0\n", 8, r"hosts.txt:1: each line must be NAME or NAME WORKERS \(node0 8\), not 'a 0'"),
    "a command": ("$(reboot)\n", 8, "NAME or NAME WORKERS"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_hosts_that_do_not_fit_are_refused(hosts, name):
    text, workers, message = REFUSED[name]
    with pytest.raises(ClusterError, match=message):
        cluster_for(workers, hosts(text))


def test_addresses_are_written_as_a_node_prints_its_own(hosts):
    """The script compares them, as text, with those of `hostname -I`."""
    assert cluster_for(16, hosts("[2001:DB8:0::7]\nNode1\n")).names == "2001:db8::7 Node1"


def test_what_cannot_be_launched_is_refused(tmp_path):
    with pytest.raises(ClusterError, match=r"nowhere\.txt: the file cannot be read"):
        cluster_for(8, tmp_path / "nowhere.txt")
    with pytest.raises(ClusterError, match="the recipe's 12 workers do not fill whole nodes of 8 workers: write"):
        cluster_for(12)
    with pytest.raises(ClusterError, match="--port 80: msrun needs a port from 1024"):
        generate({}, port=80)


SIZES = "train_dataset.data_loader.sizes"


@pytest.mark.parametrize(
    ("given", "settings"),
    [
        ([f"{SIZES}=[160, 0, 0]"], {f"{SIZES}=[160, 0, 0]", f"{SIZES}.0=160"}),
        ([f"{SIZES}.0=160", "seed=7"], {f"{SIZES}.0=160", "seed=7"}),
        (["lr_schedule={total_steps: 20, warmup_steps: 2}"], {"lr_schedule={total_steps: 20, warmup_steps: 2}"}),
        (["plugins.spike_guard={}", "plugins.finite_loss=False"], {"plugins.spike_guard={}", f"{SIZES}.0=160"}),
    ],
)
def test_the_settings_of_a_script_are_those_of_this_host_in_one_call(given, settings):
    """The nodes refused a script which held both what the user sets and what --steps makes of it."""
    recipe = ROOT / "recipes/mini/pretrain.yaml"
    options = [word for each in given for word in ("--set", each)]
    done = CliRunner(catch_exceptions=False).invoke(train, [str(recipe), "--script", "--steps", "20", *options])
    held = [shlex.split(line)[1] for line in done.stdout.splitlines() if line.startswith("    --set ")]
    assert settings <= set(held)
    chosen = apply_overrides(load_recipe(recipe), given)
    assert apply_overrides(load_recipe(recipe), held) == apply_overrides(chosen, steps_overrides(chosen, 20, given))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("lr_schedule.total_steps=40", "--steps 20, which sets lr_schedule.total_steps=20; keep one of the two"),
        ("lr_schedule={total_steps: 40, warmup_steps: 2}", "--set lr_schedule.total_steps=40: this contradicts"),
        (f"{SIZES}=[64000, 0, 0]", f"--steps 20, which sets {SIZES}.0=160"),
        (f"{SIZES}.0=80", f"--steps 20, which sets {SIZES}.0=160"),
        ("train_dataset={data_loader: {sizes: [8, 0, 0]}}", f"which sets {SIZES}.0=160"),
        ("train_dataset_task.dataset_config.data_loader.sizes=[8, 0, 0]", f"which sets {SIZES}.0=160"),  # by an anchor
        ("runner_config.epochs=2", "--steps 20, which sets runner_config.epochs=1"),
    ],
)
@pytest.mark.parametrize("way", [["--script"], ["--dry-run"]])
def test_a_number_of_steps_and_a_setting_that_contradicts_it_are_refused(given, says, way):
    """--steps won without a word."""
    done = CliRunner().invoke(train, [str(ROOT / MINI), *way, "--steps", "20", "--set", given])
    assert isinstance(done.exception, RecipeError) and says in str(done.exception)


@pytest.mark.parametrize("more", [["--nodes", "x"], ["--script", "--resume", "auto"]])
def test_options_that_do_not_go_together_are_refused(more):
    assert CliRunner().invoke(train, [str(ROOT / MINI), *more]).exit_code == 2


def test_what_lies_outside_the_checkout_is_said_for_every_node_needs_it(tmp_path):
    inside = CliRunner().invoke(train, [str(ROOT / MINI), "--script"])
    assert inside.exit_code == 0 and "note: " not in inside.stderr
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(f"base_config: {ROOT / MINI}\n")
    data = "train_dataset.data_loader.config.data_path=['1', ../corpus]"
    flags = ("--set", data, "--resume", "/shared/iteration_00000005", "--run-dir", "/shared/run")
    done = CliRunner().invoke(train, [str(recipe), "--script", *flags])
    assert done.exit_code == 0 and done.stdout.startswith("#!/usr/bin/env bash")
    notes = [line for line in done.stderr.splitlines() if line.startswith("note: ")]
    assert [note.split(" is outside the checkout (")[0] for note in notes] == [
        f"note: the recipe: {recipe}",
        "note: --run-dir: /shared/run",
        "note: --resume: /shared/iteration_00000005",
        "note: train_dataset.data_loader.config.data_path: ../corpus",
    ]


def test_binding_can_be_switched_off():
    recipe = ascend(data_parallel=2)
    assert "] || BIND=yes\n" in generate(recipe)
    assert "] || BIND=no\n" in generate({**recipe, "context": {"affinity_config": {"device_0": {}}}}), "it has its own"
    text = CliRunner().invoke(train, [str(ROOT / MINI), "--script", "--no-bind"]).stdout
    assert "] || BIND=no\n" in text and text.splitlines()[1].endswith(f"tc3 train {MINI} --script --no-bind")


def test_a_node_without_the_recipe_says_so(tmp_path):
    script = tmp_path / "run.sh"
    script.write_text(launch_script(Launch("recipes/gone.yaml", "output/x"), {}))
    done = subprocess.run(["bash", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stderr == (
        "error: no recipes/gone.yaml on this node: every node needs the recipe there\n"
    )
