from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from click.testing import CliRunner, Result

from plugins.errors import DataError, RecipeError, TC3Error
from tests.tools.data.data_helpers import CALL, REPOSITORY, environment, write_index
from tools.data.imbalance import render as imbalance_render
from tools.data.imbalance.cli import imbalance_command

CONFIG = "train_dataset.data_loader.config"
LARGE = REPOSITORY / "recipes" / "telechat3_438b" / "context_128k.yaml"
WITHOUT_MASK = REPOSITORY / "recipes" / "telechat3_438b" / "pretrain_4k.yaml"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(imbalance_command, [*map(str, arguments)])


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    lengths = np.random.default_rng(1).lognormal(8, 1.4, 20_000).astype(np.int32) + 1
    write_index(folder / "corpus", lengths)
    (folder / "corpus.bin").unlink()
    return folder / "corpus"


@pytest.mark.slow
def test_text(prefix: Path) -> None:
    result = run(prefix, "--recipe", LARGE, "--steps", 4)
    assert result.exit_code == 0, result.output
    for word in (
        "20,000 documents",
        "samples of 131,072 tokens",
        "512 samples per step = 8 x 64 x 1",
        "ranks wait for each other at the end of a step; 8 pipeline stages",
        "looked at 4 of 750 steps",
        "step/even, attention",
        "a pipeline can stay below 1",
        "predicted step time with plugins.attention_balance: -",
        "over 8 context-parallel ranks",
        "modelled, not measured",
    ):
        assert word in result.stdout
    tables = [line for line in result.stdout.splitlines() if "│" in line or "┃" in line]
    assert max(map(len, tables)) <= 80 and not any("…" in line for line in tables)  # heads are whole, too


@pytest.mark.slow
def test_the_gain_is_that_of_the_seconds_beside_it(prefix: Path) -> None:
    """-44.3 % stood beside seconds that gave -34 %: one number left communication out, the other did not."""
    arguments = [prefix, "--recipe", LARGE, "--steps", 4]
    text, found = run(*arguments).stdout, json.loads(run(*arguments, "--json").stdout)
    share, speed_up = re.search(r"attention_balance: ([-+.\d]+)% \(([.\d]+) x as fast\)", text).groups()
    without, balanced = map(
        float, re.search(r"([.\d]+) s as they come, ([.\d]+) s with plugins.attention_balance", text).groups()
    )
    assert float(share) == pytest.approx(100 * (balanced / without - 1), abs=0.06)
    assert float(speed_up) == pytest.approx(without / balanced, abs=2e-3)
    result, seconds = found["result"], found["seconds"]
    assert result["speed_up"] == pytest.approx(seconds["uneven"][0] / seconds["uneven"][1])
    assert result["speed_up_of"] == "step"
    # documents apart attend to less than samples of one document
    assert result["pairs_over_undivided"] < 1 and seconds["even"] < seconds["uneven"][1] < seconds["uneven"][0]
    assert seconds["even"] < seconds["step"]


def test_where_no_seconds_are_predicted_the_gain_is_said_to_be_of_computation(prefix: Path) -> None:
    small = REPOSITORY / "recipes" / "mini" / "pretrain_eod_balanced.yaml"
    text = run(prefix, "--recipe", small, "--steps", 2).stdout
    assert "predicted computation of a step, without communication, with plugins.attention_balance: " in text
    assert "step: not predicted" in text


@pytest.mark.slow
def test_json_is_one_object_on_stdout(prefix: Path, tmp_path: Path) -> None:
    picture = tmp_path / "deep" / "imbalance.svg"
    ep = "parallel_config.expert_parallel=512"
    result = run(prefix, "--recipe", LARGE, "--set", ep, "--steps", 3, "--json", "--picture", picture)
    content = json.loads(result.stdout)
    assert content["modelled"] is True and content["equal_costs"] is None
    assert content["documents"]["count"] == 20_000
    assert sum(row["documents"] for row in content["documents"]["histogram"]) == 20_000
    found = content["result"]
    assert found["layout"]["ranks_per_barrier"] == 8 and found["layout"]["pipeline_stages"] == 8
    assert found["steps_looked_at"] == [0, 374, 749]
    for key in ("attention_over_even", "step_over_even"):
        before, after = found[key]["mean"]
        assert before > 1.2 * after and found[key]["lower_bound"] <= after
    assert found["speed_up"] > 1.1 and 0 < found["attention_share"] < 1
    context = found["context_parallel_slowest_over_mean"]
    assert 1 <= context["balanced"] < 1.05 < context["contiguous"]
    assert f"drawn: {picture}" in result.stderr
    assert ElementTree.parse(picture).getroot().tag.endswith("svg")
    for word in ("document lengths", "attention of each rank in step 375", "slowest rank of each micro-batch"):
        assert word in picture.read_text("utf-8")


