"""Runs each fault of the zoo, lets `tc3 accuracy diagnose` say what differs without knowing the fault, and writes
docs/bug-zoo.md.

    python -m tests.zoo.run [--work FOLDER] [--made] [FAULT ...]

The recipe is tests/training/tiny.yaml with one decoder layer, for six steps in one process, with random tokens. Runs
that the folder has are not repeated. A fault is caught if there is a finding; it is named right if the rung and the
module of the finding that is printed first are those that `FAULTS` says. A false alarm is a finding in a run without a
fault.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click
import numpy as np

from tests.zoo.faults import FAULTS, Fault
from tools.accuracy.diagnose.evidence import read_side
from tools.accuracy.diagnose.ladder import Verdict, diagnose
from tools.data.index import write_corpus
from tools.files.atomic import write_atomically
from tools.recipe.dump import dump_recipe
from tools.recipe.load import load_recipe
from tools.recipe.override import apply_overrides

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "bug-zoo.md"
STEPS, SAVED = 6, 2  # steps of a run, and the one from which a resume goes on
SMALLER = ("model.model_config.num_hidden_layers=1", "model.model_config.first_k_dense_replace=0")  # to compile sooner
# runs without a fault: name -> (overrides, from which step it goes on); those without overrides must equal `clean`
CLEAN = {
    "clean": ((), 0),
    "clean_again": ((), 0),
    "clean_resumed": ((), SAVED),
    "clean_seed_7": (("seed=7", "train_dataset.data_loader.config.seed=7"), 0),
    "clean_seed_8": (("seed=8", "train_dataset.data_loader.config.seed=8"), 0),
}
Row = tuple[str, Fault, float, Verdict]  # name, fault, seconds of its run, what was said
Clean = tuple[str, str, float, Verdict]  # name, what it was compared with, seconds, what was said
HEAD = """# The bug zoo: faults of others, and what `tc3 accuracy diagnose` says

Each fault below trained wrongly without an error in somebody's framework, or is one of our own of that kind.
`tests/zoo/faults.py` puts each into the mini of `tests/training/tiny.yaml` (six steps, one CPU process), and `tc3
accuracy diagnose` compares that run with the faultless one, without knowing the fault. `python -m tests.zoo.run`
repeats all this and writes this page.

