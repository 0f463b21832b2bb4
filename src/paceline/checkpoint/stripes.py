"""Stripes: which ranks hold parity of which other ranks' data, so that any few of a team can be lost.

A team of S ranks has S stripes. Stripe p has its `num_parity` parity blocks on the ranks at positions p, p + 1, ... of
the team, and one data block of each of the others, its *data ranks*. So each rank's part is cut into S - num_parity
blocks, each in another stripe, and each rank holds as many parity blocks as any other. Whichever `num_parity` ranks are
lost, no stripe loses more than its code restores.
"""

from dataclasses import dataclass
from functools import cached_property

from paceline.checkpoint.erasure import ErasureCode
from paceline.errors import SettingsError


def make_teams(num_ranks: int, num_data: int, num_parity: int) -> list[list[int]]:
    """Return the ranks of each team: at least `num_data` + `num_parity`, neighbours in different teams.

    Neighbours are often of one host, which is lost as a whole.

    Raises:
        SettingsError: There are too few ranks for one team.
    """
    smallest = num_data + num_parity
    num_teams = num_ranks // smallest
    if not num_teams:
        raise SettingsError(
            f"peers that hold parity must be at least num_data({num_data}) + num_parity({num_parity}) = {smallest} "
            f"ranks, but there are {num_ranks}; start more, or lower one of the two"
        )
    return [list(range(first, num_ranks, num_teams)) for first in range(num_teams)]


@dataclass(frozen=True)
class Stripes:
    """Stripes of one team.

    Args:
        size: Number of ranks.
        num_parity: Number of parity blocks of a stripe.
    """

    size: int
    num_parity: int

    @cached_property
    def code(self) -> ErasureCode:
        """Code of each stripe."""
        return ErasureCode(self.size - self.num_parity, self.num_parity)

    def data_ranks(self, stripe: int) -> list[int]:
        """Return the positions of a stripe's data ranks; block j is that of the j-th."""
        return [(stripe + self.num_parity + block) % self.size for block in range(self.size - self.num_parity)]

    def parity_ranks(self, stripe: int) -> list[int]:
        """Return the positions of the ranks that hold a stripe's parity blocks."""
        return [(stripe + block) % self.size for block in range(self.num_parity)]

    def stripe_of_data(self, position: int, block: int) -> int:
        """Return the stripe of a block of a rank's part."""
        return (position - self.num_parity - block) % self.size

    def stripe_of_parity(self, position: int, block: int) -> int:
        """Return the stripe whose parity block of that number a rank holds."""
        return (position - block) % self.size
