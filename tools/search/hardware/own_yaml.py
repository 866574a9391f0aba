"""A YAML file of somebody's own: a cluster, measurements."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from plugins.errors import TC3Error
from tools.files.small_yaml import SmallLoader, small_text


def read_yaml(path: Path, error: type[TC3Error], shown: str | None = None) -> Any:
    """What is in a file.

    Args:
        error: to raise; shown: the file's name in it, `path` by default.

    Raises:
        error: it cannot be read, is no YAML, or of a size that no such file has.
    """
    name = shown or str(path)
    try:
        return yaml.load(small_text(path, error), SmallLoader)
    except OSError as wrong:
        raise error(f"{name}: cannot be read: {wrong.strerror}") from None
    except (yaml.YAMLError, RecursionError) as wrong:
        raise error(f"{name}: cannot be read: {' '.join(str(wrong).split()) or 'nested too deep'}") from None
    except TC3Error:
        raise
    except ValueError as wrong:  # a date or a number that is none
        raise error(f"{name}: cannot be read: {' '.join(str(wrong).split())}") from None
