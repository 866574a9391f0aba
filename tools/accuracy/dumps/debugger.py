"""msprobe's `PrecisionDebugger`, configured for a whole dump, and the one thing in it that CPU cannot run.

The import name `msprobe` comes from the distribution mindstudio-probe.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from plugins.private_hooks import replace


def debugger(folder: Path, level: str, task: str, rank: int) -> Any:
    """A `PrecisionDebugger` that writes `folder/stepN/rankM/`.

    Args:
        level: L0 (cells), L1 (functions), mix (both), or L2 (kernels of a compiled graph).
        task: statistics, or tensor (values as .npy besides).
        rank: of this worker; each has a configuration file of its own.
    """
    everything = {"scope": [], "list": [], "data_mode": ["all"], "summary_mode": "statistics"}
    content = {"task": task, "level": level, "dump_path": str(folder), "rank": [], "step": [], "extra_info": True}
    config = folder / f"msprobe_rank{rank}.json"
    config.write_text(json.dumps({**content, "statistics": everything, "tensor": everything}), "utf-8")
    config.chmod(0o640)  # msprobe refuses a file that others may write
    os.environ.setdefault("PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION", "python")
    from msprobe.mindspore import PrecisionDebugger

    use_numpy_statistics()
    return PrecisionDebugger(config_path=str(config))


def use_numpy_statistics() -> None:
    """Let msprobe compute a tensor's statistics with NumPy: `mint.norm` has no CPU kernel.

    Stands in for `MindsporeDataProcessor.get_stat_info` of mindstudio-probe 26.2.0; the results differ from its own in
    that sums are taken in float64.
    """
    import mindspore as ms
    from msprobe.core.dump.data_dump.data_processor.base import TensorStatInfo
    from msprobe.core.dump.data_dump.data_processor.mindspore_processor import MindsporeDataProcessor

    def get_stat_info(self: Any, data: Any) -> Any:
        self.api_register.restore_inner_used_api()
        values = (data.astype(ms.float32) if data.dtype == ms.bfloat16 else data).asnumpy()
        self.api_register.register_inner_used_api()
        return TensorStatInfo(*statistics(values))

    replace(
        MindsporeDataProcessor, "get_stat_info", 'get_norm_value = mint.norm if hasattr(mint, "norm")', get_stat_info
    )


def statistics(values: np.ndarray) -> tuple[Any, ...]:
    """(largest, smallest, mean, L2 norm) of an array; of booleans the first two, of nothing none."""
    if not values.size:
        return ()
    if values.dtype == np.bool_:
        return bool(values.max()), bool(values.min())
    wide = np.abs(values).astype(np.float64) if np.iscomplexobj(values) else values.astype(np.float64)
    return float(wide.max()), float(wide.min()), float(wide.mean()), float(np.sqrt(np.square(wide).sum()))
