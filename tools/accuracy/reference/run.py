"""`python -m tools.accuracy.reference.run JOB.npz OUT.npz`: the reference as a process. Torch, transformers, NumPy.

JOB holds `job`, the JSON of `sizes` and `hyper`; `weights/<Hugging Face name>`; `batch/input_ids|labels|loss_mask`
[steps, B, S]; optionally `state/<step>/weight|moment|square/<name>` and `load/<step>/<layer>`, the other side's, for
`train.single_steps`. OUT is a record (`tools.accuracy.align.sides`). Exit code 3: torch or transformers is missing.
"""

from __future__ import annotations

import json
import sys

import numpy as np

MISSING = 3


def main(job_file: str, out_file: str) -> int:
    """Run a job."""
    try:
        import torch
        import transformers
    except ImportError as error:
        print(error, file=sys.stderr)
        return MISSING
    from tools.accuracy.reference.start import Hyper
    from tools.accuracy.reference.train import Reference, run, single_steps
    from tools.weights.hugging_face_sizes import Sizes

    with np.load(job_file) as file:
        stored = {name: file[name] for name in file.files}
    job = json.loads(str(stored["job"]))
    torch.use_deterministic_algorithms(True)
    reference = Reference(Sizes(**job["sizes"]), below(stored, "weights/"))
    batches, hyper = below(stored, "batch/"), Hyper(**job["hyper"])
    record = run(reference, hyper, batches)
    if "state/0/weight/lm_head.weight" in stored:
        kinds = ("weight", "moment", "square")
        states = [
            {kind: below(stored, f"state/{step}/{kind}/") for kind in kinds} for step in range(len(hyper.rates) + 1)
        ]
        loads = [below(stored, f"load/{step}/") for step in range(len(hyper.rates))]
        singles = single_steps(reference, hyper, batches, states, loads)
        record.update({f"single/{name}": values for name, values in singles.items()})
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    np.savez(out_file, **record, about=np.array(json.dumps(versions)))
    return 0


def below(stored: dict[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    """Return the arrays under a prefix, without it."""
    return {name.removeprefix(prefix): array for name, array in stored.items() if name.startswith(prefix)}


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
