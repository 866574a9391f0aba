"""This module lets the agents of a run communicate through files in an attempt's folder, on the disk that they share.

`Meeting` is one agent's side of the meeting. In addition to the files of `tools.runs.attempts`, the folder of an
attempt holds these files:

* `there-HOST.json` says that this host's agent waits or works; the file is written anew about once a second while it
  waits;
* `claim-WHAT-N` says which agent writes the plan or the verdict, and which process is the agent of a host
  (`launch.agent.disk.Claim`);
* `over.json` names the host whose part was the first to end badly.

Plan, verdict, ends and `over.json` are published: the first version of each file remains, whichever other agent tries
to write it. So all agents follow the same plan and the same verdict, even if agents die. Only an agent that holds a
claim lists the folder in a loop.

A call reads a few files, whatever the number of hosts, and returns at once; callers call it again in a loop. Each call
may raise `LostDiskError`, after `lost_after` seconds without an answer, or `ClusterError`, if another process acts as
this host. `launch.agent.disk` says what each kind of disk guarantees.

A `Watch` finds hosts that no longer give a sign of life, from changes that this host has observed itself, so clocks of
two hosts are never compared.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from launch.agent.disk import Claim, Disk, Found, Holder
from plugins.errors import ClusterError, DataError
from tools.runs.attempts import (
    BEAT,
    END,
    FOLDER,
    GONE,
    PLAN,
    THERE,
    VERDICT,
    Attempt,
    Beat,
    End,
    Form,
    Plan,
    Verdict,
    file_of,
    folder_of,
    parse,
    text_of,
)

OVER = "over.json"
LOOKS = 8  # at claims, in the time after which somebody is lost
SIGNS = 4  # of life, in that time
LOST_AFTER = 4.0  # seconds without a sign of life of a node, or an answer of the disk, unless a user says otherwise
SETTLE = 2.0  # of these times the verdict waits for the ends of those who still give signs of life
LONGEST = 180  # bytes of a host's name in a file's


class Watch:
    """A `Watch` records for how long each observed value has not changed. The time between two observations of a value
    counts as at most `most` seconds, because this process may have been stopped between them.

    An observation after a long pause of this process (the disk stalled, the process was stopped, a clock was set) says
    little about other hosts: the same cause may have delayed them, and they must get time to write. So an observation
    never adds more than `most` seconds, and adds nothing if the clock went back.
    """

    def __init__(self, most: float):
        self.most = most
        self._seen: dict[Hashable, tuple[object, float, float]] = {}  # its mark, the last look, seconds without change

    def unchanged(self, key: Hashable, mark: object, now: float) -> float:
        """Return for how many seconds, up to the time `now`, all calls for the observed file or host `key` have passed
        the same value `mark`; return 0 at the first call for `key`.
        """
        before = self._seen.get(key)
        if before is None or before[0] != mark:
            quiet = 0.0
        else:
            quiet = before[2] + min(max(now - before[1], 0.0), self.most)
        self._seen[key] = (mark, now, quiet)
        return quiet


class Meeting:
    """The agent of one host communicates with the agents of other hosts through this object.

    Args:
        run_dir: the run's folder, on the shared disk.
        host: this host's name, which no other agent has.
        lost_after: seconds without a sign of life after which a host, or the disk, counts as lost.
        disk: used instead of a `Disk` of its own.
    """

    def __init__(self, run_dir: Path, host: str, *, lost_after: float = LOST_AFTER, disk: Disk | None = None):
        if not host.isprintable() or not 0 < len(quote(host, safe="")) <= LONGEST:
            raise ClusterError(f"--host {host!r}: this is not a valid host name; give a name from the file of --nodes")
        self.run_dir, self.host, self.lost_after = run_dir, host, lost_after
        self.disk = disk or Disk(lost_after)
        self.me = Holder(host, self.disk.name)
        self._place = f"host-{quote(host, safe='')}"
        self._watch = Watch(lost_after / 2)
        self._claims: dict[tuple[int, str], Claim] = {}
        self._next: dict[tuple[int, str], float] = {}  # when something is due again

    def now(self) -> float:
        """Return the time by the disk's clock, in seconds since 1970."""
        return self.disk.now(self.run_dir / FOLDER)

    def come(self, number: int) -> None:
        """Announce that this host is present and fit for attempt `number`.

        If an earlier agent had this host's name, this call waits until that agent is surely gone, at most about twice
        `lost_after`. If the attempt includes the earlier agent, this host's part in the attempt has ended badly, and
        the call records this.

        Raises:
            ClusterError: an agent of this host's name is at work.
        """
        self.disk.folder(folder_of(self.run_dir, number))
        claim = self._claim(number, self._place)
        returns = claim.holder == self.me
        before: tuple[Holder | None, object] | None = None
        while not claim.hold():
            sign = self._sign(number, claim.holder) if claim.holder else None
            if before and sign and before[0] == claim.holder and before[1] != sign:
                raise ClusterError(
                    f"--host {self.host}: an agent with this name already runs in {claim.folder}; give each node its "
                    "own name"
                )
            before = (claim.holder, sign) if sign else before
            self.disk.pause(self.lost_after / LOOKS)
        plan = self._form(number, PLAN, Plan)  # one that is made once we are seen to be there counts on us
        self._say_there(number)
        self._check_place(number)
        self.disk.keep_room(file_of(self.run_dir / FOLDER, ".room-", self.host))
        if plan and self.host in plan.hosts and not returns:
            self.lost(number, self.host, "its agent was restarted in the middle of the attempt")

    def gone(self, number: int) -> None:
        """Announce that this host leaves attempt `number` and must not be counted; do nothing if this agent never
        announced the host, for example because another agent has its name.
        """
        claim = self._claims.get((number, self._place))
        if claim and claim.holder == self.me:
            self._say_there(number, gone=True)

    def there(self, number: int) -> list[str]:
        """Return the hosts that announced themselves for attempt `number`, did not leave it and are alive. Each call
        opens several files for each host.
        """
        names = self.disk.names(folder_of(self.run_dir, number))
        hosts = [unquote(name.removeprefix(THERE).removesuffix(".json")) for name in names if name.startswith(THERE)]
        return [host for host in hosts if not self._gone_or_quiet(number, host)]

    def plan(self, number: int, wanted: Callable[[list[str]], Plan | None]) -> Plan | None:
        """Return the plan of attempt `number`; return None if the plan has not been written yet. Call the method `come`
        first, then call this method repeatedly until it returns a plan.

        Args:
            number: the attempt.
            wanted: called, on one host at a time, with the hosts that are present; returns the plan, or None to wait
                for more hosts. It should be quick: another host calls its own after this one has taken `lost_after`
                seconds.
        """
        if not self._form(number, PLAN, Plan) and self._chosen(number, "plan"):
            plan = wanted(self.there(number))
            if plan and self.plans(number):  # it may have taken long
                self._publish(number, PLAN, text_of(plan))
        return self._form(number, PLAN, Plan)

    def plans(self, number: int) -> bool:
        """Return whether this agent still plans attempt `number`: another agent may have taken over the planning if
        this agent took long or was stopped.
        """
        return self._claim(number, "plan").hold()

    def is_planned(self, number: int) -> bool:
        """Return whether another agent is making the plan of attempt `number` at this moment. That agent may have to
        read terabytes for the plan, and gives signs of life meanwhile. To notice that the signs of life have stopped,
        call this method again after some time.
        """
        holder, folder = self._claim(number, "plan").holder, folder_of(self.run_dir, number)
        beat = self.disk.read(file_of(folder, BEAT, holder.host)) if holder and holder != self.me else None
        key = (number, "planning", holder)
        return beat is not None and self._watch.unchanged(key, beat.mark, self.disk.now(folder)) < self.lost_after

    def beat(self, number: int, beat: Beat) -> None:
        """Give a sign of life; call this about once a second while this host takes part or waits as a spare."""
        self._check_place(number)
        self.disk.replace(file_of(folder_of(self.run_dir, number), BEAT, self.host), text_of(beat))

    def stale(self, number: int, host: str) -> bool:
        """Return whether `host`, which is in the plan, has given no sign of life for `lost_after` seconds; only time in
        which this agent was watching counts.
        """
        folder = folder_of(self.run_dir, number)
        found = self.disk.read(file_of(folder, BEAT, host))
        quiet = self._watch.unchanged((number, "beat", host), found and found.mark, self.disk.now(folder))
        return quiet >= self.lost_after and self.ended(number, host) is None

    def end(self, number: int, end: End) -> None:
        """Write how the workers of a host ended, unless this was written before. If the workers ended with a failure,
        also write that the attempt is over.
        """
        self._publish(number, file_of(folder_of(self.run_dir, number), END, end.host).name, text_of(end))
        stands = self.ended(number, end.host)
        if stands and _is_bad(stands):
            self._publish(number, OVER, json.dumps({"host": stands.host, "time": stands.time}) + "\n")

    def ended(self, number: int, host: str) -> End | None:
        """Return how the workers of a host ended; return None if the host has not written this yet."""
        found = self.disk.read(file_of(folder_of(self.run_dir, number), END, host))
        return parse(found.text, End) if found else None

    def lost(self, number: int, host: str, why: str) -> None:
        """Write, for a host that can no longer write, that its workers ended in the phase of the host's last sign of
        life.
        """
        folder = folder_of(self.run_dir, number)
        found = self.disk.read(file_of(folder, BEAT, host))
        beat = (parse(found.text, Beat) if found else None) or Beat(host, 0.0, "start", 0.0)
        now = self.disk.now(folder)
        self.end(number, End(host, now, "failed", beat.phase, beat.step, "lost node", message=why, by=self.host))

    def over(self, number: int) -> str | None:
        """Return the host whose workers were the first to end with a failure; return None if no host reported a
        failure. If the file that reports the failure is broken, return "an unknown host".
        """
        found = self.disk.read(folder_of(self.run_dir, number) / OVER)
        return str(_content(found.text).get("host", "an unknown host")) if found else None

    def verdict(self, number: int, decide: Callable[[Attempt], Verdict]) -> Verdict | None:
        """Return the verdict on attempt `number`, or None as long as there is no verdict; call this method in a loop
        after this host's part has ended.

        One host calls its `decide` as soon as all hosts of the plan have written how their parts ended; if one part
        ended badly or was lost, the other hosts get some time to write their ends. Hosts that give no sign of life any
        more are recorded as lost.
        """
        if not self._form(number, VERDICT, Verdict) and self._chosen(number, "verdict"):
            attempt = self._attempt(number)
            if self._settled(attempt):
                self._publish(number, VERDICT, text_of(decide(self._attempt(number))))
        return self._form(number, VERDICT, Verdict)

    def refuse(self, number: int, verdict: Verdict) -> None:
        """Write the verdict on an attempt for which no plan can be made."""
        self._publish(number, VERDICT, text_of(verdict))

    def withdraw(self, number: int) -> None:
        """Remove the folder of an attempt that was refused before it had a plan. Call this only in a run of a single
        host, because other hosts would read the verdict in this folder.
        """
        self.disk.remove(folder_of(self.run_dir, number))

    def _settled(self, attempt: Attempt) -> bool:
        number = attempt.number
        missing = [host for host in (attempt.plan.hosts if attempt.plan else []) if host not in attempt.ends]
        lost = [host for host in missing if self._gone_or_quiet(number, host)]
        for host in lost:
            self.lost(number, host, f"no sign of life for {self.lost_after:g} s")
        if len(lost) == len(missing):
            return True
        waiting = self.over(number) is not None
        for end in attempt.ends.values():
            if _is_bad(end) and not waiting:  # who wrote it died before it could say that all is over
                self.end(number, end)
        waited = self._watch.unchanged((number, "settle"), waiting, self.disk.now(attempt.folder))
        return waiting and waited >= SETTLE * self.lost_after

    def _attempt(self, number: int) -> Attempt:
        """Return what `tools.runs.attempts.read_attempt` returns, read from a disk that may be lost."""
        folder = folder_of(self.run_dir, number)
        names = self.disk.names(folder)
        beats, ends = self._by_host(folder, names, BEAT, Beat), self._by_host(folder, names, END, End)
        return Attempt(folder, number, self._form(number, PLAN, Plan), beats, ends, None)

    def _by_host(self, folder: Path, names: list[str], start: str, kind: type[Form]) -> dict[str, Form]:
        """Return the contents of the files whose names begin with `start`, by host; broken files are left out."""
        found: dict[str, Form] = {}
        for name in names:
            if name.startswith(start) and (file := self.disk.read(folder / name)) and (form := parse(file.text, kind)):
                found[unquote(name.removeprefix(start).removesuffix(".json"))] = form
        return found

    def _chosen(self, number: int, what: str) -> bool:
        """Give a sign of life if one is due, and return whether this agent has the claim to do `what`; the claim is
        checked only now and then.
        """
        if self._due(number, "sign", SIGNS):
            self._say_there(number)
        return self._due(number, what, LOOKS) and self._claim(number, what).hold()

    def _claim(self, number: int, what: str) -> Claim:
        def dead(holder: Holder) -> bool:
            return self._quiet(number, holder) >= self.lost_after

        if (number, what) not in self._claims:
            self._claims[number, what] = Claim(self.disk, folder_of(self.run_dir, number), what, self.me, dead)
        return self._claims[number, what]

    def _due(self, number: int, what: str, times: int) -> bool:
        """Return whether a task is due that this agent does `times` times within `lost_after` seconds."""
        now = self.disk.ticks()
        if now < self._next.get((number, what), now):
            return False
        self._next[number, what] = now + self.lost_after / times
        return True

    def _say_there(self, number: int, gone: bool = False) -> None:
        self._check_place(number)
        content = {"host": self.host, "process": self.me.process, GONE: gone}
        self.disk.replace(file_of(folder_of(self.run_dir, number), THERE, self.host), json.dumps(content) + "\n")

    def _check_place(self, number: int) -> None:
        claim = self._claim(number, self._place)
        if claim.holder != self.me or claim.lost():
            raise ClusterError(
                f"{claim.folder}: another agent of host {self.host} has replaced this agent, so this agent ends now"
            )

    def _gone_or_quiet(self, number: int, host: str) -> bool:
        found = self.disk.read(file_of(folder_of(self.run_dir, number), THERE, host))
        holder = Holder.of(found)
        if holder is None:  # never came
            holder = Holder(host, "")
        return _left(found) or self._quiet(number, holder) >= self.lost_after

    def _quiet(self, number: int, holder: Holder) -> float:
        """Return for how many seconds an agent has given no sign of life, counted from this agent's first look."""
        sign = self._sign(number, holder)
        return self._watch.unchanged((number, holder), sign, self.disk.now(folder_of(self.run_dir, number)))

    def _sign(self, number: int, holder: Holder) -> object:
        """Return a value that changes with each sign of life; None if another process has taken the host's place, or if
        the host has left.
        """
        folder = folder_of(self.run_dir, number)
        there = self.disk.read(file_of(folder, THERE, holder.host))
        if Holder.of(there) != holder or _left(there):
            return None
        beat = self.disk.read(file_of(folder, BEAT, holder.host))
        return there and there.mark, beat and beat.mark

    def _publish(self, number: int, name: str, text: str) -> None:
        self.disk.publish(folder_of(self.run_dir, number) / name, text)

    def _form(self, number: int, name: str, kind: type[Form]) -> Form | None:
        path = folder_of(self.run_dir, number) / name
        found = self.disk.read(path)
        form = parse(found.text, kind) if found else None
        if found and form is None:
            raise DataError(
                f"{path} cannot be read, because its content is damaged; move the folder of this attempt "
                f"away, and start the agents again"
            )
        return form


def _is_bad(end: End) -> bool:
    return end.outcome not in ("done", "told to end")


def _left(there: Found | None) -> bool:
    return there is not None and bool(_content(there.text).get(GONE))


def _content(text: str) -> dict[str, Any]:
    """Return the mapping that a file holds; an empty mapping if a host that crashed has left the file broken."""
    with suppress(ValueError):
        content = json.loads(text)
        if isinstance(content, dict):
            return content
    return {}
