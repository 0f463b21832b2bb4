"""What a worker that averages in pairs has at its end among some workers, from which it goes on among others."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class AveragesEnd:
    """The averages of a worker at its end among some workers.

    Args:
        epoch: Epoch of their group.
        rank: The worker's rank in it.
        request: Rank and number of the request whose answer has not come; None if there is none.
        answers: Number of each caller's last request, and the difference that it was sent, by the caller's rank.
    """

    epoch: int
    rank: int
    request: tuple[int, int] | None
    answers: Mapping[int, tuple[int, Tensor]]

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The last answers."""
        return {f"answer {caller}": delta for caller, (_, delta) in self.answers.items()}

    def document(self) -> dict[str, Any]:
        """Return the rest, as JSON."""
        answered = {str(caller): number for caller, (number, _) in self.answers.items()}
        return {"epoch": self.epoch, "rank": self.rank, "request": self.request, "answered": answered}


def find_unanswered(ends: Sequence[Mapping[str, Any]]) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Return the ends of active and passive workers whose last average only the passive one has made.

    Args:
        ends: Documents of `AveragesEnd`.
    """
    return [
        (active, passive)
        for active in ends
        for passive in ends
        if active["epoch"] == passive["epoch"]
        and active["request"]
        and list(active["request"]) == [passive["rank"], passive["answered"].get(str(active["rank"]))]
    ]
