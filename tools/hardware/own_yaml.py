"""A YAML file of somebody's own: a cluster, measurements."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from plugins.errors import TC3Error
from tools.files.small_yaml import SmallLoader, small_text


class _Loader(SmallLoader):
    """Refuses a key that stands twice in a mapping, of which YAML would silently keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        lines: dict[str, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if isinstance(key, yaml.ScalarNode) and key.value in lines and key.value != "<<":
                raise yaml.MarkedYAMLError(
                    problem=f"key {key.value!r} is already set in line {lines[key.value]}", problem_mark=key.start_mark
                )
            lines[key.value if isinstance(key, yaml.ScalarNode) else ""] = line
        return super().construct_mapping(node, deep)


def read_yaml(path: Path, error: type[TC3Error], shown: str | None = None) -> Any:
    """What is in a file.

    Args:
        error: to raise; shown: the file's name in it, `path` by default.

    Raises:
        error: it cannot be read, is no YAML, or of a size that no such file has.
    """
    name = shown or str(path)
    try:
        return yaml.load(small_text(path, error), _Loader)
    except OSError as wrong:
        raise error(f"{name}: cannot be read: {wrong.strerror}") from None
    except yaml.MarkedYAMLError as wrong:
        mark = wrong.problem_mark or wrong.context_mark
        line = f":{mark.line + 1}" if mark else ""
        raise error(f"{name}{line}: cannot be read: {wrong.problem or wrong.context}") from None
    except (yaml.YAMLError, RecursionError) as wrong:
        raise error(f"{name}: cannot be read: {' '.join(str(wrong).split()) or 'nested too deep'}") from None
    except TC3Error:
        raise
    except ValueError as wrong:  # a date or a number that is none
        raise error(f"{name}: cannot be read: {' '.join(str(wrong).split())}") from None
