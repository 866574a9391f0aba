"""This module is `launch/train.py` with the recorder of `tc3 accuracy align` as an additional plugin, in a separate
process.
"""

from __future__ import annotations

import runpy

from plugins import ADAPTERS

RECORDER = "align_recorder"

if __name__ == "__main__":
    ADAPTERS[RECORDER] = "tools.accuracy.align.recorder"
    runpy.run_module("launch.train", run_name="__main__", alter_sys=True)
