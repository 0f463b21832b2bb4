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
    """Counts how often this worker is healed, also while others come and go; one that errs again and again leaves.

    Each worker counts its own healings, and says when there are too many: a new one need not know those of before.
    """

    def __init__(self) -> None:
        self._steps: deque[int] = deque(maxlen=_MOST_HEALED)

    def note(self, step: int, interval: int) -> bool:
        """Take in that this worker was healed at a step; return whether it has been so too often, once."""
        self._steps.append(step)
        is_found = len(self._steps) == _MOST_HEALED and self._steps[0] > step - _find_window(interval)
        if is_found:
            self._steps.clear()
        return is_found

    def react(self, ranks: Sequence[int], step: int, group: Group, interval: int, member: Member | None) -> str:
        """Let a rank leave that has been healed too often; return words on it, empty if none has. All ranks call it.

        Args:
            ranks: Ranks that were healed.
            step: Number of updates.
            group: The present workers.
            interval: Steps from one comparison to the next.
            member: This worker's connection to the supervisor; None if workers stay the same.

        Raises:
            DivergenceError: There is one, and training cannot go on without it.
        """
        is_found = group.names[group.rank] in ranks and self.note(step, interval)
        said = group.gather_documents([socket.gethostname(), is_found], name="healings of workers")
        found = [f"rank {rank} on host {host}" for rank, (host, errs) in zip(group.names, said, strict=True) if errs]
        if not found:
            return ""
        window = _find_window(interval)
        words = f"{', '.join(found)} was healed {_MOST_HEALED} times within {window} steps, up to step {step}"
        if member is None or not member.can_leave:
            raise DivergenceError(
                f"a worker must not become different again and again, but {words}; its machine is faulty, or code "
                "changes its state on that rank only: take it out, and resume from the last checkpoint"
            )
        if is_found:
            member.leave()
        return f"{words}: its machine is faulty, or code changes its state there only; it leaves, and others go on"


def _find_window(interval: int) -> int:
    """Return the steps within which healings count: ten comparisons, and 1,000 steps at least."""
    return max(_LEAST_WINDOW, 10 * interval)
