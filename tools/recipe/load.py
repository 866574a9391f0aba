"""This module reads a recipe exactly as MindFormers would, without importing MindFormers. The recipe that the module
returns also holds the file and line of every value.

The rules of reading follow `MindFormerConfig._file2dict` (mindformers 1.9.0, tools/register/config.py): `base_config:`
names files relative to the recipe; these files are merged shallowly with each other, and then deeply with the recipe. A
recipe that was read has the sections that every tool uses (as mappings, and the callbacks as a list of mappings), and
no number that is impossible for a training: NaN, infinity, or a number outside `tools.ranges`. Some such numbers would
keep every tool busy for hours (a billion layers); with others, a run would silently train another model.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from plugins import ADAPTERS
from plugins.errors import RecipeError, did_you_mean
from plugins.settings import settings_of
from tools.files.small_yaml import SmallLoader, TooLarge, small_text
from tools.ranges import RANGES, Range, recipe_range, short

BASE_CONFIG = "base_config"
KeyPath = tuple[Any, ...]  # mapping keys and list indices from the top of the recipe

_PLAIN_TAGS = ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")
_MERGE_TAG = "tag:yaml.org,2002:merge"
_MAX_FILES = 50  # a recipe and its bases
_REPO_RECIPES = Path(__file__).resolve().parents[2] / "recipes"
_idents = itertools.count()


class Mark(NamedTuple):
    """A `Mark` holds the file and the line where a value of a recipe was written; marks with the same `ident` share one
    value through a YAML anchor.
    """

    file: str
    line: int
    ident: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


class Recipe(dict[str, Any]):
    """A `Recipe` is a nested dict of a recipe's sections, merged with those of its base recipes. A `Recipe` also holds
    its file (`source`), and the file and line of every value (`marks`).
    """

    source: str = ""
    marks: dict[KeyPath, Mark]

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.marks = {}


@dataclass(eq=False)
class _Spot:
    """A `_Spot` is one YAML node: its value (of spots, if a container) and its place. An alias is the same spot."""

    value: Any
    file: str
    line: int
    ident: int = field(default_factory=lambda: next(_idents))


def load_recipe(path: str | os.PathLike[str]) -> Recipe:
    """Return the flat effective recipe of a file, checked so that tools can work with it. All commands except `tc3
    check` load recipes with this function.

    Raises:
        RecipeError: as for `read_recipe`, or a section is not a mapping, or a number is impossible for a training.
    """
    recipe = read_recipe(path)
    refuse_sections(recipe)
    for place, _, wrong, right in bad_numbers(recipe):
        _refuse(recipe, place, f"{wrong}; {right}")
    return recipe


def read_recipe(path: str | os.PathLike[str]) -> Recipe:
    """Return the flat effective recipe of the YAML file `path`, with its bases merged in. The values of the recipe are
    not checked.

    The returned dict equals MindFormers' own dict before it adds defaults; aliases of a list or mapping stay one
    object.

    Raises:
        RecipeError: the file or a base is missing, is not YAML, is not a mapping, has a duplicate key or a base cycle;
            or the file is larger or deeper than any recipe.
    """
    file = os.fspath(path)
    top = _Bases().read(file, parents=[])
    recipe = Recipe(_plain(top, {}))
    recipe.source = file
    recipe.marks = dict(_marks(top, ()))
    return recipe


class _Bases:
    """A `_Bases` holds the files of one recipe, each read once however many name it."""

    def __init__(self) -> None:
        self.spots: dict[str, _Spot] = {}  # by real path

    def read(self, file: str, parents: list[str]) -> _Spot:
        """Return the values of a recipe's file with its base recipes merged in. The argument `parents` holds the real
        paths of all files that inherit from this file.
        """
        try:
            real = os.path.realpath(file)
        except OSError:  # there is no working folder
            real = file
        if real in parents:
            chain = " -> ".join(os.path.relpath(name) for name in [*parents[parents.index(real) :], real])
            raise RecipeError(f"{file}: the recipe names itself as its base through `{BASE_CONFIG}`: {chain}")
        if real not in self.spots:
            if len(parents) + len(self.spots) >= _MAX_FILES:
                raise RecipeError(f"{file}: `{BASE_CONFIG}` leads to more than {_MAX_FILES} files; use fewer bases")
            self.spots[real] = self._merged(file, [*parents, real])
        return self.spots[real]

    def _merged(self, file: str, parents: list[str]) -> _Spot:
        top = _spots(file, _text(file))
        if BASE_CONFIG not in top.value:
            return top
        base_names = top.value[BASE_CONFIG]
        top = _Spot({key: spot for key, spot in top.value.items() if key != BASE_CONFIG}, top.file, top.line)
        merged: dict[Any, _Spot] = {}
        for name in base_names.value if isinstance(base_names.value, list) else [base_names]:
            merged.update(self.read(_base_file(name, file), parents).value)
        return _merge(top, _Spot(merged, file, 1))


def _base_file(name: _Spot, file: str) -> str:
    """Return path of a base named in `file`; raises when it is not there."""
    if not isinstance(name.value, str):
        raise RecipeError(
            f"{name.file}:{name.line}: `{BASE_CONFIG}` must be a file name or a list of them, not {name.value!r}"
        )
    base = os.path.join(os.path.dirname(file), name.value)
    if not os.path.isfile(base):
        raise RecipeError(f"{name.file}:{name.line}: the base {name.value!r} was not found{_nearby(base, file)}")
    return base


def _merge(child: _Spot, base: _Spot) -> _Spot:
    """Return `child` deeply over `base`: mappings merge, everything else is replaced; neither is changed."""
    if base.value is None or base.value is False:  # nothing, or a plugin that the base leaves off
        return child
    if not isinstance(base.value, dict):
        raise RecipeError(
            f"{child.file}:{child.line}: this mapping cannot replace a plain value of the base recipe "
            f"({base.file}:{base.line})"
        )
    merged = dict(base.value)
    for key, spot in child.value.items():
        merged[key] = _merge(spot, merged[key]) if isinstance(spot.value, dict) and key in merged else spot
    return _Spot(merged, child.file, child.line)


def _plain(spot: _Spot, seen: dict[int, Any]) -> Any:
    """Return the ordinary value of a spot; one container per spot, so that aliases stay shared."""
    if not isinstance(spot.value, (dict, list)):
        return spot.value
    if spot.ident not in seen:
        if isinstance(spot.value, dict):
            seen[spot.ident] = {key: _plain(item, seen) for key, item in spot.value.items()}
        else:
            seen[spot.ident] = [_plain(item, seen) for item in spot.value]
    return seen[spot.ident]


def _marks(spot: _Spot, path: KeyPath) -> Any:
    if path:
        yield path, Mark(spot.file, spot.line, spot.ident)
    if isinstance(spot.value, (dict, list)):
        items = spot.value.items() if isinstance(spot.value, dict) else enumerate(spot.value)
        for key, item in items:
            yield from _marks(item, (*path, key))


def _text(file: str) -> str:
    if not file.endswith((".yaml", ".yml")):
        public = "; write a model's sizes under model.model_config of a recipe (docs/your-own-model.md)"
        hint = public if file.endswith(".json") else _nearby(file)
        raise RecipeError(f"{file}: a recipe must be a .yaml file{hint}")
    try:
        return small_text(file)
    except FileNotFoundError:
        raise RecipeError(f"{file}: there is no such recipe{_nearby(file)}") from None
    except OSError as error:
        raise RecipeError(f"{file}: the file cannot be read: {error.strerror}") from None


@functools.lru_cache(maxsize=512)  # recipes of a family have bases in common, and a search reads its recipe often
def _spots(file: str, text: str) -> _Spot:
    """Return the top-level mapping of one file, which nobody changes; raises RecipeError with file and line."""
    return _Reader(file, text).read()


class _Reader:
    """A `_Reader` turns one YAML file into spots."""

    def __init__(self, file: str, text: str):
        self.file = file
        self.text = text
        self.spots: dict[int, _Spot] = {}  # by id of the node, all of which `self.root` keeps alive
        self.open: set[int] = set()  # nodes being read, to notice an anchor inside itself

    def read(self) -> _Spot:
        """Return the top-level mapping of a recipe's YAML file; errors are raised as RecipeError with file and line."""
        try:
            self.loader = SmallLoader(self.text)
            self.root = self.loader.get_single_node()
            if not isinstance(self.root, yaml.MappingNode):
                found = "the file is empty" if self.root is None else "it is a list or a plain value"
                raise RecipeError(f"{self.file}:1: the top level of a recipe must be a mapping, but {found}")
            for node in _mappings(self.root):  # before any is flattened, which also flattens what it merges
                self._refuse_duplicates(node)
            return self._spot(self.root)
        except RecursionError:  # the one way left: a mapping merged into itself
            raise RecipeError(f"{self.file}: an anchor contains itself; write its values out") from None
        except yaml.YAMLError as error:
            raise RecipeError(_yaml_message(self.file, error)) from None

    def _spot(self, node: yaml.Node) -> _Spot:
        """Return the spot of a node, the same one each time the node is met (that is what an alias is)."""
        line = node.start_mark.line + 1
        if id(node) in self.open:
            raise RecipeError(f"{self.file}:{line}: an anchor contains itself; write its values out")
        if id(node) not in self.spots:
            self.open.add(id(node))
            self.spots[id(node)] = _Spot(self._value(node), self.file, line)
            self.open.discard(id(node))
        return self.spots[id(node)]

    def _value(self, node: yaml.Node) -> Any:
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node)
        if node.tag not in _PLAIN_TAGS:
            raise RecipeError(
                f"{self.file}:{node.start_mark.line + 1}: the tag {node.tag!r} is not plain YAML; leave the tag out"
            )
        if isinstance(node, yaml.SequenceNode):
            return [self._spot(item) for item in node.value]
        assert isinstance(node, yaml.MappingNode)
        self.loader.flatten_mapping(node)
        return {self._scalar(key): self._spot(item) for key, item in node.value}

    def _scalar(self, node: yaml.Node) -> Any:
        try:
            return self.loader.construct_object(node)
        except (ValueError, OverflowError):  # 2024-13-45, an integer of 5,000 digits
            text = node.value if len(node.value) <= 30 else f"{node.value[:20]}..."
            raise RecipeError(
                f"{self.file}:{node.start_mark.line + 1}: YAML cannot read the value {text}; put it in quotes if it is "
                "a text"
            ) from None

    def _refuse_duplicates(self, node: yaml.MappingNode) -> None:
        """Raise when a mapping holds a key twice: YAML would silently keep the last."""
        first: dict[Any, int] = {}
        for key_node, _ in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                raise RecipeError(f"{self.file}:{line}: a key must be a plain text or number, not a list or mapping")
            if key_node.tag == _MERGE_TAG:
                continue
            key = self._scalar(key_node)
            if not isinstance(key, str | int | float | None):
                raise RecipeError(f"{self.file}:{line}: the key {key_node.value} must be a plain text or number")
            if key in first:
                raise RecipeError(
                    f"{self.file}:{line}: the key {key!r} is already set in line {first[key]}; "
                    "YAML would silently keep the last value, so remove one of them"
                )
            first[key] = line


