"""The one exception tree: every error a user can cause, with where it is and what would be right.

The command line turns each of these into one message and exit code 2; a traceback means a bug of ours.
"""

from __future__ import annotations

from difflib import get_close_matches

UNRESOLVED = "auto is not resolved: `tc3 recipe show` prints the recipe with values, as launch/train.py resolves it"


class TC3Error(ValueError):
    """Base of every error that is the user's to mend (report: none; DESIGN rule 5)."""


class RecipeError(TC3Error):
    """A recipe, an override or a plugin setting is wrong. The message names file and key path."""


class DataError(TC3Error):
    """A corpus, a tokenizer or a Megatron index is missing, broken or does not fit."""


class CheckpointError(TC3Error):
    """A checkpoint is missing, incomplete or does not belong to this run."""


class ClusterError(TC3Error):
    """Workers, ports, devices or hosts are not what the recipe needs."""


class VersionError(TC3Error):
    """Another MindSpore or MindFormers is installed than the ones that were verified."""


class StoppedError(Exception):
    """A run has ended itself for what it saw: a failed run (exit code 1) that says why, no slip of the user's."""


def did_you_mean(word: object, known: list[str]) -> str:
    """Return ``" (did you mean 'x'?)"`` for the closest of `known`, or an empty string."""
    close = get_close_matches(str(word), known, n=1, cutoff=0.6)
    return f" (did you mean {close[0]!r}?)" if close else ""
