"""This module replaces private code of MindSpore, MindFormers and msprobe. The only other code in this repository that
replaces private code of these packages is `stand_in` in `plugins/semi_auto_cpu/communication.py`.

A patch replaces a function that contains a certain line of their source, and a subclass may rely on a line that calls
the overridden method. The caller names this line, and if the line no longer exists the patch raises an error: another
version may not need the patch any more, or may need it elsewhere, and a patch that is never called fails silently.
`docs/upgrade-mindformers.md` lists every use.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class OutdatedHookError(RuntimeError):
    """This error means that private code of MindSpore or MindFormers, on which a hook relies, has changed."""


# the source of a class takes the parser 50 ms in a long file, and a training asks for some of them six times
_source_of = functools.cache(inspect.getsource)


def relies_on(function: Any, line: str) -> None:
    """Check that the source code of a patched function or class still contains `line`.

    Raises:
        OutdatedHookError: the source does not have this line.
    """
    if line not in _source_of(function):
        raise OutdatedHookError(
            f"{function.__module__}.{function.__qualname__} no longer contains the line {line!r}; install the versions "
            "in constraints.txt, or see docs/upgrade-mindformers.md"
        )


def replace(owner: Any, name: str, line: str, replacement: Callable[..., Any]) -> None:
    """Set the attribute `name` of `owner` (a module or a class) to `replacement` permanently; a second call keeps the
    first replacement.

    Raises:
        OutdatedHookError: the source of the original does not hold `line`.
    """
    original = getattr(owner, name)
    if getattr(original, "tc3_patch", False):
        return
    relies_on(original, line)
    replacement.tc3_patch = True  # type: ignore[attr-defined]
    setattr(owner, name, replacement)


@contextmanager
def replaced(owner: Any, name: str, line: str, replacement: Callable[..., Any]) -> Iterator[None]:
    """Replace an attribute as `replace` does, but only until the `with` block ends.

    Raises:
        OutdatedHookError: as in `replace`.
    """
    original = getattr(owner, name)
    replace(owner, name, line, replacement)
    try:
        yield
    finally:
        setattr(owner, name, original)


def steps_before(params: Any) -> int:
    """Return the number of training steps that the run made before it was resumed; MindFormers' `cur_step_num` counts
    only the steps after the resume. The number of earlier steps is read from MFLossMonitor, because no other callback
    has it.
    """
    from mindformers.core.callback.callback import MFLossMonitor

    monitor = next(each for each in params.list_callback if isinstance(each, MFLossMonitor))
    return monitor.initial_step or 0


def train_step(params: Any) -> Any:
    """Return the train step (the cell with optimizer and loss scale) from `params`, which `run_context.original_args()`
    gives to a callback.

    In sink mode, which recipes for Ascend use, MindSpore wraps the train step in another cell after `on_train_begin`.
    This wrapper fetches batches, and has neither an optimizer nor a loss scale; its `network` is the train step.
    """
    from mindspore.train.dataset_helper import _DataWrapper

    step = params.train_network
    return step.network if isinstance(step, _DataWrapper) else step