def _mappings(root: yaml.Node) -> Iterator[yaml.MappingNode]:
    """Yield every mapping of a document once, in the order of its text."""
    todo, seen = [root], set()
    while todo:
        node = todo.pop()
        if id(node) in seen or not isinstance(node, yaml.CollectionNode):
            continue
        seen.add(id(node))
        if isinstance(node, yaml.MappingNode):
            yield node
            todo += reversed([part for pair in node.value for part in pair])
        else:
            todo += reversed(node.value)


def _yaml_message(file: str, error: yaml.YAMLError) -> str:
    """Return one line for a YAML syntax error: file, line and what the parser stumbled over."""
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    place = f"{file}:{mark.line + 1}" if mark else file
    context = getattr(error, "context", None)
    problem = getattr(error, "problem", None) or str(error).splitlines()[0].removesuffix(" in ")
    if isinstance(error, TooLarge):
        return f"{place}: {problem}"
    return f"{place}: not valid YAML: {problem}" + (f" ({context})" if context else "")


def _nearby(file: str, recipe: str = "") -> str:
    """Return a hint (did you mean) from the YAML files around a path that does not exist and those of this repository.
    The path of a base is told as it stands in the `recipe` that names it.
    """
    try:
        around = Path(file).parent
        while not around.is_dir():
            around = around.parent
        found = [str(path) for pattern in ("*.y*ml", "*/*.y*ml") for path in around.glob(pattern)]
        if _REPO_RECIPES.is_dir():
            found += [os.path.relpath(path) for path in _REPO_RECIPES.glob("**/*.yaml")]
    except OSError:  # a folder that may not be read, or no working folder
        return ""
    recipes = [path for path in found if os.path.basename(path) != "card.yaml"]
    if not recipe:
        return did_you_mean(os.path.normpath(file), recipes)
    recipes = [path for path in recipes if os.path.abspath(path) != os.path.abspath(recipe)]
    # a recipe that was copied out of its folder: only its bases are elsewhere now
    same = [path for path in recipes if Path(path).parts[-2:] == Path(os.path.abspath(file)).parts[-2:]]
    here = os.path.dirname(recipe) or os.curdir
    if same:
        return f" (did you mean {os.path.relpath(same[0], here)!r}?)"
    return did_you_mean(os.path.relpath(file, here), [os.path.relpath(path, here) for path in recipes])


