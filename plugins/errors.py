"""This module defines every error that a user can cause. The message of an error names the file or key, what is wrong
there, and a valid value.

The command line turns each of these errors into one message and exit code 2; a traceback means that this repository has
a bug.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path

UNRESOLVED = (
    "auto has not been replaced by a value yet: start the run with tc3 train, or write the value that `tc3 recipe "
    "show` prints"
)

# in the error of a process that has lost another one; that one knows more
OUT_OF_REACH = "is out of reach"
CLOSED = "closed its connection"


class TC3Error(ValueError):
    """A `TC3Error` is the base class of every error that the user can correct.

    Args:
        wrong: what is wrong, and what would be right.
        key: the key path of the wrong value (after its file, if it is known), with which the message begins; empty if
            `wrong` is the whole message.
    """

    def __init__(self, wrong: str = "", key: str = ""):
        super().__init__(f"{key}: {wrong}" if key else wrong)
        self.key, self.wrong = key, wrong


class RecipeError(TC3Error):
    """A recipe, an override or a plugin setting is wrong. The error's message names the file and the key path."""


class DataError(TC3Error):
    """A corpus, a tokenizer or a Megatron index is missing, is broken, or does not fit the recipe."""


class CheckpointError(TC3Error):
    """A checkpoint is missing, incomplete or does not belong to this run."""


class ClusterError(TC3Error):
    """Workers, ports, devices or hosts do not meet the needs of the recipe."""


class VersionError(TC3Error):
    """The installed MindSpore or MindFormers is not one of the verified versions."""


class StoppedError(Exception):
    """A run has ended itself because of a value that it observed, such as a loss that is not finite. The run has failed
    (exit code 1); the user has made no mistake.
    """


def did_you_mean(word: object, known: list[str]) -> str:
    """Return ``" (did you mean 'x'?)"`` for the nearest name in `known`, or an empty string if no name is similar."""
    close = get_close_matches(str(word), known, n=1, cutoff=0.6)
    return f" (did you mean {close[0]!r}?)" if close else ""


def refuse_unknown(
    place: str, keys: Iterable[object], known: Iterable[str], error: type[TC3Error] = RecipeError, what: str = "key"
) -> None:
    """Refuse the first of `keys` that is not in `known`, because a misspelt key would silently have no effect.

    Args:
        place: the text before the key in the message, such as ``"rows.yaml: rows[3].config."``.
        what: the word for a key in the message.

    Raises:
        error: a key is unknown; the message names the nearest known key, or all keys if none is similar.
    """
    names = list(known)
    for key in keys:
        if key not in names:
            near = did_you_mean(key, names) or (f"; known are {', '.join(names)}" if names else "; it has none")
            raise error(f"no such {what}{near}", f"{place}{key}")


def read_text(path: Path, error: type[TC3Error], option: str = "") -> str:
    """Return the text of a file that the user has named, with `option` in front of the file's name in messages.

    Raises:
        error: the file cannot be read, is not an ordinary file or is not in UTF-8.
    """
    try:
        if path.is_file() or path.is_dir() or not path.exists():  # a pipe would be waited for
            return path.read_text("utf-8-sig")
        why = ", because it is not an ordinary file"
    except UnicodeDecodeError as wrong:
        why = f": byte {wrong.start + 1} is not UTF-8"
    except OSError as wrong:
        why = f" ({wrong.strerror})"
    raise error(f"{option}{path}: the file cannot be read{why}")


def not_json(error: Exception) -> str:
    """Return the end of an error message that says why a text is not JSON, made from the exception of `json.loads`; the
    caller writes the file's name before it.
    """
    if isinstance(error, json.JSONDecodeError):
        if not error.doc.strip():
            return "is empty: JSON was expected"
        # of a single line, the caller names the number
        line = f"line {error.lineno}, " if "\n" in error.doc.strip() else ""
        return f"is not JSON: {line}column {error.colno}: {error.msg.lower()}"
    if isinstance(error, UnicodeDecodeError):
        return f"is not JSON: byte {error.start + 1} is not UTF-8"
    if isinstance(error, RecursionError):
        return "is not JSON that can be read: its brackets are nested too deep"
    return f"is not JSON: {' '.join(str(error).split())[:120]}"
