"""Which keys of a config some Python reads: `config.a.b`, `config["a"]`, `config.get("a")`, `getattr(config, "a")`.

MindFormers passes most YAML sections around as dictionaries, so the code that reads them is the only place that says
which keys exist.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

Chain = tuple[str, ...]
_GETTERS = ("get", "pop", "get_value", "setdefault")
_METHODS = {*_GETTERS, "items", "keys", "values", "append", "update", "set_value", "to_dict", "to_diff_dict", "copy"}


def reads(files: Iterable[Path], roots: Iterable[str], of_self: bool = False) -> dict[str, set[str]]:
    """Keys read below each root: ``{"": {"seed", ...}, "checkpoint": {"prefix", ...}}`` for the root ``config``.

    Args:
        files: Python sources.
        roots: names of variables that hold the config, `self.` left out.
        of_self: count only those that are attributes of `self`.
    """
    found: dict[str, set[str]] = defaultdict(set)
    names = set(roots)
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            chain = _chain(node)
            if chain and chain[0] == "self":
                chain = chain[1:]
            elif of_self:
                continue
            if chain and chain[0] in names:
                for depth, key in enumerate(chain[1:]):
                    if key in _METHODS:
                        break
                    found[".".join(chain[1 : depth + 1])].add(key)
    return dict(found)


def unread(names: Iterable[str], files: Iterable[Path]) -> list[str]:
    """Those of `names` that no file reads as an attribute of anything, nor has as a text, sorted."""
    left = set(names)
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                left.discard(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                left.discard(node.value)
    return sorted(left)


def _chain(node: ast.AST) -> Chain | None:
    """``config.a.get("b")`` as ``("config", "a", "b")``; None for anything else."""
    if isinstance(node, ast.Name):
        return (node.id,)
    if isinstance(node, ast.Attribute):
        return _extend(node.value, node.attr)
    if isinstance(node, ast.Subscript):
        return _extend(node.value, _text(node.slice))
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and isinstance(node.ops[0], (ast.In, ast.NotIn)):
        return _extend(node.comparators[0], _text(node.left))
    if isinstance(node, ast.Call) and node.args:
        if isinstance(node.func, ast.Attribute) and node.func.attr in _GETTERS:
            return _extend(node.func.value, _text(node.args[0]))
        if isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr") and len(node.args) > 1:
            return _extend(node.args[0], _text(node.args[1]))
    return None


def _extend(parent: ast.AST, key: str | None) -> Chain | None:
    chain = _chain(parent)
    return (*chain, *key.split(".")) if chain and key else None


def _text(node: ast.AST) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None