_LOADER = ("train_dataset", "data_loader")
SECTIONS = (
    *((name,) for name in ("checkpoint", "context", "grouped_lr_schedule", "lr_schedule", "model", "optimizer")),
    *((name,) for name in ("parallel", "parallel_config", "plugins", "recompute_config", "runner_config")),
    *((name,) for name in ("runner_wrapper", "swap_config", "train_dataset", "train_dataset_task", "trainer")),
    *(("model", "model_config"), ("parallel", "pipeline_config"), ("parallel", "parallel_optimizer_config")),
    *(_LOADER, (*_LOADER, "config")),
)


def refuse_sections(recipe: Mapping[str, Any]) -> None:
    """Raise an error for the first section of a recipe that is present but is not a mapping. This function stops at the
    first wrong section, but `tc3 check` lists all sections that are not mappings.

    Raises:
        RecipeError: the message has file, line and key path.
    """
    for path in SECTIONS:
        if not isinstance(look(recipe, path), Mapping | None):
            _refuse(recipe, path, "must be a mapping")
    callbacks = recipe.get("callbacks")
    if not isinstance(callbacks, list | None):
        _refuse(recipe, ("callbacks",), "must be a list")
    for index, callback in enumerate(callbacks or []):
        if not isinstance(callback, Mapping):
            _refuse(recipe, ("callbacks", index), "must be a mapping with a `type`")


