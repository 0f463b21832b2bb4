"""What workers last had in common, and the exchange of how far each has moved away from it."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from paceline.comm.group import Group, Work
from paceline.errors import NonFiniteError, SettingsError
from paceline.sync.exchanger import Exchanger, Parcel

_PARCEL_BYTES = 16 * 2**20
"""While one parcel is on the wire the next is filled."""

Landing = Callable[[str, Tensor, Tensor], None]
"""What moves the anchor of a block, in place; it gets the block's name, its anchor, and the mean difference."""


class Anchor:
    """The value that some tensors had on all workers when these last met, and what is exchanged when they meet again.

    Each worker sends its differences from the anchor, times the mass of the samples that made them. They are small, so
    that codecs suit them, and what a codec holds back is added to those of the next meeting. Of tensors of less
    than 32 bits the anchor and the sums have 32. It holds two copies of the tensors.

    Args:
        name: What errors call it.
        values: This worker's tensors, by block; changed in place by `land`.
        group: The workers; all of them make it in the same step.
        exchanger: What sums the differences.
    """

    def __init__(self, name: str, values: Mapping[str, Tensor], group: Group, exchanger: Exchanger) -> None:
        self._name = name
        self._values = dict(values)
        self._group = group
        self._exchanger = exchanger
        self.tensors = {block: value.detach().to(_sum_dtype(value), copy=True) for block, value in values.items()}
        """The anchor of each block: the same bits on every worker."""
        self._parcels = _pack(name, self.tensors, group, exchanger.bucket_bytes or _PARCEL_BYTES)
        self._works: list[Work] = []
        self._total_mass = 0.0
        self.is_sent = False
        """Whether differences were sent that have not landed."""

    @property
    def wire_bytes(self) -> int:
        """Bytes that this worker sends in one exchange."""
        return sum(self._exchanger.wire_bytes(parcel) for parcel in self._parcels)

    @property
    def mean(self) -> dict[str, Tensor]:
        """The mean difference of each block, once it has arrived."""
        return {block: view for parcel in self._parcels for block, view in parcel.blocks.items()}

    def send(self, mass: float, total_mass: float, step: int) -> None:
        """Start to exchange the differences, which count by the `mass` of this worker in the `total_mass` of all."""
        assert not self.is_sent
        self.is_sent, self._total_mass = True, total_mass
        for parcel in self._parcels:
            parcel.flags.fill_(1)
            parcel.num_non_finite = 0
            for block, view in parcel.blocks.items():
                torch.sub(self.tensors[block], self._values[block], out=view)
            # A worker without samples counts for nothing, whatever its tensors are: NaN times 0 is NaN.
            parcel.numerators.mul_(mass) if mass else parcel.numerators.zero_()
            self._works.append(self._exchanger.exchange(parcel, lambda: total_mass, step))

    def arrive(self) -> float:
        """Wait until the mean difference is known, and return the seconds waited; the anchor stays.

        Raises:
            NonFiniteError: It is not finite.
        """
        if not self._works:
            return 0.0
        began_s = time.perf_counter()
        for work in self._works:
            work.wait()
        self._works = []
        num_non_finite = max(parcel.num_non_finite for parcel in self._parcels)
        for parcel in self._parcels:
            self._exchanger.land(parcel, self._total_mass)
        if num_non_finite or not all(bool(parcel.numerators.isfinite().all()) for parcel in self._parcels):
            self._exchanger.roll_back()
            self._refuse()
        self._exchanger.commit(())
        return time.perf_counter() - began_s

    def land(self, landing: Landing | None = None, mixing: float = 0.0) -> None:
        """Move the anchor by what has arrived, and the worker's tensors to it.

        Args:
            landing: How the anchor moves; by the mean difference without it.
            mixing: Weight that the worker's own tensors keep.
        """
        self.move(landing)
        for block, anchor in self.tensors.items():
            value = self._values[block]
            if mixing:
                value.copy_(torch.lerp(anchor, value.to(anchor.dtype), mixing))
            else:
                value.copy_(anchor)

    def move(self, landing: Landing | None = None) -> None:
        """Move the anchor by what has arrived, and leave the worker's tensors where they are; see `land`."""
        assert self.is_sent
        assert not self._works
        for block, mean in self.mean.items():
            if landing is None:
                self.tensors[block].sub_(mean)
            else:
                landing(block, self.tensors[block], mean)
        self.is_sent = False

    @contextmanager
    def averaged(self, mass: float) -> Iterator[None]:
        """Inside, the worker's tensors are the mean over all workers by their `mass`; outside, its own again.

        Where nobody has any mass they count alike. It costs one all-reduce of their size, which is not compressed.
        """
        total = torch.tensor([mass], dtype=torch.float64, device=self._group.device)
        self._group.all_reduce(total, name=f"mass of {self._name}").wait()
        weight = mass / float(total) if float(total) else 1 / self._group.size
        own = {block: value.clone() for block, value in self._values.items()}
        for dtype in sorted({tensor.dtype for tensor in self.tensors.values()}, key=str):
            blocks = [block for block, tensor in self.tensors.items() if tensor.dtype == dtype]
            flat = torch.cat([(self.tensors[block] - own[block]).flatten() for block in blocks])
            flat = flat * weight if weight else torch.zeros_like(flat)
            self._group.all_reduce(flat, name=f"mean of {self._name}").wait()
            for block, part in zip(blocks, flat.split([own[block].numel() for block in blocks]), strict=True):
                self._values[block].copy_(self.tensors[block] - part.view(own[block].shape))
        try:
            yield
        finally:
            for block, value in self._values.items():
                value.copy_(own[block])

    def state(self) -> dict[str, Tensor]:
        """Return the anchor, and the mean difference where it was sent and has not landed: the same on all workers.

        What is on the wire is waited for.
        """
        self.arrive()
        state = {f"{self._name}/{block}": tensor for block, tensor in self.tensors.items()}
        if self.is_sent:
            state |= {f"{self._name} arrived/{block}": mean for block, mean in self.mean.items()}
        return state

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take on what `state` returned.

        Raises:
            SettingsError: It is of other blocks.
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
                self.is_sent = True

    def _refuse(self) -> None:
        mine = all(bool(value.isfinite().all()) for value in self._values.values())
        finite = self._group.gather_documents(mine, name="what is finite")
        where = ", ".join(f"rank {rank}" for rank, is_finite in enumerate(finite) if not is_finite)
        raise NonFiniteError(
            f"{self._name} must be finite where workers meet, but the mean of what they sent is not"
            f"{f', since those of {where} are not' if where else ''}; lower the learning rate or clip gradients"
        )


def _sum_dtype(value: Tensor) -> torch.dtype:
    return torch.promote_types(value.dtype, torch.float32)


def _pack(name: str, tensors: Mapping[str, Tensor], group: Group, parcel_bytes: int) -> list[Parcel]:
    """Return parcels of about `parcel_bytes`, each of one dtype, that take all blocks in order."""
    plan: list[dict[str, Tensor]] = []
    for block, tensor in tensors.items():
        last = plan[-1] if plan else {}
        size = sum(other.nbytes for other in last.values()) + tensor.nbytes
        if not last or size > parcel_bytes or next(iter(last.values())).dtype != tensor.dtype:
            plan.append({})
        plan[-1][block] = tensor
    parcels = []
    for number, blocks in enumerate(plan):
        sizes = [tensor.numel() for tensor in blocks.values()]
        dtype = next(iter(blocks.values())).dtype
        buffer = group.allocate(sum(sizes) + len(blocks), dtype)
        parts = buffer[: sum(sizes)].split(sizes)
        views = {b: part.view(tensor.shape) for (b, tensor), part in zip(blocks.items(), parts, strict=True)}
        parcels.append(Parcel(f"{name} {number}", buffer, views))
    return parcels
