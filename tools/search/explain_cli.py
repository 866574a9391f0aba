"""`tc3 search explain`: where a measured step differs from the predicted one; exit code 2 for a wrong input."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click
from rich.console import Console

from plugins.errors import DataError
from tools.estimate.efficiency import UNKNOWN, cluster, efficiency_of, known_error
from tools.hardware import DEFAULT_HARDWARE
from tools.profile.modelled import modelled
from tools.profile.study import Study, run_of, study
from tools.ranges import RANGES, Number
from tools.search.explain import Line, advice, lines, lines_of_total, table


@click.command("explain")
@click.argument("recipe", type=click.Path(path_type=Path))
@click.option(
    "--measured", required=True, metavar="SECONDS|PROFILE", help="A step's time, or a folder of MindSpore's profiler."
)
@click.option("--cluster", "cluster_name", default=DEFAULT_HARDWARE, show_default=True, metavar="NAME|FILE.yaml")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a key that RECIPE has.")
@click.option("--steps", type=Number("steps"), help="That PROFILE holds, where its files do not tell steps apart.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
def explain(
    recipe: Path, measured: str, cluster_name: str, overrides: tuple[str, ...], steps: int | None, as_json: bool
) -> None:
    """Put RECIPE's predicted step beside a measured one, term by term, and name the gap.

    Of a profile every second is attributed to a term of the estimator; of a step's time alone the terms stay unknown,
    and each is told by how much it would have to be off to explain the gap by itself (docs/calibrate.md).

    \b
    tc3 search explain recipes/telechat3_105b/pretrain_4k.yaml --measured 12.3
    tc3 search explain recipes/telechat3_105b/pretrain_4k.yaml --measured output/profile --cluster mine.yaml
    """
    config = run_of(recipe, overrides)
    seconds = _seconds(measured)
    seen = None if seconds else study(Path(measured), config, steps)
    hardware = cluster(cluster_name)
    if seen and seen.profile.device == "CPU" != hardware.device:
        raise DataError(
            f"--cluster {cluster_name}: {seen.profile.source} is a CPU's profile; make that CPU's file by "
            f"`tc3 search calibrate {measured} --recipe {recipe} --out FILE.yaml`"
        )
    predicted = modelled(config, hardware, efficiency_of(hardware), seen.stage if seen else None)
    rows = lines(predicted, seen.measured) if seen else lines_of_total(predicted, seconds or 0.0)
    total = seen.measured.seconds if seen else seconds or 0.0
    error = known_error(hardware)
    if as_json:
        click.echo(json.dumps(_as_json(rows, predicted, total, seen, error.as_json() if error else None)))
        return
    console = Console(soft_wrap=True, highlight=False, markup=False)
    step = sum(predicted.values())
    console.print(f"predicted {step:.4g} s, measured {total:.4g} s: the prediction is {step / total - 1:+.1%} off")
    console.print(f"such predictions: {error.words if error else UNKNOWN}")
    console.print(table(rows))
    for line in _remarks(rows, total, seen):
        console.print(line)


def _seconds(text: str) -> float | None:
    """A step's time; None where the text is none."""
    try:
        number = float(text)
    except ValueError:
        return None
    if refusal := RANGES["seconds"].refusal(number):
        raise DataError(f"--measured {text}: {refusal}")
    return number


def _remarks(rows: list[Line], total: float, seen: Study | None) -> list[str]:
    if seen is None:
        return ["alone: the factor by which this term alone would have to be off; a profile tells which it was"]
    found = [f"gap: {line}" for line in advice(rows, total)] or ["no term is off by more than 1 % of the step"]
    if seen.measured.replayed:
        found.append(f"of matmuls, attention and other operators {seen.measured.replayed:.4g} s are recomputation")
    kinds = sorted(seen.measured.unknown.items(), key=lambda item: -item[1])
    found += [f"not attributed: {kind}: {seconds:.4g} s" for kind, seconds in kinds[:10]]
    return [*found, *(f"note: {note}" for note in seen.profile.notes)]


def _as_json(
    rows: list[Line], predicted: dict[str, float], total: float, seen: Study | None, error: dict[str, float] | None
) -> dict[str, object]:
    return {
        "predicted": sum(predicted.values()),
        "measured": total,
        "known_error": error,
        "terms": [{**asdict(line), "gap": line.gap} for line in rows],
        "advice": advice(rows, total),
        "recomputation": seen.measured.replayed if seen else None,
        "not_attributed": seen.measured.unknown if seen else None,
        "notes": list(seen.profile.notes) if seen else [],
    }
