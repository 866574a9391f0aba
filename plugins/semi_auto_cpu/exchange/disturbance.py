"""For tests only: delays before collectives, and faults that a run must notice. `TC3_COLLECTIVES_TEST` names them.

"delay=20 seed=3" waits up to 20 ms before each call, otherwise on each rank. "drop:Send:2@0" never sends the third Send
of rank 0, "skip:AllReduce" leaves all AllReduce of all ranks out (each returns its own input), "skip:Receive:0@1" the
first Receive of rank 1, which gets zeros, so that its next one takes what was sent to the first,
"reverse:AllGather:0@1" has the first AllGather of rank 1 believe in the reverse order of its group. "synchronous" makes
each Send wait for its Receive.
"""

from __future__ import annotations

import random
import re
import time
from collections import defaultdict
from dataclasses import dataclass

from plugins.errors import ClusterError

VARIABLE = "TC3_COLLECTIVES_TEST"
_FAULT = re.compile(r"(drop|skip|reverse):(\w+)(?::(\d+))?(?:@(\d+))?")


@dataclass(frozen=True)
class Fault:
    """What goes wrong: `kind` at an operator's call of this number on this rank; None is each of them."""

    kind: str
    operator: str
    call: int | None = None
    rank: int | None = None


class Disturbance:
    """Delays and faults of one rank.

    Args:
        text: see the module; "" is none.

    Raises:
        ClusterError: a word of the text is none of these.
    """

    def __init__(self, text: str, rank: int):
        words = dict.fromkeys(text.split())
        settings = dict(word.split("=", 1) for word in words if re.fullmatch(r"(delay|seed)=\d+", word))
        self.synchronous = "synchronous" in words
        faults = [match for word in words if (match := _FAULT.fullmatch(word))]
        if len(settings) + len(faults) + self.synchronous != len(words):
            raise ClusterError(f"{VARIABLE}={text!r}: words are delay=MS, seed=N, drop|skip|reverse:OP:CALL@RANK")
        self._most = int(settings.get("delay", 0)) / 1000
        self._random = random.Random(f"{settings.get('seed', 0)} {rank}")
        self._faults = [_fault(match) for match in faults]
        self._faults = [fault for fault in self._faults if fault.rank in (None, rank)]
        self._calls: defaultdict[str, int] = defaultdict(int)

    def begin(self, operator: str) -> str:
        """Wait; return the kind of fault that this call of the operator has, or "" for none."""
        if self._most:
            time.sleep(self._random.uniform(0, self._most))
        if not self._faults:
            return ""
        number = self._calls[operator]
        self._calls[operator] += 1
        hits = (fault.kind for fault in self._faults if fault.operator == operator and fault.call in (None, number))
        return next(hits, "")


def _fault(match: re.Match[str]) -> Fault:
    kind, operator, call, rank = match.groups()
    return Fault(kind, operator, None if call is None else int(call), None if rank is None else int(rank))