def look(recipe: Any, path: KeyPath, default: Any = None) -> Any:
    """Return the value at a key path of a recipe; return `default` if the recipe has no such key."""
    for key in path:
        if isinstance(recipe, dict) and key in recipe:
            recipe = recipe[key]
        else:
            return default
    return recipe


def dotted(path: KeyPath) -> str:
    """Return a key path such as ``("callbacks", 2, "prefix")`` as text, such as ``callbacks.2.prefix``."""
    return ".".join(map(str, path))


def place_of(recipe: Mapping[str, Any], path: KeyPath = ()) -> str:
    """Return the place of a key path as ``file:line: ``, or ``file: `` if the line is unknown; return an empty text if
    the file is unknown, too.
    """
    mark = getattr(recipe, "marks", {}).get(path)
    source = str(mark) if mark else getattr(recipe, "source", "")
    return f"{source}: " if source else ""


def _refuse(recipe: Mapping[str, Any], path: KeyPath, wrong: str) -> None:
    raise RecipeError(f"{place_of(recipe, path)}{dotted(path)}: {wrong}")


# YAML 1.1 reads 1e-3 as text; people mean a number
EXPONENT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")
_MEMORY = re.compile(r"(\d+(\.\d+)?)GB")
_INTEGERS = 2**63  # MindSpore's integers have 64 bits
_DEGREES = ("data_parallel", "model_parallel", "pipeline_stage", "context_parallel")