Read the rates with care. Whoever wrote the command also wrote these faults, and corrected the command by them: when
they were first run, six of the first ten were caught but named by another rung or module (rounding before the fault,
routers' biases under the rung `update`, a router's loss before the decoder's), and those verdicts were mended. One
fault (torchtitan #4054) was first put into a class that the mini does not use, and changed nothing. Several faults have
no module to be named: for them only the rung was judged. No fault here needs several ranks. Faults that were kept apart
would judge the command better.

"""


def run(work: Path, name: str, overrides: tuple[str, ...], fault: str = "", resumed: bool = False) -> float | str:
    """Train one run unless the folder has it; return its seconds, or the end of its error."""
    done = work / f"{name}.json"
    if not done.exists():
        corpus = work / "random"
        if not corpus.with_suffix(".idx").exists():
            write_corpus(corpus, np.random.default_rng(1).integers(20, 200, 400, dtype=np.int32), 512, 0, 1)
        recipe = load_recipe(ROOT / "tests" / "training" / "tiny.yaml")
        recipe["plugins"] = {**recipe["plugins"], "step_record": {"steps": 3}}
        sizes = f"train_dataset.data_loader.sizes.0={STEPS * recipe['runner_config']['batch_size']}"
        data = f"train_dataset.data_loader.config.data_path.1={corpus}"
        saves = f"checkpoint.save_interleaved_steps={SAVED}"
        recipe = apply_overrides(recipe, (sizes, data, saves, f"lr_schedule.total_steps={STEPS}", *SMALLER, *overrides))
        file = work / f"{name}.yaml"
        dump_recipe(recipe, file)
        checkpoint = str(work / "clean" / "checkpoint" / f"iteration_{SAVED:08d}") if resumed else ""
        command = [
            sys.executable,
            str(Path(__file__).with_name("worker.py")),
            str(file),
            str(work / name),
            fault,
            checkpoint,
        ]
        begin = time.monotonic()
        ended = subprocess.run(command, cwd=work, capture_output=True, text=True, check=False)
        (work / f"{name}.log").write_text(ended.stdout + ended.stderr)
        write_atomically(done, json.dumps({"seconds": time.monotonic() - begin, "code": ended.returncode}))
    told = json.loads(done.read_text())
    return told["seconds"] if not told["code"] else f"the run failed: {(work / f'{name}.log').read_text()[-200:]}"


def judged(verdict: Verdict, fault: Fault) -> str:
    """Return "right", "caught" (something else is named) or "missed"."""
    if not verdict.findings:
        return "missed"
    first = verdict.first[0]
    return "right" if first.rung in fault.rungs and fault.module in first.module else "caught"


def told(verdict: Verdict) -> str:
    """Return the first finding in words."""
    if not verdict.findings:
        return verdict.word
    first = verdict.first[0]
    return f"step {first.step}, {first.rung}, {first.module}: {first.detail}".replace("|", "\\|")


def page(rows: list[Row], clean: list[Clean], failed: list[str]) -> str:
    """Return docs/bug-zoo.md."""
    words = [judged(verdict, fault) for _, fault, _, verdict in rows]
    caught, right = len(rows) - words.count("missed"), words.count("right")
    alarms = sum(bool(verdict.findings) for *_, verdict in clean)
    lines = [
        f"Of {len(rows)} faults {caught} were caught, {right} with the right rung and module first.",
        f"Of {len(clean)} runs without a fault {alarms} had a finding.",
        "",
        "| fault | source | what was said first | verdict | seconds of the run |",
        "|---|---|---|---|---|",
    ]
    for (_, fault, seconds, verdict), word in zip(rows, words, strict=True):
        lines.append(f"| {fault.what} | {fault.source} | {told(verdict)} | {word} | {seconds:.0f} |")
    lines += ["", "| without a fault | compared with | what was said | seconds of the run |", "|---|---|---|---|"]
    lines += [f"| `{name}` | {other} | {told(verdict)} | {seconds:.0f} |" for name, other, seconds, verdict in clean]
    if failed:
        lines += ["", "Not judged, because the run itself failed or was not made: " + ", ".join(failed) + "."]
    return HEAD + "\n".join(lines) + "\n"


@click.command()
@click.argument("faults", nargs=-1, type=click.Choice(list(FAULTS)))
@click.option("--work", type=click.Path(path_type=Path), help="Folder for the runs; a temporary one by default.")
@click.option("--made", is_flag=True, help="Judge the runs that the folder has, and train none.")
@click.option("--page", "file", default=PAGE, type=click.Path(path_type=Path), help="The page that is written.")
def main(faults: tuple[str, ...], work: Path | None, made: bool, file: Path) -> None:
    """Train and judge; print a line for each run."""
    with tempfile.TemporaryDirectory() as folder:
        place = (work or Path(folder)).absolute()
        place.mkdir(parents=True, exist_ok=True)
        rows: list[Row] = []
        clean: list[Clean] = []
        failed: list[str] = []
        if isinstance(seconds := run(place, "clean", ()), str):
            raise click.ClickException(f"clean: {seconds}")
        for name in faults or FAULTS:
            if made and not (place / f"{name}.json").exists():
                failed.append(name)
                continue
            found = FAULTS[name]
            seconds = run(place, name, (), name, found.resumed)
            if isinstance(seconds, str):
                failed.append(name)
                click.echo(f"{name}: {seconds}")
                continue
            verdict = diagnose(read_side(place / "clean"), read_side(place / name))
            rows.append((name, found, seconds, verdict))
            click.echo(f"{name}: {judged(verdict, found)}: {told(verdict)}")
        for name, (overrides, after) in CLEAN.items():
            if made and not (place / f"{name}.json").exists():
                continue
            seconds = run(place, name, overrides, resumed=bool(after))
            if isinstance(seconds, str):
                raise click.ClickException(f"{name}: {seconds}")
            single = name == "clean" or overrides
            sides = [read_side(place / name)] if single else [read_side(place / "clean"), read_side(place / name)]
            clean.append((name, "laws" if single else "`clean`", seconds, diagnose(*sides)))
            click.echo(f"{name}: {told(clean[-1][-1])}")
    write_atomically(file, page(rows, clean, failed))


if __name__ == "__main__":
    main()
