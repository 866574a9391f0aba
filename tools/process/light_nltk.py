"""NLTK without scikit-learn and scipy.stats: MindFormers imports it for scores of texts, training calls none of it.

NLTK asks for both where it can do without, which is a sixth of what the import of MindFormers costs each worker.
"""

import importlib
import sys
from contextlib import suppress

UNUSED = ("sklearn", "scipy.stats")


def import_it() -> None:
    """Import NLTK, if it is there; call before MindFormers is imported. Others find its helpers as ever."""
    absent = [name for name in UNUSED if name not in sys.modules]
    sys.modules |= dict.fromkeys(absent)  # type: ignore[arg-type]  # None: an import of it says that it is not there
    try:
        with suppress(ImportError):  # MindFormers' own import says so
            importlib.import_module("nltk")
    finally:
        for name in absent:
            sys.modules.pop(name, None)
