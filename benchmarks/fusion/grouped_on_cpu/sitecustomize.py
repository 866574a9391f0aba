"""On the PYTHONPATH of a worker, this module enables the compiler pass of `plugins.grouped_gradient` on CPU, where a
recipe cannot switch it on.

The pass must be known to MindSpore before the one that renames operators for CPU. TC3_COUNT is a folder: each rank
notes there how often InplaceGroupedMatmulAdd has run. TC3_WITHOUT_PASS leaves the pass out.
"""

import os
import sys
from pathlib import Path


def _arm():
    from plugins.grouped_gradient import adapter as grouped
    from plugins.semi_auto_cpu import adapter
    from plugins.semi_auto_cpu.kernels import KERNELS

    original, kernel = adapter.before_mindformers, KERNELS["InplaceGroupedMatmulAdd"]
    count = Path(os.environ["TC3_COUNT"]) / f"rank_{os.environ['RANK_ID']}"

    def before_mindformers(recipe):
        if "TC3_WITHOUT_PASS" not in os.environ:
            grouped.add_pass()
        return original(recipe)

    def counted(*arguments):
        with count.open("a") as file:
            file.write(".")
        return kernel(*arguments)

    adapter.before_mindformers, KERNELS["InplaceGroupedMatmulAdd"] = before_mindformers, counted


if os.environ.get("MS_ROLE") == "MS_WORKER" and any(word.endswith("launch/train.py") for word in sys.orig_argv):
    _arm()