class Refusal(NamedTuple):
    """A `Refusal` describes a number in a recipe that is not allowed: its key path, what is wrong with it, and what is
    allowed.
    """

    path: tuple[Any, ...]
    value: Any
    wrong: str
    right: str

    @property
    def size(self) -> bool:
        """Return whether the number must be a whole number, such as a size from which other values are computed."""
        span = recipe_range(_words(self.path))
        return self.path[0] != "plugins" and (span is None or span.whole)


def bad_numbers(recipe: Mapping[str, Any]) -> Iterator[Refusal]:
    """Yield every number of a recipe that is not allowed, in the order of the keys. If all numbers are allowed, check
    the number of devices.
    """
    bad = list(bad_leaves(recipe))
    yield from bad or bad_devices(recipe)


def bad_leaves(node: Any, path: tuple[Any, ...] = ()) -> Iterator[Refusal]:
    """Yield every number that is not allowed, in the value `node` at the key path `path` and in its nested values."""
    if isinstance(node, dict | list):
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            yield from bad_leaves(value, (*path, key))
    elif problem := number_problem(path, node):
        yield Refusal(path, node, *problem)


def bad_devices(recipe: Mapping[str, Any]) -> Iterator[Refusal]:
    """Yield a `Refusal` if the product of the parallel degrees is larger than the number of devices of any cluster."""
    degrees = recipe.get("parallel_config")
    written = [degrees.get(key) for key in _DEGREES] if isinstance(degrees, dict) else []
    sizes = [size for size in written if type(size) is int]
    if not RANGES["devices"].holds(math.prod(sizes)):
        wrong = f"{' x '.join(map(str, sizes))} = {math.prod(sizes):,} devices are out of range"
        yield Refusal(("parallel_config",), None, wrong, f"{RANGES['devices'].words} as the product of the degrees")


def number_problem(path: tuple[Any, ...], value: Any) -> tuple[str, str] | None:
    """Return what is wrong with the number at a key path, and which numbers are allowed there. Return None if the
    number is allowed.
    """
    span = recipe_range(_words(path))
    if isinstance(value, str):
        return _text_problem(value, span) if span else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if isinstance(value, float) and not math.isfinite(value):
        return f"{value} is not a finite number", span.words if span else "write a number"
    if path[:1] == ("plugins",) and len(path) == 3 and path[1] in ADAPTERS:
        return settings_of(path[1]).number_problem(path[2], value)
    if span is None:
        large = isinstance(value, int) and abs(value) >= _INTEGERS
        return (f"{short(value)} does not fit into 64 bits", "write a smaller number") if large else None
    return None if span.holds(value) else (f"{short(value)} is out of range", span.words)


def _words(path: tuple[Any, ...]) -> list[str]:
    return [key for key in path if isinstance(key, str)]


def _text_problem(text: str, span: Range) -> tuple[str, str] | None:
    """Return text where a number belongs: one that YAML takes for text, or a size of memory. Other words pass."""
    if memory := _MEMORY.fullmatch(text):
        return None if span.holds(float(memory[1])) else (f"{short(text)} is out of range", f"{span.words}, in GB")
    try:
        number = float(text)
    except ValueError:
        return None
    if not math.isfinite(number):
        return f"{short(text)} is not a finite number", span.words
    return f"{short(text)!r} is text, not a number", f"write {as_yaml(text)}"


def as_yaml(text: str) -> str:
    """Return advice for a number that YAML 1.1 reads as text: ``1e-8`` must be written as ``1.0e-8``, and other numbers
    must be written without quotes.
    """
    text = text.strip()
    if not EXPONENT.fullmatch(text):
        return f"{text} without quotes"
    mantissa, _, power = text.lower().partition("e")
    dot = mantissa if "." in mantissa else f"{mantissa}.0"
    return f"{dot}e{power if power[0] in '+-' else '+' + power} (YAML 1.1 takes {text} for text)"
