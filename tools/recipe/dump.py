"""This module writes a flat recipe as one YAML file, from which MindFormers reads the same values. YAML anchors of the
recipe stay anchors in the file.
"""

from __future__ import annotations

import io
import os
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from tools.files.atomic import write_atomically
from tools.recipe.load import KeyPath, Recipe


def dump_recipe(recipe: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Write `recipe` as YAML to `path`, atomically. The keys keep the recipe's order, and no Python tags are written.

    Values that the recipe's author shared through anchors stay shared, so an override of the flat file
    still reaches all their places.

    Raises:
        yaml.representer.RepresenterError: a value is not a plain YAML value (a bug of the caller).
    """
    write_atomically(path, recipe_text(recipe))


def recipe_text(recipe: dict[str, Any]) -> str:
    """Return `recipe` as the YAML text that `dump_recipe` writes."""
    node = _Dumper(io.StringIO(), sort_keys=False, default_flow_style=False).represent_data(dict(recipe))
    _fold_lists(node)
    shared: dict[Hashable, yaml.Node] = {}
    if isinstance(recipe, Recipe):
        _share_scalars(node, recipe, recipe, (), shared)
    return yaml.serialize(node, Dumper=_Dumper, width=110)  # ASCII: allow_unicode would fold some line breaks


def is_of_run(recipe: Path) -> bool:
    """Return whether the file `recipe` is the effective recipe that a run keeps in its folder, RUN/recipe.yaml. The
    folder of a run has a sub-folder `attempts`. If a folder has no `attempts` (a run started by a script or by msrun),
    the recipe must name its own folder as `output_dir`.
    """
    if recipe.name != "recipe.yaml" or (recipe.parent / "attempts").is_dir():
        return recipe.name == "recipe.yaml"
    try:
        content = yaml.safe_load(recipe.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return False  # whoever reads the recipe says what is wrong
    return isinstance(content, dict) and str(content.get("output_dir")) == str(recipe.absolute().parent)


class _Dumper(yaml.SafeDumper):
    """A `_Dumper` is a SafeDumper whose anchors are named after the key they stand at."""

    def anchor_node(self, node: yaml.Node, name: str = "top") -> None:
        """Record the YAML nodes that appear twice, as the parent class does, and name their anchors after a key."""
        if node in self.anchors:
            if self.anchors[node] is None:
                self.anchors[node] = self._free_name(node)
            return
        self.anchors[node] = None
        self.names = getattr(self, "names", {})
        self.names[id(node)] = name
        if isinstance(node, yaml.SequenceNode):
            for item in node.value:
                self.anchor_node(item, name)
        elif isinstance(node, yaml.MappingNode):
            for key, item in node.value:
                self.anchor_node(key, name)
                self.anchor_node(item, str(key.value))

    def _free_name(self, node: yaml.Node) -> str:
        name = "".join(char if char.isalnum() or char == "_" else "_" for char in self.names[id(node)])
        self.taken = getattr(self, "taken", {})
        self.taken[name] = self.taken.get(name, 0) + 1
        return name if self.taken[name] == 1 else f"{name}_{self.taken[name]}"


def _fold_lists(node: yaml.Node) -> bool:
    """Write lists of plain values, and lists of such lists, on one line; tell whether `node` fits on one."""
    if isinstance(node, yaml.SequenceNode):
        folded = [_fold_lists(item) for item in node.value]  # all of them, also after the first that does not fit
        node.flow_style = all(folded)
        return node.flow_style
    if isinstance(node, yaml.MappingNode):
        for _, item in node.value:
            _fold_lists(item)
    return isinstance(node, yaml.ScalarNode)


def _share_scalars(
    node: yaml.Node, value: Any, recipe: Recipe, path: KeyPath, shared: dict[Hashable, yaml.Node]
) -> None:
    """Make scalars with the same mark and value one node, which YAML writes as an anchor and its aliases."""
    if not isinstance(node, yaml.CollectionNode):
        return
    keys = list(value) if isinstance(value, dict) else range(len(value))
    for position, key in enumerate(keys):
        here = (*path, key)
        item = node.value[position]
        child = item[1] if isinstance(item, tuple) else item
        mark = recipe.marks.get(here)
        if mark and isinstance(child, yaml.ScalarNode):
            child = shared.setdefault((mark.ident, child.tag, child.value), child)
            node.value[position] = (item[0], child) if isinstance(item, tuple) else child
        _share_scalars(child, value[key], recipe, here, shared)
