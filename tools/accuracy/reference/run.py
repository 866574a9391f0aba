"""This module trains the reference model in a process: `python -m tools.accuracy.reference.run JOB.npz OUT.npz`.

JOB holds `job`, the JSON of `sizes` and `hyper`; `weights/<Hugging Face name>`; `batch/input_ids|labels|loss_mask`
[steps, B, S]; optionally `state/<step>/weight|moment|square/<name>` and `load/<step>/<layer>` of the MindFormers
training, for `train.single_steps`. OUT is a record (`tools.accuracy.align.sides`). The exit code is 3 without torch or
transformers.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np

MISSING = 3
KINDS = ("weight", "moment", "square")
Arrays = dict[str, np.ndarray]


def main(job_file: str, out_file: str) -> int:
    """Train the reference model as `job_file` says, and write the results into `out_file`."""
    try:
        import torch
        import transformers
    except ImportError as error:
        print(error, file=sys.stderr)
        return MISSING
    from tools.accuracy.reference.start import Hyper
    from tools.accuracy.reference.train import Reference, run, single_steps
    from tools.weights.hugging_face_sizes import Sizes

    stored = read(job_file)
    job = json.loads(str(stored["job"]))
    torch.use_deterministic_algorithms(True)
    reference = Reference(Sizes(**job["sizes"]), below(stored, "weights/"))
    batches, hyper = below(stored, "batch/"), Hyper(**job["hyper"])
    record = run(reference, hyper, batches)
    if "state/0/weight/lm_head.weight" in stored:
        singles = single_steps(reference, hyper, batches, *states_of(stored, len(hyper.rates)))
        record.update({f"single/{name}": values for name, values in singles.items()})
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    np.savez(out_file, **record, about=np.array(json.dumps(versions)))
    return 0


def read(file: str | Path) -> Arrays:
    """Return the arrays of an .npz file as a dictionary by their names."""
    with np.load(file) as stored:
        return dict(stored)


def below(stored: Mapping[str, np.ndarray], prefix: str) -> Arrays:
    """Return the arrays whose names begin with a prefix, by their names without this prefix."""
    return {name.removeprefix(prefix): array for name, array in stored.items() if name.startswith(prefix)}


def states_of(stored: Mapping[str, np.ndarray], steps: int) -> tuple[list[dict[str, Arrays]], list[Arrays]]:
    """Return weights and moments before each step and after the last, and the experts' loads of each step."""
    states = [{kind: below(stored, f"state/{step}/{kind}/") for kind in KINDS} for step in range(steps + 1)]
    return states, [below(stored, f"load/{step}/") for step in range(steps)]


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
