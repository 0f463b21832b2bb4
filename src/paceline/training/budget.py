"""The budget of a run: money, hours and energy that it may use, over all its attempts."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field

from paceline.comm.group import Group
from paceline.errors import BudgetError, SettingsError
from paceline.monitor.events import BudgetSpent
from paceline.monitor.reader import read_log, select
from paceline.monitor.usage import sum_usage
from paceline.registry import Settings
from paceline.topology import Joules, Site
from paceline.topology.site import check_priced

_CHECK_S = 5.0
"""Longest time from one check to the next, by the length of steps so far."""
_ENOUGH_STEPS = 10
"""Steps whose mean length is trusted, for the step at which a budget will end."""


class Budget(Settings):
    """Limits of what a run may use, from the moment at which its workers meet, over all its attempts; none by default.

    Training stops after the last step that they pay for, with a checkpoint.
    """

    money: float | None = Field(default=None, gt=0)
    """Money in the currency of `site`'s price, for hosts with workers."""
    hours: float | None = Field(default=None, gt=0)
    """Time that workers train, in hours."""
    energy: Joules | None = None
    """Energy as measured or declared, in joules or with a unit, such as 5kWh."""
    warn_share: float = Field(default=0.8, gt=0, lt=1)
    """Share of a limit at which a warning is logged."""

    @property
    def limits(self) -> dict[str, float]:
        """Limits by name: money, hours in h, energy in J."""
        given = {"money": self.money, "hours": self.hours, "energy": self.energy}
        return {name: float(limit) for name, limit in given.items() if limit is not None}

    def check(self, site: Site) -> None:
        """Raise `SettingsError` where the site tells nothing of what is limited."""
        if self.money is not None:
            check_priced(site, "budget.money")
        if self.energy is not None and not site.measures_energy:
            raise SettingsError("site.measures_energy must be true with budget.energy, but got false; leave one out")


@dataclass(frozen=True)
class Spent:
    """What a run has used, in the units of `Budget.limits`."""

    money: float = 0.0
    hours: float = 0.0
    energy: float = 0.0

    @classmethod
    def of_log(cls, path: Path) -> "Spent":
        """Return what the log of a run says; nothing without a log."""
        usage = sum_usage(read_log(path) if path.exists() else [])
        return cls(usage.money or 0.0, usage.duration_s / 3600, usage.energy_j)

    def of(self, name: str) -> float:
        """Return what is used of a limit."""
        return float(getattr(self, name))

    def minus(self, other: "Spent") -> "Spent":
        """Return the difference."""
        return Spent(self.money - other.money, self.hours - other.hours, self.energy - other.energy)


def find_unit(name: str, site: Site) -> str:
    """Return the unit of a limit."""
    return {"money": site.used_currency, "hours": "h", "energy": "J"}[name]


def check_resumed(budget: Budget, site: Site, log: Path) -> None:
    """Raise `BudgetError` where a run that is to be resumed has spent its budget."""
    if not budget.limits or not log.exists():
        return
    records = read_log(log)
    ends = select(records, BudgetSpent)
    reached = {ends[-1].event.name: ends[-1].event.limit} if ends else {}
    spent = Spent.of_log(log)
    for name, limit in budget.limits.items():
        if spent.of(name) >= limit or limit <= reached.get(name, 0.0):
            unit = find_unit(name, site)
            raise BudgetError(
                f"the budget must pay for a step, but {spent.of(name):.4g} of {limit:.4g} {unit} are spent; give more "
                f"(--budget.{name} {2 * limit:.4g}{'J' if unit == 'J' else ''}), or none"
            )


@dataclass(frozen=True)
class BudgetVerdict:
    """What a check has found: warnings, and the limit that is reached, if there is one."""

    warnings: tuple[str, ...] = ()
    reached: str = ""
    spent: float = 0.0
    limit: float = 0.0
    unit: str = ""


