"""Outer parameters: the last common values of the workers, and the exchange of each worker's difference from them."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from paceline.comm.group import Group, Work
from paceline.errors import NonFiniteError, SettingsError
from paceline.sync.reducer import FlatBucket, GradientReducer, read_findings

_BUCKET_BYTES = 16 * 2**20
"""Size of a bucket: while one is on the wire the next is filled."""

OuterUpdate = Callable[[str, Tensor, Tensor], None]
"""Function that updates a block's outer parameters in place, given its name, these and its mean difference."""


class OuterParameters:
    """Values that some tensors had on all workers after the last sync step, and the exchange at the next one.

    Each worker sends its differences from the outer parameters, times the weight of the samples that made them. They
    are small, so codecs suit them, and residuals of a codec are added to the differences of the next sync step. If
    tensors have less than 32 bits, the outer parameters and the sums have 32. It holds two copies of the tensors.

    Args:
        name: Name in errors.
        values: This worker's tensors, by block; changed in place by `apply`.
        group: Group of the workers; all of them make it in the same step.
        reducer: Reducer of the differences.
    """

    def __init__(self, name: str, values: Mapping[str, Tensor], group: Group, reducer: GradientReducer) -> None:
        self._name = name
        self._values = dict(values)
        self._group = group
        self._reducer = reducer
        self.tensors = {block: value.detach().to(_sum_dtype(value), copy=True) for block, value in values.items()}
        """Outer parameters of each block, bitwise equal on all workers."""
        self._buckets = _pack(name, self.tensors, group, reducer.bucket_bytes or _BUCKET_BYTES)
        self._works: list[Work] = []
        self._total_weight = 0.0
        self.is_sent = False
        """Whether sent differences have not been applied yet."""
        self._has_arrived = False

    @property
    def wire_bytes(self) -> int:
        """Bytes that this worker sends in one exchange."""
        return sum(self._reducer.wire_bytes(bucket) for bucket in self._buckets)

    @property
    def mean(self) -> dict[str, Tensor]:
        """Mean difference of each block, once it has arrived."""
        return {block: view for bucket in self._buckets for block, view in bucket.blocks.items()}

    def send(
        self, weight: float, total_weight: float, step: int, differences: Mapping[str, Tensor] | None = None
    ) -> None:
        """Start to exchange the differences, with this worker's `weight` in the `total_weight` of all.

        Args:
            weight: Weight of this worker.
            total_weight: Weight of all workers.
            step: Number of updates done before.
            differences: Outer parameters less this worker's tensors, if they are not those of now.
        """
        assert not self.is_sent
        self.is_sent, self._has_arrived, self._total_weight = True, False, total_weight
        for bucket in self._buckets:
            bucket.flags.fill_(1)
            bucket.findings = None
            for block, view in bucket.blocks.items():
                if differences is None:
                    torch.sub(self.tensors[block], self._values[block], out=view)
                else:
                    view.copy_(differences[block])
            # A worker without samples counts as zeros, whatever its tensors are: NaN times 0 is NaN.
            bucket.numerators.mul_(weight) if weight else bucket.numerators.zero_()
            self._works.append(self._reducer.reduce(bucket, lambda: total_weight, step))

    def receive(self) -> float:
        """Wait for the mean difference, and return the seconds waited; nothing changes yet.

        Raises:
            NonFiniteError: The mean difference is not finite.
        """
        if not self._works:
            return 0.0
        began_s = time.perf_counter()
        for work in self._works:
            work.wait()
        self._works = []
        num_non_finite = max(num for num, _ in read_findings(self._buckets))
        for bucket in self._buckets:
            self._reducer.finalize(bucket, self._total_weight)
        if num_non_finite or not all(bool(bucket.numerators.isfinite().all()) for bucket in self._buckets):
            self._reducer.roll_back()
            self._refuse()
        self._reducer.commit(())
        self._has_arrived = True
        return time.perf_counter() - began_s

    def apply(self, outer_update: OuterUpdate | None = None, mixing: float = 0.0) -> None:
        """Update the outer parameters by the mean difference, and copy them to the worker's tensors.

        Args:
            outer_update: Update of the outer parameters; by default the mean difference is added.
            mixing: Weight that the worker's own tensors keep.
        """
        self.update(outer_update)
        for block, outer in self.tensors.items():
            value = self._values[block]
            if mixing:
                value.copy_(torch.lerp(outer, value.to(outer.dtype), mixing))
            else:
                value.copy_(outer)

    def update(self, outer_update: OuterUpdate | None = None) -> None:
        """Update the outer parameters by the mean difference, without changing the worker's tensors; see `apply`."""
        assert self.is_sent
        assert not self._works
        for block, mean in self.mean.items():
            if outer_update is None:
                self.tensors[block].sub_(mean)
            else:
                outer_update(block, self.tensors[block], mean)
        self.is_sent = False

    def abandon(self) -> bool:
        """Drop differences that were sent to workers of which some are lost, unless their mean has arrived.

        Returns:
            Whether there were any.
        """
        if not self.is_sent or self._has_arrived:
            return False
        self._works, self.is_sent = [], False
        self._reducer.roll_back()
        return True

    @contextmanager
    def averaged(self, weight: float) -> Iterator[None]:
        """While active, the worker's tensors are the mean over all workers by `weight`; afterwards, its own again.

        If all weights are 0 they count equally. The cost is one uncompressed all-reduce of their size.
        """
        total = torch.tensor([weight], dtype=torch.float64, device=self._group.device)
        self._group.all_reduce(total, name=f"weight of {self._name}").wait()
        fraction = weight / float(total) if float(total) else 1 / self._group.size
        own = {block: value.clone() for block, value in self._values.items()}
        try:
            for dtype in sorted({tensor.dtype for tensor in self.tensors.values()}, key=str):
                blocks = [block for block, tensor in self.tensors.items() if tensor.dtype == dtype]
                flat = torch.cat([(self.tensors[block] - own[block]).flatten() for block in blocks])
                flat = flat * fraction if fraction else torch.zeros_like(flat)
                self._group.all_reduce(flat, name=f"mean of {self._name}").wait()
                for block, part in zip(blocks, flat.split([own[block].numel() for block in blocks]), strict=True):
                    self._values[block].copy_(self.tensors[block] - part.view(own[block].shape))
            yield
        finally:
            for block, value in self._values.items():
                value.copy_(own[block])

    def state(self) -> dict[str, Tensor]:
        """Return the outer parameters, and a mean difference that is not applied yet: the same on all workers.

        Waits for an exchange under way.
        """
        self.receive()
        state = {f"{self._name}/{block}": tensor for block, tensor in self.tensors.items()}
        if self.is_sent:
            state |= {f"{self._name} arrived/{block}": mean for block, mean in self.mean.items()}
        return state

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Load the result of `state`.

        Raises:
            SettingsError: The state is that of other blocks.
        """
        missing = [block for block in self.tensors if f"{self._name}/{block}" not in state]
        if missing:
            raise SettingsError(
                f"{self._name} must have the blocks of the checkpoint, but {missing[0]} is not in it; "
                "resume with the same model and the same settings of sync"
            )
        for block, tensor in self.tensors.items():
            tensor.copy_(state[f"{self._name}/{block}"])
        for block, mean in self.mean.items():
            if (arrived := state.get(f"{self._name} arrived/{block}")) is not None:
                mean.copy_(arrived)
                self.is_sent = self._has_arrived = True

    def _refuse(self) -> None:
        mine = all(bool(value.isfinite().all()) for value in self._values.values())
        finite = self._group.gather_documents(mine, name="what is finite")
        where = ", ".join(f"rank {rank}" for rank, is_finite in enumerate(finite) if not is_finite)
        raise NonFiniteError(
            f"{self._name} must be finite at a sync step, but the mean of what they sent is not"
            f"{f', since those of {where} are not' if where else ''}; lower the learning rate or clip gradients"
        )


def _sum_dtype(value: Tensor) -> torch.dtype:
    return torch.promote_types(value.dtype, torch.float32)


def _pack(name: str, tensors: Mapping[str, Tensor], group: Group, bucket_bytes: int) -> list[FlatBucket]:
    """Return buckets of about `bucket_bytes`, each of one dtype, that take all blocks in order."""
    plan: list[dict[str, Tensor]] = []
    for block, tensor in tensors.items():
        last = plan[-1] if plan else {}
        size = sum(other.nbytes for other in last.values()) + tensor.nbytes
        if not last or size > bucket_bytes or next(iter(last.values())).dtype != tensor.dtype:
            plan.append({})
        plan[-1][block] = tensor
    buckets = []
    for number, blocks in enumerate(plan):
        sizes = [tensor.numel() for tensor in blocks.values()]
        dtype = next(iter(blocks.values())).dtype
        buffer = group.allocate(sum(sizes) + len(blocks), dtype)
        parts = buffer[: sum(sizes)].split(sizes)
        views = {b: part.view(tensor.shape) for (b, tensor), part in zip(blocks.items(), parts, strict=True)}
        buckets.append(FlatBucket(f"{name} {number}", buffer, views))
    return buckets
