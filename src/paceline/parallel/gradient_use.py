"""Which sharded parameters a step used, and whether the sum of their gradients was finite."""

import zlib
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from paceline.comm.group import Group
from paceline.errors import MismatchError
from paceline.parallel.local import list_gathered
from paceline.parallel.reduce_scatter import CodedReduceScatter

_NUM_HASHES = 1 << 16
"""Number of values that an order of blocks may have: so few that sums of their squares are exact."""


class UseOfStep(NamedTuple):
    """Use of a step, the same on every rank of the group."""

    unused: list[str]
    """Parameters that no rank used."""
    num_non_finite: int
    """Ranks that got a gradient that was not finite through a codec."""
    num_overflown: int
    """Ranks whose sum of finite gradients is too large."""


class GradientUse:
    """Notes which parameters of a sharded module have gradients in backward.

    Ranks that share parameters sum zeros for those that none of them used, so that a gradient of zeros does not tell;
    weight decay and momentum would move what stays as it is in all other layouts.

    Also notes the blocks that forward gathers, in their order: ranks that gather others of the same size at a time mix
    their parameters, and then wait for ever in backward.

    On the wire: an all-reduce of 4 bytes for each parameter a step, and another among replicas, in host memory. With
    a codec two numbers more, for which the host waits once, unless it reads the norm of the gradients anyway.

    Args:
        module: Module of this rank, with the names of its parameters.
        parts: Modules that `shard_module` returned: itself, or the stages of a pipeline.
        group: Ranks that share the parameters.
        advice: Advice about ranks that gather different blocks.
        reduce_scatter: Codec that sums the gradients, if there is one.
    """

    def __init__(
        self,
        module: nn.Module,
        parts: Sequence[nn.Module],
        group: Group,
        advice: str,
        reduce_scatter: CodedReduceScatter | None = None,
    ) -> None:
        self._advice = advice
        self._names = {id(p): name for name, p in module.named_parameters() if p.requires_grad}
        self._places = {name: place for place, name in enumerate(self._names.values())}
        self._group = group
        self._reduce_scatter = reduce_scatter
        self._used: set[str] = set()
        self._hooked: set[str] = set()
        self._gathered: list[str] = []
        """Names of the blocks that the step's forward passes gathered, in their order."""
        self._num_done = 0
        """Number of them before the last backward."""
        for name, parameter in module.named_parameters():
            if name in self._places and not parameter.dim():  # every rank has all of it
                parameter.register_post_accumulate_grad_hook(self._make_hook(name))
        self._blocks = {id(block): name for name, block in module.named_modules()}
        for block in {block for part in parts for block in part.modules() if isinstance(block, FSDPModule)}:
            block.register_forward_pre_hook(self._watch)

    def exchange(self, replicas: Group, others: Group | None = None, *, checks_finite: bool = True) -> UseOfStep:
        """Return the use of the step, and begin anew; every rank calls it once a step.

        Args:
            replicas: Ranks over which the step sums the gradients of this rank's shard.
            others: Ranks with other parts of its matrices, which must know too of what is not finite.
            checks_finite: Whether to say what is not finite of what the codec has summed.
        """
        self._gathered.clear()
        self._num_done = 0
        used = torch.zeros(len(self._places))
        used[[self._places[name] for name in self._used]] = 1.0
        self._used = set()
        for group in (self._group, replicas):
            if group.size > 1:  # in host memory: to read it, the host need not wait for a GPU
                group.on_cpu().all_reduce(used, name="use of parameters").wait()
        unused = [name for name, count in zip(self._places, used.tolist(), strict=True) if not count]
        if self._reduce_scatter is None:
            return UseOfStep(unused, 0, 0)
        flags = self._reduce_scatter.take_flags()
        if not checks_finite:
            return UseOfStep(unused, 0, 0)
        for among in (self._group, replicas, others):
            if among is not None and among.size > 1:
                among.all_reduce(flags, name="finite gradients").wait()
        num_non_finite, num_overflown = flags.tolist()
        return UseOfStep(unused, int(num_non_finite), int(num_overflown))

    @property
    def repeats_blocks(self) -> bool:
        """Whether a block ran forward more than once since the last backward: torch sums its gradient each time."""
        recent = self._gathered[self._num_done :]
        return len(set(recent)) < len(recent)

    def end_backward(self) -> None:
        """Note that what ran forward until now has run backward."""
        self._num_done = len(self._gathered)

    def order(self) -> tuple[float, float]:
        """Return a hash of the blocks that the step's forward passes gathered, in their order, and its square."""
        found = float(zlib.crc32("\n".join(self._gathered).encode()) % _NUM_HASHES)
        return found, found**2

    def check_order(self, sums: Sequence[float], group: Group) -> None:
        """Check that all ranks of a group gathered the same blocks.

        Args:
            sums: Sums over the group of what `order` returned.
            group: Ranks that must gather the same.

        Raises:
            MismatchError: Ranks gathered different blocks; the message names the first of them.
        """
        if group.size * sums[1] == sums[0] ** 2:  # only of equal numbers
            return
        orders = group.gather_documents(self._gathered, name="blocks that were gathered")
        rank, other = next((rank, other) for rank, other in enumerate(orders) if other != orders[0])
        pairs = list(zip_longest(orders[0], other, fillvalue="no more"))
        number = next(number for number, (one, two) in enumerate(pairs) if one != two)
        raise MismatchError(
            f"ranks that share parameters must gather the same blocks, but gather {number} of a step was of "
            f"{pairs[number][0]} on rank {group.names[0]} and of {pairs[number][1]} on rank {group.names[rank]}, since "
            f"the model chooses blocks by its samples; {self._advice}"
        )

    def _watch(self, module: nn.Module, inputs: Any) -> None:
        """Watch the gathered parameters of a block, which torch makes in its first forward and then keeps."""
        if not isinstance(module, FSDPModule) or not torch.is_grad_enabled():
            return
        self._gathered.append(self._blocks.get(id(module), "") or "the model itself")
        for held in list_gathered(module):
            name = self._names.get(id(held.sharded_param))
            if name is not None and name not in self._hooked:
                self._hooked.add(name)
                held.unsharded_param.register_post_accumulate_grad_hook(self._make_hook(name))

    def _make_hook(self, name: str) -> Any:
        def note(_: Tensor) -> None:
            self._used.add(name)

        return note
