"""The reducer of virtual workers' gradients, which are summed along one fixed tree."""

import torch
from torch import Tensor

from paceline.comm.group import DoneWork, Group, Work
from paceline.compression import NoCodec
from paceline.programs.summation_tree import SummationTree, TreeSum
from paceline.sync.reducer import Divisor, FlatBucket
from paceline.sync.reducers import DenseReducer, ReducerThread


class TreeReducer(DenseReducer):
    """Sums whole buffers over virtual workers, in the same order whatever the number of workers.

    A worker calls `keep` after each of its virtual workers but the last, and `reduce` for that. It holds the sums of
    its blocks so far: with c virtual workers, at most floor(log2(c)) copies of the gradients beside the present ones.
    For the cost on the wire see `SummationTree`.

    Args:
        group: Group of the workers.
        tree: Tree of the virtual workers.
    """

    can_split = False

    def __init__(self, group: Group, tree: SummationTree) -> None:
        super().__init__(group, None)
        self._tree = tree
        self._sums: dict[str, TreeSum[Tensor]] = {}
        self._thread = ReducerThread(group, NoCodec(), None) if group.size > 1 else None

    def keep(self, bucket: FlatBucket) -> None:
        """Add a virtual worker's gradients to its block, and zero them in the bucket for the next one's."""
        kept = bucket.buffer.clone()
        kept[len(bucket.numerators) :] = 0  # flags are the worker's, and come with its last one
        self._sum_of(bucket).push(kept)
        bucket.numerators.zero_()

    def reduce(self, bucket: FlatBucket, divisor: Divisor, step: int, loss_scale: float = 1.0) -> Work:
        """Add the last virtual worker's gradients, and sum blocks over the workers in a thread of this reducer's."""
        mine = self._sum_of(bucket)
        group = self._thread.group if self._thread is not None else None

        def job() -> None:
            mine.push(bucket.buffer)
            total = sum_blocks(mine.take(), self._tree, group, name=bucket.name)
            bucket.buffer.copy_(total)

        if self._thread is not None:
            return self._thread.submit(job, bucket.buffer.device)
        job()
        return DoneWork()

    def wire_bytes(self, bucket: FlatBucket) -> int:
        """Return the bytes of the slices of all blocks, and of the gathered sum."""
        return round((self._tree.most_blocks + 1) * (self._size - 1) / self._size * bucket.numerators.nbytes)

    def close(self) -> None:
        """Close thread and connections."""
        if self._thread is not None:
            self._thread.close()

    def _sum_of(self, bucket: FlatBucket) -> TreeSum[Tensor]:
        return self._sums.setdefault(bucket.name, TreeSum(Tensor.add_))


def sum_blocks(mine: list[Tensor], tree: SummationTree, group: Group | None, *, name: str) -> Tensor:
    """Return the sum of all workers' blocks, along the tree; it may take the place of one of them.

    Args:
        mine: Sums of this worker's blocks: flat tensors, on all workers of the same length and dtype.
        tree: Tree of the blocks.
        group: Workers; None for a worker alone.
        name: Name in errors.
    """
    total: TreeSum[Tensor] = TreeSum(Tensor.add_)
    if group is None or group.size == 1:
        for block, part in zip(tree.blocks, mine, strict=True):
            total.push(part, block.size)
        return total.total()
    length, num = len(mine[0]), group.size
    slice_length = -(-length // num)
    sent = mine[0].new_zeros(num, tree.most_blocks, slice_length)
    for number, part in enumerate(mine):
        padded = torch.nn.functional.pad(part, (0, num * slice_length - length))
        sent[:, number] = padded.view(num, slice_length)
    received = torch.empty_like(sent)
    group.all_to_all(received, sent, name=name).wait()
    num_taken = [0] * num
    for block in tree.blocks:
        total.push(received[block.rank, num_taken[block.rank]], block.size)
        num_taken[block.rank] += 1
    gathered = mine[0].new_empty(num, slice_length)
    group.all_gather(gathered, total.total(), name=name).wait()
    return gathered.flatten()[:length]
