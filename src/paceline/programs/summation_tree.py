"""Summation in one fixed order, whatever the number of workers: the tree, and the parts of it that each worker has.

Floating-point sums depend on their order. Here a global batch has a fixed number of terms, one per virtual worker, and
term i is added to term i + 1 for even i, their sum to the next one, and so on: a binary tree over blocks whose sizes
are powers of two. (With 12 terms: blocks of 8 and 4.) A worker gets whole blocks, so that it can add up each by itself,
and sends only their sums. For c terms these are as many as c has ones in binary: c = 4 is one block, c = 6 two, of 4
and 2.

Cost on the wire, for n workers and b bytes per term: each sum is cut into n slices, and slice r of all sums goes to
rank r, which adds them up and sends the result to all. With at most k blocks per worker that is (k + 1) (n - 1) / n * b
bytes a rank, (k + 1) / 2 times those of an all-reduce: the same for k = 1, and at most twice up to 14 terms per worker.
"""

from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

from paceline.errors import SettingsError

Term = TypeVar("Term")


class TreeBlock(NamedTuple):
    """A subtree: some consecutive terms, added up by one worker."""

    start: int
    size: int
    """Number of terms: a power of two, which divides `start`."""
    rank: int
    """Worker that adds them up."""


class TreeSum(Generic[Term]):
    """Terms that are added up as they come, in their order, each block once it is complete.

    Args:
        add: Function that returns the sum of an earlier and a later part.
    """

    def __init__(self, add: Callable[[Term, Term], Term]) -> None:
        self._add = add
        self._parts: list[tuple[int, Term]] = []

    def push(self, term: Term, size: int = 1) -> None:
        """Add the next term, or the sum of the next `size` terms: sizes of blocks never ascend."""
        while self._parts and self._parts[-1][0] == size:
            _, earlier = self._parts.pop()
            term, size = self._add(earlier, term), 2 * size
        self._parts.append((size, term))

    def take(self) -> list[Term]:
        """Return the sums of the blocks so far, and begin anew."""
        taken, self._parts = [term for _, term in self._parts], []
        return taken

    def total(self) -> Term:
        """Return the sum of all terms, and begin anew."""
        *earlier, total = self.take()
        for part in reversed(earlier):
            total = self._add(part, total)
        return total


class SummationTree:
    """The blocks of a fixed tree, divided among workers as evenly as terms can be.

    Args:
        num_terms: Number of terms.
        num_workers: Number of workers.

    Raises:
        SettingsError: There are fewer terms than workers.
    """

    def __init__(self, num_terms: int, num_workers: int) -> None:
        if num_terms < num_workers:
            raise SettingsError(
                f"num_virtual_workers must be at least the number of workers, but got {num_terms} for {num_workers} "
                "workers; start fewer, or begin a run with more virtual workers"
            )
        self.num_terms = num_terms
        least, rest = divmod(num_terms, num_workers)
        counts = [least + (rank < rest) for rank in range(num_workers)]
        self.blocks: list[TreeBlock] = []
        """All blocks, in the order of their terms."""
        start, size = 0, 1 << (counts[0].bit_length() - 1)
        while size:  # the largest first, so that each begins at a multiple of its size
            for rank, count in enumerate(counts):
                if count & size:
                    self.blocks.append(TreeBlock(start, size, rank))
                    start += size
            size //= 2
        self.most_blocks = max(count.bit_count() for count in counts)
        """Largest number of blocks of a worker."""

    def blocks_of(self, rank: int) -> list[TreeBlock]:
        """Return the blocks of a worker, in order; the first of rank 0 begins with term 0."""
        return [block for block in self.blocks if block.rank == rank]

    def terms_of(self, rank: int) -> list[int]:
        """Return the terms of a worker, in the order in which it computes them."""
        return [term for block in self.blocks_of(rank) for term in range(block.start, block.start + block.size)]
