"""This module reads YAML files that people write, and limits the number of values and levels in these files; recipes
stay far below these limits. A file whose YAML aliases would expand to too many values is refused before the aliases are
expanded.

A small file with aliases of aliases can expand to more values than any memory holds, ten thousand brackets overflow the
stack, and the parser needs minutes for a file of 100 MB. The composer counts the values that it has read, with aliases
and merge keys expanded, and stops at the first value beyond the limit.
"""

from __future__ import annotations

import os
import stat
from typing import Any

import yaml

from plugins.errors import RecipeError, TC3Error

MAX_BYTES = 512 * 1024  # the largest recipe of this repository or MindFormers has 20 KiB
MAX_VALUES = 50_000
MAX_DEPTH = 50


class TooLarge(yaml.MarkedYAMLError):
    """This error means that a YAML file has too many values or levels of nesting; the part of the file that was read is
    well-formed.
    """


class SmallLoader(yaml.SafeLoader):
    """A `SmallLoader` is a YAML loader that raises `TooLarge` for a file with more than MAX_VALUES values (with aliases
    expanded) or more than MAX_DEPTH levels.
    """

    def __init__(self, stream: str):
        super().__init__(stream)
        self.values = self.depth = 0
        self.written_out: dict[int, tuple[int, int]] = {}  # of a composed collection: values, levels

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Return the next node of the YAML file as the parent class does, and count this node towards the limits of the
        file's size.
        """
        self.depth += 1
        self.values += 1
        self._hold(self.values, self.depth)
        try:
            node = super().compose_node(parent, index)
        finally:
            self.depth -= 1
        if isinstance(node, yaml.CollectionNode) and id(node) not in self.written_out and not self._open(node):
            parts = [part for item in node.value for part in (item if isinstance(item, tuple) else (item,))]
            sizes = [self.written_out.get(id(part), (1, 1)) for part in parts]
            size = 1 + sum(values for values, _ in sizes), 1 + max((levels for _, levels in sizes), default=0)
            self._hold(*size, node.start_mark)
            self.written_out[id(node)] = size
        return node

    @staticmethod
    def _open(node: yaml.Node) -> bool:
        """Return whether a node is an alias of one that is still being read: an anchor inside itself."""
        return node.end_mark is None

    def _hold(self, values: int, levels: int, mark: yaml.Mark | None = None) -> None:
        problem = ""
        if values > MAX_VALUES:
            problem = f"the file has more than {MAX_VALUES:,} values (with its aliases written out)"
        if levels > MAX_DEPTH:
            problem = f"the values are nested more than {MAX_DEPTH} levels deep"
        if problem:
            raise TooLarge(problem=problem, problem_mark=mark or self.get_mark())


def small_text(path: str | os.PathLike[str], error: type[TC3Error] = RecipeError) -> str:
    """Read a YAML file that a person has written, and return its text.

    Raises:
        error: `path` is not a valid file name, or the file is not a regular file, too large, or not in UTF-8.
        OSError: the file does not exist, or may not be read.
    """
    file = os.fspath(path)
    try:
        status = os.stat(file)
        if not stat.S_ISREG(status.st_mode):
            raise error(f"{file}: this is {'a folder' if stat.S_ISDIR(status.st_mode) else 'not an ordinary file'}")
        if status.st_size > MAX_BYTES:
            size, most = status.st_size / 2**20, MAX_BYTES / 2**20
            raise error(f"{file}: the file has {size:.1f} MiB, but only files of at most {most:g} MiB are read")
        with open(file, "rb") as stream:
            content = stream.read(MAX_BYTES)
        return content.decode("utf-8")
    except UnicodeDecodeError as wrong:
        line = content[: wrong.start].count(b"\n") + 1
        raise error(f"{file}:{line}: the file cannot be read: byte 0x{content[wrong.start]:02x} is not UTF-8") from None
    except ValueError as wrong:  # a NUL in the name
        raise wrong if isinstance(wrong, TC3Error) else error(f"{file!r}: this is not the name of a file") from None
