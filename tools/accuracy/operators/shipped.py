"""This module compares the golden results of this host with those of another CPU in shipped.json, because a host that
computes wrong golden results would also judge its device wrongly. The file holds the root mean square and a few
elements of each golden tensor of every operator's first shape.

`python -m tools.accuracy.operators.shipped --update` writes the file again; this needs only NumPy.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

import click
import numpy as np

from plugins.errors import DataError, not_json
from tools.accuracy.judge import tolerance
from tools.accuracy.operators.run import Array, make_case
from tools.accuracy.operators.spec import Spec
from tools.files.atomic import write_atomically

FILE = Path(__file__).with_name("shipped.json")
SEED = 0  # of the inputs
SAMPLES = 3  # elements kept of each tensor
ALLOWED = tolerance("float32", 1)  # relative to the element or to the root mean square, whichever is larger
_DIGITS = 8


def numbers_of(spec: Spec, dtype: str) -> dict[str, list[float]]:
    """Return root mean square and sample elements of each golden result of an operator's first shape."""
    case = make_case(spec, spec.shapes[0], dtype, SEED)
    tensors = {f"output {number}": array for number, array in enumerate(case.outputs)}
    tensors |= {f"gradient {number}": array for number, array in zip(spec.wrt, case.grads, strict=False)}
    return {f"{spec.name} {dtype} {name}": _summary(name, array) for name, array in tensors.items()}


def _summary(name: str, array: Array) -> list[float]:
    flat = np.asarray(array, np.float64).ravel()
    places = np.random.default_rng([zlib.crc32(name.encode()), flat.size]).integers(0, flat.size, SAMPLES)
    finite = flat[np.isfinite(flat)]
    values = [np.sqrt(np.mean(np.square(finite))) if finite.size else 0.0, *flat[places]]
    return [float(f"{value:.{_DIGITS}g}") for value in values]


def read_shipped(file: Path = FILE) -> dict[str, Any]:
    """Return the values of the keys "made" (a date), "numpy" (a version) and "results" in a file of golden results;
    raise DataError if the file holds no golden results.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        content["results"].keys()
    except (OSError, ValueError) as error:
        reason = not_json(error) if isinstance(error, ValueError) else "cannot be read"
        raise DataError(f"{file}: the file {reason}; get it again from the repository") from None
    except (KeyError, TypeError, AttributeError):
        raise DataError(f"{file}: the file holds no golden results; get it again from the repository") from None
    return dict(content)


def differences(pairs: Iterable[tuple[Spec, str]], shipped: dict[str, Any]) -> tuple[int, list[str]]:
    """Return the number of compared tensors of the pairs (operator, type), and a line for each that differs."""
    compared, lines = 0, []
    for spec, dtype in pairs:
        for name, got in numbers_of(spec, dtype).items():
            compared += 1
            lines += list(_differences(name, got, shipped["results"].get(name)))
    return compared, lines


def _differences(name: str, got: list[float], want: list[float] | None) -> Iterator[str]:
    if want is None:
        yield f"{name}: the shipped golden results do not have this tensor"
        return
    for one, other in zip(got, want, strict=True):
        same = one == other or (np.isnan(one) and np.isnan(other))
        if not (same or abs(one - other) <= ALLOWED * max(abs(other), want[0])):
            yield f"{name}: this host computes {one:.6g}, shipped is {other:.6g}"
            return


@click.command()
@click.option(
    "--update",
    is_flag=True,
    required=True,
    help="Compute the reference results of the operators again, and overwrite shipped.json with them.",
)
def main(update: bool) -> None:
    """Compute the golden results of all operators, and write them with today's date."""
    from tools.accuracy.operators.report import SPECS

    results: dict[str, list[float]] = {}
    for spec in SPECS.values():
        for dtype in spec.dtypes:
            results |= numbers_of(spec, dtype)
    lines = [f"  {json.dumps(name)}: {json.dumps(values)}" for name, values in results.items()]
    head = f'{{\n "made": "{date.today().isoformat()}",\n "numpy": "{np.__version__}",\n "results": {{\n'
    write_atomically(FILE, head + ",\n".join(lines) + "\n }\n}\n")
    click.echo(f"written: {FILE} ({FILE.stat().st_size:,} bytes)")


if __name__ == "__main__":
    main()
