"""Runs each fault of the zoo, lets `tc3 accuracy diagnose` say what differs without knowing the fault, and writes
docs/bug-zoo.md.

    python -m tests.zoo.run [--work FOLDER] [--made] [NAME ...]

The recipes are tests/training/tiny.yaml and sharded*.yaml with one decoder layer (two in a pipeline), for six steps
with random tokens. Runs that the folder has are not repeated. A fault is caught if there is a finding; it is named
right if the stage and the module of the finding that is printed first are those that `FAULTS` says. A false alarm is a
finding in a run without a fault.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import numpy as np

from launch.run.compile_cache import KEY
from launch.run.msrun import free_port, msrun_command, worker_count, worker_environment
from tests.zoo.fault import FAULTS, Fault
from tests.zoo.worker import VARIABLE
from tools.accuracy.diagnose.differences import Verdict, diagnose
from tools.accuracy.diagnose.evidence import read_side
from tools.data.index import write_corpus
from tools.files.atomic import write_atomically
from tools.recipe.dump import dump_recipe
from tools.recipe.load import Recipe, load_recipe
from tools.recipe.override import apply_overrides

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "bug-zoo.md"
STEPS, SAVED = 6, 2  # steps of a run, and the one from which a resume goes on
GLOBAL_BATCH = 4
WORKER = Path(__file__).with_name("worker.py")
SMALLER = ("model.model_config.num_hidden_layers=1", "model.model_config.first_k_dense_replace=0")  # to compile sooner
TWO_LAYERS = ("model.model_config.num_hidden_layers=2", SMALLER[1])  # one for each stage, with a router each
# layout -> (recipe of tests/training, overrides, the layout of one process with which it is compared)
LAYOUTS = {
    "": ("tiny.yaml", (), ""),
    "data2": ("tiny_dp2.yaml", (), ""),
    "one": ("sharded.yaml", (), "one"),
    "tp2": ("sharded_tp2.yaml", (), "one"),
    "dp2": ("sharded_zero.yaml", ("parallel.enable_parallel_optimizer=False",), "one"),
    "ep2": ("sharded_ep2.yaml", (), "one"),
    "cp2": ("../zoo/cp2.yaml", (), "one"),
    "two_layers": ("sharded.yaml", TWO_LAYERS, "two_layers"),
    "pp2": ("sharded_pp2.yaml", TWO_LAYERS, "two_layers"),
    "muon": ("sharded_muon.yaml", (), "muon"),
}


def of_layout(layout: str) -> str:
    """Return the name of the faultless run of a layout."""
    return f"clean_{layout}" if layout else "clean"


# runs without a fault: name -> (layout, overrides, whether it goes on from a faultless one, what it is compared with;
# "" means the laws of one run only)
CLEAN = {
    "clean": ("", (), False, ""),
    "clean_again": ("", (), False, "clean"),
    "clean_resumed": ("", (), True, "clean"),
    "clean_seed_7": ("", ("seed=7", "train_dataset.data_loader.config.seed=7"), False, ""),
    "clean_seed_8": ("", ("seed=8", "train_dataset.data_loader.config.seed=8"), False, ""),
    **{
        of_layout(name): (name, (), False, "" if one == name else of_layout(one))
        for name, (_, _, one) in LAYOUTS.items()
        if name
    },
    "clean_tp2_resumed": ("tp2", (), True, "clean_tp2"),
}
RESULTS = Path(__file__).with_name("results.json")  # what was said last of each run, and first of a fault
HEAD = """# The bug zoo: faults of others, and what `tc3 accuracy diagnose` says

Each fault on this page makes a training compute wrong values, but raises no error. Some faults occurred in public
frameworks or in this repository, and some were invented for this page after the example of real faults. `tests/zoo`
inserts each fault into the mini recipe `tests/training/tiny.yaml`, which then trains for six steps on one or two CPU
processes. `tc3 accuracy diagnose` compares the faulty run with a run without the fault, and is not told which fault was
inserted. If the faulty run has two processes, it is compared with a run of the same model on one process. If the faulty
run was resumed from a checkpoint, it is compared with a run that was not interrupted.

`python -m tests.zoo.run` repeats the runs and comparisons of all faults and writes this page.
`python -m tests.zoo.run NAME` repeats only the fault NAME and keeps the recorded results of all other faults.

A fault counts as caught if `tc3 accuracy diagnose` reports any difference between the faulty run and the run with which
it is compared. The author of each fault wrote down the stage of the comparison (such as `forward` or `update`) and the
module of the model that `diagnose` should name. A fault counts as named right if the first difference that `diagnose`
prints has the stage and the module that the author of the fault wrote down. What this page calls rules are the rules by
which `diagnose` finds and names differences.

