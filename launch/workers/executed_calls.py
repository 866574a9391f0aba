"""The collectives of a sharded CPU run's first step, one file a rank: what `tc3 accuracy collectives` compares.

Beside them stands which place MindSpore was told that the rank has in each group, by which it cuts weights.

Every such run writes it: noting a call takes a microsecond, and a later step makes the same calls.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from tools.files.atomic import write_atomically

if TYPE_CHECKING:
    from plugins.semi_auto_cpu.collectives import Collectives


class FirstStep:
    """Records the first step of this process: of a run, or of its resumed part.

    Args:
        collectives: of this rank. file: for the record.
    """

    def __init__(self, collectives: Collectives, file: Path):
        self.collectives, self.file = collectives, file
        self.written = False

    def begin(self) -> None:
        """A step begins."""
        if not self.written:
            self.collectives.begin_recording()

    def end(self, step: int) -> None:
        """Its graph has run."""
        if not self.written:
            self.written = True
            calls, places = self.collectives.end_recording(), self.collectives.groups.ranks.places
            write_atomically(self.file, json.dumps({"step": step, "calls": calls, "places": places}))
