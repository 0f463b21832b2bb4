"""Why a choice is the choice: what binds it, what would change it by how much, what is wrong with its neighbours."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import exp, expm1, log
from typing import Any

import numpy as np

from paceline.parallel.pipeline.orders import OrderName
from paceline.planner.candidate import Candidate, Division
from paceline.planner.choice import Choice, describe_excess
from paceline.planner.pool import MEMORY_HIGH, MORE_MEMORY, OBJECTIVES, Needs, Pool, find_needs, price_needs
from paceline.planner.problem import PlanProblem
from paceline.planner.space import BUCKETS, OFFLOADS, Legality
from paceline.simulator.training.answers import QUANTILE
from paceline.simulator.training.memory import estimate_memory
from paceline.simulator.training.price import TERMS

CHANGES: dict[str, dict[str, float]] = {
    "twice the bandwidth between hosts": {"network": 2.0},
    "twice the bandwidth inside hosts": {"local": 2.0},
    "devices that compute twice as fast": {"peak": 2.0, "peak_matrix": 2.0, "peak_widest": 2.0},
    "twice the bandwidth of devices' memory": {"memory": 2.0},
}
"""Changes of machines, as factors on columns of `StepBatch`."""
NO_CHANGE = "no change"
_WORDS = {
    "matrix": "matrix products", "attention": "attention", "pointwise": "operators that move bytes", "loss": "the loss",
    "launch": "starting kernels", "tensor": "exchanges of tensor ranks", "context": "exchanges of context ranks",
    "pipeline": "messages between stages", "bubble": "the pipeline's bubble", "sharded": "gathering shards",
    "data": "exchange of gradients", "slowdown": "computing slowed by exchanges", "optimizer": "the optimizer",
    "coding": "codecs", "offload": "waiting for the host's memory", "straggler": "waiting for the slowest rank",
}  # fmt: skip
"""Terms of a step in words."""


def describe_term(name: str) -> str:
    """Return a term of a step in words; those of a profile are words."""
    return _WORDS.get(name, name)


def describe_change(ratio: float) -> str:
    """Return a ratio of a number to what it was as ``-12%``, ``no change`` or ``30 times``."""
    if abs(ratio - 1) >= 10:
        return f"{ratio:.3g} times"
    words = f"{ratio - 1:+.0%}"
    return NO_CHANGE if words in ("+0%", "-0%") else words


@dataclass(frozen=True)
class Neighbour:
    """A candidate that differs from the choice in one thing, and why it was not taken.

    Args:
        candidate: The candidate.
        change: Difference, in words.
        verdict: refused, memory, slower, tie or other.
        reason: Sentence.
        ratio: Time of a step over the choice's; None if it has none.
        term: Term of the step that is most larger; empty if there is none.
    """

    candidate: Candidate
    change: str
    verdict: str
    reason: str
    ratio: float | None = None
    term: str = ""


@dataclass(frozen=True)
class WhatIf:
    """A change of the machines, and what it would bring.

    Args:
        change: The change.
        same_ratio: Time of the same plan then, over the one now; None if it stays as it is.
        best: The best plan then.
        best_ratio: Time of that plan over the shortest now.
    """

    change: str
    same_ratio: float | None
    best: Candidate
    best_ratio: float


def list_what_ifs(choice: Choice) -> list[WhatIf]:
    """Return what changes of machines would bring, the greatest gain first."""
    pool, step_s = choice.pool, choice.pool.step_s
    is_open = np.array([_is_open(choice, one.candidate) for one in pool.needs], dtype=bool)
    now, least = float(step_s[choice.index]), float(step_s[is_open & pool.fits].min())
    found = []
    for change, factors in CHANGES.items():
        then = pool.with_columns(factors).step_s
        found.append(_compare(pool, change, then, is_open & pool.fits, least, float(then[choice.index]) / now))
    larger = choice.needs.available_bytes * (MORE_MEMORY - 1)
    more = np.array([one.memory_bytes * MEMORY_HIGH <= one.available_bytes * MORE_MEMORY for one in pool.needs])
    words = f"{larger / 1e9:.3g} GB more memory on each device"
    found.append(_compare(pool, words, step_s, is_open & more, least, None))
    return sorted(found, key=lambda one: one.best_ratio)


def _is_open(choice: Choice, candidate: Candidate) -> bool:
    """Return whether a candidate is one of the chosen machines, and training has not turned out to refuse it."""
    return candidate.machines == choice.needs.candidate.machines and candidate not in choice.refused


def _compare(
    pool: Pool,
    change: str,
    step_s: "np.ndarray[Any, np.dtype[np.float64]]",
    is_open: "np.ndarray[tuple[int], np.dtype[np.bool_]]",
    least: float,
    same: float | None,
) -> WhatIf:
    indices = np.flatnonzero(is_open)
    best = int(indices[int(np.argmin(step_s[indices]))])
    return WhatIf(change, same, pool.needs[best].candidate, float(step_s[best]) / least)


def list_neighbours(choice: Choice) -> list[Neighbour]:
    """Return the candidates that differ from the choice in one thing, each with why it was not taken."""
    pool, chosen = choice.pool, choice.needs
    legality = Legality(pool.problem)
    found: list[Neighbour] = []
    priced: list[tuple[str, Needs]] = []
    for change, candidate in _list_steps_aside(pool.problem, chosen.candidate):
        if refusal := legality.find_refusal(candidate) or choice.refused.get(candidate):
            found.append(Neighbour(candidate, change, "refused", f"training refuses it: {refusal}"))
            continue
        needs = find_needs(pool.problem, candidate)
        if needs.fits:
            priced.append((change, needs))
        else:
            found.append(Neighbour(candidate, change, "memory", _explain_memory(needs)))
    return [*_judge(choice, priced), *found]


def _judge(choice: Choice, priced: list[tuple[str, Needs]]) -> list[Neighbour]:
    """Return neighbours that fit, by time, each compared with the choice."""
    aside = price_needs(choice.pool.problem, choice.pool.posterior, [choice.needs, *(needs for _, needs in priced)])
    spreads = aside.ratio_spreads(range(len(aside.needs)))[0]
    objectives = aside.objectives()
    found = []
    for number, (change, needs) in enumerate(priced, 1):
        ratio = float(aside.step_s[number] / aside.step_s[0])
        half = QUANTILE * float(spreads[number])
        longer = aside.terms[number] - aside.terms[0]
        term = TERMS[int(np.argmax(longer))]
        if abs(log(ratio)) <= half:
            verdict, reason = "tie", f"{describe_change(ratio)}, known to ± {expm1(half):.0%}: a tie"
            if choice.by != "step_s":
                reason += f"; {_compare_objective(choice.by, objectives, number)}"
        elif ratio > 1:
            verdict = "slower"
            reason = (
                f"{describe_change(ratio)} ({describe_change(ratio * exp(-half))} to "
                f"{describe_change(ratio * exp(half))}), most by "
                f"{_WORDS[term]} (+{float(longer.max()):.3g} s)"
            )
        else:
            verdict, reason = "other", describe_change(ratio)
            if choice.by != "step_s":
                reason += f", but {_compare_objective(choice.by, objectives, number)}"
        if needs.candidate.way is not None:
            reason += f"; with {needs.candidate.steps_factor:.3g} times the steps to the same loss"
        if excess := describe_excess(choice.pool.problem, objectives[number]):
            reason += f"; it takes {excess}"
        found.append(Neighbour(needs.candidate, change, verdict, reason, ratio, term if ratio > 1 else ""))
    return sorted(found, key=lambda one: one.ratio or 0.0)


def _compare_objective(by: str, objectives: "np.ndarray[Any, np.dtype[np.float64]]", number: int) -> str:
    column = tuple(OBJECTIVES).index(by)
    ratio = float(objectives[number, column] / max(objectives[0, column], 1e-300))
    return f"{describe_change(ratio)} of {OBJECTIVES[by]}"


def _explain_memory(needs: Needs) -> str:
    if not needs.fits_host:
        return (
            f"does not fit: up to {needs.host_bytes * MEMORY_HIGH / 1e9:.3g} GB would wait in the host's "
            f"{needs.description.case.cluster.host.memory_bytes / 1e9:.3g} GB"
        )
    parts = estimate_memory(needs.description)
    most = max(
        (parts.state_bytes, "parameters, gradients and optimizer state"),
        (parts.activation_bytes, "activations"),
        (parts.working_bytes, "gathered parameters"),
    )
    return (
        f"does not fit: it needs up to {needs.memory_bytes * MEMORY_HIGH / 1e9:.3g} GB a rank of "
        f"{needs.available_bytes / 1e9:.3g}, most of it {most[1]} ({most[0] / 1e9:.3g} GB)"
    )


def _list_steps_aside(problem: PlanProblem, candidate: Candidate) -> Iterator[tuple[str, Candidate]]:
    """Yield candidates that differ in one thing, each with what differs."""
    division, many = candidate.division, candidate.num_micro_batches
    has_host_devices = problem.machines[candidate.machines].has_host_devices
    for recompute in ("none", "selective", "full"):
        if recompute != candidate.recompute:
            yield f"{recompute.replace('none', 'no')} recomputation", replace(candidate, recompute=recompute)
    if division.is_plain and candidate.bucket_bytes is None and not has_host_devices:
        for offload in ("none", *OFFLOADS):
            if offload != candidate.offload:
                yield f"offload {offload}", replace(candidate, offload=offload)
    ways = [] if problem.inexact is None else problem.inexact.list_ways(division.num_workers)
    for way in (None, *ways) if division.is_plain else ():
        if way != candidate.way:
            words = "every_step" if way is None else way.name
            yield words, replace(candidate, way=way, bucket_bytes=None, offload="none")
    if division.is_plain and division.data > 1 and candidate.offload == "none" and not has_host_devices:
        for bucket_bytes in (None, *BUCKETS):
            if bucket_bytes != candidate.bucket_bytes:
                words = "the default size" if bucket_bytes is None else f"{bucket_bytes / 2**20:g} MiB"
                yield f"buckets of {words}", replace(candidate, bucket_bytes=bucket_bytes)
    for number in (many * 2, many // 2):
        if number:
            words = f"{number} micro-batch{'es' * (number > 1)}"
            yield words, replace(candidate, num_micro_batches=number)
    if division.sharded > 1:
        for stage in (1, 2, 3):
            if stage != division.zero_stage:
                yield f"ZeRO-{stage}", replace(candidate, division=replace(division, zero_stage=stage))
    orders: tuple[tuple[OrderName, int], ...] = (("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("zero_bubble", 1))
    for order, chunks in orders if division.pipeline > 1 else ():
        if (order, chunks) != (division.order, division.stages_per_rank):
            other = replace(division, order=order, stages_per_rank=chunks)
            yield f"order {order}", replace(candidate, division=other)
    axes = ("data", "sharded", "context", "tensor", "pipeline")
    for giver in axes:
        for taker in axes:
            if giver != taker and getattr(division, giver) % 2 == 0:
                changed = {giver: getattr(division, giver) // 2, taker: getattr(division, taker) * 2}
                words = f"{taker} {changed[taker]}, {giver} {changed[giver]}"
                yield words, _divide(candidate, replace(division, **changed))
    for axis in axes[:2]:
        if getattr(division, axis) % 2 == 0:
            fewer = getattr(division, axis) // 2
            yield f"half the ranks ({axis} {fewer})", _divide(candidate, replace(division, **{axis: fewer}))
    for index, machines in enumerate(problem.machines):
        if index != candidate.machines:
            yield f"on {machines.name}", replace(candidate, machines=index)


def _divide(candidate: Candidate, division: Division) -> Candidate:
    """Return a candidate of another division, without what only replicas of a whole model have."""
    division = _tidy(division)
    if not division.is_plain:
        return replace(candidate, division=division, offload="none", bucket_bytes=None, way=None)
    if division.data == 1:
        return replace(candidate, division=division, bucket_bytes=None, way=None)
    return replace(candidate, division=division)


def _tidy(division: Division) -> Division:
    """Return a division without settings of axes that it does not have."""
    if division.sharded == 1:
        division = replace(division, zero_stage=3)
    return division if division.pipeline > 1 else replace(division, order="1f1b", stages_per_rank=1)
