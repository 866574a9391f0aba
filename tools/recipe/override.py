"""This module changes single values of a recipe from the command line. For an override `a.b.c=value`, the module
compares the type of the new value with the type of the present value.

New keys are allowed only below `plugins` (`--set plugins.NAME...`): a recipe need not contain a plugin that is off, or
a setting of a plugin that has its default value.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import yaml

from plugins import ADAPTERS
from plugins.errors import RecipeError, did_you_mean
from plugins.settings import settings_of
from tools.files.small_yaml import SmallLoader
from tools.recipe.load import EXPONENT, KeyPath, Recipe, bad_devices, bad_leaves, dotted, place_of

__all__ = ["also_changed", "apart", "apply_overrides", "dotted", "get_path", "shared_paths", "with_part"]

# keys for which MindFormers takes a number, a flag or a list per stage, whichever stands in the recipe
_SCALAR_OR_LIST = {
    *("offset", "recompute", "select_recompute", "select_comm_recompute"),
    *("select_recompute_exclude", "select_comm_recompute_exclude", "moe_layer_freq"),
}
# mappings from operator patterns, which are the recipe's own, to such values
_OF_PATTERNS = {("recompute_config", key) for key in _SCALAR_OR_LIST if key.startswith("select_")}
_KINDS = {bool: "true or false", int: "an integer", float: "a number", str: "text", list: "a list", dict: "a mapping"}


@dataclass
class _Given:
    """A `_Given` holds what overrides have set so far."""

    before: dict[str, Any]  # the recipe without these overrides, whose anchors tell which places share a value
    by: dict[KeyPath, str] = field(default_factory=dict)  # the override that has set a key path, also through an anchor
    named: set[KeyPath] = field(default_factory=set)  # the key paths that an override names itself

    def name(self, paths: Sequence[KeyPath], override: str) -> None:
        """Record that the command-line override `override` sets the key paths `paths`."""
        self.named.update(paths)
        self.by.update(dict.fromkeys(paths, override))

    def places(self, path: KeyPath) -> list[KeyPath]:
        """Return the key path `path`, and the key paths that share its value through a YAML anchor. Key paths inside a
        mapping or list that another override replaces as a whole are left out.
        """
        own, *shared = shared_paths(self.before, path)
        return [own, *(place for place in shared if not any(place[:end] in self.by for end in range(1, len(place))))]


def apply_overrides(recipe: dict[str, Any], overrides: Sequence[str]) -> Recipe:
    """Return a copy of `recipe` with every override ``"a.b=c"`` applied; an index selects an item of a list
    (``callbacks.2.prefix=x``).

    The value of an override is YAML (1e-3 is a number). A value that is shared through a YAML anchor changes at all its
    places, except inside a list that another override sets as a whole. A mapping as a value sets the keys that it
    contains, one by one. Keys may be new only below `plugins`.

    Raises:
        RecipeError: an override has no '=', an unknown key, a value of another type, or a number that is impossible for
            a training; two overrides set the same value; or one override sets a whole list or plugin, and another
            override a part of it.
    """
    result = copy.deepcopy(recipe) if isinstance(recipe, Recipe) else Recipe(copy.deepcopy(recipe))
    given = _Given(recipe)
    for override in overrides:
        name, equals, text = override.partition("=")
        if not equals or not name.strip():
            raise RecipeError(
                f"--set {override}: an override must have the form KEY.PATH=VALUE, for instance "
                "runner_config.batch_size=4"
            )
        if is_new(result, name.strip()):
            _write_new(result, name.strip(), _parse(text, override), override, given)
            continue
        path = _find(result, name.strip())
        _assign(result, path, _parse(text, override), text.strip(), override, given)
    for _, _, wrong, right in bad_devices(result) if overrides else ():
        raise RecipeError(f"--set {' '.join(overrides)}: {wrong}; {right}")
    return result


def _as_text(value: Any) -> str:
    """Return a value as `--set` takes it."""
    return json.dumps(value, ensure_ascii=False, default=str)


def apart(overrides: Sequence[str], *keys: str) -> list[str]:
    """Split each override that sets a mapping which contains one of `keys` into one override for each key of the
    mapping, and return all overrides.
    """
    found = []
    for override in overrides:
        name, _, text = override.partition("=")
        inside = any(key.startswith(f"{name.strip()}.") for key in keys)
        value = _parse(text, override) if inside else None
        if isinstance(value, dict) and value:
            single = [f"{name.strip()}.{key}={_as_text(item)}" for key, item in value.items()]
            found += apart(single, *keys)
        else:
            found.append(override)
    return found


def with_part(override: str, places: Sequence[str], value: Any) -> str:
    """Set `value` at the dotted names `places` inside the list that an override sets, and return the changed
    override.
    """
    name, _, text = override.partition("=")
    begin = f"{name.strip()}."
    inside = [place.removeprefix(begin).split(".") for place in places if place.startswith(begin)]
    whole = _parse(text, override) if inside else None
    for words in inside:
        *path, last = (int(word) if word.isdecimal() else word for word in words)
        get_path(whole, tuple(path))[last] = value
    return f"{name.strip()}={_as_text(whole)}" if inside else override


def shared_paths(recipe: dict[str, Any], path: KeyPath) -> list[KeyPath]:
    """Return the key paths that share the value at `path` through a YAML anchor, `path` first."""
    marks = getattr(recipe, "marks", {})
    if path not in marks:
        return [path]
    ident = marks[path].ident
    return [path] + [other for other, mark in marks.items() if mark.ident == ident and other != path]


def also_changed(recipe: dict[str, Any], override: str, changed: dict[str, Any] | None = None) -> list[str]:
    """Return the dotted names that the override ``"a.b=c"`` also changes because they share the value of `a.b` through
    a YAML anchor. Names that another override has set in the recipe `changed` are left out.
    """
    name = override.partition("=")[0].strip()
    if is_new(recipe, name):
        return []
    path = _find(recipe, name)
    others = shared_paths(recipe, path)[1:]
    if changed is not None:
        others = [other for other in others if _reached(changed, other) == _reached(changed, path)]
    return [dotted(other) for other in others]


def get_path(recipe: Any, path: KeyPath) -> Any:
    """Return the value at a key path. KeyError or IndexError is raised if the path does not exist."""
    for key in path:
        recipe = recipe[key]
    return recipe


def _find(recipe: dict[str, Any], name: str) -> KeyPath:
    """Return the key path of a dotted name; raises with a suggestion when the recipe has no such key."""
    node: Any = recipe
    path: KeyPath = ()
    words = name.split(".")
    while words:
        # operator patterns are keys with dots of their own
        keys = {str(key): key for key in node} if isinstance(node, dict) else {}
        count = next((count for count in range(1, len(words) + 1) if ".".join(words[:count]) in keys), 1)
        word, words = ".".join(words[:count]), words[count:]
        if isinstance(node, list) and word.isdecimal() and int(word) < len(node):
            key: Any = int(word)
        elif word in keys:
            key = keys[word]
        else:
            raise RecipeError(f"{place_of(recipe)}--set {name}: {_unknown(recipe, node, path, word, name)}")
        path, node = (*path, key), node[key]
    return path


def _unknown(recipe: dict[str, Any], node: Any, path: KeyPath, word: str, name: str) -> str:
    """Return why `word` does not exist below `path`, and which dotted name was probably meant."""
    here = dotted(path) or "the recipe"
    if isinstance(node, list):
        return f"{here} is a list of {len(node)}: its indices are 0 to {len(node) - 1}, not {word!r}"
    if not isinstance(node, dict):
        return f"{here} is a plain value ({node!r}) and has no key {word!r}"
    known = [dotted(other) for other in _paths(recipe, ())]
    leaf = name.rsplit(".", 1)[-1]
    same_leaf = [other for other in known if other.rsplit(".", 1)[-1] == leaf]
    hint = did_you_mean(name, same_leaf) or did_you_mean(name, known)
    if not hint and same_leaf:
        hint = f" (did you mean {same_leaf[0]!r}?)"
    new = "" if same_leaf else "; --set changes only keys that the recipe has: write a new key into the recipe"
    return f"{here} has no key {word!r}{hint}{new}"


def _paths(node: Any, path: KeyPath) -> Any:
    """Yield the key path of everything below `node`."""
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from _paths(value, (*path, key))


def _parse(text: str, override: str) -> Any:
    """Return the YAML value of the text right of '='."""
    if EXPONENT.fullmatch(text.strip()):
        return float(text)
    try:
        return _floats(SmallLoader(text).get_single_data())
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = getattr(error, "problem", None) or "broken"
        raise RecipeError(f"--set {override[:100]}: the value is not valid YAML ({reason}); put it in quotes") from None


def _write_new(recipe: Recipe, name: str, value: Any, override: str, given: _Given) -> None:
    """Add what is not there, of a plugin."""
    path = tuple(name.split("."))
    for place, _, wrong, right in bad_leaves(value, path):
        raise RecipeError(f"{place_of(recipe)}--set {override}: {dotted(place)}: {wrong}; {right}")
    for place in _parts(path, value):
        _refuse_whole_and_part(recipe, place, value, override, given)
    _refuse_second(path, _reached(recipe, path), value, override, given)
    given.name(_parts(path, value), override)
    write_new(recipe, name, value, f"{place_of(recipe)}--set {override}")


def _parts(path: KeyPath, value: Any) -> list[KeyPath]:
    """Return the key paths that a value sets: its own, or those of the keys of a mapping. An empty mapping switches a
    plugin on, which is a part without a name.
    """
    return [(*path, key) for key in value or (None,)] if isinstance(value, dict) else [path]


def _refuse_whole_and_part(recipe: Recipe, path: KeyPath, value: Any, override: str, given: _Given) -> None:
    """Raise an error if another override has set a whole of which `path` is a part, or names a part of it, and they do
    not agree: whichever came last would win silently.
    """
    for other, earlier in given.by.items():
        whole, part = sorted((path, other), key=len)
        if len(whole) == len(part) or part[: len(whole)] != whole or earlier == override:
            continue
        if part == other and part not in given.named:  # reached only through an anchor
            continue
        of_the_whole = value if whole == path else _reached(recipe, whole)
        of_the_part = value if part == path else _reached(recipe, part)
        if not isinstance(of_the_whole, list) or _reached(of_the_whole, part[len(whole) :]) != of_the_part:
            raise RecipeError(
                f"--set {override}: this contradicts --set {earlier}: one of them sets the whole of {dotted(whole)}, "
                "the other a part of it; keep one of the two"
            )


def _refuse_second(path: KeyPath, present: Any, value: Any, override: str, given: _Given) -> None:
    """Raise an error if another override has set `path` to a `present` value other than `value`."""
    earlier = given.by.get(path, override)
    if earlier != override and present != value:
        raise RecipeError(
            f"--set {override}: this sets {dotted(path)}, which --set {earlier} has already set; keep one --set"
        )


def _reached(recipe: Any, path: KeyPath) -> Any:
    """Return the value at a key path; None if there is none."""
    try:
        return get_path(recipe, path)
    except (KeyError, IndexError, TypeError):
        return None


def _floats(value: Any) -> Any:
    """Convert texts such as 1e-3 to numbers, also inside lists and mappings."""
    if isinstance(value, str) and EXPONENT.fullmatch(value):
        return float(value)
    if isinstance(value, list):
        return [_floats(item) for item in value]
    if isinstance(value, dict):
        return {key: _floats(item) for key, item in value.items()}
    return value


def _assign(recipe: Recipe, path: KeyPath, value: Any, text: str, override: str, given: _Given) -> None:
    """Set `path`, and everything that shares its value, after checking the kind of `value`."""
    old = get_path(recipe, path)
    if isinstance(old, dict) and isinstance(value, dict):
        if not value:
            given.name(_parts(path, value), override)
        for key, item in value.items():
            name = f"{dotted(path)}.{key}"
            if path in _OF_PATTERNS:
                old.setdefault(key, False)
            if is_new(recipe, name):
                _write_new(recipe, name, item, override, given)
            else:
                _assign(recipe, _find(recipe, name), item, str(item), override, given)
        return
    value = _fit(old, value, text, path, f"{place_of(recipe, path)}--set {override}")
    for place, _, wrong, right in bad_leaves(value, path):
        raise RecipeError(f"--set {override}: {dotted(place)}: {wrong}; {right}")
    places = given.places(path)
    for place in places:  # all of them before the first is set: two of them may be in one list
        _refuse_whole_and_part(recipe, place, value, override, given)
        _refuse_second(place, get_path(recipe, place), value, override, given)
    given.name([path], override)
    for place in places:
        given.by.setdefault(place, override)
        get_path(recipe, place[:-1])[place[-1]] = value
        _forget_below(recipe, place)


def _forget_below(recipe: dict[str, Any], path: KeyPath) -> None:
    """Drop the marks inside a list that has been replaced: its new entries are nobody's alias."""
    marks = getattr(recipe, "marks", {})
    for inner in [other for other in marks if len(other) > len(path) and other[: len(path)] == path]:
        del marks[inner]


