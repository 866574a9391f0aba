"""Training in PyNative, where msprobe's L0, L1 and mix levels live."""

from __future__ import annotations

import mindspore as ms

from plugins.cpu_backend.pynative import stand_ins
from plugins.private_hooks import replace


def enable() -> None:
    """Switch to PyNative. Call after the CPU backend's check, which refuses it because it is slow: a dump wants it."""
    for hook in stand_ins():
        replace(*hook)
    ms.set_context(mode=ms.PYNATIVE_MODE)
