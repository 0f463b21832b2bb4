"""Healing of replicas, or of their gradients, that have become different: odd ones take what the majority has."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from paceline.comm.group import Group
from paceline.errors import DivergenceError
from paceline.parallel.local import local
from paceline.parallel.model_shard import ModelShard
from paceline.replica.hashing import describe_difference, find_difference, hash_tensor


@dataclass(frozen=True)
class Healed:
    """What was healed."""

    ranks: list[int]
    """Ranks that were odd, by their numbers in errors."""
    source_rank: int
    """Rank whose state they took."""
    difference: str
    """First difference, in words."""


OnHealed = Callable[[Healed], None]
"""Function that is told of what was healed, on every rank."""


def heal(
    everybody: Sequence[Mapping[str, str]], group: Group, targets: Mapping[str, Tensor | tuple[dict[Any, Any], Any]]
) -> Healed | None:
    """Let odd ranks take what differs from the majority; None where there is no majority. Every rank calls it.

    Args:
        everybody: Hashes by rank; see `find_difference`.
        group: The ranks.
        targets: Hashed values: tensors, or numbers as a dictionary and a key.
    """
    (common, count), *_ = Counter(tuple(hashes.items()) for hashes in everybody).most_common()
    if 2 * count <= len(everybody):
        return None
    odd = [rank for rank, hashes in enumerate(everybody) if tuple(hashes.items()) != common]
    source = next(rank for rank in range(len(everybody)) if rank not in odd)
    difference = describe_difference(everybody, group.names)
    for name, expected in common:
        if name not in targets or all(hashes.get(name) == expected for hashes in everybody):
            continue
        target = targets[name]
        if isinstance(target, Tensor):
            with torch.no_grad():
                sent = local(target).detach().contiguous()
                group.broadcast(sent, source=source, name=f"healing of {name}").wait()
                local(target).copy_(sent)
        else:
            state, key = target
            state[key] = group.gather_documents(state[key], name=f"healing of {name}")[source]
    return Healed([group.names[rank] for rank in odd], group.names[source], difference)


class GradientComparison:
    """Compares, at intervals, what each worker has received as the sum of all gradients, before the update.

    Each must have received the same bits. A bit that flips later, in memory or on the way to one of them, is found
    before it reaches the parameters. What flips before the sum is in it on all workers alike, and is seen only by its
    size (`paceline.training.Anomalies`). It costs a hash of the gradients, and a gather of 16 bytes.

    Args:
        parameters: Parameters that are trained, by name.
        shard: Model shard of this rank.
        interval: Steps from one comparison to the next.
        on_healed: Function that is told when odd ranks have taken the gradients of the majority; None to end instead.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], shard: ModelShard, interval: int, on_healed: OnHealed | None
    ) -> None:
        self._parameters, self._group = parameters, shard.group
        self._interval, self._on_healed = interval, on_healed

    def check(self, step: int) -> None:
        """Compare the gradients of `step`, if it is due; every rank calls it.

        Raises:
            DivergenceError: Replicas differ, and are not healed; the update was not made.
        """
        if step % self._interval:
            return
        gradients = {f"gradient of {n}": p.grad for n, p in self._parameters.items() if p.grad is not None}
        everybody = find_difference({name: hash_tensor(local(g)) for name, g in gradients.items()}, self._group)
        if not everybody:
            return
        if self._on_healed is not None and (healed := heal(everybody, self._group, gradients)) is not None:
            self._on_healed(healed)
            return
        raise DivergenceError(
            f"the sum of all gradients must be the same on every rank, but at step {step} "
            f"{describe_difference(everybody, self._group.names)}; a machine or its memory is faulty: the update was "
            "not made, so resume from the last checkpoint without that machine"
        )