class BudgetGuard:
    """Checks at steps that all workers agree on whether the budget pays for another step.

    Args:
        budget: Limits.
        site: Place of the run.
        before: Use by earlier attempts, on rank 0.
        read: Function that returns seconds, joules and money that this worker has used in this session.
        clock: Monotonic clock.
    """

    def __init__(
        self,
        budget: Budget,
        site: Site,
        before: Spent,
        read: Callable[[], tuple[float, float, float]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._budget, self._before, self._read, self._clock = budget, before, read, clock
        self._units = {name: find_unit(name, site) for name in budget.limits}
        self.next_step: int | None = None
        """Step after which all workers check next; None for never."""
        self._first = self._last = (0, clock(), before)
        self._warned: set[str] = set()
        self.verdict = BudgetVerdict()
        """Verdict of the latest check."""

    def begin(self, step: int, world: Group) -> None:
        """Begin to check; all workers call it when they have resumed.

        Args:
            step: Number of steps done, as far as this worker knows.
            world: All workers.
        """
        if self._budget.limits:
            mine = [step, self._clock(), vars(self._before)]
            step, now_s, before = world.gather_documents(mine, name="begin of the budget")[0]
            self.next_step, self._before = step + 1, Spent(**before)
            self._first = self._last = (step, now_s, self._before)

    def check(self, step: int, num_steps: int, world: Group) -> BudgetVerdict:
        """Return the verdict after a step; all workers call it, with the same step.

        Args:
            step: Number of steps done.
            num_steps: Number of steps of the whole training.
            world: All workers.
        """
        if self.next_step is None or step < self.next_step:
            return BudgetVerdict()
        seconds, joules, money = self._read()
        of_rank = world.gather_documents([self._clock(), seconds, joules, money], name="budget")
        now_s, seconds = of_rank[0][:2]  # what rank 0 says, so that all come to the same verdict
        before = self._before
        spent = Spent(
            before.money + sum(one[3] for one in of_rank),
            before.hours + seconds / 3600,
            before.energy + sum(one[2] for one in of_rank),
        )
        self.verdict = self._judge(step, num_steps, now_s, spent)
        return self.verdict

    def _judge(self, step: int, num_steps: int, now_s: float, spent: Spent) -> BudgetVerdict:
        last_step, last_s, last_spent = self._last
        num_new = max(1, step - last_step)
        step_s, used = max(1e-9, (now_s - last_s) / num_new), spent.minus(last_spent)
        self._last = step, now_s, spent
        left = {
            name: (limit - spent.of(name)) / max(used.of(name) / num_new, 1e-300)
            for name, limit in self._budget.limits.items()
        }
        name = min(left, key=lambda each: left[each])
        limit, unit = self._budget.limits[name], self._units[name]
        if left[name] < 1:
            return BudgetVerdict(reached=name, spent=spent.of(name), limit=limit, unit=unit)
        # Meters may lag behind, so that one reading is no ground to pass over many steps.
        self.next_step = step + max(1, min(int(left[name] / 2), round(_CHECK_S / step_s), 2 * num_new))
        return BudgetVerdict(warnings=tuple(self._list_warnings(step, num_steps, spent)))

    def _list_warnings(self, step: int, num_steps: int, spent: Spent) -> list[str]:
        found = []
        for name, limit in self._budget.limits.items():
            amount = f"{spent.of(name):.4g} of {limit:.4g} {self._units[name]}"
            if name not in self._warned and spent.of(name) >= self._budget.warn_share * limit:
                self._warned |= {name, f"{name} will end"}
                found.append(
                    f"{amount} are spent at step {step:,} of {num_steps:,}; the run stops when they are used up"
                )
            num_new = step - self._first[0]
            per_step = spent.minus(self._first[2]).of(name) / max(1, num_new)
            last = step + int((limit - spent.of(name)) / max(per_step, 1e-300))
            if f"{name} will end" not in self._warned and num_new >= _ENOUGH_STEPS and last < num_steps:
                self._warned.add(f"{name} will end")
                found.append(
                    f"the budget will end near step {last:,} of {num_steps:,}: {amount} are spent after {num_new:,} "
                    "steps of this start; give more, or fewer steps"
                )
        return found
