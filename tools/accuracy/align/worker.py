"""`launch/train.py` with the recorder of `tc3 accuracy align` as one more plugin, in a process of its own."""

from __future__ import annotations

import runpy

from plugins import ADAPTERS

RECORDER = "align_recorder"

if __name__ == "__main__":
    ADAPTERS[RECORDER] = "tools.accuracy.align.recorder"
    runpy.run_module("launch.train", run_name="__main__", alter_sys=True)
