"""Small pipeline-balance instances, and all their plans."""

import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np

from tools.layout.instance import read_instance

CASE_438B = Path(__file__).parent / "data" / "telechat3_438b_pp8_v2_mb64_45gb.json"


def content(stages=2, chunks=1, micro_batches=4, counts=(4,), cap=100.0, schedule=None, options=2, scale=1.0):
    """The file's content: types that differ, options that trade memory for time."""
    return {
        "schema": "pp-balance/1",
        "name": "small",
        "P": stages,
        "V": chunks,
        "M": micro_batches,
        "schedule": schedule or ("1f1b" if chunks == 1 else "interleaved_1f1b"),
        "memory_cap": cap,
        "static_mem": [5.0 + (s == 0) for s in range(stages)],
        "head": {"fwd": 0.5, "bwd": 1.0},
        "tail": {"fwd": 2.0, "bwd": 4.0},
        "body": [
            {
                "name": f"type{t}",
                "count": count,
                "fwd": (2.0 + t) * scale,
                "bwd": (4.0 + t) * scale,
                "param_mem": 3.0 + t,
                "options": [
                    {"name": f"option{o}", "extra_bwd": o * (1.0 + t), "act_mem": 8.0 / (1 + 2 * o)}
                    for o in range(options)
                ],
            }
            for t, count in enumerate(counts)
        ],
    }


def instance(folder, **numbers):
    path = Path(folder) / "small.json"
    path.write_text(json.dumps(content(**numbers)), "utf-8")
    return read_instance(path)


def with_passes(problem, height, update=0.0):
    """The instance in which passes and buffers need memory once: the more, the stronger the option and the later the
    type; the last stage's ends need as much as a middling option. The ends keep activations, too. The optimizer's
    update needs memory for each layer, and once the more, the later the type; the first stage's ends need a part of it.
    """

    def type_of(number, kind):
        options = tuple(replace(o, working=height * (number + 2 * n)) for n, o in enumerate(kind.options))
        updated, zeroed = update * (1 + 0.2 * number), update * (0.3 + 1.5 * number)
        return replace(kind, options=options, buffers=height * (0.5 - 0.3 * number), updated=updated, zeroed=zeroed)

    types = tuple(type_of(number, kind) for number, kind in enumerate(problem.types))
    ends = np.where(np.arange(problem.stages) == problem.stages - 1, 1.5 * height, 0.0)
    kept = np.zeros(len(problem.stage_of))
    kept[0], kept[-1] = 0.2 * height, 0.4 * height
    zeroed = np.where(np.arange(problem.stages) == 0, 0.9 * update, 0.0)
    updated = problem.static * (update > 0)
    return replace(problem, types=types, working=ends, kept=kept, updated=updated, zeroed=zeroed)


def all_plans(problem):
    """[N, K, C] every well-formed plan, found without the code under test: layers as a row, cut into chunks."""
    size = problem.chunks * problem.stages
    row = [t for t, kind in enumerate(problem.types) for _ in range(kind.count)]
    plans = []
    for cuts in itertools.combinations_with_replacement(range(len(row) + 1), size - 1):
        ends = [0, *cuts, len(row)]
        pieces = [row[a:b] for a, b in itertools.pairwise(ends)]
        if len(row) >= size - 2 and not all(pieces[1:-1]):
            continue
        choices = [list(_options(problem, piece)) for piece in pieces]
        plans += [np.column_stack(columns) for columns in itertools.product(*choices)]
    return np.array(plans)


def _options(problem, piece):
    """Each way to give the layers of a chunk an option, as the chunk's column of a plan."""
    each_type = []
    for t, kind in enumerate(problem.types):
        ways = itertools.combinations_with_replacement(range(len(kind.options)), piece.count(t))
        each_type.append(
            [np.bincount(way, minlength=len(kind.options)) if way else np.zeros(len(kind.options), int) for way in ways]
        )
    for combination in itertools.product(*each_type):
        yield np.concatenate(combination)
