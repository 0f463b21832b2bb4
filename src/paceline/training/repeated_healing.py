"""Workers that are healed again and again: their machine errs, and training goes on without them, or ends."""

import socket
from collections import deque
from collections.abc import Sequence

from paceline.comm.group import Group
from paceline.elastic.member import Member
from paceline.errors import DivergenceError

_MOST_HEALED = 3
"""Number of healings of one worker within the window from which on its machine is not trusted."""
_LEAST_WINDOW = 1000
"""Least window, in steps."""


class RepeatedHealing:
    """Counts how often each rank is healed, the same on all ranks, and puts out one that errs again and again.

    Args:
        group: The workers.
        interval: Steps from one comparison to the next: the window is ten of them, and 1,000 steps at least.
    """

    def __init__(self, group: Group, interval: int) -> None:
        self._group, self._window = group, max(_LEAST_WINDOW, 10 * interval)
        self._healed: deque[tuple[int, int]] = deque()
        self._put_out: set[int] = set()

    def note(self, ranks: Sequence[int], step: int) -> list[int]:
        """Take in that ranks were healed at a step; return those that have been so too often, each once."""
        self._healed.extend((step, rank) for rank in ranks)
        while self._healed[0][0] <= step - self._window:
            self._healed.popleft()
        counts = [rank for _, rank in self._healed]
        found = [rank for rank in ranks if counts.count(rank) >= _MOST_HEALED and rank not in self._put_out]
        self._put_out |= set(found)
        return found

    def react(self, ranks: Sequence[int], step: int, member: Member | None) -> str:
        """Let a rank leave that has been healed too often; return words on it, empty if none has. All ranks call it.

        Args:
            ranks: Ranks that were healed.
            step: Number of updates.
            member: This worker's connection to the supervisor; None if workers stay the same.

        Raises:
            DivergenceError: There is one, and training cannot go on without it.
        """
        found = self.note(ranks, step)
        if not found:
            return ""
        hosts = self._group.gather_documents(socket.gethostname(), name="hosts of workers")
        who = ", ".join(f"rank {rank} on host {hosts[self._group.names.index(rank)]}" for rank in found)
        words = f"{who} was healed {_MOST_HEALED} times within {self._window} steps, up to step {step}"
        if member is None or not member.can_leave:
            raise DivergenceError(
                f"a worker must not become different again and again, but {words}; its machine is faulty, or code "
                "changes its state on that rank only: take it out, and resume from the last checkpoint"
            )
        if self._group.names[self._group.rank] in found:
            member.leave()
        return f"{words}: its machine is faulty, or code changes its state there only; it leaves, and others go on"