@pytest.mark.slow
def test_the_pictures_legend_has_no_frame_to_overflow_and_stands_below_the_curves(
    prefix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = []
    monkeypatch.setattr(imbalance_render, "save_figure", lambda figure, path: figures.append(figure) or path)
    run(prefix, "--recipe", LARGE, "--steps", 1, "--picture", tmp_path / "a.svg")
    (figure,) = figures
    figure.draw_without_rendering()
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["no scheduling", "attention_balance"]
    box = legend.get_window_extent()
    for axes in figure.axes[1:]:
        assert axes.get_legend() is None and axes.get_ylabel() == "over the mean (modelled)"
        assert box.y1 <= axes.get_tightbbox().y0
    assert not any(shown.get_frame_on() for shown in (legend, figure.axes[0].get_legend()))


@pytest.mark.slow
def test_the_picture_of_the_same_numbers_is_the_same_file(prefix: Path, tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("a.svg", "b.svg")]
    for file in files:
        assert run(prefix, "--recipe", LARGE, "--steps", 1, "--picture", file).exit_code == 0
    assert files[0].read_bytes() == files[1].read_bytes()


def test_a_recipe_without_masks_has_nothing_to_balance(prefix: Path, tmp_path: Path) -> None:
    picture = tmp_path / "lengths.png"
    result = run(prefix, "--recipe", WITHOUT_MASK, "--picture", picture)
    assert result.exit_code == 0 and picture.stat().st_size > 1000
    assert "20,000 documents" in result.stdout
    assert "nothing to balance" in result.stdout and "every sample costs the same" in result.stdout
    content = json.loads(run(prefix, "--recipe", WITHOUT_MASK, "--json").stdout)
    assert content["result"] is None and "create_compressed_eod_mask" in content["equal_costs"]


@pytest.mark.slow
def test_a_window_has_no_bound(prefix: Path) -> None:
    found = json.loads(run(prefix, "--recipe", LARGE, "--steps", 1, "--window", 2, "--json").stdout)["result"]
    assert found["layout"]["window"] == 2 and found["steps_looked_at"] == [0, 1]
    assert found["step_over_even"]["lower_bound"] is None
    assert "samples change places within 2 steps" in run(prefix, "--recipe", LARGE, "--steps", 1, "--window", 2).stdout


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        (["nowhere", "--recipe", LARGE], DataError, "nowhere.idx: there is no such file; give PREFIX"),
        (["nowhere", "--recipe", "recipes/nowhere.yaml"], RecipeError, "no such recipe"),
        (["nowhere", "--recipe", LARGE, "--picture", "a.pdf"], DataError, ".svg or .png"),
        (["nowhere", "--recipe", LARGE, "--set", "seedd=1"], RecipeError, "did you mean"),
        (["PREFIX", "--recipe", LARGE, "--set", f"{CONFIG}.eod_pad_length=3"], RecipeError, "documents of sample"),
        (
            ["PREFIX", "--recipe", LARGE, "--window", "751"],
            RecipeError,
            "--window 751: the window is longer than the run, which has 750 steps",
        ),
    ],
)
def test_user_errors(prefix: Path, arguments: list[object], kind: type[TC3Error], message: str) -> None:
    result = run(*[prefix if argument == "PREFIX" else argument for argument in arguments])
    assert isinstance(result.exception, kind)
    assert message in str(result.exception) and "\n" not in str(result.exception)


@pytest.mark.parametrize("arguments", [["--steps", "0"], ["--window", "0"], []])
def test_usage_errors(prefix: Path, arguments: list[str]) -> None:
    recipe = ["--recipe", LARGE] if arguments else []
    assert run(prefix, *recipe, *arguments).exit_code == 2


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys, tools.data.imbalance.render; print([m for m in ('mindspore', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
def test_a_bar_appears_on_a_terminal_and_only_on_stderr(prefix: Path) -> None:
    main, terminal = os.openpty()
    command = [*CALL, "data", "imbalance", str(prefix), "--recipe", str(LARGE), "--steps", "2", "--json"]
    here = {"env": environment() | {"TERM": "xterm"}, "stdout": subprocess.PIPE}
    result = subprocess.run(command, stderr=terminal, check=True, **here)
    os.close(terminal)
    seen = os.read(main, 1 << 20).decode()
    os.close(main)
    assert len(json.loads(result.stdout)["result"]["steps_looked_at"]) == 2
    assert "\x1b[" in seen and "planning steps" in seen


@pytest.mark.slow
def test_memory_grows_by_few_bytes_a_document(tmp_path: Path) -> None:
    """Of what is allocated: mapped lengths are pages of the file."""
    measure = (
        "import tracemalloc\n"
        "from launch.cli import main\n"
        "tracemalloc.start()\n"
        "try:\n"
        "    main()\n"
        "except SystemExit as stop:\n"
        "    assert not stop.code\n"
        "print('peak', tracemalloc.get_traced_memory()[1])\n"
    )
    peaks, millions = [], (6, 12)  # both above the documents that the index handles at a time
    for count in millions:
        write_index(tmp_path / "corpus", np.random.default_rng(1).integers(500, 3500, count * 1_000_000, np.int32))
        command = [sys.executable, "-c", measure, "data", "imbalance", str(tmp_path / "corpus"), "--recipe", str(LARGE)]
        command += ["--steps", "4", "--json"]
        done = subprocess.run(command, env=environment(), stdout=subprocess.PIPE, text=True, check=True, timeout=600)
        peaks.append(int(done.stdout.split()[-1]))
    # 4 bytes of an epoch's order, 4 while it is shuffled, and 28 a sample, of which there is one for 65 documents
    assert (peaks[1] - peaks[0]) / ((millions[1] - millions[0]) * 1e6) < 10, peaks
