"""A fleet's plan in words and as JSON."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from paceline.monitor.formatting import duration, interval, number
from paceline.planner.fleet_intervals import Amount, Priced
from paceline.planner.fleet_planning import FleetPlan
from paceline.planner.plan_file import name_recipe


def name_runs(recipes: Sequence[str]) -> list[str]:
    """Return names of runs for people: recipes without directories, and numbers where these are the same."""
    short = [name_recipe(recipe) for recipe in recipes]
    counts = Counter(short)
    seen: Counter[str] = Counter()
    names = []
    for name in short:
        seen[name] += 1
        names.append(f"{name} #{seen[name]}" if counts[name] > 1 else name)
    return names


def describe_fleet(fleet: FleetPlan) -> list[str]:
    """Return the plan in words, one line each."""
    best, hosts = fleet.best, fleet.fleet.num_hosts
    problem = fleet.curves[0].run.problem
    names = [curve.run.name for curve in fleet.curves]
    lines = [
        f"fleet: {fleet.fleet.num_ranks} ranks of {fleet.machines.name} on {hosts} host{'s' * (hosts > 1)}, for "
        f"{len(names)} runs",
        f"all have ended after {_time(best.end_s)}",
    ]
    energy_kwh = [value / 3.6e6 for value in best.energy_j]
    of_all = []
    if energy_kwh[0]:
        of_all.append(f"{interval(*energy_kwh)} kWh")
        of_all.append(f"{interval(*map(problem.site.carbon_kg, best.energy_j))} kgCO2e")
    if problem.has_prices:
        of_all.append(f"{interval(*best.money)} in {problem.currency}, each run for its share of the hosts")
    if of_all:
        lines.append("all together: " + "; ".join(of_all))
    if fleet.machines.price_words:
        lines.append(f"price: {fleet.machines.price_words}")
    for entry, times in sorted(zip(best.timetable.entries, best.runs, strict=True), key=lambda pair: pair[0].begin_s):
        before = " and ".join(names[run] for run in fleet.list_before(entry))
        when = f"after {before}, from {_time(times.begin_s)}" if entry.begin_s else "from the start"
        plan = fleet.plans[entry.run].candidate.describe()
        lines.append(f"  {names[entry.run]}: {_ranks(fleet, entry.units)}, {when}, for {_time(times.time_s)}: {plan}")
    lines.append(_describe_proof(fleet))
    left = [f"{curve.run.name} on {curve.space.left_out}" for curve in fleet.curves if curve.space.left_out]
    lines += [f"not searched: {'; '.join(left)}"] if left else []
    for name, other in fleet.others.items():
        lines.append(f"{name}: {_compare(fleet, other)}")
    lines += [_say_excess(fleet, what, amount, limit) for what, amount, limit in _list_excesses(fleet)]
    return lines


def _time(amount: Amount) -> str:
    return f"{duration(amount[0])} ({duration(amount[1])} to {duration(amount[2])})"


def _ranks(fleet: FleetPlan, units: Sequence[int]) -> str:
    timetable = fleet.best.timetable
    ranks = sorted(unit * timetable.unit + one for unit in units for one in range(timetable.unit))
    hosts = sorted({rank // fleet.fleet.ranks_per_host for rank in ranks})
    on = f"host{'s' * (len(hosts) > 1)} {_list(hosts)}"
    if len(ranks) == len(hosts) * fleet.fleet.ranks_per_host:
        return f"all ranks of {on}"
    return f"ranks {_list([rank % fleet.fleet.ranks_per_host for rank in ranks])} of {on}"


def _list(numbers: Sequence[int]) -> str:
    """Return ascending numbers, with ranges: ``0-3, 6``."""
    found: list[list[int]] = []
    for one in numbers:
        if found and one == found[-1][-1] + 1:
            found[-1][1:] = [one]
        else:
            found.append([one])
    return ", ".join("-".join(map(str, ends)) for ends in found)


def _describe_proof(fleet: FleetPlan) -> str:
    least = {"time": "ends sooner", "money": "costs less", "energy": "uses less energy"}[fleet.by]
    if fleet.found.is_proven:
        return f"by estimate no other order of runs that hold such ranks to their end {least}"
    gap = fleet.best.end_s[0] / fleet.found.bound_s - 1
    return (
        f"the best of {fleet.found.num_nodes:,} tried: that no other {least} is not proven; by estimate none ends more "
        f"than {gap / (1 + gap):.1%} sooner"
    )


def _compare(fleet: FleetPlan, other: Priced | None) -> str:
    if other is None:
        return "impossible: there are more runs than parts of the fleet that they fit on"
    if other.timetable.order == fleet.best.timetable.order:
        return f"{_time(other.end_s)}: the same"
    low, high = (f"{value - 1:+.0%}" for value in other.ratio[1:])
    words = f"{_time(other.end_s)}, {other.ratio[0] - 1:+.1%} ({low} to {high})"
    if fleet.by == "money":
        words += f", {interval(*other.money)} in {fleet.curves[0].run.problem.currency}"
    return words + (": a tie, the difference is less than is known" if other.is_tie else "")


def _list_excesses(fleet: FleetPlan) -> list[tuple[str, Amount, float]]:
    limits, best = fleet.limits, fleet.best
    pairs = (
        ("time", best.end_s, limits.within_s),
        ("money", best.money, limits.budget),
        ("energy", best.energy_j, limits.energy_j),
    )
    return [(what, amount, limit) for what, amount, limit in pairs if limit is not None and amount[2] > limit]


def _say_excess(fleet: FleetPlan, what: str, amount: Amount, limit: float) -> str:
    currency = fleet.curves[0].run.problem.currency
    allowed = {
        "time": duration(limit),
        "money": f"{number(limit)} in {currency}",
        "energy": f"{number(limit / 3.6e6)} kWh",
    }[what]
    return f"the upper end of the interval of {what} is beyond the {allowed} that are allowed"


def to_document(fleet: FleetPlan, files: Sequence[str]) -> dict[str, Any]:
    """Return all of a plan as JSON.

    Args:
        fleet: The plan.
        files: File of the plan of each run.
    """
    best, timetable = fleet.best, fleet.best.timetable
    entries = {entry.run: (entry, times) for entry, times in zip(timetable.entries, best.runs, strict=True)}
    runs = []
    for run, curve in enumerate(fleet.curves):
        entry, times = entries[run]
        option = curve.options[entry.option]
        runs.append(
            {
                "name": curve.run.name,
                "file": files[run],
                "plan": fleet.plans[run].candidate.describe(),
                "ranks": list(timetable.list_ranks(entry)),
                "after": [fleet.curves[other].run.name for other in fleet.list_before(entry)],
                **{
                    name: value
                    for key in ("begin_s", "end_s", "time_s")
                    for name, value in _name(key, getattr(times, key))
                },
                "money": option.money if curve.run.problem.has_prices else None,
                "energy_j": option.energy_j or None,
                "curve": [asdict(one) for one in curve.options],
            }
        )
    return {
        "version": 1,
        "fleet": {"cluster": fleet.machines.name, **asdict(fleet.fleet), "num_ranks": fleet.fleet.num_ranks},
        "by": fleet.by,
        "is_proven": fleet.found.is_proven,
        "bound_s": fleet.found.bound_s,
        **_describe(fleet, best),
        "runs": runs,
        "compared": {
            name: None
            if one is None
            else _describe(fleet, one) | dict(_name("ratio", one.ratio)) | {"is_tie": one.is_tie}
            for name, one in fleet.others.items()
        },
        "took_s": fleet.took_s,
    }


def _describe(fleet: FleetPlan, priced: Priced) -> dict[str, Any]:
    problem = fleet.curves[0].run.problem
    nothing = (None, None, None)
    carbon_kg = tuple(map(problem.site.carbon_kg, priced.energy_j))
    return dict(
        [
            *_name("end_s", priced.end_s),
            *_name("money", priced.money if problem.has_prices else nothing),
            *_name("energy_j", priced.energy_j if priced.energy_j[0] else nothing),
            *_name("carbon_kg", carbon_kg if priced.energy_j[0] else nothing),
        ]
    )


def _name(name: str, amount: Sequence[float | None]) -> list[tuple[str, float | None]]:
    """Return an amount and the ends of its interval, by name."""
    return list(zip((name, f"{name}_low", f"{name}_high"), amount, strict=True))