def _fit(old: Any, value: Any, text: str, path: KeyPath, where: str) -> Any:
    """Return `value` converted to the type of the present value in the recipe; raise RecipeError if it has another
    type.
    """
    name = dotted(path)
    if isinstance(old, dict):
        a_plugin = path[:1] == ("plugins",) and len(path) == 2
        if a_plugin and value is False:
            return value
        keys = next((f"a mapping; set its keys, for instance {name}.{key}=..." for key in old), "an empty mapping")
        switch = f"; {name}=False leaves the plugin off" if a_plugin else ""
        raise RecipeError(f"{where}: {name} is {keys}{switch}")
    if isinstance(value, dict) and path in _OF_PATTERNS:
        return value
    if isinstance(value, dict):
        raise RecipeError(f"{where}: {name} is {_kind(old)} ({old!r}), not a mapping")
    if path[-1:] == ("offset",) and isinstance(value, (int, list, str)) and not isinstance(value, bool):
        return value  # text: `auto`, or a Megatron layout
    if isinstance(old, str) and isinstance(value, (bool, int, float)):
        return text
    if isinstance(old, float) and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(old, list) and isinstance(value, list):
        return [str(item) for item in value] if old and all(isinstance(item, str) for item in old) else value
    if type(old) is type(value) or old is None or (value is None and isinstance(old, str)):
        return value
    if isinstance(value, (list, int)) and isinstance(old, (list, int)) and _takes_both(path):
        return value
    if {type(old), type(value)} == {str, list} and _text_or_list(path):
        return value
    given = f"{value!r} is {_kind(value)}{_right(old, value)}"
    if value is None:
        given = f"{text} means no value" if text.strip() else "no value is given"
    raise RecipeError(f"{where}: {name} must be {_kind(old)} (now {old!r}), but {given}")