"""
WORKED = """
## From a wrong curve to the line

The example of this section is a run that was resumed from step 2 with a fault. At step 4 the loss of the resumed run is
6.2681, but the loss of the same run without an interruption is 6.2697. Both runs of the example recorded their steps by
`plugins.step_record`. `tc3 accuracy diagnose A B`, where A is the uninterrupted run and B the resumed run, prints this
difference:

```text
-> step 2, resume, global_step, ranks 0: global_step: norm 2 and 0
   usually: the save left it out, the resume did not load it, or it was loaded into another part
```

With the option `--all`, `diagnose` also lists the later differences of the two runs: from step 3 on the learning rate
(0.0015 and 0) and the update of every weight differ, and from step 4 on the losses differ. No difference in data,
weights or moments comes before these differences, so the resumed run loaded data, weights and moments correctly, but
not the optimizer's step counter. The step counter is `global_step` of MindSpore's `Optimizer`; the learning-rate
schedule and AdamW's bias correction read this counter. The fault of the example must therefore lie in the code that
loads a checkpoint into the optimizer. The fault of the example was inserted by `dim_5` in `tests/zoo/unseen.py`, which
sets the optimizer's step counter to 0 at the resume. The same fault was reported for DiM-DiffusionMamba, where a resume
loaded the model, but the learning rate started from the beginning. To compare two recorded runs, `diagnose` takes a
second of processor time.

"""
HEADING = {
    "public": "## Faults from public threads that were not used to make the rules",
    "unseen": "## Earlier faults that were not used to make the rules",
    "known": "## Faults that were used to make the rules",
}
ABOUT = {
    "public": """The author of the 13 faults of this table had read this page, but not the rules of
`tc3 accuracy diagnose`. The author wrote the 13 faults as public threads describe them, and wrote down for each fault
the stage and the module that `diagnose` should name. The 13 faults were committed to the repository before `diagnose`
had been run on any of them. In seven of the 13 faulty runs the first training step is still correct, and five of the 13
faulty runs are sharded or data-parallel runs.

