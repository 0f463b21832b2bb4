"""Tables of what came of a campaign."""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

_HEADER = (
    "{} | runs | faults | changes | restarts | resumes | updates made again | median pause | p99 | longest | failed"
)


def tabulate(outcomes: Sequence[dict[str, Any]]) -> str:
    """Return Markdown tables by kind of fault, by what followed, and by rule and phase of those that were killed."""
    parts = [
        _table("fault", outcomes, lambda one: one["scenario"]["name"]),
        _table("killed workers", [one for one in outcomes if "kill" in one["scenario"]["name"]], _describe_recovery),
        _table("rule", [one for one in outcomes if _is_killed(one)], lambda one: one["scenario"]["rule"]),
        _table(
            "phase", [one for one in outcomes if _is_killed(one)], lambda one: one["scenario"]["faults"][0]["phase"]
        ),
    ]
    return "\n\n".join(parts)


def _describe_recovery(outcome: dict[str, Any]) -> str:
    if not outcome["num_struck"]:
        return "the run ended before"
    if outcome["num_resumes"]:
        return "a person starts it again"
    return "all start again" if outcome["num_restarts"] else "the others go on"


def _is_killed(outcome: dict[str, Any]) -> bool:
    return bool(outcome["scenario"]["name"] == "kill")


def _table(what: str, outcomes: Sequence[dict[str, Any]], key: Callable[[dict[str, Any]], str]) -> str:
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for outcome in outcomes:
        groups[key(outcome)].append(outcome)
    lines = [f"| {_HEADER.format(what)} |", "|" + " --- |" * 11]
    for name, found in [*sorted(groups.items()), ("all", [*outcomes])]:
        sums = [
            sum(one[field] for one in found)
            for field in ("num_struck", "num_changes", "num_restarts", "num_resumes", "num_again")
        ]
        failed = sum(bool(one["problems"]) for one in found)
        lines.append(f"| {name} | {' | '.join(map(str, [len(found), *sums, *_describe_pauses(found), failed]))} |")
    return "\n".join(lines)


def _describe_pauses(outcomes: Sequence[dict[str, Any]]) -> tuple[str, str, str]:
    pauses = sorted(pause for one in outcomes for pause in one["pauses_s"])
    if not pauses:
        return "", "", ""
    p99 = pauses[math.ceil(0.99 * len(pauses)) - 1]
    return f"{median(pauses):.2f} s", f"{p99:.2f} s", f"{pauses[-1]:.2f} s"