def _takes_both(path: KeyPath) -> bool:
    """Return whether a key accepts numbers as well as flags or lists."""
    return path[-1] in _SCALAR_OR_LIST or path[:-1] in _OF_PATTERNS


def _text_or_list(path: KeyPath) -> bool:
    """Return whether a key is a setting of a plugin that may be text as well as a list."""
    if path[0] != SECTION or len(path) != 3 or path[1] not in ADAPTERS:
        return False
    section = settings_of(path[1])
    return path[2] in {each.name for each in fields(section)} and {str, tuple} <= set(section.kinds(path[2]))


def _right(old: Any, value: Any) -> str:
    """Return the advice for a wrong value, if the right value is obvious."""
    if isinstance(old, int) and isinstance(value, float) and value.is_integer() and not isinstance(old, bool):
        return f": write {int(value)}"
    if isinstance(old, bool) and value in (0, 1):
        return f": write {'true' if value else 'false'}"
    if isinstance(old, list) and not isinstance(value, list):
        return f": write [{value}], or name one entry by its index"
    return ""


def _kind(value: Any) -> str:
    return _KINDS.get(type(value), "empty" if value is None else type(value).__name__)


SECTION = "plugins"


def is_new(recipe: Mapping[str, Any], name: str) -> bool:
    """Return whether an override adds a plugin or a plugin's setting that the recipe does not have yet. A misspelt key
    does not count.
    """
    words = name.split(".")
    if words[0] != SECTION or len(words) not in (2, 3):
        return False
    written = recipe.get(SECTION) or {}
    if len(words) == 2:
        return written.get(words[1], False) is False
    settings = written.get(words[1]) or {}
    near = isinstance(settings, Mapping) and (words[2] in settings or did_you_mean(words[2], list(settings)))
    return isinstance(settings, Mapping) and not near


