"""This module starts a model in a separate process, asks it for logits, and ends that process together with this
one.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import click
import numpy as np

from launch.run.msrun import worker_environment
from plugins.errors import CheckpointError
from tools.files.atomic import last_lines
from tools.process.children import child, terminate_as_interrupt
from tools.process.waiting import Progressing
from tools.recipe.dump import dump_recipe

WORKER = Path(__file__).with_name("worker.py")
LOOK = 0.2  # seconds between looks at whether the process still lives
Logits = Callable[[Sequence[int]], np.ndarray]


@dataclass(frozen=True)
class Ready:
    """The worker sends this message when the model is built and compiled."""


@dataclass(frozen=True)
class Refused:
    """The worker sends this message when the model cannot be built for a reason that the user can correct."""

    reason: str


def continuation(
    logits: Logits, choose: Callable[[np.ndarray], int], prompt: Sequence[int], window: int, most: int, end: int | None
) -> Iterator[int]:
    """Yield the ids that follow `prompt`, one by one, at most `most` ids; if the model chooses the id `end`, this id is
    yielded as the last one.

    Args:
        logits: returns the logits, float [V], of the token after ids [n], 1 <= n <= `window`.
        choose: a function that returns a token's id from logits.
        window: how many tokens the model sees; older tokens are dropped.
        end: the id that ends a document; None if no id does.
    """
    ids = list(prompt)
    for _ in range(most):
        ids.append(choose(logits(ids[-window:])))
        yield ids[-1]
        if ids[-1] == end:
            return


@contextmanager
def answering_model(recipe: Mapping[str, Any], weights: Path) -> Iterator[Logits]:
    """Yield a function that maps token ids to the logits of the next token, computed by the model of a `forward_recipe`
    with `weights`. A line on stderr reports that the model is being built.

    Raises:
        CheckpointError: the weights are not the model's, or the recipe not one for CPU.
        ClickException: the process failed.
    """
    with tempfile.TemporaryDirectory(prefix="tc3-generate-") as folder, terminate_as_interrupt():
        place, file = Path(folder), Path(folder) / "recipe.yaml"
        dump_recipe({**recipe, "output_dir": folder}, file)
        ours, theirs = Pipe()
        with (place / "log").open("wb") as log, ours, theirs:
            command = [sys.executable, str(WORKER), str(file), str(weights.absolute()), str(theirs.fileno())]
            with child(
                command,
                env=worker_environment(1, place),
                cwd=folder,  # MindSpore leaves files where it stands
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is ours to hear
            ) as process:
                theirs.close()
                with Progressing("building and compiling the model"):
                    first = _answer(process, ours, place / "log")
                if isinstance(first, Refused):
                    raise CheckpointError(first.reason)

                def logits(ids: Sequence[int]) -> np.ndarray:
                    ours.send(list(ids))
                    found: np.ndarray = _answer(process, ours, place / "log")
                    return found

                yield logits


def _answer(process: subprocess.Popen[bytes], pipe: Connection, log: Path) -> Any:
    try:
        while not pipe.poll(LOOK):
            pass
        return pipe.recv()
    except (EOFError, ConnectionError):
        code = process.wait()
        last = "\n".join(last_lines(log)[-15:])
        raise click.ClickException(f"the process that ran the model ended with exit code {code}:\n{last}") from None
