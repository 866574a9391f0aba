"""This module holds the results of `tc3 check`: the faults of a recipe (each with file, line and remedy), and the
recipe's sizes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from plugins.errors import RecipeError
from tools.recipe.load import KeyPath, Recipe, dotted, place_of

SEVERITIES = ERROR, WARNING, NOTE = ("error", "warning", "note")


@dataclass(frozen=True)
class Finding:
    """A `Finding` is one error or warning about a recipe."""

    # "error" (the run would fail, or would be another run than the recipe describes), "warning", or "note" (it runs as
    # written, but MindFormers computes something other than a user may expect)
    severity: str
    file: str
    line: int  # 0 if the value has no place
    key: str  # dotted key path
    wrong: str  # the fault of the value
    right: str = ""  # a value that would be right, if one is known
    source: str = ""  # the line of MindFormers that would fail or ignore the value, if it is known

    def __str__(self) -> str:
        return f"{self.place}{self.severity}: {self.words}" + (f" [{self.source}]" if self.source else "")

    @property
    def place(self) -> str:
        """Return the place of the faulty value as ``file:line: ``, without the parts that are not known."""
        return f"{self.file}:{self.line}: " if self.line else f"{self.file}: " if self.file else ""

    @property
    def words(self) -> str:
        """Return the finding as text: the key, what is wrong with its value, and a right value."""
        return f"{self.key}: {self.wrong}" + (f"; {self.right}" if self.right else "")


@dataclass
class Report:
    """A `Report` holds a recipe's findings, and its sizes, which are None if errors prevent them."""

    recipe: Recipe
    findings: list[Finding] = field(default_factory=list)
    table: dict[str, Any] | None = None

    @property
    def errors(self) -> list[Finding]:
        """Return the findings for which the recipe is refused."""
        return [finding for finding in self.findings if finding.severity == ERROR]

    @property
    def warnings(self) -> list[Finding]:
        """Return the findings for which the recipe is refused with `--strict`."""
        return [finding for finding in self.findings if finding.severity == WARNING]

    @property
    def clean(self) -> bool:
        """Return whether the recipe may run."""
        return not self.errors

    def as_json(self) -> dict[str, Any]:
        """Return the findings and sizes as the content that `tc3 check --json` prints."""
        return {
            "recipe": self.recipe.source,
            "clean": self.clean,
            "findings": [asdict(finding) for finding in self.findings],
            "table": self.table,
        }


class Findings:
    """A `Findings` collects the faults of a recipe. If several keys share a wrong value through a YAML anchor, the
    value is listed only once.
    """

    def __init__(self, recipe: Recipe, line_of: Any):
        self.recipe = recipe
        self.line_of = line_of  # rule -> MindFormers line
        self.found: list[Finding] = []
        self._seen: set[tuple[int | KeyPath, str]] = set()

    def error(self, path: KeyPath, wrong: str, right: str = "", rule: str = "", source: str = "") -> None:
        """Add an error about the value at a key path."""
        self._add(ERROR, path, wrong, right, source or self.line_of(rule))

    def warning(self, path: KeyPath, wrong: str, right: str = "", rule: str = "", source: str = "") -> None:
        """Add a warning about the value at a key path."""
        self._add(WARNING, path, wrong, right, source or self.line_of(rule))

    def note(self, path: KeyPath, wrong: str, right: str = "", rule: str = "") -> None:
        """Add a note: with this recipe, MindFormers computes something that a user may not expect, and no change to the
        recipe avoids this.
        """
        self._add(NOTE, path, wrong, right, self.line_of(rule))

    def refusal(self, section: KeyPath, error: RecipeError, rule: str = "", right: str = "") -> None:
        """Add an error that a plugin raised while it read its settings. The error is listed at the key that the error
        names or, if it names no key, at the key `section`.
        """
        path = tuple(error.key.split("."))
        inside = path[: len(section)] == section
        self.error(path if inside else section, error.wrong if inside else str(error), right, rule)

    def _add(self, severity: str, path: KeyPath, wrong: str, right: str, source: str) -> None:
        file, line = self._place(path)
        mark = self.recipe.marks.get(path)
        identity = (mark.ident if mark else path, wrong)
        if identity not in self._seen:
            self._seen.add(identity)
            self.found.append(Finding(severity, file, line, dotted(path), wrong, right, source))

    def _place(self, path: KeyPath) -> tuple[str, int]:
        """Return file and line of a key path, or of the nearest mapping around it."""
        for length in range(len(path), 0, -1):
            if mark := self.recipe.marks.get(path[:length]):
                return os.path.normpath(mark.file), mark.line
        return self.recipe.source, 0


def refused(errors: Sequence[Finding]) -> RecipeError:
    """Return the error with which a tool refuses a recipe in which `tc3 check` found errors. The message holds the
    first error, and the number of other errors. An error about the model's type comes first, because with a wrong type
    every other key of the model seems wrong.
    """
    first = next((error for error in errors if error.key.endswith(".model_type")), errors[0])
    others = len(errors) - 1
    more = f". The recipe has {others} more error{'s' * (others > 1)}; `tc3 check` lists them" * (others > 0)
    return RecipeError(f"{first.place}{first.words}{more}")


def refusal(recipe: Mapping[str, Any], path: KeyPath, text: str) -> RecipeError:
    """Return a RecipeError about a key of a recipe; the message begins with the file and line (if known) and the key
    path.
    """
    return RecipeError(f"{place_of(recipe, path)}{dotted(path)}: {text}")


def in_file(recipe: Mapping[str, Any], error: RecipeError) -> RecipeError:
    """Return `error` with the recipe's file in its message, unless the message already names the file."""
    source, text = getattr(recipe, "source", ""), str(error)
    return error if not source or source in text else RecipeError(f"{source}: {text}")
