"""This module compares new trainings with the golden numbers of `tests/golden/NAME.json`; a commit that changes golden
numbers states the reason. Losses and norms are compared by Table 2 of the TeleChat3-MoE report, because processors sum
in different orders; the samples must be equal.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from plugins.errors import DataError
from plugins.lines import locked
from tools.accuracy.equivalence.runs import LOSSES, ROOT, Trained, group_norms
from tools.accuracy.equivalence.trained import COUNTED, DTYPE
from tools.accuracy.judge import tolerance
from tools.files.atomic import real_path, write_atomically

GOLDEN = ROOT / "tests" / "golden"
DIGITS = 7  # of a float32
MADE_WITH = ("mindspore", "mindformers")


def golden_file(folder: Path, recipe: str) -> Path:
    """Return the path of a recipe's golden numbers: ``mini-pretrain.json`` for recipes/mini/pretrain.yaml."""
    path = Path(recipe).absolute()
    return folder / f"{path.parent.name}-{path.stem}.json"


def recorded(folder: Path, recipe: str) -> str:
    """Return the path under which a golden file records a recipe, relative to this checkout or else to the file."""
    path = real_path(recipe)
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else os.path.relpath(path, real_path(folder))


def owner(file: Path, recipe: str) -> str:
    """Return the recipe to which a golden file belongs if it is not the given recipe, but another one that has the same
    golden file; otherwise return "". Raise DataError if the file does not hold golden numbers.
    """
    name = str(_content(file).get("recipe"))
    # as an absolute or relative path wrote it before
    known = name == recorded(file.parent, recipe) or real_path(name) == real_path(recipe)
    return "" if known else name


def numbers_of(run: Trained) -> dict[str, Any]:
    """Return the numbers of a training that a golden file stores."""
    steps = [
        {**step_numbers(step), "norms": {group: rounded(norm) for group, norm in group_norms(norms).items()}}
        for step, norms in zip(run.steps, run.norms, strict=True)
    ]
    return {"samples": hashlib.sha256(json.dumps(run.samples).encode()).hexdigest()[:16], "steps": steps}


def step_numbers(step: Mapping[str, Any]) -> dict[str, Any]:
    """Return the losses, the global norm and the tokens of one step."""
    return {"tokens": step["tokens"], **{name: rounded(step[name]) for name in LOSSES if step[name] is not None}}


def rounded(value: float) -> float:
    """Return a number with as many digits as a golden file keeps."""
    return float(f"{value:.{DIGITS}g}")


def write_golden(file: Path, recipe: str, runs: Mapping[str, Mapping[str, Any]]) -> None:
    """Write `runs` (name -> numbers) into a golden file, beside the numbers of other runs in it; raise DataError if a
    number is not finite.
    """
    for name, run in runs.items():
        for where, value in _numbers(run):
            if not math.isfinite(value):
                raise DataError(
                    f"{name}: {where} is {value}, but a golden number must be finite, so nothing was written"
                )
    made = {"recipe": recorded(file.parent, recipe), "made_with": {name: version(name) for name in MADE_WITH}}
    file.parent.mkdir(parents=True, exist_ok=True)
    with locked(file.parent):
        old = read_golden(file) if file.exists() else {}
        content = made | {"runs": dict(sorted({**old, **runs}.items()))}
        write_atomically(file, json.dumps(content, indent=1) + "\n")


def _numbers(run: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield every number of a run, and where it stands."""
    for number, step in enumerate(run["steps"], 1):
        yield from ((f"step {number} {key}", value) for key, value in step.items() if key != "norms")
        yield from ((f"step {number} gradient norm of {group}", norm) for group, norm in step.get("norms", {}).items())


def read_golden(file: Path) -> dict[str, Any]:
    """Return a golden file's numbers by the names of runs; raise DataError if the file holds no golden numbers."""
    return _content(file)["runs"]


def _content(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text("utf-8"))
        for run in content["runs"].values():
            numbers = [*_numbers(run), *(("tokens", step["tokens"]) for step in run["steps"])]
            for where, value in numbers:
                if not isinstance(value, int | float):
                    raise ValueError(f"{where} is {value!r}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(
            f"{file}: this is not a file of golden numbers ({error!r}); remove it, and write a new one with --update"
        ) from None
    return content


def differences(golden: Mapping[str, Any], runs: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return one line for each number of `runs` that differs from its golden number, if it has one."""
    known = [(name, run) for name, run in runs.items() if name in golden]
    return [f"{name}: {line}" for name, run in known for line in _run_differences(golden[name], run)]


def _run_differences(golden: Mapping[str, Any], run: Mapping[str, Any]) -> Iterator[str]:
    if golden.get("samples") != run.get("samples"):
        yield f"samples {run.get('samples')}, golden {golden.get('samples')}: other data, or another order"
    if len(golden["steps"]) != len(run["steps"]):
        yield f"{len(run['steps'])} steps, golden {len(golden['steps'])}; give --steps {len(golden['steps'])}"
        return
    for number, (want, got) in enumerate(zip(golden["steps"], run["steps"], strict=True), 1):
        for key in (key for key in want if key != "norms"):
            yield from _difference(f"step {number} {key}", want[key], got.get(key), key, want["tokens"])
        wants, gots = want.get("norms", {}), got.get("norms", {})
        for group in [*wants, *(group for group in gots if group not in wants)]:
            where = f"step {number} gradient norm of {group}"
            yield from _difference(where, wants.get(group), gots.get(group), "", want["tokens"])


def _difference(where: str, want: float | None, got: float | None, key: str, tokens: int) -> Iterator[str]:
    if want is None or got is None:
        yield f"{where}: {got}, golden {want}"
        return
    allowed = 0.0 if key == "tokens" else COUNTED.get(key, tolerance(DTYPE, tokens))
    off = abs(got - want) / max(abs(want), 1e-30)
    if not off <= allowed + 10.0**-DIGITS:  # true of NaN too
        yield f"{where}: {got:.{DIGITS}g}, golden {want:.{DIGITS}g} (off by {off:.2g}, allowed {allowed:.2g})"
