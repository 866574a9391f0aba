"""This module is the training process that `tc3 accuracy align` starts: `launch/train.py` with a recorder."""

from __future__ import annotations

import runpy

from plugins import ADAPTERS

RECORDER = "align_recorder"

if __name__ == "__main__":
    ADAPTERS[RECORDER] = "tools.accuracy.align.recorder"
    runpy.run_module("launch.train", run_name="__main__", alter_sys=True)