Two of the 13 faults (Megatron-Bridge #5840, Modalities #426) were inserted into the training a second time and in a
different way, after a first run and after the rules of `diagnose` had been read. The first version of the two faults
that were inserted twice overwrote the weights when the training began, which is earlier than in the real faults. The
column "first try" holds for Megatron-Bridge #5840 and Modalities #426 the result of the second version; the expected
stage and module were written down before the first version was run. After the trainings with all 13 faults, the rules
of `diagnose` were changed because `diagnose` had found three of the faults but had named a wrong stage or module. By
the changed rules, the weights from which a sharded run starts are read after a first step with a learning rate of 0,
and norms inside attention belong to the module attention.
""",
    "unseen": """The author of the 25 faults of this table had read the rules of `tc3 accuracy diagnose`, and wrote down
for each fault the stage and the module that `diagnose` should name. The 25 earlier faults were committed to the
repository before `diagnose` had been run on any of them. After the first runs of the 25 earlier faults, the rules of
`diagnose` were changed because of the results. For faults in how the model is built, the stage `configuration` was
accepted as right from then on. The last column of the table of the 25 faults holds the results with the changed rules,
so this column does not show how well `diagnose` finds new faults.

Of the 25 faults, the two faults in pipelines (pp2) were run last. When the two faults in pipelines were run, `diagnose`
also gave a false alarm for a pipeline without a fault: a router's auxiliary loss of 0 / 0. For both faults in
pipelines, `diagnose` named the auxiliary loss of 0 / 0 first, and not the fault. After the runs of the two faults in
pipelines, three false alarms of `diagnose` in pipelines were removed: the auxiliary loss of 0 / 0, the counters of
routers that a pipeline stage does not use, and loads of experts that were summed over micro-batches.
""",
    "known": """The author of `tc3 accuracy diagnose` also wrote the faults of this table, and corrected the rules of
the command because of these faults. For six of the first ten faults that its author wrote, `diagnose` caught the fault
at the first run, but named a wrong stage or module. For the six faults that were named wrong, `diagnose` named a
difference by rounding that came before the fault, routers' biases under the stage `update`, or a router's loss before
the decoder's loss. After the first run of the first ten faults, the rules of `diagnose` were corrected. One fault
(torchtitan #4054) was first inserted into a class that the mini recipe does not use, so this fault changed nothing in
the run. For a fault that belongs to no module, only the stage that `diagnose` named was judged.
""",
}
LAYOUTS_TOLD = (
    "In the column of processes, tp2, dp2, ep2, cp2 and pp2 stand for MindSpore's sharded graph on two processes, and "
    "data2\nstands for the data-parallel graph on two processes; muon stands for one process that trains with Muon."
)


def run(
    work: Path, name: str, overrides: tuple[str, ...], fault: str = "", resumed: bool = False, layout: str = ""
) -> float | str:
    """Train one run unless the folder has it; return its seconds, or the end of its error."""
    done, file, run_dir = work / f"{name}.json", work / f"{name}.yaml", work / name
    if not done.exists():
        recipe = _recipe(work, layout, overrides)
        dump_recipe(recipe, file)
        checkpoint = work / of_layout(layout) / "checkpoint" / f"iteration_{SAVED:08d}" if resumed else None
        environment = {**worker_environment(worker_count(recipe), run_dir), VARIABLE: fault}
        command = msrun_command(recipe, run_dir, free_port(), checkpoint, worker=WORKER, config=file)
        if fault not in FAULTS or FAULTS[fault].same_graph:
            environment |= _graph(work, layout, name, worker_count(recipe))
        if not recipe["use_parallel"]:
            command = [sys.executable, *command[command.index(str(WORKER)) :]]
            environment.pop("TC3_SUPERVISED")
        begin = time.monotonic()
        ended = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True, check=False)
        logs = "".join(each.read_text(errors="replace")[-3000:] for each in (run_dir / "logs").glob("worker_*.log"))
        (work / f"{name}.log").write_text(ended.stdout + ended.stderr + logs)
        write_atomically(done, json.dumps({"seconds": time.monotonic() - begin, "code": ended.returncode}))
    told = json.loads(done.read_text())
    return told["seconds"] if not told["code"] else f"the run failed: {(work / f'{name}.log').read_text()[-200:]}"


def _both(work: Path, against: str, name: str, made: bool) -> float | str:
    """Train a run and what it is compared with; return the seconds of the run, or why there is none."""
    for each in dict.fromkeys((against, name)):
        if made and not (work / f"{each}.json").exists():
            return f"{each} was not made"
        if each in FAULTS:
            seconds = run(work, each, (), each, FAULTS[each].resumed, FAULTS[each].layout)
        else:
            layout, overrides, resumed, _ = CLEAN[each]
            seconds = run(work, each, overrides, "", resumed, layout)
        if isinstance(seconds, str):
            return seconds
    return seconds


def _graph(work: Path, layout: str, name: str, workers: int) -> dict[str, str]:
    """Variables with which a run loads the graph that the faultless run of its layout has compiled."""
    own, whole = work / name / "graph", work / of_layout(layout) / "graph"
    if whole.exists() and whole != own:
        shutil.copytree(whole, own, dirs_exist_ok=True)
    for rank in range(workers):
        (own / f"rank_{rank}").mkdir(parents=True, exist_ok=True)
    return {"MS_COMPILER_CACHE_ENABLE": "1", "MS_COMPILER_CACHE_PATH": str(own), KEY: f"of the zoo's layout {layout!r}"}


def _recipe(work: Path, layout: str, overrides: tuple[str, ...]) -> Recipe:
    """The recipe of a layout that trains `STEPS` steps on random tokens."""
    corpus = work / "random"
    if not corpus.with_suffix(".idx").exists():
        write_corpus(corpus, np.random.default_rng(1).integers(20, 200, 400, dtype=np.int32), 512, 0, 1)
    file, changes, _ = LAYOUTS[layout]
    recipe = load_recipe(ROOT / "tests" / "training" / file)
    recipe["plugins"] = {**recipe["plugins"], "step_record": {"steps": 3}}
    samples = STEPS * GLOBAL_BATCH
    data = f"train_dataset.data_loader.config.data_path.1={corpus}"
    keys = (f"train_dataset.data_loader.sizes.0={samples}", data, f"lr_schedule.total_steps={STEPS}")
    saves = f"checkpoint.save_interleaved_steps={SAVED}"
    return apply_overrides(
        recipe, (*keys, saves, *(changes if changes == TWO_LAYERS else (*SMALLER, *changes)), *overrides)
    )


def judged(verdict: Verdict, fault: Fault) -> str:
    """Return "right", "caught" (something else is named) or "missed"."""
    if not verdict.findings:
        return "missed"
    first = verdict.first[0]
    return "right" if first.stage in fault.stages and fault.module in first.module else "caught"


def told(verdict: Verdict) -> str:
    """Return the first finding in words."""
    if not verdict.findings:
        return verdict.word
    first = verdict.first[0]
    return f"step {first.step}, {first.stage}, {first.module}: {first.detail}".replace("|", "\\|")


def page(results: dict[str, dict[str, Any]]) -> str:
    """Return docs/bug-zoo.md."""
    clean = {name: results[name] for name in CLEAN if name in results}
    alarms = sum(row["word"] != "right" for row in clean.values())
    rates, tables, now = [], [], []
    for batch, heading in HEADING.items():
        rows = {name: results[name] for name, each in FAULTS.items() if each.batch == batch and name in results}
        words = [row["first"]["word"] for row in rows.values() if "first" in row]
        now += [row["word"] for row in rows.values()]
        if words:
            rates.append(
                f"* Of {len(words)} {heading.removeprefix('## ').lower()} of `diagnose`, the command caught "
                f"{len(words) - words.count('missed')}, and named the right stage and module of "
                f"{words.count('right')} at the first try."
            )
        tables += [heading, "", ABOUT[batch], *_table(rows, bool(words)), ""]
    lines = [
        *rates,
        f"* Of all {len(now)} faults, `diagnose` with today's rules catches {len(now) - now.count('missed')}, and "
        f"names the right stage and module of {now.count('right')}.",
        f"* In {alarms} of {len(clean)} runs without a fault `diagnose` reported a finding.",
        "",
        LAYOUTS_TOLD,
    ]
    tables += ["## Runs without a fault", "", "| run | compared with | what was said |", "|---|---|---|"]
    tables += [f"| `{name}` | {row['against']} | {row['said']} |" for name, row in clean.items()]
    if absent := [name for name in FAULTS if name not in results]:
        tables += ["", "Not judged, because the run failed or was not made: " + ", ".join(absent) + "."]
    return HEAD + "\n".join(lines) + "\n" + WORKED + "\n".join(tables) + "\n"


def _table(rows: dict[str, dict[str, Any]], tried: bool) -> list[str]:
    """The lines of a table of faults; `tried`: with what was said at the first try."""
    if tried:
        lines = ["| fault | source | processes | what was said first, at the first try | first try | today |"]
        lines += ["|---|---|---|---|---|---|"]
    else:
        lines = ["| fault | source | processes | what is said first | verdict |", "|---|---|---|---|---|"]
    for name, row in rows.items():
        fault = FAULTS[name]
        said = (
            f"{row['first']['said']} | {row['first']['word']} | {row['word']}"
            if tried
            else f"{row['said']} | {row['word']}"
        )
        lines.append(f"| {fault.what} | {fault.source} | {fault.layout or 'one'} | {said} |")
    return lines


def judge(work: Path, name: str, made: bool) -> dict[str, Any]:
    """Make a run, compare it, and return what is kept of the verdict; "failed" says why there is none."""
    if name in FAULTS:
        against = of_layout(FAULTS[name].layout if FAULTS[name].resumed else LAYOUTS[FAULTS[name].layout][2])
    else:
        against = CLEAN[name][-1]
    seconds = _both(work, against or name, name, made)
    if isinstance(seconds, str):
        return {"failed": seconds}
    verdict = diagnose(*[read_side(work / each) for each in (against, name) if each])
    word = judged(verdict, FAULTS[name]) if name in FAULTS else "alarm" if verdict.findings else "right"
    return {"word": word, "said": told(verdict), "against": f"`{against}`" if against else "laws"}


@click.command()
@click.argument("names", nargs=-1, type=click.Choice([*FAULTS, *CLEAN]))
@click.option("--work", type=click.Path(path_type=Path), help="Folder for the runs; a temporary one by default.")
@click.option("--made", is_flag=True, help="Judge the runs that the folder has, and train none.")
@click.option("--results", default=RESULTS, type=click.Path(path_type=Path), help="The file that keeps what was said.")
@click.option("--page", "file", default=PAGE, type=click.Path(path_type=Path), help="The page that is written.")
def main(names: tuple[str, ...], work: Path | None, made: bool, results: Path, file: Path) -> None:
    """Train and judge; print a line for each run."""
    kept = json.loads(results.read_text()) if results.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        place = (work or Path(folder)).absolute()
        place.mkdir(parents=True, exist_ok=True)
        for name in names or (*FAULTS, *CLEAN):
            row = judge(place, name, made)
            click.echo(f"{name}: {row.get('failed') or row['word'] + ': ' + row['said']}")
            if "failed" in row:
                continue
            if name in FAULTS and FAULTS[name].batch != "known":
                row["first"] = kept.get(name, {}).get("first") or {"word": row["word"], "said": row["said"]}
            kept[name] = row
            write_atomically(results, json.dumps(kept, indent=1) + "\n")
    write_atomically(file, page(kept))


if __name__ == "__main__":
    main()
