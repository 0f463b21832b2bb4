"""Buffers of a module that forward changes, such as BatchNorm's running statistics, in steps of virtual workers."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from paceline.comm.group import Group
from paceline.errors import GradientError
from paceline.programs.summation_tree import SummationTree, TreeSum
from paceline.sync.tree_reducer import sum_blocks


class _Held:
    """One buffer, its value at the beginning of the step, and how to see that it changed."""

    def __init__(self, owner: nn.Module, key: str) -> None:
        self.owner, self.key = owner, key
        # Torch's kernels change running statistics without a new version.
        self._is_statistic = isinstance(owner, _NormBase)
        self.note()

    @property
    def tensor(self) -> Tensor:
        return self.owner._buffers[self.key]  # type: ignore[return-value]

    @property
    def is_changed(self) -> bool:
        is_running = self._is_statistic and self.owner.training
        return is_running or self.tensor is not self._noted or self.tensor._version != self._version

    def note(self) -> None:
        """Begin with the present value."""
        self._noted = self.tensor
        self.start = self.tensor.detach().clone()
        self._version = self.tensor._version

    def set(self, value: Tensor) -> None:
        """Replace the value, in the tensor that the step began with."""
        self.owner._buffers[self.key] = self._noted
        self._noted.copy_(value.view_as(self._noted))
        self._version = self._noted._version


class StepBuffers:
    """Buffers of a step. Each virtual worker begins with the same ones, and changes them by its own samples.

    At the end of the step, those of floating point are the means over all virtual workers; others, such as counts of
    batches, are those of virtual worker 0. Only buffers that some forward has changed are exchanged.

    Args:
        module: The model.
        tree: Tree of the virtual workers.
        group: The workers.
    """

    def __init__(self, module: nn.Module, tree: SummationTree, group: Group) -> None:
        self._tree, self._group = tree, group
        owners = [
            (owner, key) for owner in module.modules() for key, held in owner._buffers.items() if held is not None
        ]
        self._held = [_Held(owner, key) for owner, key in owners]
        self._taken: list[list[Tensor | None]] = []
        self._has_begun = False

    def begin(self) -> None:
        """Note the present values as those of the step's beginning; does nothing inside a step."""
        if not self._has_begun:
            self._has_begun = True
            for held in self._held:
                if held.is_changed:
                    held.note()

    def changed(self) -> Tensor:
        """Return, for each buffer, 1 if a virtual worker of this worker has changed it in this step, else 0."""
        flags = [held.is_changed or any(one[i] is not None for one in self._taken) for i, held in enumerate(self._held)]
        return torch.tensor(flags, dtype=torch.float64)

    def take(self) -> None:
        """Take the values of a virtual worker, and go back to those of the step's beginning."""
        taken: list[Tensor | None] = []
        for held in self._held:
            keeps_shape = held.tensor.shape == held.start.shape  # else it is a cache, which is computed again
            taken.append(held.tensor.detach().clone() if held.is_changed and keeps_shape else None)
            if held.is_changed:
                held.set(held.start)
        self._taken.append(taken)

    def exchange(self, changed: Sequence[bool]) -> None:
        """Set the buffers that any virtual worker has `changed`. All workers call it.

        Raises:
            GradientError: One of them is complex.
        """
        numbers = [number for number, is_changed in enumerate(changed) if is_changed]
        real = [number for number in numbers if self._held[number].start.is_floating_point()]
        counts = [number for number in numbers if number not in real]
        if any(self._held[number].start.is_complex() for number in counts):
            raise GradientError("buffers that forward changes must be real with num_virtual_workers; keep two of them")
        if real:
            assert len(self._taken) == len(self._tree.terms_of(self._group.rank))
            blocks: TreeSum[Tensor] = TreeSum(Tensor.add_)
            for number in range(len(self._taken)):
                blocks.push(self._flatten(number, real).double())
            mean = sum_blocks(blocks.take(), self._tree, self._group, name="buffers") / self._tree.num_terms
        if counts:
            first = self._flatten(0, counts).long()
            self._group.broadcast(first, source=0, name="buffers of virtual worker 0").wait()
        # Only now, so that a worker lost in between leaves all buffers as at the step's beginning.
        if real:
            self._set(real, mean)
        if counts:
            self._set(counts, first)
        self.drop()

    def drop(self) -> None:
        """End the step; buffers that were taken and not exchanged stay as at its beginning."""
        self._taken, self._has_begun = [], False

    def _flatten(self, virtual_worker: int, numbers: Sequence[int]) -> Tensor:
        values = [self._taken[virtual_worker][number] for number in numbers]
        return torch.cat(
            [
                (self._held[number].start if value is None else value).flatten().to(self._wide(number))
                for number, value in zip(numbers, values, strict=True)
            ]
        )

    def _wide(self, number: int) -> torch.dtype:
        return torch.float64 if self._held[number].start.is_floating_point() else torch.int64

    def _set(self, numbers: Sequence[int], flat: Tensor) -> None:
        parts = flat.split([self._held[number].start.numel() for number in numbers])
        for number, part in zip(numbers, parts, strict=True):
            self._held[number].set(part)
            self._held[number].note()
