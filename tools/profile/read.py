"""Find the profile in a folder, whatever of MindSpore's it holds."""

from __future__ import annotations

import re
from pathlib import Path

from plugins.errors import DataError
from tools.profile import ascend, cpu
from tools.profile.kernels import Profile


def read_profile(folder: Path, steps: int | None = None) -> Profile:
    """The profile at or below a folder; of several ranks the lowest.

    Args:
        steps: that it holds, where its files do not tell steps apart.

    Raises:
        DataError: there is no profile, or it cannot be read.
    """
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder: want the output of MindSpore's profiler")
    places = [folder] if _holds_csv(folder) else []
    places += sorted(path for path in folder.rglob(ascend.FOLDER) if path.is_dir() and _holds_csv(path))
    if places:
        return ascend.read_ascend(min(places, key=_rank), steps)
    frameworks = sorted({path.parent for path in folder.rglob(cpu.TIMES)})
    if frameworks:
        return cpu.read_cpu(min(frameworks, key=_rank))
    raise DataError(
        f"{folder}: no profile below it: neither {ascend.FOLDER}/{ascend.KERNELS} or {ascend.STATISTIC} (Ascend) "
        f"nor FRAMEWORK/{cpu.TIMES} (CPU, with data_simplification off)"
    )


def _holds_csv(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (ascend.KERNELS, ascend.STATISTIC))


def _rank(folder: Path) -> tuple[int, str]:
    found = re.findall(r"rank_(\d+)", str(folder))
    return int(found[-1]) if found else 0, str(folder)
