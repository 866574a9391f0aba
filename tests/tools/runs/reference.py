"""This module computes slowly where the time of a run went: it reads the files as they are, and asks for every tenth
of a second.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from statistics import median


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def tenths(run: Path) -> Counter:
    """Tenths of a second of each kind, of a run with attempts."""
    plans = [json.loads(path.read_text()) for path in sorted(run.glob("attempts/*/plan.json"))]
    ends = [
        max(json.loads(path.read_text())["time"] for path in folder.glob("end-*.json"))
        for folder in sorted((run / "attempts").iterdir())
    ]
    steps, parts = [], []
    for record in lines(run / "metrics" / "rank_0.jsonl"):
        if "total_steps" in record:
            parts.append(record["time"])
        else:
            attempt = max(number for number, plan in enumerate(plans) if plan["time"] <= parts[-1])
            steps.append(record | {"attempt": attempt})
    spans = lines(run / "metrics" / "spans.jsonl")
    first = {
        attempt: min(s["step"] for s in steps if s["attempt"] == attempt) for attempt in {s["attempt"] for s in steps}
    }
    usual = median(s["seconds"] for s in steps if s["step"] != first[s["attempt"]])

    def kind(moment: float) -> str:
        attempt = max(number for number, plan in enumerate(plans) if plan["time"] <= moment)
        if moment > ends[attempt]:
            return "waiting"
        for span in spans:
            if span["begin"] <= moment < span["end"]:
                return span["kind"]
        own = [step for step in steps if step["attempt"] == attempt]
        for step in own:
            if step["time"] - step["seconds"] <= moment < step["time"]:
                if step["step"] == first[attempt] and moment < step["time"] - usual:
                    return "compile"
                again = any(plan["step"] < step["step"] for plan in plans[attempt + 1 :])
                return "lost" if again else "kept"
        if not own or moment < min(step["time"] for step in own):
            return "start"
        return "stop" if moment > max(step["time"] for step in own) else "between"

    begin = plans[0]["time"]
    ticks = round((ends[-1] - begin) * 10)
    return Counter(kind(begin + (tick + 0.5) / 10) for tick in range(ticks))
