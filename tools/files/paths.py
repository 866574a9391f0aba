"""What stands at a path that a user gave, links followed, also those that lead back to themselves."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def real_path(path: str | os.PathLike[str]) -> Path:
    """`path` without links, as far as they lead anywhere: `Path.resolve` fails where links go in a circle."""
    return Path(os.path.realpath(path))


def what_is(path: str | os.PathLike[str]) -> str:
    """What stands at `path` where something else was wanted, in words: "no such file or folder", "a folder"."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        gone = os.path.islink(path)
        return f"a link to {os.readlink(path)}, which is not there" if gone else "no such file or folder"
    except OSError as error:
        return "a link that leads back to itself" if error.errno == errno.ELOOP else _reason(error)
    except ValueError:  # a NUL
        return "no name of a file"
    if stat.S_ISDIR(mode):
        return "a folder"
    return "a file" if stat.S_ISREG(mode) else "a device, a pipe or a socket, not a file"


def _reason(error: OSError) -> str:
    return "no such file or folder" if error.errno == errno.ENOTDIR else f"cannot be read ({error.strerror})"