def write_new(recipe: dict[str, Any], name: str, value: Any, where: str) -> None:
    """Write a value at the new key `plugins.NAME` or `plugins.NAME.SETTING`; `tc3 check` says which settings exist.

    Raises:
        RecipeError: the plugin does not exist, or the value of its whole section has another form than the plugin
            reads.
    """
    plugin, setting = (*name.split(".")[1:], None)[:2]
    if plugin not in ADAPTERS:
        raise RecipeError(f"{where}: there is no plugin {plugin!r}{did_you_mean(plugin, list(ADAPTERS))}")
    whole = value if setting is None else {setting: value}
    if whole is not False and (wrong := _no_section(plugin, whole)):
        raise RecipeError(f"{where}: {wrong}")
    written = recipe[SECTION] = recipe.get(SECTION) or {}
    written[plugin] = value if setting is None else {**(written.get(plugin) or {}), setting: value}


def _no_section(plugin: str, value: Any) -> str:
    """Return why a value has not the form of a plugin's section, and what to write; "" if it has. The section of a
    plugin without settings may be True instead of a mapping.
    """
    section = settings_of(plugin)
    if section.look(True)[0] is not None:
        return "" if value is True else str(section.look(value)[1][0].wrong)
    if isinstance(value, dict):
        return ""
    right = section.RIGHT
    if section.look({})[0] is not None:
        ways = f" for the defaults, {section.KEY}.SETTING=VALUE for one of its own" if fields(section) else ""
        right = f"write {section.KEY}={{}}{ways}"
    return f"{value!r} is not a mapping of the plugin's settings; {right}"
